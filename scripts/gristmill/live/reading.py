"""The reader: which units a results folder has, and how far each is.

- A unit's rows are the lines of its requests.jsonl. A worker counts those that its journal knew, so `done` is exact for
  what has begun; what has not begun counts nothing, though its journal may know it.
- The cut into shards that counts is the one that was touched last. What was said before the requests or the shards were
  made is of earlier ones and does not count.
- A unit is done when its last file (manifest.json, of a training metrics.json) is newer than all that led to it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gristmill.live.files import Counts, Growing, json_object, mtime
from gristmill.live.journals import ERRORS, Job, Journal, Speed
from gristmill.live.liveness import holder
from gristmill.live.snapshot import (
    ALIVE,
    Kind,
    Owner,
    Progress,
    UnitProgress,
    UnitState,
    WorkerProgress,
    WorkerState,
)
from gristmill.live.workers import NOW_S, SILENT_S, Said, Turn, Worker
from gristmill.types import FAILURE_REASONS, NO_EARLIER_ANSWER, JsonDict
from gristmill.values import count

_KINDS: dict[str, Kind] = {"runs/*": "run", "judges/*/*": "judge", "logits/*": "logits", "trainings/*": "training"}
_SHARD = re.compile(r"(\d+)-of-(\d+)")
#: One of these makes a folder a unit.
_TRACES = ("requests.jsonl", "journal", "live", "steps.jsonl", "task.json")
#: More shards than any plan makes are no shards.
_MOST_SHARDS = 100_000


class Reader:
    """Reads a results folder again and again; not for several threads."""

    def __init__(self, results: Path) -> None:
        """Prepare; nothing is read yet."""
        self._results = results
        self._units: dict[Path, _Unit] = {}

    def read(self) -> Progress:
        """What is going on now. What is made or removed meanwhile is left out; nothing is raised for it."""
        at = time.time()
        if not self._results.is_dir():
            self._units.clear()
            return Progress((), at, exists=False)
        owner, since = _owner(self._results / ".gristmill" / "lock")
        try:
            folders = dict(_unit_folders(self._results))
        except OSError:  # removed while it was listed
            folders = {}
        self._units = {folder: self._units.get(folder) or _unit(folder, kind) for folder, kind in folders.items()}
        found: list[UnitProgress] = []
        for folder, unit in self._units.items():
            try:
                found.append(unit.read(folder.relative_to(self._results).as_posix(), at, owner, since))
            except OSError:  # removed meanwhile, or not readable
                continue
        return Progress(tuple(found), at, owner)


def _unit_folders(results: Path) -> Iterator[tuple[Path, Kind]]:
    for pattern, kind in _KINDS.items():
        for folder in sorted(results.glob(pattern)):
            if any((folder / name).exists() for name in _TRACES):
                yield folder, kind


def _owner(lock: Path) -> tuple[Owner, float]:
    """Whether a Snakemake is at work, and since when, if that is sure."""
    found = holder(lock)
    if found is None or found.lives is False:
        return "none", 0.0
    return ("running", found.since) if found.lives else ("unknown", 0.0)


def _unit(folder: Path, kind: Kind) -> _Unit:
    return _Training(folder, kind) if kind == "training" else _Unit(folder, kind)


class _Unit:
    """A run, a judge on its target, or a teacher's texts."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        """Prepare; nothing is read yet."""
        self.folder, self.kind = folder, kind
        self._counts, self._workers = Counts(), dict[str, Worker]()
        self._journal, self._speed = Journal(folder / "journal"), Speed(NOW_S)

    def read(self, name: str, at: float, owner: Owner, since: float) -> UnitProgress:
        """How far it is."""
        read = [self._worker(shard).read(at, turn) for shard, turn in self._turns(since)]
        workers = [worker for worker, _, _ in read]
        heard = [said for _, said, _ in read if said is not None]
        errors = [text for _, _, said in read for text in said]
        manifest = None if any(worker.state in ALIVE for worker in workers) else self._finished()
        if manifest is not None:
            return self._done(name, manifest, workers, heard)
        if not heard and self._has_journal():
            return self._from_journal(name, at, owner)
        total = self._rows()
        if total is None and workers and all(worker.total is not None for worker in workers):
            total = sum(worker.total or 0 for worker in workers)
        return summed(name, self.kind, workers, heard, total, errors, owner)

    def _worker(self, shard: str) -> Worker:
        if shard not in self._workers:
            self._workers[shard] = self._made(shard)
        return self._workers[shard]

    def _made(self, shard: str) -> Worker:
        step = "logits" if self.kind == "logits" else "generate"
        lock, log = self.folder / "journal" / f"{shard}.lock", self.folder / "logs" / f"{step}-{shard}.log"
        return Worker(self.folder, shard, lock, log)

    def _turns(self, run_since: float) -> Iterator[tuple[str, Turn]]:
        """The shards of the cut that counts, and what is known of each."""
        shards = self._shards()
        cut = self.folder / "shards" / str(shards)
        since = max(mtime(self.folder / "requests.jsonl") or 0.0, mtime(cut) or 0.0)
        for number in range(1, shards + 1):
            shard = f"{number}-of-{shards}"
            part = self.folder / "parts" / str(shards) / f"{shard}.jsonl"
            made = mtime(part)
            finished = made is not None and made >= since
            rows = self._counts.lines(part) if finished else self._counts.lines(cut / f"{shard}.jsonl")
            yield shard, Turn(since, finished, rows, run_since)

    def _shards(self) -> int:
        """How many shards the cut has that was touched last; 0 where none is known."""
        touched = [(mtime(path) or 0.0, path.name) for kind in ("shards", "parts") for path in _in(self.folder / kind)]
        for path in _in(self.folder / "live"):
            if found := _SHARD.fullmatch(path.stem):
                touched.append((mtime(path) or 0.0, found[2]))
        numbers = [(at, int(name)) for at, name in touched if name.isascii() and name.isdigit()]
        last = max((one for one in numbers if one[1] <= _MOST_SHARDS), default=(0.0, 0))
        return last[1]

    def _rows(self) -> int | None:
        skipped = b'"skipped":' if self.kind == "logits" else None
        return self._counts.lines(self.folder / "requests.jsonl", skipped)

    def _finished(self) -> JsonDict | None:
        """The manifest, when it is newer than what led to it."""
        path = self.folder / "manifest.json"
        made, asked = mtime(path), mtime(self.folder / "requests.jsonl")
        live = max((mtime(one) or 0.0 for one in _in(self.folder / "live")), default=0.0)
        if made is None or made < (asked or 0.0) or made < live:
            return None
        return json_object(path.read_bytes())

    def _done(
        self, name: str, manifest: JsonDict, workers: Sequence[WorkerProgress], heard: Sequence[Said]
    ) -> UnitProgress:
        reasons = manifest.get("finish_reasons")
        named = reasons if isinstance(reasons, dict) else {}
        unanswered = sum(count(named.get(reason)) or 0 for reason in (*FAILURE_REASONS, NO_EARLIER_ANSWER))
        windows = manifest.get("failed")  # of a teacher: names and reasons
        failed = len(windows) if isinstance(windows, dict) else unanswered
        total, tokens = count(manifest.get("requests")), count(manifest.get("completion_tokens"))
        total = (self._rows() or 0) if total is None else total
        tokens = sum(said.tokens for said in heard) if tokens is None else tokens
        speeds = (0.0, overall(heard), 0.0)
        return UnitProgress(name, self.kind, total - failed, total, failed, tokens, *speeds, tuple(workers), (), "done")

    def _has_journal(self) -> bool:
        return any(path.suffix == ".jsonl" for path in _in(self.folder / "journal"))

    def _from_journal(self, name: str, at: float, owner: Owner) -> UnitProgress:
        """Counted, for results of a version whose workers said nothing themselves."""
        self._journal.look()
        answered, total = self._journal.answered, self._rows()
        done = len(answered) if total is None else min(len(answered), total)
        failures = self._journal.failures(answered)
        workers = [self._counted(job, at - written) for job, written in self._journal.jobs()]
        tokens = sum(worker.tokens for worker in workers)
        state = unit_state(workers, done, total, owner)
        now = self._speed.add(at, tokens)
        made = [worker.tokens for worker in workers if worker.state in ALIVE]
        speeds = (now if made else 0.0, None, None)
        errors = tuple(failures[-ERRORS:])
        return UnitProgress(name, self.kind, done, total, len(failures), tokens, *speeds, tuple(workers), errors, state)

    def _counted(self, job: Job, age_s: float) -> WorkerProgress:
        shard, about = str(job.about.get("shard", "?")), job.about
        held = holder(self.folder / "journal" / f"{shard}.lock") if _SHARD.fullmatch(shard) else None
        state: WorkerState = "done" if job.ended else "lost"
        if not job.ended and held is not None and held.lives is not False:
            state = "running" if held.lives or age_s < SILENT_S else "silent"
        counts = (job.answers, None, job.failed, job.tokens)
        engine = str(about["engine"]) if "engine" in about else None
        return WorkerProgress(shard, str(about.get("host")), state, *counts, None, None, None, 0, engine, ())


