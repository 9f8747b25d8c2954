"""One worker of a unit: what it says of itself, whether it lives, and what its GPUs do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.gpu.monitor import FORMAT as GPU_FORMAT
from gristmill.live.files import Ends, json_object
from gristmill.live.liveness import Holder, holder
from gristmill.live.snapshot import ALIVE, OVER, PHASES, Device, WorkerProgress, WorkerState
from gristmill.live.writing import ERROR_CHARACTERS, FORMAT
from gristmill.types import JsonDict
from gristmill.values import count, number

#: What "now" is, of a speed.
NOW_S = 30.0
#: A worker on another host that said nothing for so long may be gone; it speaks every writing.BEAT_S.
SILENT_S = 60.0
#: Between two clocks of one moment: a lock is noted just before a worker begins to speak.
CLOCK_S = 0.1
#: A GPU's sample that is older says nothing about now; there is one a second.
SAMPLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Said:
    """What a worker said: its first line, and the last few, each with a time."""

    about: JsonDict
    lines: tuple[JsonDict, ...]

    @property
    def last(self) -> JsonDict:
        """Its last word."""
        return self.lines[-1]

    @property
    def begun(self) -> float:
        """When this attempt began."""
        return number(self.about.get("begun_unix_s")) or 0.0

    @property
    def phase(self) -> WorkerState:
        """What it did when it said its last word; `running` for a word of a later version."""
        said = self.last.get("phase")
        return next((phase for phase in PHASES if phase == said), "running")

    @property
    def known(self) -> int:
        """Rows that had an answer before."""
        return count(self.about.get("known")) or 0

    @property
    def done(self) -> int:
        """Rows with an answer."""
        done = count(self.last.get("done"))
        return self.known if done is None else done

    @property
    def span(self) -> tuple[float, float] | None:
        """From when to when it made tokens; None before."""
        at, seconds = self.last["at"], number(self.last.get("seconds"))
        return None if seconds is None else (at - seconds, at)

    def overall(self) -> float | None:
        """Tokens a second since the model was there."""
        seconds = number(self.last.get("seconds"))
        return self.tokens / seconds if seconds else None

    @property
    def tokens(self) -> int:
        """Tokens made in this attempt."""
        return count(self.last.get("tokens")) or 0

    def now(self) -> float | None:
        """Tokens a second over the last NOW_S, up to its last word."""
        if self.span is None:
            return None
        begun, at = self.span
        earlier = [line for line in self.lines if begun <= line["at"] <= at - NOW_S and "tokens" in line]
        then, before = (earlier[-1]["at"], count(earlier[-1]["tokens"]) or 0) if earlier else (begun, 0)
        return max(0.0, (self.tokens - before) / (at - then)) if at > then else None

    def seconds_left(self) -> float | None:
        """By the rows that it made so far."""
        total, seconds = count(self.about.get("total")), number(self.last.get("seconds"))
        made = self.done + self.failed - self.known
        if total is None or not seconds or made <= 0:
            return None
        return max(0, total - self.done - self.failed) * seconds / made

    @property
    def failed(self) -> int:
        """Rows that failed in this attempt."""
        return count(self.last.get("failed")) or 0

    def errors(self) -> list[str]:
        """The different errors in its last lines, the newest last."""
        found = dict.fromkeys(str(line["error"]) for line in self.lines if line.get("error"))
        return [text[:ERROR_CHARACTERS] for text in found]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the unit knows of a worker."""

    #: What was said or locked before is of earlier requests, or of another cut of them.
    since: float
    #: Its part is there.
    finished: bool
    #: Rows of its part or shard, where it has not said it itself.
    rows: int | None
    #: When the Snakemake that is at work began; 0 where none is known. A worker that ended before has its turn to come.
    run_since: float = 0.0


