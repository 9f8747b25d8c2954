"""Whether the holder of a lock file lives, without touching the lock.

Trying a lock, even for a moment, would make a worker that takes it just then wait, and a Snakemake that starts give up.
So it is the note in the file (locks.py) that is read, and the process that it names is looked for: a lock is held until
its process ends. A process that began after the note was written is another one with the same number.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from gristmill.live.files import json_object

#: Between the clock of a process's begin, in ticks since the machine's, and that of the note.
CLOCK_S = 2.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took a lock last."""

    host: str
    since: float
    #: None: it is on another host.
    lives: bool | None


def holder(path: Path) -> Holder | None:
    """Who took a lock last, and whether it lives; None for a lock that was never taken."""
    try:
        note = json_object(path.read_bytes())
    except OSError:
        return None
    if note is None or not isinstance(note.get("pid"), int) or not isinstance(note.get("since"), int | float):
        return None
    host, since = str(note.get("host")), float(note["since"])
    return Holder(host, since, _lives(note["pid"], since) if host == socket.gethostname() else None)


def _lives(pid: int, since: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() <= since + CLOCK_S and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False
