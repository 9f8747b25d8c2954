"""When which GPU worked for what, from the samples of all runs and judges, small enough to draw.

- A lane is a GPU of a host, a span is a job's hold of it, a block is its mean utilization over one of BLOCKS stretches.
- Samples are read twice, first for the spans and then for the blocks, so that a week of them needs no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.gpu.usage import read_folder
from gristmill.report.axis import Axis, Stretch
from gristmill.types import JsonDict

BLOCKS = 200


@dataclass(frozen=True, slots=True)
class Span:
    """A job on a GPU, or a block of it: seconds on the axis, the place of its unit, and how busy (None: not known)."""

    lane: int
    unit: int
    start: float
    end: float
    busy: float | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything that is drawn."""

    lanes: list[str]
    units: list[str]
    jobs: list[Span]
    blocks: list[Span]
    #: Places on the axis where a pause was shortened.
    cuts: list[float]
    seconds: float


@dataclass(slots=True)
class _Job:
    """One device in one session, in wall-clock seconds since 1970."""

    lane: int
    unit: int
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Held:
    """Which job held which GPU from when to when."""

    folders: Mapping[str, Path]
    lanes: dict[str, int] = field(default_factory=dict)
    jobs: dict[tuple[str, str], _Job] = field(default_factory=dict)

    @property
    def spans(self) -> list[Stretch]:
        """From when to when each job held a GPU."""
        return [(job.first, job.last) for job in self.jobs.values()]


def read_held(folders: Mapping[str, Path]) -> Held:
    """Read the units' folders of samples once.

    Args:
        folders: unit → its gpu/ folder, which need not exist.
    """
    held = Held(folders)
    for unit, folder in enumerate(folders.values()):
        _read_jobs(folder, unit, held.lanes, held.jobs)
    return held


def timeline_of(held: Held, axis: Axis) -> Timeline | None:
    """The timeline on an axis that has all of its spans; None when there is no sample."""
    if not held.jobs:
        return None
    spans = [Span(job.lane, job.unit, axis.at(job.first), axis.at(job.last)) for job in held.jobs.values()]
    blocks = _blocks(list(held.folders.values()), held.jobs, axis)
    return Timeline(list(held.lanes), list(held.folders), spans, blocks, axis.cuts, axis.seconds)


def _read_jobs(folder: Path, unit: int, lanes: dict[str, int], jobs: dict[tuple[str, str], _Job]) -> None:
    """Add a unit's jobs, and the lanes they need."""
    names: dict[tuple[str, str], str] = {}
    for line in read_folder(folder):
        if "uuid" not in line:
            names |= {(line["session"], gpu["uuid"]): _lane_name(line, gpu) for gpu in line.get("devices", ())}
            continue
        key, time = (line["session"], line["uuid"]), line["time_unix_s"]
        if key not in jobs:
            lane = lanes.setdefault(names.get(key) or str(line["uuid"]), len(lanes))
            jobs[key] = _Job(lane, unit, time, time)
        jobs[key].last = max(jobs[key].last, time)


def _lane_name(header: JsonDict, gpu: JsonDict) -> str:
    part = f" {gpu['uuid']}" if gpu["uuid"].startswith("MIG-") else ""
    return f"{header['host']} · GPU {gpu['index']}{part} · {gpu['name']}"


def _blocks(folders: Sequence[Path], jobs: Mapping[tuple[str, str], _Job], axis: Axis) -> list[Span]:
    """Mean utilization of each job over the stretches of the axis; a sample counts where it was taken."""
    width = axis.seconds / BLOCKS
    sums: dict[tuple[str, str, int], list[float]] = {}
    for line in (line for folder in folders for line in read_folder(folder)):
        if line.get("utilization_ratio") is not None:
            place = int(axis.at(line["time_unix_s"]) / width) if width else 0
            total = sums.setdefault((line["session"], line["uuid"], min(place, BLOCKS - 1)), [0.0, 0])
            total[0], total[1] = total[0] + line["utilization_ratio"], total[1] + 1
    return [
        Span(job.lane, job.unit, *_within(job, place * width, width, axis), busy / count)
        for (session, uuid, place), (busy, count) in sums.items()
        for job in [jobs[session, uuid]]
    ]


def _within(job: _Job, start: float, width: float, axis: Axis) -> tuple[float, float]:
    """A block's stretch, not longer than its job."""
    return max(start, axis.at(job.first)), min(start + width, axis.at(job.last))
