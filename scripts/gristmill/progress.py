"""Progress lines for a job's log: rows done and total, tokens a second, time left.

Plain lines from a thread of their own, one every few seconds when something changed and one a minute when nothing did:
a batch that takes long shows as a job that lives, and a log read the next morning is not full of repetition.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from gristmill.types import Completion, Outcome

EVERY_S, QUIET_S = 5.0, 60.0


def log(message: str) -> None:
    """One timestamped line on stderr; a log on a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Progress:
    """Counts outcomes; inside a `with` block it says now and then how far the job is."""

    total: int
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Requests asked again, of those that are done.
    retries: int = 0
    #: The last row that failed, and why.
    failure: str | None = None
    _start: float = field(default_factory=time.monotonic)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        """Start the clock and the lines."""
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        """Say the last line."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        log(self.line())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first request was handed over."""
        return time.monotonic() - self._start

    def add(self, outcome: Outcome) -> None:
        """Count one outcome; a failed row is named at once."""
        self.done += 1
        if isinstance(outcome, Completion):
            self.prompt_tokens += outcome.prompt_tokens
            self.completion_tokens += outcome.completion_tokens
        else:
            self.failed += 1
            self.failure = f"row {outcome.rid} failed: {outcome.reason}: {outcome.detail}"
            log(self.failure)

    def line(self) -> str:
        """`120/500 rows, 345.6 tokens/s, 0:01:10 left`; no guess before the first row is done."""
        rate = self.completion_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0
        line = f"{self.done}/{self.total} rows, {rate:.1f} tokens/s"
        if self.done == 0:
            return f"{line}, the first rows are on their way"
        left_s = round(self.elapsed_s / self.done * (self.total - self.done))
        return f"{line}, {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"

    def _speak(self) -> None:
        said_done, said_at = -1, self._start
        while not self._ended.wait(EVERY_S):
            if self.done != said_done or time.monotonic() - said_at >= QUIET_S:
                said_done, said_at = self.done, time.monotonic()
                log(self.line())
