"""What every job on a model's GPUs has around its work: alone with its part, a lease, an end when its run is over."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from gristmill import fence, locks
from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.errors import UserError
from gristmill.gpu import allocation, gpus, lease
from gristmill.planning.workers import Worker
from gristmill.progress import log
from gristmill.stopping import Stop, interruptible
from gristmill.types import Gpu


@contextlib.contextmanager
def alone(unit: str, name: str, journal: Path, wait_s: float) -> Iterator[Stop]:
    """Hold the lock of a shard's part, with signals handled, until the block ends; leaves when the run is over.

    Raises:
        UserError: another job made this part for longer than `wait_s`.
        stopping.Interrupted: a signal came.
    """
    journal.mkdir(parents=True, exist_ok=True)
    with (
        interruptible() as stop,
        _leaving_with_the_run(),
        locks.held(journal / f"{name}.lock", f"{unit} {name}", wait_s, log),
    ):
        _wait_for_orphans(unit, name, journal, wait_s)
        yield stop


def usable(worker: Worker, model: ModelConfig, config: GpusConfig, scheduled: bool = False) -> list[Gpu]:
    """The GPUs of this host that a worker may take; none for a model that is served elsewhere.

    Args:
        worker: whose group they are of.
        model: the model's config.
        config: the config's gpus section.
        scheduled: a cluster's scheduler started this job, with GPUs for it.
    """
    if model.engine == "endpoint":
        return []
    wanted: Literal["auto", "none"] | list[int | str]
    wanted = config.devices if worker.group is None else config.groups[worker.group].devices
    there = gpus.usable(gpus.inventory(), os.environ, wanted)
    if not there and model.engine != "echo" and not isinstance(wanted, str):
        raise UserError(f"gpus.devices is {wanted}, but no such GPU may be used on this host; set it to auto")
    if scheduled and model.engine != "echo" and wanted != "none":
        allocation.require_some(there)
    return there


@contextlib.contextmanager
def held(
    there: Sequence[Gpu], worker: Worker, purpose: str, config: GpusConfig, scheduled: bool = False
) -> Iterator[list[Gpu]]:
    """A worker's group, also for the echo engine, which stands in for a real one; nothing without a GPU.

    What a scheduler gave this job alone is taken as it is; else the group is leased.
    """
    if not there:
        yield []
        return

    def filled(looked_at: Sequence[Gpu]) -> dict[str, str]:
        return lease.filled(looked_at, config.busy_memory_mib)

    if scheduled and (giver := allocation.owner()):
        devices = allocation.take(there, worker.gpus, giver, filled, log)
        log(f"{giver} gave {device_names(devices)}")
        yield devices
        return
    want = (there, worker.gpus, purpose, config.wait_minutes * 60)
    with lease.leased(*want, log, gpus.links(there), filled) as devices:
        log(f"lease on {device_names(devices)}")
        yield devices


def device_names(devices: Sequence[Gpu]) -> str:
    """`GPU 0 (NVIDIA H100), GPU 1 (NVIDIA H100)`, for a message."""
    return ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in devices) or "the CPU"


@contextlib.contextmanager
def _leaving_with_the_run() -> Iterator[None]:
    """Stop, as at a scheduler's warning, when the Snakemake of this job is gone and another one owns the results."""
    ended = threading.Event()

    def leave() -> None:
        log("the Snakemake that started this job is gone, and another one owns the results; leaving")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=fence.watch, args=(ended.wait, leave), daemon=True, name="fence").start()
    try:
        yield
    finally:
        ended.set()


def _wait_for_orphans(unit: str, name: str, journal: Path, wait_s: float) -> None:
    """Wait for jobs of a killed Snakemake that cut the unit into another number of shards and still work."""
    layout = name.rpartition("-")[2]
    for path in sorted(journal.glob("*.lock")):
        if path.stem.rpartition("-")[2] != layout:
            with locks.held(path, f"{unit} {name}, waiting", wait_s, log):
                pass
