"""What a run is doing at one moment, as values: frozen, and JSON by dataclasses.asdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["run", "judge", "logits", "training"]
#: waiting: not begun, or its turn will come; running: a worker is at it; stopped: begun, and nobody is at it;
#: failed: as stopped, and a worker's last word was an error.
UnitState = Literal["waiting", "running", "done", "stopped", "failed"]
#: waiting: not begun. starting: reads what is known. queued: waits for GPUs. loading: the model is on its way. running.
#: done, failed, stopped (by a signal): its last word. lost: its process is gone without one. silent: it runs on another
#: host and said nothing for SILENT_S.
WorkerState = Literal[
    "waiting", "starting", "queued", "loading", "running", "done", "failed", "stopped", "lost", "silent"
]
#: A worker in one of these is at work.
ALIVE: tuple[WorkerState, ...] = ("starting", "queued", "loading", "running")
#: Not done, and nobody is at it.
OVER: tuple[WorkerState, ...] = ("failed", "stopped", "lost")
#: What a worker may say of itself.
PHASES: tuple[WorkerState, ...] = tuple(state for state in get_args(WorkerState) if state not in ("lost", "silent"))
#: running: its process lives on this host. unknown: it was started on another host. none: there is none.
Owner = Literal["running", "unknown", "none"]


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of a worker; None where nothing is known, as without a driver or before the first sample."""

    index: int | None
    uuid: str
    name: str
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """One job of a unit. Rows are steps in a training, and windows of text for a teacher's logits."""

    shard: str
    #: None before it has begun.
    host: str | None
    state: WorkerState
    #: Rows with an answer, those among them that the journal knew before.
    done: int
    #: None while it is not known.
    total: int | None
    failed: int
    #: Tokens that this job made since it began.
    tokens: int
    #: Over the last 30 s; None while nothing is known.
    tokens_per_second_now: float | None
    #: Since its model was loaded.
    tokens_per_second_overall: float | None
    #: Rows in work at the same time; None where the engine does not say.
    batch_rows: int | None
    #: Batches that were halved, requests sent again, and judges asked again.
    retries: int
    engine: str | None
    devices: tuple[Device, ...]
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class UnitProgress:
    """A run, a judge on its target, a teacher's texts or a training."""

    #: Its folder below results/: `runs/direct`, `judges/grader/direct`.
    unit: str
    kind: Kind
    done: int
    total: int | None
    #: Rows that failed; they are asked again, and are not in `done`.
    failed: int
    tokens: int
    tokens_per_second_now: float | None
    tokens_per_second_overall: float | None
    seconds_left: float | None
    workers: tuple[WorkerProgress, ...]
    #: The last few, the newest last. Texts of models, servers and libraries: escape them before they are shown.
    errors: tuple[str, ...]
    state: UnitState


@dataclass(frozen=True, slots=True)
class Progress:
    """All units of a results folder."""

    units: tuple[UnitProgress, ...]
    #: Seconds since 1970.
    at: float
    #: Whether a Snakemake is at work on the results, as its lock file says.
    owner: Owner = "none"
    #: False: there is no such folder (yet, or any more).
    exists: bool = True

    @property
    def is_live(self) -> bool:
        """Whether anything may still change: a Snakemake may be there, or a worker is."""
        return self.owner != "none" or any(unit.state == "running" for unit in self.units)
