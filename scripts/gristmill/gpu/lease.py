"""A lease on exact GPUs: an flock per UUID, a whole group or nothing.

- Snakemake's tokens say how many GPUs are busy, never which; correctness rests on the lease, speed on the tokens.
- Nothing is held while waiting, so two jobs cannot deadlock: one look takes what is free, keeps the best whole group
  and gives the rest back. Looks follow one another (by a lock), or they would see each other's half-taken groups.
- A device that others fill without a lease (`busy_memory_mib`) is passed over; that is asked while its lock is held,
  when no gristmill job can be what fills it.
- The kernel releases a lease when its process dies, so a crash leaves nothing to clean up.
- CUDA_VISIBLE_DEVICES is set to the leased UUIDs, and must be set before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill import locks
from gristmill.errors import UserError
from gristmill.gpu import gpus as devices
from gristmill.gpu import health
from gristmill.gpu.nvml import Links
from gristmill.gpu.topology import nearest
from gristmill.types import Gpu

#: Seconds between two looks: short at first, for groups that come and go, and long for a night's wait.
FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.5
#: How much longer than asked a job waits for its turn to look; a look takes milliseconds.
LOOK_S = 10.0
#: UUID → who fills the device, for those that are not to be used.
Foreign = Callable[[Sequence[Gpu]], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a job asks for: `count` of the GPUs it may use, which are in order of preference."""

    gpus: Sequence[Gpu]
    count: int
    #: Shown to whoever waits for these devices.
    purpose: str
    #: How near the GPUs are to each other; a near group is preferred.
    links: Links
    foreign: Foreign


def lease_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The per-host folder of lock files, shared by all users: GRISTMILL_LEASES, else one below the temporary folder."""
    folder = Path(environ.get("GRISTMILL_LEASES") or Path(tempfile.gettempdir()) / "gristmill-leases")
    try:
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}; set GRISTMILL_LEASES to another folder") from error
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise UserError(f"{folder} is not a folder; remove it or set GRISTMILL_LEASES to one that all users can write")
    return folder


@contextlib.contextmanager
def leased(
    gpus: Sequence[Gpu],
    count: int,
    purpose: str,
    wait_s: float,
    log: Callable[[str], None],
    links: Links | None = None,
    foreign: Foreign = lambda gpus: {},
) -> Iterator[list[Gpu]]:
    """Hold `count` of the given GPUs for the block and make them the only ones CUDA shows.

    Args:
        gpus: the devices this process may use, in order of preference.
        count: GPUs of one worker.
        purpose: shown to whoever waits for these devices.
        wait_s: how long to wait while others hold them.
        log: takes progress messages.
        links: how near the GPUs are to each other (gpus.links).
        foreign: says which devices others fill without a lease (`filled`).

    Raises:
        UserError: there are fewer devices than `count`, also without those set aside (health.py), or the wait ran out.
    """
    if count > len(gpus):
        raise UserError(f"gpus_per_model={count} but {len(gpus)} GPUs may be used here; use {len(gpus)} or fewer")
    if count > 1 and any(gpu.uuid.startswith("MIG-") for gpu in gpus):
        raise UserError(f"gpus_per_model={count}, but CUDA shows a process one MIG device only; use 1")
    if "torch" in sys.modules:
        raise AssertionError("a lease must be taken before torch is imported, or its mask has no effect")
    health.refuse_sick(gpus, count, lease_folder())
    held = _wait_for_group(Wish(gpus, count, purpose, links or {}, foreign), wait_s, log)
    previous = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu, _ in held)
    try:
        yield [gpu for gpu, _ in held]
    finally:
        _restore("CUDA_VISIBLE_DEVICES", previous)
        for _, fd in held:
            locks.release(fd)


def filled(gpus: Sequence[Gpu], limit_mib: int) -> dict[str, str]:
    """UUID → who fills it, for the GPUs with more than `limit_mib` MiB in use."""
    return {
        uuid: ", ".join(use.processes) or f"{use.used_mib} MiB of another process"
        for uuid, use in devices.use(gpus).items()
        if use.used_mib > limit_mib
    }


def foreign_use(gpus: Sequence[Gpu], limit_mib: int) -> dict[str, str]:
    """UUID → why a plan must do without it: others fill it and no gristmill job holds it, or it is set aside."""
    folder = lease_folder()
    sick = health.quarantined(folder, time.time())
    found = {uuid: f"filled by {who} (gpus.busy_memory_mib)" for uuid, who in filled(gpus, limit_mib).items()}
    free = {uuid: why for uuid, why in found.items() if not locks.is_held(folder / f"{uuid}.lock")}
    return free | {gpu.uuid: f"set aside: {sick[gpu.uuid]}" for gpu in gpus if gpu.uuid in sick}


def _wait_for_group(wish: Wish, wait_s: float, log: Callable[[str], None]) -> list[tuple[Gpu, int]]:
    folder = lease_folder()
    deadline = time.monotonic() + wait_s
    pause_s, said, busy = FIRST_LOOK_S, "", "another look at the GPUs is going on"
    while True:
        with _looking(folder, wish.purpose) as may_look:
            if may_look:
                held, busy = _try_group(folder, wish)
                if held:
                    return held
        if time.monotonic() >= deadline + (0 if may_look else LOOK_S):
            raise UserError(
                f"no group of {wish.count} free GPUs within {wait_s / 60:g} minutes; held: {busy}; "
                "see gpus.wait_minutes"
            )
        if may_look and busy != said:
            log(f"waiting for {wish.count} of {len(wish.gpus)} GPUs; held: {busy}")
            said = busy
        time.sleep(pause_s * (0.5 + random.random()))
        pause_s = min(LAST_LOOK_S, 1.05 * pause_s)


@contextlib.contextmanager
def _looking(folder: Path, purpose: str) -> Iterator[bool]:
    """The right to look for free GPUs, which one process has at a time; False when it is another's."""
    fd = locks.try_lock(folder / "look.lock", purpose)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            locks.release(fd)


def _try_group(folder: Path, wish: Wish) -> tuple[list[tuple[Gpu, int]], str]:
    """The best whole group of what is free, or nothing and a text that says who holds what."""
    free: dict[Gpu, int] = {}
    busy: list[str] = []
    sick = health.quarantined(folder, time.time())
    with contextlib.ExitStack() as taken:  # all goes back but the group, also when a lock file cannot be used
        for gpu in wish.gpus:
            if gpu.uuid in sick:
                busy.append(f"GPU {gpu.index} set aside: {sick[gpu.uuid]}")
                continue
            path = folder / f"{gpu.uuid}.lock"
            fd = locks.try_lock(path, wish.purpose)
            if fd is None:
                busy.append(f"GPU {gpu.index} by {locks.holder(path)}")
            else:
                taken.callback(locks.release, fd)
                free[gpu] = fd
        full = wish.foreign(list(free)) if len(free) >= wish.count else {}
        busy += [f"GPU {gpu.index} without a lease by {full[gpu.uuid]}" for gpu in free if gpu.uuid in full]
        group = nearest([gpu for gpu in free if gpu.uuid not in full], wish.count, wish.links)
        if group:
            taken.pop_all()
            for gpu in free.keys() - set(group):
                locks.release(free[gpu])
            return [(gpu, free[gpu]) for gpu in group], ""
    return [], "; ".join(busy)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
