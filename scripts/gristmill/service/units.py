"""The units of a run as answers, events and records have them: what gristmill.live reads, in base units.

- Texts of workers, servers and logs are cleaned as in a terminal (live/words.py); they are data, never markup.
- What is not known is null, never 0: a unit's rows before its requests are there, a speed before the first token.
- A run may have thousands of workers. `cut` leaves those that are looked at first: of a whole run at most MOST_WORKERS
  that are not done. `worker_states` counts all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from pydantic import BaseModel, Field

from gristmill.gpu.monitor import MIB
from gristmill.live import Device, UnitProgress, WorkerProgress
from gristmill.live.snapshot import Kind, UnitState, WorkerState
from gristmill.live.words import WORKER_ORDER, clean
from gristmill.types import JsonDict

#: Of a run, wherever not all are given.
MOST_WORKERS = 64
_KINDS: dict[str, Kind] = {"runs": "run", "judges": "judge", "logits": "logits", "trainings": "training"}


class DeviceView(BaseModel):
    """A GPU of a worker, by its newest sample."""

    index: int | None
    uuid: str
    name: str
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    utilization_ratio: float | None
    power_watts: float | None
    temperature_celsius: float | None

    @classmethod
    def of(cls, device: Device) -> DeviceView:
        """The same in bytes."""
        return cls(
            index=device.index,
            uuid=clean(device.uuid),
            name=clean(device.name),
            memory_total_bytes=_bytes(device.memory_total_mib),
            memory_used_bytes=_bytes(device.memory_used_mib),
            utilization_ratio=device.utilization_ratio,
            power_watts=device.power_watts,
            temperature_celsius=device.temperature_celsius,
        )


class WorkerView(BaseModel):
    """One job of a unit."""

    shard: str
    host: str | None
    state: WorkerState
    rows: int | None = Field(description="of its shard; null while it is not known")
    done: int
    failed: int
    tokens: int = Field(description="made since the job began")
    tokens_per_second_now: float | None = Field(description="over the last 30 s")
    tokens_per_second_overall: float | None = Field(description="since the model was loaded")
    seconds_left: float | None
    batch_rows: int | None = Field(description="rows in work at the same time")
    retries: int = Field(description="batches halved, requests sent again, judges asked again")
    engine: str | None
    devices: list[DeviceView]

    @classmethod
    def of(cls, worker: WorkerProgress) -> WorkerView:
        """What was read of it."""
        return cls(
            shard=clean(worker.shard),
            host=None if worker.host is None else clean(worker.host),
            state=worker.state,
            rows=worker.total,
            done=worker.done,
            failed=worker.failed,
            tokens=worker.tokens,
            tokens_per_second_now=worker.tokens_per_second_now,
            tokens_per_second_overall=worker.tokens_per_second_overall,
            seconds_left=worker.seconds_left,
            batch_rows=worker.batch_rows,
            retries=worker.retries,
            engine=None if worker.engine is None else clean(worker.engine),
            devices=[DeviceView.of(device) for device in worker.devices],
        )


class UnitView(BaseModel):
    """How far a run, a judge on its target, a teacher's texts or a training is."""

    unit: str = Field(description="its folder below results/")
    kind: Kind
    state: UnitState
    rows: int | None = Field(description="asked for: rows, windows of a teacher, steps of a training; null: not known")
    done: int
    failed: int
    tokens: int | None = Field(description="null for runs of a version that did not keep them")
    tokens_per_second_now: float | None = Field(description="over the last 30 s")
    tokens_per_second_overall: float | None = Field(description="since the model was loaded")
    seconds_left: float | None
    errors: list[str] = Field(description="the last few, the newest last")
    worker_states: dict[WorkerState, int] = Field(description="how many of all its workers are in each state")
    workers: list[WorkerView] = Field(
        description="all in GET /v1/runs/{id} while the run is at work; elsewhere those not done, of units not done, "
        f"at most {MOST_WORKERS} of a run, failed ones first"
    )

    @classmethod
    def of(cls, unit: UnitProgress) -> UnitView:
        """What was read of it, with all its workers."""
        return cls(
            unit=clean(unit.unit),
            kind=unit.kind,
            state=unit.state,
            rows=unit.total,
            done=unit.done,
            failed=unit.failed,
            tokens=unit.tokens,
            tokens_per_second_now=unit.tokens_per_second_now,
            tokens_per_second_overall=unit.tokens_per_second_overall,
            seconds_left=unit.seconds_left,
            errors=[clean(text) for text in unit.errors],
            worker_states=dict(Counter(worker.state for worker in unit.workers)),
            workers=[WorkerView.of(worker) for worker in unit.workers],
        )


def cut(units: Sequence[UnitView]) -> list[UnitView]:
    """The units with the workers that are looked at first, at most MOST_WORKERS of all units together."""
    at_work = [(place, unit) for place, unit in enumerate(units) if unit.state != "done"]
    found = [(place, worker) for place, unit in at_work for worker in unit.workers if worker.state != "done"]
    found.sort(key=lambda pair: WORKER_ORDER.index(pair[1].state))
    kept = defaultdict[int, list[WorkerView]](list)
    for place, worker in found[:MOST_WORKERS]:
        kept[place].append(worker)
    return [unit.model_copy(update={"workers": kept[place]}) for place, unit in enumerate(units)]


def units_as_json(units: Sequence[UnitView]) -> list[JsonDict]:
    """The units for a record."""
    return [unit.model_dump(mode="json") for unit in cut(units)]


def rows_of(units: Sequence[UnitView]) -> int | None:
    """What all units together are asked for; None while it is not known of each, or nothing is asked yet."""
    known = [unit.rows for unit in units if unit.rows is not None]
    return sum(known) if known and len(known) == len(units) else None


def recorded(unit: JsonDict, succeeded: bool) -> UnitView:
    """A unit of a run that has ended, as its record has it.

    A version before kept no more than unit, rows, done and failed, and of a training the steps made as its rows.

    Raises:
        ValueError, KeyError: it is none.
    """
    if "state" in unit:
        return UnitView.model_validate(unit)
    kind = _KINDS[unit["unit"].partition("/")[0]]
    rows = unit["rows"] if succeeded or kind != "training" else None
    is_done = succeeded or (rows is not None and unit["done"] == rows > 0)
    return UnitView(
        unit=unit["unit"],
        kind=kind,
        state="done" if is_done else "stopped",
        rows=rows,
        done=unit["done"],
        failed=unit["failed"],
        tokens=None,
        tokens_per_second_now=None,
        tokens_per_second_overall=None,
        seconds_left=None,
        errors=[],
        worker_states={},
        workers=[],
    )


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * MIB
