"""What stands in front of every request: host, size, token, rate, and the headers that go with every answer.

Plain ASGI, since a stream must pass through it unchanged. The body is read here, to its limit and within a time: a
client that sends without end, or one byte a minute, is refused before anything is parsed.
"""

from __future__ import annotations

import asyncio
import math
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill.service.auth import Gate, host_name
from gristmill.service.problems import Problem
from gristmill.service.requests import RequestMetrics

#: What needs no token: whether the process answers, and the page, which holds no data.
OPEN_PATHS = frozenset({"/health", "/"})
BODY_S = 10.0
#: A browser may neither guess types, nor frame an answer, nor keep it.
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_NOTHING = "default-src 'none'; frame-ancestors 'none'"


class Guard:
    """Wraps the application."""

    def __init__(
        self, app: ASGIApp, gate: Gate, hosts: frozenset[str], max_body_bytes: int, metrics: RequestMetrics
    ) -> None:
        """Keep what decides."""
        self._app, self._gate, self._hosts = app, gate, hosts
        self._max_body_bytes, self._metrics = max_body_bytes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer with a problem."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                there = {name.lower() for name, _ in message["headers"]}
                more = {**HEADERS, "content-security-policy": _NOTHING}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in more.items() if k.encode() not in there),
                ]
            await send(message)

        try:
            await self._answer(scope, receive, send_guarded)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count(scope["method"], route, status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send)

    def _check(self, scope: Scope) -> None:
        """Host, token and rate.

        Raises:
            Problem: one of them is wrong.
        """
        headers = dict(scope["headers"])
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        if host not in self._hosts:
            raise Problem(421, "this service has another name; call it 127.0.0.1, or start it with --allowed-host")
        if scope["path"] not in OPEN_PATHS and not self._gate.knows(_text(headers.get(b"authorization"))):
            wait_s = self._gate.guesses.take()
            if wait_s is not None:
                raise _too_many(wait_s, "too many requests without the token")
            raise Problem(
                401,
                "the token is missing or wrong; send `Authorization: Bearer TOKEN`, the content of the token file",
                {"WWW-Authenticate": 'Bearer realm="gristmill"'},
            )
        wait_s = self._gate.requests.take()
        if wait_s is not None:
            raise _too_many(wait_s, "too many requests")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            Problem: it is too large, or does not come.
        """
        limit = self._max_body_bytes
        too_large = Problem(413, f"the body is over {limit} bytes; no request here needs more", {"Connection": "close"})
        length = _text(dict(scope["headers"]).get(b"content-length"))
        if length is not None and (not length.isdigit() or int(length[:20]) > limit):
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Problem(400, "the client left before its body was here")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise Problem(408, f"the body did not come within {BODY_S:g} s", {"Connection": "close"}) from None


def _too_many(wait_s: float, what: str) -> Problem:
    return Problem(429, f"{what}; wait {wait_s:.1f} s", {"Retry-After": str(math.ceil(wait_s))})


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
