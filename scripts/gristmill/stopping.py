"""Ending early and well: what a job does with SIGTERM (a scheduler's warning) and SIGINT.

- While the model generates, the first signal asks the engine to begin nothing new, and the job has FINISH_S for the
  answers in flight; then, or at a second signal, Interrupted is raised in the main thread. At any other time the first
  signal raises it at once.
- A main thread that hangs in C (a kernel on a lost GPU, a read from a dead disk) never sees a signal. A thread does,
  through the wake-up descriptor, and ends the process after LIMIT_S: every answer is with the operating system already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

#: Seconds from the signal: for the answers in flight, and until the process is ended from outside its main thread.
FINISH_S, LIMIT_S = 7.0, 9.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """SIGTERM or SIGINT came; `signum` says which.

    Like KeyboardInterrupt no Exception, so that no library takes it for a failure of its own and goes on.
    """

    def __init__(self, signum: int) -> None:
        """Keep the signal for the exit status."""
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop:
    """Whether a signal came, and what is done about it."""

    def __init__(self) -> None:
        """No signal yet."""
        self.signum: int | None = None
        self._begin: Callable[[], None] | None = None

    @contextlib.contextmanager
    def finishing(self, begin: Callable[[], None]) -> Iterator[None]:
        """Within the block the first signal calls `begin` and gives what is in flight FINISH_S to end by itself."""
        self._begin = begin
        try:
            yield
        finally:
            self._begin = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def check(self) -> None:
        """Raise Interrupted when a signal came."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def on_signal(self, signum: int, _frame: object) -> None:
        """The handler of SIGTERM and SIGINT."""
        first, self.signum = self.signum is None, self.signum or signum
        if not first or self._begin is None:
            raise Interrupted(self.signum)
        self._begin()
        signal.setitimer(signal.ITIMER_REAL, FINISH_S)

    def on_alarm(self, _signum: int, _frame: object) -> None:
        """The handler of SIGALRM: the time for the answers in flight is over."""
        self.check()


@contextlib.contextmanager
def interruptible() -> Iterator[Stop]:
    """Handle SIGTERM and SIGINT as described above; call it in the main thread."""
    stop = Stop()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()
    threading.Thread(target=_end_a_hung_process, args=(reader, ended), daemon=True, name="stopping").start()
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, stop.on_signal) for number in _SIGNALS}
    previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, stop.on_alarm)
    try:
        yield stop
    finally:
        ended.set()
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        os.close(writer)  # the thread reads the end of it


def _end_a_hung_process(reader: int, ended: threading.Event) -> None:
    """In a thread: see the first signal, and end the process if the main thread has not done so in time."""
    try:
        while data := os.read(reader, 1):
            if data[0] in _SIGNALS and not ended.wait(LIMIT_S):
                print(f"stopped by {signal.Signals(data[0]).name}, hung", file=sys.stderr, flush=True)
                os._exit(128 + data[0])
    finally:
        os.close(reader)
