"""One run as it is kept on the disk: what was asked for, which process it is, how it ended.

    runs/<id>/run.json       written before anything is started
    runs/<id>/process.json   by the launcher: pid and start time
    runs/<id>/stop.json      when it was asked to stop
    runs/<id>/ended.json     by the launcher: exit status, time, units (units.py)
    runs/<id>/log            what Snakemake says

Each is written atomically and once (stop.json twice), so whatever is there is whole; the state follows from them.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gristmill.files import read_json
from gristmill.service.processes import Identity
from gristmill.service.units import UnitView, recorded
from gristmill.types import JsonDict

State = Literal["starting", "running", "stopping", "finished", "failed", "stopped", "lost"]
ACTIVE: frozenset[State] = frozenset({"starting", "running", "stopping"})
RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
#: How long a launcher may take to say which process it is.
START_S = 30.0
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Record:
    """A run's files, read."""

    id: str
    folder: Path
    run: JsonDict
    process: Identity | None
    stop: JsonDict | None
    ended: JsonDict | None

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read a run's folder; raises OSError, ValueError or KeyError when run.json is not one."""
        run = read_json(folder / "run.json")
        process = _maybe(folder / "process.json")
        identity = None if process is None else Identity(int(process["pid"]), str(process["started"]))
        for key in ("config", "directory", "results", "created", "command"):
            run[key]
        return cls(folder.name, folder, run, identity, _maybe(folder / "stop.json"), _maybe(folder / "ended.json"))

    def state(self, now: float) -> State:
        """What the files and the process say at `now` (seconds since 1970)."""
        if self.ended is not None:
            if self.ended["exit_code"] == 0:
                return "finished"
            return "stopped" if self.stop is not None else "failed"
        if self.process is None:
            return "starting" if now - self.run["created"] < START_S else "lost"
        if not self.process.is_alive():
            return "lost"
        return "running" if self.stop is None else "stopping"

    def units(self) -> tuple[UnitView, ...]:
        """How far its units were when it ended; raises ValueError, KeyError or TypeError when that cannot be read."""
        if self.ended is None:
            return ()
        succeeded = self.ended["exit_code"] == 0
        return tuple(recorded(unit, succeeded) for unit in self.ended.get("units", ()))

    def log_tail(self) -> str:
        """The end of what Snakemake said."""
        try:
            with open(self.folder / "log", "rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                handle.seek(max(0, size - _TAIL_BYTES))
                return handle.read(_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""


def settled(folder: Path) -> tuple[Record, State]:
    """A record and its state. A process that is gone may have written ended.json meanwhile: look once more."""
    record = Record.read(folder)
    state = record.state(time.time())
    if state == "lost":
        record = Record.read(folder)
        state = record.state(time.time())
    return record, state


def _maybe(path: Path) -> JsonDict | None:
    with contextlib.suppress(FileNotFoundError):
        value = read_json(path)
        return value if isinstance(value, dict) else None
    return None
