"""results/comparisons.json on the page: which differences the shared rows bear out, and which they do not.

- A run is called better only where the 95 % interval of the difference excludes 0 and the adjusted p is below ALPHA.
- Differences are in percentage points, of the first run of the pair.
- A file that names a run which is not in the report is of another config, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import UserError
from gristmill.report.inputs import Bounds, InputFile, read_file
from gristmill.report.words import NONE, count

#: p_holm has to be below this before a run is called better.
ALPHA = 0.05
TESTS = {"mcnemar_exact": "McNemar, exact", "mcnemar_chi2": "McNemar, χ²", "paired_t": "paired t"}


class Discordant(InputFile):
    """Rows that only one of two runs has right."""

    only_first: int
    only_second: int


class Comparison(InputFile):
    """Two runs by one metric on the rows they share."""

    dataset: str
    metric: str
    runs: tuple[str, str]
    n_common: int
    n_only_first: int = 0
    n_only_second: int = 0
    samples: tuple[int, int] = (1, 1)
    ungraded: tuple[int, int] = (0, 0)
    invalid: tuple[int, int] = (0, 0)
    values: tuple[float | None, float | None]
    difference: float | None = None
    ci95: Bounds = None
    bootstrap_ci95: Bounds = None
    discordant: Discordant | None = None
    test: str | None = None
    p: float | None = None
    p_holm: float | None = None
    family_size: int = 0
    note: str | None = None

    @property
    def clear(self) -> bool:
        """Whether one run may be called better."""
        return excludes_zero(self.ci95) and self.p_holm is not None and self.p_holm < ALPHA

    @property
    def better(self) -> str | None:
        """The run that is better, where one is."""
        if not self.clear or not self.difference:
            return None
        return self.runs[0] if self.difference > 0 else self.runs[1]

    @property
    def says(self) -> str:
        """What follows for the two runs."""
        if self.difference is None:
            return "nothing to compare"
        if self.p_holm is None:
            return "no p, so no run is named"
        if excludes_zero(self.ci95) and not self.clear:
            return "not clear once p is adjusted"
        return "the rows do not tell"

    @property
    def left_out(self) -> list[str]:
        """What does not take part in the difference, or is wrong in it without being read, counted."""
        parts = [
            f"{count(n)} only in {run}"
            for n, run in zip((self.n_only_first, self.n_only_second), self.runs, strict=True)
            if n
        ]
        for name, numbers in (("without a grade", self.ungraded), ("invalid, so wrong", self.invalid)):
            parts += [f"{count(n)} {name} in {run}" for n, run in zip(numbers, self.runs, strict=True) if n]
        return parts

    @property
    def test_words(self) -> str:
        """The test by name, empty without one."""
        return TESTS.get(self.test, self.test) if self.test else ""


class ComparisonsFile(InputFile):
    """comparisons.json."""

    resamples: int
    comparisons: list[Comparison]


@dataclass(frozen=True, slots=True)
class Family:
    """The comparisons of one dataset and metric, whose p values are adjusted together."""

    dataset: str
    metric: str
    comparisons: list[Comparison]

    @property
    def size(self) -> int:
        """How many p values were adjusted together."""
        return max(each.family_size for each in self.comparisons)


def read_comparisons(path: Path | None, runs: Collection[str]) -> list[Family]:
    """The families of comparisons.json in its order; none without a file.

    Raises:
        UserError: the file is broken, or compares a run that is not in the report.
    """
    if path is None:
        return []
    families: dict[tuple[str, str], Family] = {}
    for each in read_file(ComparisonsFile, path).comparisons:
        foreign = [run for run in each.runs if run not in runs]
        if foreign:
            raise UserError(
                f"{path} compares {foreign[0]!r}, which is not in this report; make it again or leave it out"
            )
        key = (each.dataset, each.metric)
        families.setdefault(key, Family(*key, [])).comparisons.append(each)
    return list(families.values())


def excludes_zero(ends: Bounds) -> bool:
    """Whether an interval lies on one side of 0."""
    return ends is not None and (ends[0] > 0 or ends[1] < 0)


def points(value: float | None) -> str:
    """A difference of shares in percentage points: `+4.2`, `−0.8`."""
    if value is None:
        return NONE
    rounded = round(100 * value, 1)
    return f"{rounded:+.1f}".replace("-", "−") if rounded else "0.0"


def points_bounds(ends: Bounds) -> str:
    """`[−1.0, +9.4]`, empty when there is no interval."""
    return "" if ends is None else f"[{points(ends[0])}, {points(ends[1])}]"


def p_value(p: float | None) -> str:
    """`0.032`, `< 0.001`."""
    if p is None:
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def around_half(value: float | None) -> float | None:
    """A difference from −1 to 1 as a place from 0 to 1, for the drawn interval."""
    return None if value is None else (1 + value) / 2
