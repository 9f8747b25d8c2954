"""Advisory locks that die with their process (flock), and that say who holds them.

- The holder writes its pid, host and purpose into the file, so that a waiting job can name it.
- Lock files are opened without following symbolic links and are readable by all users of the host; anything else than a
  plain file of one name is refused, for writing the note would destroy what a hard link leads to.
- The file stays when the lock goes: removing it would let two processes lock two files of one name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gristmill.errors import UserError


def try_lock(path: Path, purpose: str) -> int | None:
    """Take a lock without waiting: its file descriptor, or None when another process holds it."""
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        os.close(fd)
        raise UserError(f"{path} cannot be locked: {error.strerror}; use a folder on a disk with file locks") from error
    note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "purpose": purpose, "since": time.time()})
    with contextlib.suppress(OSError):  # a full disk: the lock holds, and only its note is missing
        os.ftruncate(fd, 0)
        os.pwrite(fd, note.encode(), 0)
    return fd


def release(fd: int) -> None:
    """Give a lock back."""
    os.close(fd)


def is_held(path: Path) -> bool:
    """Whether another process holds a lock now; one that was never taken is not made."""
    if not path.exists():
        return False
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def holder(path: Path) -> str:
    """Who holds a lock, for a message: `pid 4711 (generate direct 1-of-4) on node7`."""
    try:
        note = json.loads(path.read_text())
        return f"pid {note['pid']} ({note['purpose']}) on {note['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@contextlib.contextmanager
def held(path: Path, purpose: str, wait_s: float, log: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock for the block, waiting for it at most `wait_s` seconds.

    Raises:
        UserError: the wait ran out; the message names the holder.
    """
    deadline = time.monotonic() + wait_s
    said = False
    while (fd := try_lock(path, purpose)) is None:
        if time.monotonic() >= deadline:
            raise UserError(f"{path} is held by {holder(path)}; stop it or wait for it, then run again")
        if not said:
            log(f"waiting for {path}, held by {holder(path)}")
            said = True
        time.sleep(0.2)
    try:
        yield
    finally:
        release(fd)


def _open(path: Path) -> int:
    """Open or create a lock file, a plain one with no second name."""
    fd = _open_any(path)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return fd
    os.close(fd)
    raise UserError(f"{path} cannot be used as a lock: it is not a plain file with one name; remove it")


def _open_any(path: Path) -> int:
    """Open or create a file.

    An existing one is opened without O_CREAT: Linux forbids creating over another user's file in a sticky folder
    (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(
            f"{path} cannot be used as a lock: {error.strerror}; remove it or choose another folder"
        ) from error
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # another process was faster
        return os.open(path, flags)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}; make its folder writable") from error
    os.fchmod(fd, 0o666)
    return fd