class _Training(_Unit):
    """A training: one worker, whose rows are steps."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        """Prepare; nothing is read yet."""
        super().__init__(folder, kind)
        self._steps, self._last = Growing(folder / "steps.jsonl"), 0

    def _made(self, shard: str) -> Worker:
        return Worker(self.folder, shard, self.folder / "train.lock", self.folder / "logs" / "train.log")

    def _turns(self, run_since: float) -> Iterator[tuple[str, Turn]]:
        made, begun = mtime(self.folder / "metrics.json"), mtime(self.folder / "task.json")
        finished = made is not None and made >= (begun or 0.0)
        yield "training", Turn(0.0, finished, self._steps_done() if finished else None, run_since)

    def _steps_done(self) -> int:
        try:
            anew, lines = self._steps.lines()
        except OSError:
            return 0
        self._last = 0 if anew else self._last
        for line in lines:
            step = (json_object(line) or {}).get("step")
            self._last = max(self._last, step) if isinstance(step, int) else self._last
        return self._last

    def _rows(self) -> int | None:
        return None

    def _has_journal(self) -> bool:
        return False

    def _finished(self) -> JsonDict | None:
        made, begun = mtime(self.folder / "metrics.json"), mtime(self.folder / "task.json")
        if made is None or made < (begun or 0.0):
            return None
        metrics = json_object((self.folder / "metrics.json").read_bytes())
        if metrics is None:
            return None
        return {"requests": metrics.get("steps", 0), "completion_tokens": metrics.get("tokens", 0)}


def summed(
    name: str,
    kind: Kind,
    workers: Sequence[WorkerProgress],
    heard: Sequence[Said],
    total: int | None,
    errors: Sequence[str],
    owner: Owner,
) -> UnitProgress:
    """A unit by its workers."""
    done, failed = sum(worker.done for worker in workers), sum(worker.failed for worker in workers)
    nows = [worker.tokens_per_second_now for worker in workers if worker.tokens_per_second_now is not None]
    left = None if total is None else max(0, total - done - failed)
    return UnitProgress(
        unit=name,
        kind=kind,
        done=done,
        total=total,
        failed=failed,
        tokens=sum(worker.tokens for worker in workers),
        tokens_per_second_now=sum(nows) if nows else None,
        tokens_per_second_overall=overall(heard),
        seconds_left=seconds_left(workers, heard, left),
        workers=tuple(workers),
        errors=tuple(errors[-ERRORS:]),
        state=unit_state(workers, done, total, owner),
    )


def overall(heard: Sequence[Said]) -> float | None:
    """Tokens a second of all workers together, from when the first began to when the last ended."""
    spans = [said.span for said in heard if said.span is not None]
    if not spans:
        return None
    seconds = max(end for _, end in spans) - min(begun for begun, _ in spans)
    return sum(said.tokens for said in heard) / seconds if seconds > 0 else None


def seconds_left(workers: Sequence[WorkerProgress], heard: Sequence[Said], left: int | None) -> float | None:
    """Until the last row, if those that run now do all that is left; None where that cannot be said."""
    running = [worker.seconds_left for worker in workers if worker.state == "running"]
    known = [seconds for seconds in running if seconds is not None]
    if left is None or not known or len(known) < len(running):
        return None
    by_shard = {str(said.about.get("shard")): said for said in heard}
    rate = 0.0
    for worker in workers:
        said = by_shard.get(worker.shard)
        if worker.state == "running" and said is not None and said.span is not None:
            seconds = said.span[1] - said.span[0]
            rate += (said.done + said.failed - said.known) / seconds if seconds > 0 else 0.0
    return max([*known, left / rate]) if rate > 0 else None


def unit_state(workers: Sequence[WorkerProgress], done: int, total: int | None, owner: Owner) -> UnitState:
    """What a unit that is not done does."""
    states = {worker.state for worker in workers}
    if states & set(ALIVE):
        return "running"
    if states & {"failed", "lost"}:
        return "failed"
    if owner == "none" or (owner == "unknown" and "stopped" in states):
        return "stopped"
    return "waiting"


def _in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
