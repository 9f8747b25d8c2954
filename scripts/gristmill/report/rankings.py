"""results/rankings.json on the page: ratings with their intervals, and the win rates that they were made from.

- A run without a rating is said to be above, below or unconnected, never given a number.
- A ranking by a judge that fails its bars on any pair is marked, and so is each such pair.
- A file that names a run or judge which is not in the report is of another config, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gristmill.errors import UserError
from gristmill.report.inputs import Bounds, InputFile, read_file

PLACES = {
    "above": "above all rated runs, without a bound",
    "below": "below all rated runs, without a bound",
    "unconnected": "not connected with the others by any chain of pairs",
}


class Rating(InputFile):
    """One run's place."""

    run: str
    rating: float | None = None
    ci95: Bounds = None
    place: str
    wins: int
    losses: int
    ties: int
    note: str | None = None

    @property
    def place_words(self) -> str:
        """The place of a run that has no rating."""
        return PLACES.get(self.place, "")


class LengthControlled(InputFile):
    """A pair's win rate at equal length."""

    win_rate: float | None = None
    ci95: Bounds = None
    overlap: bool | None = None
    note: str | None = None


class RankedPair(InputFile):
    """Two runs that the judge compared."""

    runs: tuple[str, str]
    n: int
    wins: dict[str, int]
    ties: int
    unread: dict[str, int] = {}
    win_rate: float | None = None
    win_rate_ci95: Bounds = None
    length_controlled: LengthControlled
    reliable: bool
    unreliable_because: list[str] = []


class Ranking(InputFile):
    """One judge's ranking over one dataset."""

    judge: str
    dataset: str
    reliable: bool
    n: int
    unread: int
    baseline: str | None = None
    ratings: list[Rating]
    pairs: list[RankedPair]

    @property
    def scale(self) -> Bounds:
        """From the lowest to the highest end of an interval, with a margin; None without a rating."""
        ends = [end for each in self.ratings if each.rating is not None for end in (each.rating, *(each.ci95 or ()))]
        if not ends:
            return None
        margin = max((max(ends) - min(ends)) * 0.05, 10.0)
        return min(ends) - margin, max(ends) + margin

    @property
    def runs(self) -> list[str]:
        """The ranked runs."""
        return [each.run for each in self.ratings]


class RankingsFile(InputFile):
    """rankings.json."""

    rankings: list[Ranking]


def read_rankings(path: Path | None, runs: Collection[str], judges: Collection[str]) -> list[Ranking]:
    """The rankings in the file's order; none without a file.

    Args:
        path: rankings.json.
        runs: the report's runs.
        judges: the report's judges.

    Raises:
        UserError: the file is broken, or is about a run or judge that is not in the report.
    """
    if path is None:
        return []
    found = read_file(RankingsFile, path).rankings
    for each in found:
        foreign = [run for run in each.runs if run not in runs] + ([each.judge] if each.judge not in judges else [])
        if foreign:
            raise UserError(
                f"{path} is about {foreign[0]!r}, which is not in this report; make it again or leave it out"
            )
    return found


def placed(value: float | None, scale: Bounds) -> float | None:
    """A number on a scale as a place from 0 to 1, for the drawn interval."""
    return None if value is None or scale is None else (value - scale[0]) / (scale[1] - scale[0])


def placed_bounds(ends: Bounds, scale: Bounds) -> Bounds:
    """An interval on a scale as places from 0 to 1."""
    if ends is None or scale is None:
        return None
    low, high = ((end - scale[0]) / (scale[1] - scale[0]) for end in ends)
    return low, high


def rating_bounds(ends: Bounds) -> str:
    """`[987, 1042]`, empty when there is no interval."""
    return "" if ends is None else f"[{ends[0]:.0f}, {ends[1]:.0f}]"
