"""What to change, as pure functions of the readings; each cites the numbers that it rests on.

- Nothing is said without a measurement: a value that is not known is evidence of nothing.
- A mean is over the samples of the last minutes (WINDOW_S), and of at least MIN_SAMPLES.
- Every function takes the machine as it was seen and gives the recommendations of one kind, none when all is well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from gristmill.service.readings import Reading
from gristmill.service.units import UnitView
from gristmill.types import JsonDict

WINDOW_S, MIN_SAMPLES = 120.0, 10
HALF_EMPTY_RATIO, NEARLY_FULL_RATIO = 0.5, 0.97
BUSY_RATIO, LOW_RATIO, IDLE_RATIO = 0.5, 0.3, 0.1
THROTTLED_RATIO = 0.1
HOT_CELSIUS = 85
FAILED_RATIO = 0.01
STALL_S = 900.0
#: Of many workers with the same trouble.
MOST_CITED = 8
#: As gpus.busy_memory_mib is by default.
FOREIGN_MIB = 1024
_THERMAL = frozenset({"sw_thermal_slowdown", "hw_thermal_slowdown"})
_POWER = frozenset({"sw_power_cap", "hw_power_brake_slowdown"})
_OTHER = frozenset({"hw_slowdown", "reliability", "board_limit"})
#: Engines whose retries, of a run, are batches that did not fit.
_HALVING = frozenset({"static", "continuous"})

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that a recommendation rests on."""

    subject: str
    measure: str
    value: float | str
    unit: str
    #: What it was compared with.
    limit: float | str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Something to change, and why."""

    kind: str
    severity: Severity
    advice: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class ActiveRun:
    """A run that is at work, for these functions."""

    id: str
    units: tuple[UnitView, ...]
    #: Since any of its rows moved.
    quiet_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The machine at one time."""

    gpus: tuple[Reading, ...] = ()
    runs: tuple[ActiveRun, ...] = ()


def recommend(seen: Seen) -> list[Recommendation]:
    """All recommendations, the most urgent first."""
    found = [each for function in FUNCTIONS for each in function(seen)]
    return sorted(found, key=lambda each: ("critical", "warning", "info").index(each.severity))


def memory_half_empty(seen: Seen) -> Iterator[Recommendation]:
    """A GPU at work with at least half of its memory free could take more rows at a time."""
    for reading in _held(seen):
        busy, used = _mean(reading, "utilization_ratio"), _peak_memory_ratio(reading)
        if busy is not None and used is not None and busy >= BUSY_RATIO and used < HALF_EMPTY_RATIO:
            yield Recommendation(
                "memory_half_empty",
                "info",
                f"{_name(reading)} works with memory to spare: larger batches (raise or remove "
                "models.*.max_batch_rows; trainings.*.micro_batch_rows), or a model on fewer GPUs (gpus_per_model)",
                (
                    Evidence(_name(reading), "peak of memory in use", used, "ratio", f"< {HALF_EMPTY_RATIO}"),
                    Evidence(_name(reading), "mean utilization", busy, "ratio", f">= {BUSY_RATIO}"),
                ),
            )


def memory_nearly_full(seen: Seen) -> Iterator[Recommendation]:
    """A GPU at the edge of its memory halves its batches when it runs over."""
    for reading in _held(seen):
        used = _peak_memory_ratio(reading)
        if used is not None and used >= NEARLY_FULL_RATIO:
            yield Recommendation(
                "memory_nearly_full",
                "warning",
                f"{_name(reading)} is at the edge of its memory: smaller batches (models.*.max_batch_rows), a shorter "
                "context (context_tokens), or a model on more GPUs (gpus_per_model)",
                (Evidence(_name(reading), "peak of memory in use", used, "ratio", f">= {NEARLY_FULL_RATIO}"),),
            )


def idle_in_group(seen: Seen) -> Iterator[Recommendation]:
    """Of the GPUs that one job holds, one works and another does not: the layers run one after the other."""
    groups: dict[tuple[int, str], list[Reading]] = defaultdict(list)
    for reading in _held(seen):
        assert reading.holder is not None
        groups[reading.holder.pid, reading.holder.purpose].append(reading)
    for (_, purpose), members in groups.items():
        busy = {_name(each): mean for each in members if (mean := _mean(each, "utilization_ratio")) is not None}
        if len(busy) > 1 and min(busy.values()) < IDLE_RATIO and max(busy.values()) >= BUSY_RATIO:
            yield Recommendation(
                "idle_in_group",
                "warning",
                f"{purpose}: a GPU of the group waits for the others: use tensor parallelism "
                "(models.*.parallel: tensor), by which all work at once, or fewer GPUs (gpus_per_model)",
                tuple(
                    Evidence(name, "mean utilization", mean, "ratio", f"< {IDLE_RATIO} beside >= {BUSY_RATIO}")
                    for name, mean in busy.items()
                ),
            )


