"""A lease on exact GPUs: an flock per UUID, a whole group or nothing.

- Snakemake's tokens say how many GPUs are busy, never which; correctness rests on the lease, speed on the tokens.
- Devices are tried in one order and a part of a group is given back before waiting, so two jobs cannot deadlock.
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
from pathlib import Path

from gristmill import health, locks
from gristmill.errors import UserError
from gristmill.types import Gpu


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
    gpus: Sequence[Gpu], count: int, purpose: str, wait_s: float, log: Callable[[str], None]
) -> Iterator[list[Gpu]]:
    """Hold `count` of the given GPUs for the block and make them the only ones CUDA shows.

    Args:
        gpus: the devices this process may use, in order of preference.
        count: gpus_per_model.
        purpose: shown to whoever waits for these devices.
        wait_s: how long to wait while others hold them.
        log: takes progress messages.

    Raises:
        UserError: there are fewer devices than `count`, also without those set aside (health.py), or the wait ran out.
    """
    if count > len(gpus):
        raise UserError(f"gpus_per_model={count} but {len(gpus)} GPUs may be used here; use {len(gpus)} or fewer")
    if "torch" in sys.modules:
        raise AssertionError("a lease must be taken before torch is imported, or its mask has no effect")
    health.refuse_sick(gpus, count, lease_folder())
    held = _wait_for_group(gpus, count, purpose, wait_s, log)
    previous = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu, _ in held)
    try:
        yield [gpu for gpu, _ in held]
    finally:
        _restore("CUDA_VISIBLE_DEVICES", previous)
        for _, fd in held:
            locks.release(fd)


def _wait_for_group(
    gpus: Sequence[Gpu], count: int, purpose: str, wait_s: float, log: Callable[[str], None]
) -> list[tuple[Gpu, int]]:
    folder = lease_folder()
    deadline = time.monotonic() + wait_s
    said = ""
    while True:
        held, busy = _try_group(folder, gpus, count, purpose)
        if held:
            return held
        if time.monotonic() >= deadline:
            raise UserError(
                f"no group of {count} free GPUs within {wait_s / 60:g} minutes; held: {busy}; see gpus.wait_minutes"
            )
        if busy != said:
            log(f"waiting for {count} of {len(gpus)} GPUs; held: {busy}")
            said = busy
        time.sleep(0.2 + 0.3 * random.random())


def _try_group(folder: Path, gpus: Sequence[Gpu], count: int, purpose: str) -> tuple[list[tuple[Gpu, int]], str]:
    """A whole group, or nothing and a text that says who holds what."""
    held: list[tuple[Gpu, int]] = []
    busy: list[str] = []
    sick = health.quarantined(folder, time.time())
    with contextlib.ExitStack() as part:  # an incomplete group goes back, also when a lock file cannot be used
        for gpu in gpus:
            if gpu.uuid in sick:
                busy.append(f"GPU {gpu.index} set aside: {sick[gpu.uuid]}")
                continue
            path = folder / f"{gpu.uuid}.lock"
            fd = locks.try_lock(path, purpose)
            if fd is None:
                busy.append(f"GPU {gpu.index} by {locks.holder(path)}")
                continue
            part.callback(locks.release, fd)
            held.append((gpu, fd))
            if len(held) == count:
                part.pop_all()
                return held, ""
    return [], "; ".join(busy)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