class Worker:
    """The files of one worker, read again and again."""

    def __init__(self, folder: Path, shard: str, lock: Path, log: Path) -> None:
        """Prepare; nothing is read yet."""
        self.shard = shard
        self._lock = lock
        self._live, self._log = Ends(folder / "live" / f"{shard}.jsonl"), Ends(log)
        self._gpu = Ends(folder / "gpu" / f"{shard}.jsonl")

    def read(self, at: float, turn: Turn) -> tuple[WorkerProgress, Said | None, list[str]]:
        """How far it is, what it said, and its errors."""
        self._live.look()
        said = parse(self._live) if self._live.mtime >= turn.since else None
        held = holder(self._lock)
        held = held if held is not None and (held.lives or held.since >= turn.since) else None
        last_s = max(self._live.mtime, said.last["at"] if said else 0.0, held.since if held else 0.0)
        state = state_of(said, held, turn.finished, at - last_s)
        if state in OVER and max(said.begun if said else 0.0, held.since if held else 0.0) < turn.run_since:
            state = "waiting"
        errors = said.errors() if said else []
        if state == "lost":
            errors += [f"worker {self.shard} is gone: {self._last_words()}"]
        return self._progress(at, state, said, turn), said, errors

    def _progress(self, at: float, state: WorkerState, said: Said | None, turn: Turn) -> WorkerProgress:
        if said is None:
            done = turn.rows or 0 if turn.finished else 0
            return WorkerProgress(self.shard, None, state, done, turn.rows, 0, 0, None, None, None, 0, None, ())
        total = count(said.about.get("total"))
        running = state == "running"
        return WorkerProgress(
            shard=self.shard,
            host=str(said.about.get("host")),
            state=state,
            done=said.done,
            total=turn.rows if total is None else total,
            failed=said.failed,
            tokens=said.tokens,
            tokens_per_second_now=said.now() if running else (None if state in ALIVE else 0.0),
            tokens_per_second_overall=said.overall(),
            batch_rows=count(said.last.get("batch_rows", said.about.get("batch_rows"))),
            retries=count(said.last.get("retries")) or 0,
            engine=_text(said.about.get("engine")),
            devices=self._devices(at, said.about.get("devices"), state in ALIVE),
            seconds_left=said.seconds_left() if running else None,
        )

    def _devices(self, at: float, named: object, is_alive: bool) -> tuple[Device, ...]:
        found = tuple(_device(one) for one in named if isinstance(one, dict)) if isinstance(named, list) else ()
        if not found or not is_alive:
            return found
        self._gpu.look()
        samples = {str(line.get("uuid")): line for line in map(json_object, self._gpu.last) if line is not None}
        fresh = {uuid: line for uuid, line in samples.items() if _is_fresh(line, at)}
        return tuple(_sampled(device, fresh[device.uuid]) if device.uuid in fresh else device for device in found)

    def _last_words(self) -> str:
        self._log.look()
        lines = [" ".join(line.decode("utf-8", "replace").split()) for line in (self._log.first, *self._log.last)]
        return next((line[:ERROR_CHARACTERS] for line in reversed(lines) if line), "its log says nothing")


def parse(file: Ends) -> Said | None:
    """What stands in a live file; None where nothing usable does."""
    about = json_object(file.first)
    if about is None or about.get("gristmill_live") != FORMAT:
        return None
    lines = [line for line in map(json_object, file.last) if line is not None and number(line.get("at")) is not None]
    return Said(about, tuple(lines)) if lines else None


def state_of(said: Said | None, held: Holder | None, finished: bool, age_s: float) -> WorkerState:
    """What a worker does.

    Args:
        said: what it said last; None: nothing that counts.
        held: who took its lock last; None: nobody that counts.
        finished: its part is there.
        age_s: seconds since it was last heard of, by this host's clock.
    """
    if finished:
        return "done"
    anew = said is None or (held is not None and said.begun < held.since - CLOCK_S)
    if said is not None and not anew and said.phase not in ALIVE:
        return said.phase
    if held is None:
        return "waiting" if said is None else "lost"
    if held.lives is False:
        return "lost"
    if held.lives is None and age_s > SILENT_S:
        return "silent"
    return "starting" if anew or said is None else said.phase


def _device(named: JsonDict) -> Device:
    index, total = count(named.get("index")), count(named.get("memory_total_mib"))
    return Device(index, str(named.get("uuid")), str(named.get("name")), total)


def _sampled(device: Device, sample: JsonDict) -> Device:
    names = ("utilization_ratio", "power_watts", "temperature_celsius")
    numbers: dict[str, Any] = {name: number(sample.get(name)) for name in names}
    return replace(device, memory_used_mib=count(sample.get("memory_used_mib")), **numbers)


def _is_fresh(sample: JsonDict, at: float) -> bool:
    taken = number(sample.get("time_unix_s"))
    return taken is not None and sample.get("gristmill_gpu", GPU_FORMAT) == GPU_FORMAT and at - taken < SAMPLE_S


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