def low_utilization(seen: Seen) -> Iterator[Recommendation]:
    """A GPU that a job holds and hardly uses waits for the processor, the disk, or too small batches."""
    in_idle_groups = {each.subject for found in idle_in_group(seen) for each in found.evidence}
    for reading in _held(seen):
        busy = _mean(reading, "utilization_ratio")
        if busy is not None and busy < LOW_RATIO and _name(reading) not in in_idle_groups:
            yield Recommendation(
                "low_utilization",
                "info",
                f"{_name(reading)} is held and mostly waits: look whether it still loads (local_copy for slow disks), "
                "use engine vllm or continuous, or larger batches",
                (Evidence(_name(reading), "mean utilization", busy, "ratio", f"< {LOW_RATIO}"),),
            )


def throttled_by_heat(seen: Seen) -> Iterator[Recommendation]:
    """Clocks are held back by heat."""
    return _throttled(seen, "throttled_by_heat", _THERMAL, "is held back by heat: see to its cooling (air flow, fans)")


def throttled_by_power(seen: Seen) -> Iterator[Recommendation]:
    """Clocks are held back by the power limit."""
    advice = "is held back by its power limit: raise it (nvidia-smi -pl), or check the supply"
    return _throttled(seen, "throttled_by_power", _POWER, advice)


def throttled_by_hardware(seen: Seen) -> Iterator[Recommendation]:
    """Clocks are held back by the board for another reason."""
    advice = "is held back by its board: see nvidia-smi -q -d PERFORMANCE, its cooling and its power supply"
    return _throttled(seen, "throttled_by_hardware", _OTHER, advice)


def hot(seen: Seen) -> Iterator[Recommendation]:
    """A GPU is hot, whether or not it is held back yet."""
    for reading in seen.gpus:
        celsius = _mean(reading, "temperature_celsius")
        if celsius is not None and celsius >= HOT_CELSIUS:
            yield Recommendation(
                "hot",
                "warning",
                f"{_name(reading)} is hot: see to its cooling before it is held back",
                (Evidence(_name(reading), "mean temperature", celsius, "celsius", f">= {HOT_CELSIUS}"),),
            )


def free_gpus(seen: Seen) -> Iterator[Recommendation]:
    """Rows wait, and GPUs are held by nobody."""
    free = [each for each in seen.gpus if each.holder is None and each.set_aside is None and not _is_filled(each)]
    left = sum(map(_rows_left, seen.runs))
    if free and left and any(each.holder is not None for each in seen.gpus):
        yield Recommendation(
            "free_gpus",
            "info",
            "rows wait while GPUs are free: start with more (gpus of POST /v1/runs, --resources gpu=N), or raise "
            "models.*.shards_per_worker",
            (
                Evidence(", ".join(map(_name, free)), "held by a job", "no", "", "yes"),
                Evidence(", ".join(run.id for run in seen.runs), "rows left", left, "rows", "> 0"),
            ),
        )


def set_aside(seen: Seen) -> Iterator[Recommendation]:
    """A GPU had a fault, or does not answer."""
    for reading in seen.gpus:
        why = "it does not answer" if reading.lost else reading.set_aside
        if why is not None:
            yield Recommendation(
                "set_aside",
                "critical",
                f"{_name(reading)} is not used until it is repaired: reset it (nvidia-smi --gpu-reset, or a reboot)",
                (Evidence(_name(reading), "why", why, "", "none"),),
            )


def filled_by_others(seen: Seen) -> Iterator[Recommendation]:
    """A GPU without a lease is full: jobs pass over it."""
    for reading in seen.gpus:
        if reading.holder is None and _is_filled(reading):
            yield Recommendation(
                "filled_by_others",
                "warning",
                f"{_name(reading)} is filled by processes without a lease and is passed over: end them, or raise "
                "gpus.busy_memory_mib",
                (
                    Evidence(
                        _name(reading), "memory in use", _number(reading.memory_used_mib), "MiB", f"> {FOREIGN_MIB}"
                    ),
                ),
            )


