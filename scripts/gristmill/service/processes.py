"""Which process a run is: a pid alone may be another's by now, so its start time belongs to it.

On Linux the start time is that of /proc (ticks since boot) beside the boot's id; elsewhere what ps says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, for ever."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        """Whether it is still there, and no zombie."""
        return started_at(self.pid) == self.started

    def group_is_alive(self) -> bool:
        """Whether any process of the group that it leads is there. No other gets its pid while one is."""
        started = started_at(self.pid)
        if started is not None:
            return started == self.started
        return self._signal(0)

    def signal_group(self, number: signal.Signals) -> bool:
        """Send a signal to the group; False when all of it is gone."""
        return self.group_is_alive() and self._signal(number)

    def _signal(self, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            return True
        return False


def identify(pid: int) -> Identity | None:
    """A process that is there now; None when there is none."""
    started = started_at(pid)
    return None if started is None else Identity(pid, started)


def started_at(pid: int) -> str | None:
    """When a process started, as a text that no other of this pid has; None for one that is gone or a zombie."""
    if Path("/proc/self/stat").exists():
        return _from_proc(pid)
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    state, _, started = done.stdout.strip().partition(" ")
    return None if not started or state.startswith("Z") else " ".join(started.split())


def _from_proc(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("latin-1")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a name may have spaces and brackets
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
