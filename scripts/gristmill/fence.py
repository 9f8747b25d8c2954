"""One Snakemake a results folder, and no writing by what an earlier one left behind.

- A Snakemake that starts jobs holds an flock on results/.gristmill/lock: a second one stops and names the first. The
  kernel releases it with the process, so nothing is to be unlocked after a kill -9.
- The jobs of a killed Snakemake live on. They belong to its run, whose id they have from the environment; the file
  `fence` names the run that owns the folder now. Before a result takes its name, a job looks there under a shared lock,
  and a new run changes the file under an exclusive one: what an old job made with an old config can never take the
  place of a new result.
- A program that is started by hand belongs to no run and may write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gristmill import locks
from gristmill.errors import UserError

RUN = "GRISTMILL_RUN"
FOLDER = Path("results/.gristmill")


def check_place(folder: Path = FOLDER) -> None:
    """Refuse a results folder that is something else, before Snakemake meets it.

    Raises:
        UserError: it is a file, or a link that leads nowhere.
    """
    results = folder.parent
    if results.is_symlink() and not results.exists():
        raise UserError(f"{results} is a link that leads nowhere ({results.readlink()}); make its target or remove it")
    if results.exists() and not results.is_dir():
        raise UserError(f"{results} is a file, but the results go into a folder of that name; move it away")


def claim(run: str, folder: Path = FOLDER) -> int:
    """Take the results folder for a run, for as long as this process lives; returns the lock's descriptor.

    Raises:
        UserError: another Snakemake is at work there; the message names it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}; make results/ a writable folder") from error
    lock = locks.try_lock(folder / "lock", "snakemake")
    if lock is None:
        raise UserError(
            f"{folder.parent}/ is in use by {locks.holder(folder / 'lock')}; wait for it or stop it, then run again"
        )
    try:
        with _open(folder / "fence") as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.pwrite(fd, run.encode(), 0)  # over the last run's: one that is there needs no room on the disk
            os.ftruncate(fd, len(run.encode()))
    except OSError as error:
        locks.release(lock)
        raise UserError(
            f"{folder / 'fence'} cannot be written: {error.strerror}; make room or make it writable, then run again"
        ) from error
    return lock


def is_lost(folder: Path = FOLDER) -> bool:
    """Whether this job's run is over and another one owns the results."""
    run = os.environ.get(RUN)
    if run is None:
        return False
    try:
        return (folder / "fence").read_text() not in (run, "")  # empty: it is being written
    except OSError:
        return False


@contextlib.contextmanager
def passed(path: Path, folder: Path = FOLDER) -> Iterator[None]:
    """Hold the fence open while a result takes its name.

    Raises:
        UserError: the results belong to another run by now; `path` must not be written.
    """
    if RUN not in os.environ or not (folder / "fence").exists():
        yield
        return
    with _open(folder / "fence") as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if is_lost(folder):
            raise UserError(f"{path} is not written: the Snakemake of this job is gone, and another owns results/")
        yield


def watch(ended: Callable[[float], bool], act: Callable[[], None], every_s: float = 2.0) -> None:
    """Call `act` when the run is lost; for a thread. `ended` waits so many seconds and says whether to leave."""
    while not ended(every_s):
        if is_lost():
            act()
            return


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)