def failing_rows(seen: Seen) -> Iterator[Recommendation]:
    """Rows fail."""
    for run in seen.runs:
        for unit in run.units:
            if unit.rows and unit.failed / unit.rows >= FAILED_RATIO:
                yield Recommendation(
                    "failing_rows",
                    "warning",
                    f"{unit.unit} of run {run.id} has failed rows: its log in results/ names each with the reason",
                    (Evidence(unit.unit, "failed rows", unit.failed / unit.rows, "ratio", f">= {FAILED_RATIO}"),),
                )


def halved_batches(seen: Seen) -> Iterator[Recommendation]:
    """Batches ran out of memory: what they had computed is lost, and they begin again with fewer rows."""
    for run_id, unit in ((run.id, unit) for run in seen.runs for unit in run.units if unit.kind == "run"):
        halved = [worker for worker in unit.workers if worker.engine in _HALVING and worker.retries]
        if halved:
            yield Recommendation(
                "halved_batches",
                "info",
                f"{unit.unit} of run {run_id} runs out of memory and begins batches again: set models.*.max_batch_rows "
                "to what fits, or a smaller context (context_tokens)",
                tuple(
                    Evidence(f"{unit.unit} {worker.shard}", "batches begun again", worker.retries, "batches", "> 0")
                    for worker in halved[:MOST_CITED]
                ),
            )


def stalled(seen: Seen) -> Iterator[Recommendation]:
    """No row has moved for long."""
    for run in seen.runs:
        left = _rows_left(run)
        if run.quiet_s >= STALL_S and left:
            yield Recommendation(
                "stalled",
                "warning",
                f"run {run.id} has made no progress: see its log, whether jobs wait for GPUs that others hold, and "
                "gpus.stall_minutes",
                (
                    Evidence(run.id, "time without a new row", run.quiet_s, "seconds", f">= {STALL_S:g}"),
                    Evidence(run.id, "rows left", left, "rows", "> 0"),
                ),
            )


FUNCTIONS: tuple[Callable[[Seen], Iterable[Recommendation]], ...] = (
    memory_half_empty,
    memory_nearly_full,
    idle_in_group,
    low_utilization,
    throttled_by_heat,
    throttled_by_power,
    throttled_by_hardware,
    hot,
    free_gpus,
    set_aside,
    filled_by_others,
    failing_rows,
    halved_batches,
    stalled,
)


def _throttled(seen: Seen, kind: str, reasons: frozenset[str], advice: str) -> Iterator[Recommendation]:
    for reading in seen.gpus:
        known = [each["throttle_reasons"] for each in _recent(reading) if each["throttle_reasons"] is not None]
        if len(known) < MIN_SAMPLES:
            continue
        share = sum(bool(reasons & set(each)) for each in known) / len(known)
        if share >= THROTTLED_RATIO:
            named = ", ".join(sorted(reasons & {reason for each in known for reason in each}))
            evidence = Evidence(_name(reading), f"samples with {named}", share, "ratio", f">= {THROTTLED_RATIO}")
            yield Recommendation(kind, "warning", f"{_name(reading)} {advice}", (evidence,))


def _held(seen: Seen) -> list[Reading]:
    return [each for each in seen.gpus if each.holder is not None]


def _is_filled(reading: Reading) -> bool:
    return (reading.memory_used_mib or 0) > FOREIGN_MIB


def _recent(reading: Reading) -> list[JsonDict]:
    """The samples of the window; those from before the present job began say nothing about it."""
    if not reading.samples:
        return []
    begin = reading.samples[-1]["time_unix_s"] - WINDOW_S
    if reading.holder is not None:
        begin = max(begin, reading.holder.since)
    return [each for each in reading.samples if each["time_unix_s"] >= begin]


def _mean(reading: Reading, key: str) -> float | None:
    known = [each[key] for each in _recent(reading) if each[key] is not None]
    return round(float(fmean(known)), 4) if len(known) >= MIN_SAMPLES else None


def _peak_memory_ratio(reading: Reading) -> float | None:
    known = [each["memory_used_mib"] for each in _recent(reading) if each["memory_used_mib"] is not None]
    if len(known) < MIN_SAMPLES or not reading.gpu.memory_total_mib:
        return None
    return round(float(max(known)) / reading.gpu.memory_total_mib, 4)


def _rows_left(run: ActiveRun) -> int:
    """Of the units whose rows are known."""
    return sum(max(0, unit.rows - unit.done) for unit in run.units if unit.rows is not None)


def _number(value: Any) -> float:
    return float(value or 0)


def _name(reading: Reading) -> str:
    return f"GPU {reading.gpu.index}"
