"""The runs: started, looked at, stopped. What happens stands on the disk first, so a new service finds it.

- A run is a Snakemake of its own process group, started by a launcher (launcher.py) from a list of arguments.
- One run a results folder: those of this service are known, and any other Snakemake shows by its lock (fence.py).
- Stopping is SIGINT to the group, and SIGTERM after the grace time. When each was sent stands in stop.json, so that a
  service that is restarted in between goes on with it. Nothing is ever killed: jobs end by themselves within ten
  seconds, and what does not may be writing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill import fence, locks
from gristmill.errors import UserError
from gristmill.files import write_json
from gristmill.live import Reader
from gristmill.service.configs import list_configs
from gristmill.service.problems import Problem
from gristmill.service.records import ACTIVE, RUN_ID, Record, State, settled
from gristmill.service.settings import ROOT, Settings
from gristmill.service.units import UnitView, units_as_json
from gristmill.types import JsonDict


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks to start."""

    config: str
    workspace: str | None = None
    cores: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as it was last looked at."""

    record: Record
    state: State
    units: tuple[UnitView, ...]
    #: Grows with every change, over all runs.
    version: int = 0
    #: When rows last moved (seconds since 1970).
    moved: float = 0.0

    @property
    def is_active(self) -> bool:
        """Whether its process may still work."""
        return self.state in ACTIVE


class Runs:
    """All runs that this service's folder knows. Changes go through one lock; what is read is a snapshot."""

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        """Look at what is there.

        Raises:
            UserError: the folder cannot be used.
        """
        self._settings, self._log = settings, log
        self._lock = threading.Lock()
        self._readers: dict[str, Reader] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._said: dict[str, str] = {}
        self._version = 0
        self._seen: dict[str, Seen] = {}
        try:
            settings.runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UserError(f"{settings.runs} cannot be made: {error.strerror}; name another with --state") from error
        for folder in sorted(path for path in settings.runs.iterdir() if RUN_ID.fullmatch(path.name)):
            self._look(folder)

    def all(self) -> list[Seen]:
        """The runs as last seen, the newest first."""
        return sorted(self._seen.values(), key=lambda seen: seen.record.id, reverse=True)

    def get(self, run_id: str) -> Seen:
        """One run as last seen.

        Raises:
            Problem: 404, there is none of that id.
        """
        found = self._seen.get(run_id)
        if found is None:
            raise Problem(404, "there is no such run; GET /v1/runs lists them")
        return found

    def refresh(self) -> None:
        """Look at the active runs again, and go on with stopping."""
        with self._lock:
            for seen in list(self._seen.values()):
                late = seen.state == "lost" and seen.record.process is None  # a launcher that took long to begin
                if seen.is_active or late:
                    try:
                        self._look(seen.record.folder)
                        self._escalate(self._seen[seen.record.id])
                    except Exception as error:  # whatever is wrong with one run, the others are looked at
                        self._say(
                            seen.record.id, f"run {seen.record.id} cannot be looked at: {type(error).__name__}: {error}"
                        )

    def start(self, order: Order) -> Seen:
        """Start a run.

        Raises:
            Problem: there is no such config, the workspace is not one, or the results folder is in use.
        """
        config = list_configs(self._settings.configs).get(order.config)
        if config is None:
            raise Problem(404, "there is no config of that name; GET /v1/configs lists them")
        directory = self._workspace(order.workspace)
        results = directory / "results"
        with self._lock:
            self._require_free(results)
            run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
            folder = self._settings.runs / run_id
            folder.mkdir(mode=0o700)
            write_json(
                folder / "run.json",
                {
                    "config": order.config,
                    "kinds": list(config.kinds),
                    "workspace": order.workspace,
                    "directory": str(directory),
                    "results": str(results),
                    "created": time.time(),
                    "command": self._command(config.path, directory, order),
                },
            )
            self._launch(run_id, folder)
            self._log(f"run {run_id} of {order.config} started in {directory}")
            self._look(folder)
            return self._seen[run_id]

    def stop(self, run_id: str) -> Seen:
        """Ask a run to stop; asking again changes nothing.

        Raises:
            Problem: there is none of that id, or it has ended.
        """
        self.get(run_id)
        with self._lock:
            self._look(self._settings.runs / run_id)
            seen = self._seen[run_id]
            if not seen.is_active:
                raise Problem(409, f"the run has ended ({seen.state}); there is nothing to stop")
            if seen.record.stop is None:
                self._note_stop(seen, {"asked": time.time(), "interrupted": None, "terminated": None})
                self._log(f"run {run_id} is to stop")
            self._escalate(self._seen[run_id])
            return self._seen[run_id]

    def _workspace(self, name: str | None) -> Path:
        """The folder a run works in; models.py has checked that a name is one."""
        if name is None:
            return self._settings.directory
        folder = self._settings.directory / "workspaces" / name
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.resolve().is_relative_to(self._settings.directory.resolve()):
            raise Problem(422, "workspace: it is a link that leads elsewhere; name another")
        return folder.resolve()

    def _require_free(self, results: Path) -> None:
        """Refuse a second run of one results folder, also under another name."""
        active = [seen for seen in self._seen.values() if seen.is_active]
        real = results.resolve()
        for seen in active:
            if Path(seen.record.run["results"]).resolve() == real:
                raise Problem(409, f"run {seen.record.id} works in that results folder; stop it or wait for it")
        lock = results / fence.FOLDER.name / "lock"
        if locks.is_held(lock):
            raise Problem(409, f"that results folder is in use by {locks.holder(lock)}; stop it or wait for it")
        if len(active) >= self._settings.max_active_runs:
            raise Problem(409, f"{len(active)} runs are active, the most there may be; stop one or wait for one")

    def _command(self, config: Path, directory: Path, order: Order) -> list[str]:
        words = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        words += ["--directory", str(directory)]
        words += ["--workflow-profile", str(self._settings.profile), "--configfile", str(config)]
        words += ["--cores", "all" if order.cores is None else str(order.cores)]
        return words + ([] if order.gpus is None else ["--resources", f"gpu={order.gpus}"])

    def _launch(self, run_id: str, folder: Path) -> None:
        there = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(ROOT / "scripts"), *([there] if there else [])])  # launcher.py takes it off again
        environment = {**os.environ, "PYTHONPATH": path}
        with open(folder / "log", "ab") as log:
            self._children[run_id] = subprocess.Popen(
                [sys.executable, "-m", "gristmill.service.launcher", str(folder)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _look(self, folder: Path) -> None:
        """Read a run's folder, and its progress while it is active; a folder that is no run is left out."""
        child = self._children.get(folder.name)
        if child is not None and child.poll() is not None:  # reaped, or it would stay as a zombie
            del self._children[folder.name]
        try:
            record, state = settled(folder)
            if state == "lost" and record.process is None and folder.name in self._children:
                state = record.beginning
            kept = record.units()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say(folder.name, f"{folder} is no run: {type(error).__name__}: {' '.join(str(error).split())}")
            return
        before = self._seen.get(record.id)
        is_kept = record.ended is not None or record.lost is not None
        units = kept if is_kept else self._units(record, state)
        if is_kept:
            self._readers.pop(record.id, None)
        moved = time.time() if before is None or _rows(before.units) != _rows(units) else before.moved
        now = Seen(record, state, units, self._version + 1, moved)
        if before is None or replace(now, version=0) != replace(before, version=0):
            self._version += 1
            self._seen[record.id] = now
            if before is not None and before.state != state:
                self._log(f"run {record.id} is {state}")

    def _units(self, record: Record, state: State) -> tuple[UnitView, ...]:
        """How far a run is that has no end in its record; of a lost one that is kept as it is found."""
        reader = self._readers.setdefault(record.id, Reader(Path(record.run["results"])))
        units = tuple(UnitView.of(unit) for unit in reader.read().units)
        if state == "lost" and record.process is not None:
            del self._readers[record.id]
            with contextlib.suppress(OSError):  # a folder that cannot be written: it is read again next time
                write_json(record.folder / "lost.json", {"units": units_as_json(units)})
        return units

    def _say(self, run_id: str, message: str) -> None:
        """Log it, once."""
        if self._said.get(run_id) != message:
            self._said[run_id] = message
            self._log(message)

    def _escalate(self, seen: Seen) -> None:
        """SIGINT once, and SIGTERM after the grace time."""
        stop, process = seen.record.stop, seen.record.process
        if stop is None or process is None or not seen.is_active:
            return
        if stop["interrupted"] is None:
            process.signal_group(signal.SIGINT)
            self._note_stop(seen, {**stop, "interrupted": time.time()})
        elif stop["terminated"] is None and time.time() - stop["interrupted"] >= self._settings.grace_s:
            process.signal_group(signal.SIGTERM)
            self._note_stop(seen, {**stop, "terminated": time.time()})
            self._log(f"run {seen.record.id} got SIGTERM, {self._settings.grace_s:g} s after SIGINT")

    def _note_stop(self, seen: Seen, note: JsonDict) -> None:
        with contextlib.suppress(FileNotFoundError):
            write_json(seen.record.folder / "stop.json", note)
        self._look(seen.record.folder)


def _rows(units: tuple[UnitView, ...]) -> list[tuple[str, int | None, int, int]]:
    """What moves when rows do."""
    return [(unit.unit, unit.rows, unit.done, unit.failed) for unit in units]
