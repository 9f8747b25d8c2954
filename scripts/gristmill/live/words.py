"""What is going on, in words: lines for a pipe and a snapshot, and the cells of the terminal's tables.

Texts of models, servers, logs and file names pass through `clean`: what a terminal could take for a command stands
there as its escape. Nothing here is markup.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from gristmill.live.snapshot import ALIVE, Device, Progress, UnitProgress, WorkerProgress

#: What is looked at first stands first, and what there is no room for is at the end.
UNIT_ORDER = ("running", "failed", "stopped", "waiting", "done")
WORKER_ORDER = ("failed", "lost", "silent", "running", "loading", "queued", "starting", "stopped", "waiting", "done")
#: Of an error in a line or a table.
SHOWN_CHARACTERS = 300


def clean(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """A text on one line without anything that a terminal obeys or that turns the direction of writing."""
    shown = text[: most + 1]
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in shown)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def rows(done: int, total: int | None) -> str:
    """`120/500`; `120/?` while the total is not known."""
    return f"{done}/{'?' if total is None else total}"


def rate(tokens_per_second: float | None) -> str:
    """`345.6`, or `-` where nothing is known."""
    if tokens_per_second is None:
        return "-"
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 1000 else f"{tokens_per_second:.1f}"


def duration(seconds: float | None) -> str:
    """`0:01:10`, or `-` where nothing is known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def gpu(device: Device) -> str:
    """`GPU 0 93% 70/80 GiB`, as far as it is known."""
    name = f"GPU {device.index}" if device.index is not None else clean(device.uuid, 20)
    used = "" if device.utilization_ratio is None else f" {device.utilization_ratio:.0%}"
    if device.memory_used_mib is None:
        return name + used
    total = "" if device.memory_total_mib is None else f"/{device.memory_total_mib / 1024:.0f}"
    return f"{name}{used} {device.memory_used_mib / 1024:.0f}{total} GiB"


def noun(unit: UnitProgress) -> str:
    """What is counted: rows, steps or windows."""
    return {"training": "steps", "logits": "windows"}.get(unit.kind, "rows")


def unit_line(unit: UnitProgress) -> str:
    """`runs/direct: running, 120/500 rows, 345.6 tokens/s (300.1 overall), 0:01:10 left, 2 workers`."""
    parts = [unit.state, f"{rows(unit.done, unit.total)} {noun(unit)}"]
    if unit.failed:
        parts.append(f"{unit.failed} failed")
    if unit.state == "running":
        parts.append(f"{rate(unit.tokens_per_second_now)} tokens/s ({rate(unit.tokens_per_second_overall)} overall)")
        parts.append(f"{duration(unit.seconds_left)} left")
        alive = sum(worker.state in ALIVE for worker in unit.workers)
        parts.append(f"{alive} worker{'s' if alive != 1 else ''}")
    elif unit.tokens:
        parts.append(f"{unit.tokens} tokens")
    return f"{clean(unit.unit)}: {', '.join(parts)}"


def worker_line(worker: WorkerProgress) -> str:
    """One worker of a snapshot, indented."""
    parts = [worker.state, rows(worker.done, worker.total)]
    parts += [f"{worker.failed} failed"] if worker.failed else []
    if worker.state in ALIVE:
        parts.append(f"{rate(worker.tokens_per_second_now)} tokens/s")
        parts += [f"batch {worker.batch_rows}"] if worker.batch_rows is not None else []
    parts += [f"{worker.retries} retries"] if worker.retries else []
    parts += [gpu(device) for device in worker.devices]
    where = f" on {clean(worker.host, 60)}" if worker.host else ""
    return f"  {clean(worker.shard, 60)}{where}: {', '.join(parts)}"


def summary(progress: Progress) -> str:
    """What is going on in one line."""
    if not progress.exists:
        return "no results yet; waiting for a run to begin"
    if not progress.units:
        return "a run has begun, and nothing is asked yet" if progress.is_live else "nothing was asked here yet"
    states = [unit.state for unit in progress.units]
    if all(state == "done" for state in states):
        said = "finished: " if not progress.is_live else "Snakemake is at its last steps: "
        return f"{said}{len(states)} of {len(states)} done"
    named = {state: states.count(state) for state in ("running", "waiting", "failed", "stopped", "done")}
    counts = ", ".join(f"{count} {state}" for state, count in named.items() if count)
    if not progress.is_live:
        return f"nothing is at work here: {counts}; run Snakemake again to go on"
    return counts


def snapshot(progress: Progress) -> Iterator[str]:
    """All there is, in lines."""
    yield summary(progress)
    for unit in progress.units:
        yield unit_line(unit)
        if unit.state != "done":
            yield from map(worker_line, unit.workers)
        yield from (f"  error: {clean(text)}" for text in unit.errors)


class Changes:
    """The lines that are new since the last look, for a pipe."""

    def __init__(self) -> None:
        """Nothing is said yet."""
        self._said: dict[str, str] = {}
        self._errors: set[tuple[str, str]] = set()

    def lines(self, progress: Progress) -> Iterator[str]:
        """One line for each unit that changed, and each error once; each with the time."""
        stamp = time.strftime("%H:%M:%S", time.localtime(progress.at))
        for name, line in [*((unit.unit, unit_line(unit)) for unit in progress.units), ("", summary(progress))]:
            if self._said.get(name) != line:
                self._said[name] = line
                yield f"{stamp} {line}"
        for unit in progress.units:
            for text in unit.errors:
                if (unit.unit, text) not in self._errors:
                    self._errors.add((unit.unit, text))
                    yield f"{stamp} {clean(unit.unit)}: error: {clean(text)}"
