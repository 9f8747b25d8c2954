"""A run's progress as server-sent events.

    event: progress    data: the run as GET /v1/runs lists it, at once and whenever it changes
    event: end         data: the same, when it has ended; then the stream ends

A stream looks at the last reading in memory and holds nothing, so a client that vanishes costs nothing once that is
noticed. A comment goes out every few seconds: proxies and dead connections show by it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from gristmill.service.models import RunView
from gristmill.service.runs import Seen

LOOK_S, PING_S = 0.25, 10.0


async def stream(look: Callable[[], Seen], gone: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The events of one run; `gone` says that the service is about to end."""
    version, said = -1, time.monotonic()
    yield b"retry: 2000\n\n"
    while not gone():
        seen = look()
        if seen.version != version:
            version, said = seen.version, time.monotonic()
            yield _event("progress" if seen.is_active else "end", seen)
            if not seen.is_active:
                return
        elif time.monotonic() - said >= PING_S:
            said = time.monotonic()
            yield b": still here\n\n"
        await asyncio.sleep(LOOK_S)


def _event(name: str, seen: Seen) -> bytes:
    """One event; JSON in one line has no newline that would end it."""
    return f"event: {name}\nid: {seen.version}\ndata: {RunView.of(seen).model_dump_json()}\n\n".encode()
