"""When which GPU worked for what, from the samples of all units, small enough to draw.

- A lane is a GPU of a host, a span is a job's hold of it, a block is what it measured over one of BLOCKS stretches.
- Samples are read twice, first for the spans and then for the blocks, so that a week of them needs no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.gpu.usage import read_folder
from gristmill.report.axis import Axis, Stretch
from gristmill.types import JsonDict
from gristmill.values import count

BLOCKS = 200


@dataclass(frozen=True, slots=True)
class Lane:
    """A GPU of a host."""

    name: str
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """A job on a GPU: seconds on the axis, and the places of its lane and its unit."""

    lane: int
    unit: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Block(Span):
    """A stretch of a job; what the card did not tell in it is None."""

    #: Mean share of the time in which a kernel ran.
    busy: float | None
    #: The most memory in use.
    memory_mib: float | None
    #: Mean power.
    watts: float | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything that is drawn."""

    lanes: list[Lane]
    units: list[str]
    jobs: list[Span]
    blocks: list[Block]
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
    totals: dict[str, int] = field(default_factory=dict)  # lane → MiB of its GPU
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
        _read_jobs(folder, unit, held)
    return held


def timeline_of(held: Held, axis: Axis) -> Timeline | None:
    """The timeline on an axis that has all of its spans; None when there is no sample."""
    if not held.jobs:
        return None
    spans = [Span(job.lane, job.unit, axis.at(job.first), axis.at(job.last)) for job in held.jobs.values()]
    blocks = _blocks(list(held.folders.values()), held.jobs, axis)
    lanes = [Lane(name, held.totals.get(name)) for name in held.lanes]
    return Timeline(lanes, list(held.folders), spans, blocks, axis.cuts, axis.seconds)


def _read_jobs(folder: Path, unit: int, held: Held) -> None:
    """Add a unit's jobs, and the lanes they need."""
    names: dict[tuple[str, str], str] = {}
    for line in read_folder(folder):
        if "uuid" not in line:
            for gpu in line.get("devices", ()):
                names[line["session"], gpu["uuid"]] = name = _lane_name(line, gpu)
                if total := count(gpu.get("memory_total_mib")):
                    held.totals[name] = total
            continue
        key, time = (line["session"], line["uuid"]), line["time_unix_s"]
        if key not in held.jobs:
            lane = held.lanes.setdefault(names.get(key) or str(line["uuid"]), len(held.lanes))
            held.jobs[key] = _Job(lane, unit, time, time)
        held.jobs[key].last = max(held.jobs[key].last, time)


def _lane_name(header: JsonDict, gpu: JsonDict) -> str:
    part = f" {gpu['uuid']}" if gpu["uuid"].startswith("MIG-") else ""
    return f"{header['host']} · GPU {gpu['index']}{part} · {gpu['name']}"


@dataclass(slots=True)
class _Sum:
    """The samples of a block."""

    busy: list[float] = field(default_factory=lambda: [0.0, 0])
    watts: list[float] = field(default_factory=lambda: [0.0, 0])
    memory_mib: float | None = None

    def add(self, sample: JsonDict) -> None:
        for total, value in ((self.busy, sample["utilization_ratio"]), (self.watts, sample["power_watts"])):
            if value is not None:
                total[:] = total[0] + value, total[1] + 1
        if sample["memory_used_mib"] is not None:
            self.memory_mib = max(self.memory_mib or 0.0, sample["memory_used_mib"])


def _blocks(folders: Sequence[Path], jobs: Mapping[tuple[str, str], _Job], axis: Axis) -> list[Block]:
    """What each job measured over the stretches of the axis; a sample counts where it was taken."""
    width = axis.seconds / BLOCKS
    sums: dict[tuple[str, str, int], _Sum] = {}
    for line in (line for folder in folders for line in read_folder(folder) if "uuid" in line):
        place = int(axis.at(line["time_unix_s"]) / width) if width else 0
        sums.setdefault((line["session"], line["uuid"], min(place, BLOCKS - 1)), _Sum()).add(line)
    return [
        Block(
            job.lane,
            job.unit,
            *_within(job, place * width, width, axis),
            _mean(total.busy),
            total.memory_mib,
            _mean(total.watts),
        )
        for (session, uuid, place), total in sums.items()
        for job in [jobs[session, uuid]]
    ]


def _mean(total: list[float]) -> float | None:
    return total[0] / total[1] if total[1] else None


def _within(job: _Job, start: float, width: float, axis: Axis) -> tuple[float, float]:
    """A block's stretch, not longer than its job."""
    return max(start, axis.at(job.first)), min(start + width, axis.at(job.last))
