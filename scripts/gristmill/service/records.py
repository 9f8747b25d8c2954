"""One run as it is kept on the disk: what was asked for, which process it is, how it ended.

    runs/<id>/run.json       written before anything is started
    runs/<id>/process.json   by the launcher: pid and start time
    runs/<id>/stop.json      when it was asked to stop
    runs/<id>/ended.json     by the launcher: exit status, time, units (units.py)
    runs/<id>/lost.json      by the service, when it finds that all processes are gone without an ended.json: units
    runs/<id>/log            what Snakemake says

Each is written atomically, so whatever is there is whole, and read through a type of its own, so whatever else stands
there is no record. The state follows from them.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, FiniteFloat, PositiveInt

from gristmill.files import read_json
from gristmill.service.processes import Identity
from gristmill.service.units import UnitView, recorded
from gristmill.types import JsonDict

Kind = Literal["generation", "judging", "logits", "training"]
State = Literal["starting", "running", "stopping", "finished", "failed", "stopped", "lost"]
ACTIVE: frozenset[State] = frozenset({"starting", "running", "stopping"})
RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
#: How long a launcher may take to say which process it is.
START_S = 30.0
_TAIL_BYTES = 4096


class _RunFile(BaseModel):
    config: str
    kinds: list[Kind] = []
    workspace: str | None = None
    directory: str
    results: str
    created: FiniteFloat
    command: list[str]


class _ProcessFile(BaseModel):
    pid: PositiveInt
    started: str


class _StopFile(BaseModel):
    asked: FiniteFloat
    interrupted: FiniteFloat | None
    terminated: FiniteFloat | None


class _EndedFile(BaseModel):
    exit_code: int
    ended: FiniteFloat
    units: list[JsonDict] = []


class _LostFile(BaseModel):
    units: list[JsonDict]


@dataclass(frozen=True, slots=True)
class Record:
    """A run's files, read."""

    id: str
    folder: Path
    run: JsonDict
    process: Identity | None
    stop: JsonDict | None
    ended: JsonDict | None
    lost: JsonDict | None = None

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Read a run's folder; raises OSError or ValueError when run.json, process.json or ended.json is not one."""
        run = _RunFile.model_validate(read_json(folder / "run.json")).model_dump()
        process = _maybe(folder / "process.json", _ProcessFile)
        identity = None if process is None else Identity(process["pid"], process["started"])
        ended = _maybe(folder / "ended.json", _EndedFile)
        stop, lost = _usable(folder / "stop.json", _StopFile), _usable(folder / "lost.json", _LostFile)
        return cls(folder.name, folder, run, identity, stop, ended, lost)

    def state(self, now: float) -> State:
        """What the files and the process say at `now` (seconds since 1970)."""
        if self.ended is not None:
            if self.ended["exit_code"] == 0:
                return "finished"
            return "stopped" if self.stop is not None else "failed"
        if self.process is None:
            return self.beginning if now - self.run["created"] < START_S else "lost"
        if not self.process.group_is_alive():
            return "lost"
        return "running" if self.stop is None else "stopping"

    @property
    def beginning(self) -> State:
        """The state as long as no process is known: a run may be told to stop before it has one."""
        return "starting" if self.stop is None else "stopping"

    def units(self) -> tuple[UnitView, ...]:
        """How far its units were when it ended; raises ValueError, KeyError or TypeError when that cannot be read."""
        kept = self.ended or self.lost or {"units": ()}
        succeeded = self.ended is not None and self.ended["exit_code"] == 0
        return tuple(recorded(unit, succeeded) for unit in kept["units"])

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


def _maybe(path: Path, kind: type[BaseModel]) -> JsonDict | None:
    """What a file has; None where there is none. Raises OSError or ValueError for one that is something else."""
    with contextlib.suppress(FileNotFoundError):
        return kind.model_validate(read_json(path)).model_dump()
    return None


def _usable(path: Path, kind: type[BaseModel]) -> JsonDict | None:
    """The same of a file that a run can do without: one that is something else asks for nothing."""
    with contextlib.suppress(ValueError):
        return _maybe(path, kind)
    return None
