"""How fast each job was over time, from what the jobs said of themselves while they ran (gristmill.live.writing).

- A job's tokens are known at some moments, each a few seconds after the one before; between two they are taken to have
  come evenly. Its speed is a mean over one of BLOCKS stretches of the axis, or over a whole job that is shorter.
- Attempts that failed or were stopped are jobs of their own. Files that were removed are missed by nobody: the numbers
  of the whole are in the manifests.
- A clock that was set back, or a count that fell, is no speed: such a moment is left out.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.live.files import json_object
from gristmill.live.writing import EARLIER, FORMAT
from gristmill.report.axis import Axis, Stretch
from gristmill.values import count, number

BLOCKS = 100


@dataclass(frozen=True, slots=True)
class Job:
    """An attempt at a shard: the moments at which its tokens were known, the first without any; at least two."""

    unit: str
    shard: str
    moments: tuple[tuple[float, int], ...]

    @property
    def span(self) -> Stretch:
        """From when to when it made tokens, in seconds since 1970."""
        return self.moments[0][0], self.moments[-1][0]

    @property
    def tokens(self) -> int:
        """All that it made."""
        return self.moments[-1][1]

    @property
    def per_second(self) -> float:
        """Its mean speed."""
        return self.tokens / (self.moments[-1][0] - self.moments[0][0])


@dataclass(frozen=True, slots=True)
class Speed:
    """A job's mean over a stretch of the axis: the middle of it, in seconds, and tokens a second."""

    at: float
    per_second: float


@dataclass(frozen=True, slots=True)
class Lane:
    """A unit's jobs, each with its speeds."""

    unit: str
    jobs: tuple[Job, ...]
    speeds: tuple[tuple[Speed, ...], ...]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Everything that is drawn, and the axis's length and cuts."""

    lanes: list[Lane]
    seconds: float
    cuts: list[float]


def read_jobs(folders: Mapping[str, Path]) -> list[Job]:
    """The jobs that told of tokens, by unit, the earliest first.

    Args:
        folders: unit → its live/ folder, which need not exist.
    """
    found: list[Job] = []
    for unit, folder in folders.items():
        files = [path for place in (folder, folder / EARLIER) for path in sorted(place.glob("*.jsonl"))]
        jobs = [job for path in files if path.is_file() for job in _read_job(unit, path)]
        found += sorted(jobs, key=lambda job: (job.span, job.shard))
    return found


def throughput_of(jobs: Sequence[Job], axis: Axis) -> Throughput | None:
    """The jobs on an axis that has all of their spans; None when there is none."""
    if not jobs:
        return None
    grouped = itertools.groupby(jobs, key=lambda job: job.unit)
    lanes = [
        Lane(unit, (made := tuple(group)), tuple(tuple(_speeds(job, axis)) for job in made)) for unit, group in grouped
    ]
    return Throughput(lanes, axis.seconds, axis.cuts)


def _read_job(unit: str, path: Path) -> Iterator[Job]:
    """The job of a file; nothing where it says nothing usable."""
    try:
        first, *lines = map(json_object, path.read_bytes().splitlines() or [b""])
    except OSError:  # removed meanwhile
        return
    if first is None or first.get("gristmill_live") != FORMAT:
        return
    moments: list[tuple[float, int]] = []
    for line in lines:
        line = line or {}
        at, seconds, tokens = number(line.get("at")), number(line.get("seconds")), count(line.get("tokens"))
        if at is None or seconds is None or tokens is None:
            continue
        if not moments:
            moments.append((at - seconds, 0))
        if at > moments[-1][0] and tokens >= moments[-1][1]:
            moments.append((at, tokens))
    if moments and moments[-1][1]:
        yield Job(unit, str(first.get("shard")), tuple(moments))


def _speeds(job: Job, axis: Axis) -> Iterator[Speed]:
    """The job's speed over each block of the axis that it worked in."""
    moments = [(axis.at(at), tokens) for at, tokens in job.moments]
    width = axis.seconds / BLOCKS
    start, end = moments[0][0], moments[-1][0]
    inner = [block * width for block in range(BLOCKS) if start < block * width < end]
    # A rest at either end is too short to tell a speed: the blocks there are joined with their neighbours.
    borders = [start, *[border for border in inner if start + width / 2 <= border <= end - width / 2], end]
    known = [_tokens_at(border, moments) for border in borders]
    for (left, before), (right, after) in itertools.pairwise(zip(borders, known, strict=True)):
        yield Speed((left + right) / 2, (after - before) / (right - left))


def _tokens_at(place: float, moments: Sequence[tuple[float, int]]) -> float:
    """Tokens made until then, if they came evenly between two moments."""
    after = min(max(bisect_right(moments, place, key=lambda moment: moment[0]), 1), len(moments) - 1)
    (left, before), (right, total) = moments[after - 1], moments[after]
    return before + (total - before) * (min(place, right) - left) / (right - left)
