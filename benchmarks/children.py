"""The processes that answer (ways.py), seen from the one that measures: started, asked, limited in time, ended.

- A process that crashes, says nothing for too long or cannot load becomes a result with a reason; nothing is raised.
- What it writes to standard error goes to a log file, whose last line is the reason for a crash.
- The whole process group is killed at the end, so that helpers of an engine do not keep a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from ways import Spec

from gristmill.gpu import nvml
from gristmill.types import Gpu, JsonDict

PROGRAM = Path(__file__).with_name("ways.py")
END_S = 20.0
BUSY_EVERY_S = 0.2


@dataclass(slots=True)
class Result:
    """What came of one way."""

    way: str
    #: ok; partial: its time was over; not available; failed; not run.
    status: str = "not run"
    reason: str | None = None
    #: From the start of the process to a model that can answer, and the part of it that is the model's own.
    start_seconds: float | None = None
    load_seconds: float | None = None
    about: JsonDict = field(default_factory=dict)
    passes: list[JsonDict] = field(default_factory=list)

    def note(self, event: JsonDict) -> bool:
        """Take what the process answered to a pass; False when it can answer no more."""
        if event["event"] == "pass":
            self.passes.append({name: value for name, value in event.items() if name != "event"})
            self.status, self.reason = ("ok", None) if event["complete"] else ("partial", "its time was over")
            return bool(event["complete"])
        self.status = {"unavailable": "not available", "late": "partial" if self.passes else "failed"}.get(
            event["event"], "failed"
        )
        self.reason = event["reason"]
        return False


class Child:
    """One process of ways.py."""

    def __init__(self, spec: Spec, python: str, environment: Mapping[str, str], log: Path) -> None:
        """Start it; `ready` waits for the model."""
        self._log = log
        self._events: queue.Queue[JsonDict] = queue.Queue()
        self._begun = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as said:
            self._process = subprocess.Popen(
                [python, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()
        self._tell(asdict(spec))

    def ready(self, limit_s: float) -> JsonDict:
        """Wait until it can answer: the event `loaded`, or the one that says why not."""
        event = self._wait(limit_s, "loading")
        return event | {"start_seconds": round(time.monotonic() - self._begun, 2)}

    def run(self, way: str, turn: int, limit_s: float, grace_s: float) -> JsonDict:
        """One pass. It is to end by itself at the limit, and is given up `grace_s` later."""
        self._tell({"way": way, "turn": turn, "limit_s": limit_s})
        return self._wait(limit_s + grace_s, way)

    def close(self) -> None:
        """Let it end, then end whatever is left of its group."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End it now, with everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tell(self, line: JsonDict) -> None:
        with contextlib.suppress(OSError):  # it is gone; `_wait` says so
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()

    def _wait(self, limit_s: float, what: str) -> JsonDict:
        end, last = time.monotonic() + limit_s, ""
        while True:
            try:
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self.kill()
                return {"event": "late", "reason": f"{what} took longer than {limit_s:.3g} s{last}"}
            if event["event"] != "progress":
                return event
            rate = event["tokens"] / event["seconds"]
            last = f"; until then {event['answered']} answers, {rate:.0f} tokens/s"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self._events.put(json.loads(line))
        code = self._process.wait()
        self._events.put({"event": "died", "reason": f"the process ended with {code}: {self._last_words()}"})

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "it said nothing"


class Busy:
    """How busy GPUs are during a `with` block, by the driver's own sampling; empty without a driver."""

    def __init__(self, devices: Sequence[Gpu]) -> None:
        self._devices = devices
        self._seen: dict[str, list[int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(5)

    def means(self) -> dict[str, float]:
        """Index and name of each GPU → mean share of time in which a kernel ran."""
        return {name: round(sum(seen) / len(seen) / 100, 3) for name, seen in self._seen.items() if seen}

    def _look(self) -> None:
        if not self._devices:
            return
        with nvml.session() as driver:
            if driver is None:
                return
            handles = {
                f"{gpu.index} {gpu.name}": nvml.ask(driver, "nvmlDeviceGetHandleByUUID", gpu.uuid)
                for gpu in self._devices
            }
            while not self._ended.wait(BUSY_EVERY_S):
                for name, handle in handles.items():
                    rates = None if handle is None else nvml.ask(driver, "nvmlDeviceGetUtilizationRates", handle)
                    if rates is not None:
                        self._seen.setdefault(name, []).append(int(rates.gpu))


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a process may take, in seconds, and how often it is asked."""

    #: From its start to a loaded model.
    load_s: float
    #: A pass of an engine.
    pass_s: float
    #: A pass of generate-…: what is finished by then is the sample.
    sample_s: float
    #: After a pass's limit, until the process is killed.
    grace_s: float
    #: Everything together; what would begin later is not run.
    budget_s: float
    passes: int


class Clock:
    """Seconds since the start, with a line to standard error for whatever happens."""

    def __init__(self, budget_s: float) -> None:
        self._begun = time.monotonic()
        self._budget_s = budget_s

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self._budget_s - (time.monotonic() - self._begun)

    def say(self, text: str) -> None:
        """`  12.3 s static: loaded in 9.1 s`."""
        print(f"{time.monotonic() - self._begun:6.1f} s  {text}", file=sys.stderr, flush=True)


def described(event: JsonDict) -> str:
    """An event for the line on standard error."""
    if event["event"] != "pass":
        return f"{event['event']}: {event.get('reason') or ''}"
    rate = event["tokens_per_second"]
    shown = "no whole batch" if rate is None else f"{rate:,.1f} tokens/s"
    whole = event.get("whole_tokens_per_second")
    shown += f" ({whole:,.1f} for the whole file)" if whole and not event["complete"] else ""
    text = f"pass {event['turn'] + 1}: {shown}, {event['answered']} of {event['requests']} answers"
    return text + "".join(f", {event[name]} {name}" for name in ("wrong", "failed") if event[name])


def started(child: Child, results: Sequence[Result], limits: Limits, clock: Clock) -> bool:
    """Wait for a process's model, for all the ways that it serves; False when there is none."""
    event = child.ready(min(limits.load_s, max(1.0, clock.left_s)))
    for result in results:
        result.start_seconds = event["start_seconds"]
        if event["event"] == "loaded":
            result.load_seconds = event["seconds"]
            result.about = {name: event[name] for name in event.keys() - {"event", "seconds", "start_seconds"}}
        else:
            result.note(event)
    clock.say(f"{results[0].way}: {described(event)} after {event['start_seconds']:.1f} s")
    return bool(event["event"] == "loaded")


def one_pass(child: Child, result: Result, turn: int, devices: Sequence[Gpu], limits: Limits, clock: Clock) -> bool:
    """Ask a way for a pass and note what came; False when it should not be asked again."""
    limit_s = limits.sample_s if result.way.startswith("generate-") else limits.pass_s
    limit_s = min(limit_s, clock.left_s - limits.grace_s)
    if limit_s <= 0:
        result.reason = result.reason or "the budget was spent"
        return False
    with Busy(devices) as busy:
        event = child.run(result.way, turn, limit_s, limits.grace_s)
    clock.say(f"{result.way}: {described(event)}")
    return result.note(event | {"busy": busy.means()} if event["event"] == "pass" else event)
