"""Drawing on a terminal until someone leaves: its state is restored whatever ends this, but for a kill -9.

- The view is on the alternate screen, so what stood there before comes back. It is drawn anew at every look, at a
  change of the window's size, and after Ctrl-Z and fg.
- Keys are read one by one and not shown; Ctrl-C and Ctrl-Z stay signals. Without a keyboard (stdin is no terminal)
  only Ctrl-C leaves.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live

_LEAVE = b"qQ\x03\x04"


class Left(Exception):
    """SIGTERM or SIGHUP came: leave as at a key."""


def show(draw: Callable[[], RenderableType], every_s: float, console: Console) -> None:
    """Draw again and again until a key or a signal ends it.

    Args:
        draw: what to show now; called every `every_s`.
        every_s: seconds between two looks.
        console: of the terminal.
    """
    with contextlib.suppress(KeyboardInterrupt, Left), _signals() as wake:
        while _until_left_or_suspended(draw, every_s, console, wake):
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # goes on here after fg
            signal.signal(signal.SIGTSTP, lambda *_: None)


def _until_left_or_suspended(draw: Callable[[], RenderableType], every_s: float, console: Console, wake: int) -> bool:
    """Whether Ctrl-Z ended it, and not a key that leaves."""
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw(), refresh=True)
            deadline = time.monotonic() + every_s
            while (left := deadline - time.monotonic()) > 0:
                ready, _, _ = select.select([wake, *keys], [], [], left)
                for fd in ready:
                    data = os.read(fd, 64)
                    if fd == wake and bytes([signal.SIGTSTP]) in data:
                        return True
                    if fd != wake and (not data or any(byte in _LEAVE for byte in data)):
                        return False
                if wake in ready:  # another size
                    live.refresh()


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """The keyboard's descriptor, read key by key; nothing where there is none."""
    fd = _keyboard()
    if fd is None:
        yield []
        return
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield [fd]
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _keyboard() -> int | None:
    """Stdin, if it is a terminal that this process may read from: one in the background is stopped for trying."""
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):  # closed, or of another session
        return None


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that the numbers of signals come through: of another size, and of Ctrl-Z."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    os.set_blocking(writing, False)

    def leave(*_: object) -> None:
        raise Left

    wanted = {
        signal.SIGWINCH: lambda *_: None,
        signal.SIGTSTP: lambda *_: None,
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
    }
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    waker = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(waker)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
