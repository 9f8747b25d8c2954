"""What a worker says of itself while it runs: results/<unit>/live/<shard>.jsonl, for whoever watches.

    with Live(path, unit, shard) as live:
        live.tell("loading", total=120, known=20)
        live.count(lambda: {"done": …, "tokens": …})
        live.tell("running", engine="static")

- The first line says who this is and what is known of the job; when that changes, it is written anew. Then a line
  every EVERY_S when numbers changed, and one every BEAT_S when none did: that is how other hosts see that a job lives.
- At MOST_BYTES every second line is dropped: nothing grows for days, and the file still tells of the whole job.
- What an earlier attempt said moves to live/earlier/ if it made tokens, so that a report shows all of the work.
- One writer, by the shard's lock. Nothing depends on the file: a full disk is said once, and the job goes on. It is
  kept open, so that a results folder that is removed meanwhile does not come back.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from gristmill.errors import UserError
from gristmill.files import dumps
from gristmill.live.files import Ends, json_object
from gristmill.live.snapshot import WorkerState
from gristmill.progress import Progress, log
from gristmill.stopping import Interrupted
from gristmill.types import JsonDict
from gristmill.values import count, number

FORMAT = 1
EVERY_S, BEAT_S = 2.0, 10.0
MOST_BYTES = 256 * 1024
#: Below live/: what earlier attempts said.
EARLIER = "earlier"
#: Of one error's text.
ERROR_CHARACTERS = 300


class Live:
    """The live file of one job. Use as a context manager; how the block ends is its last line."""

    def __init__(self, path: Path, unit: str, shard: str) -> None:
        """Prepare; the file is begun with the first `tell`, so that until then an earlier job's stands."""
        self._path = path
        self._about: JsonDict = {"unit": unit, "shard": shard, "host": socket.gethostname(), "pid": os.getpid()}
        self._about["begun_unix_s"] = round(time.time(), 3)
        self._phase: WorkerState = "starting"
        self._count: Callable[[], JsonDict] = dict
        self._said: JsonDict = {}
        self._said_at = 0.0
        self._fd: int | None = None
        self._lines: list[bytes] = []
        self._size = 0
        self._refused = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="live")

    def __enter__(self) -> Live:
        """Start the clock."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        """Say how it ended."""
        self._ended.set()
        self._thread.join()
        numbers: JsonDict = {}
        if kind is None:
            self._phase = self._phase if self._phase == "stopped" else "done"
        elif issubclass(kind, Interrupted | KeyboardInterrupt):
            self._phase = "stopped"
        else:
            self._phase, numbers = "failed", {"error": error_text(value)}
        with self._lock:
            self._say(numbers)
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def tell(self, phase: WorkerState, **about: Any) -> None:
        """Say what the job does now, and what is known of it from now on."""
        with self._lock:
            self._phase = phase
            self._about |= about
            if about or self._fd is None:
                self._begin()
            else:
                self._say()

    def count(self, numbers: Callable[[], JsonDict]) -> None:
        """Take the numbers from `numbers`, which a thread calls.

        They are done, failed, tokens, seconds, batch_rows, retries and error, each if it is known.
        """
        self._count = numbers

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            with self._lock:
                if self._fd is None:
                    continue
                changed = self._numbers() != self._said
                if changed or time.monotonic() - self._said_at >= BEAT_S:
                    self._say()

    def _numbers(self) -> JsonDict:
        """Without the clock's: whether they changed says whether anything happened."""
        return {name: value for name, value in self._count().items() if name != "seconds"}

    def _line(self, more: JsonDict | None = None) -> bytes:
        self._said, self._said_at = self._numbers(), time.monotonic()
        return dumps({"at": round(time.time(), 3), "phase": self._phase, **self._count(), **(more or {})}) + b"\n"

    def _begin(self, more: JsonDict | None = None) -> None:
        """Write the file from its first line on, with one line more."""
        try:
            if self._fd is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _set_aside(self._path)
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            self._lines.append(self._line(more))
            data = dumps({"gristmill_live": FORMAT, **self._about}) + b"\n" + b"".join(self._lines)
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
            self._size = len(data)
        except OSError as error:
            self._refuse(error)

    def _say(self, more: JsonDict | None = None) -> None:
        if self._fd is None:
            return
        if self._size > MOST_BYTES:
            self._lines = self._lines[::2]
            self._begin(more)
            return
        line = self._line(more)
        try:
            self._size += os.pwrite(self._fd, line, self._size)
            self._lines.append(line)
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        if not self._refused:
            log(f"{self._path} cannot be written: {error.strerror}; the job goes on, but nobody sees how far it is")
        self._refused = True


def _set_aside(path: Path) -> None:
    """Move an earlier attempt's file away, if it has tokens to tell of."""
    earlier = Ends(path)
    earlier.look()
    made = [count(line.get("tokens")) for line in map(json_object, earlier.last) if line is not None]
    if any(made):
        begun = number((json_object(earlier.first) or {}).get("begun_unix_s")) or earlier.mtime
        folder = path.parent / EARLIER
        folder.mkdir(exist_ok=True)
        path.replace(folder / f"{path.stem}.{begun:.3f}{path.suffix}")


def outcome_numbers(progress: Progress, engine: object, total: int) -> Callable[[], JsonDict]:
    """The numbers of a job that answers requests or scores windows.

    Args:
        progress: counts the outcomes; what is left is what it has not counted.
        engine: may say how many rows it has in work (`batch_rows`) and what it tried again (`retries`).
        total: rows of the job, those that were known before among them.
    """

    def numbers() -> JsonDict:
        left = progress.total - progress.done
        return {
            "done": max(0, total - left - progress.failed),
            "failed": progress.failed,
            "tokens": progress.completion_tokens,
            "seconds": round(progress.elapsed_s, 3),
            "batch_rows": getattr(engine, "batch_rows", None),
            "retries": progress.retries + getattr(engine, "retries", 0),
            **({"error": progress.failure[:ERROR_CHARACTERS]} if progress.failure else {}),
        }

    return numbers


def error_text(value: BaseException | None) -> str:
    """An error on one line, not too long."""
    text = str(value) if isinstance(value, UserError) else f"{type(value).__name__}: {value}"
    return " ".join(text.split())[:ERROR_CHARACTERS]
