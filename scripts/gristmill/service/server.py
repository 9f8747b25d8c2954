"""Starts the service: one a state folder, on one address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gristmill import locks
from gristmill.errors import UserError
from gristmill.service.app import Service, make_app
from gristmill.service.auth import read_or_make_token, require_safe_address
from gristmill.service.settings import Settings

#: Seconds that a connection may take to make a request.
REQUEST_S = 10.0


def serve(settings: Settings, token_named: bool, log: Callable[[str], None]) -> None:
    """Serve until a signal.

    Raises:
        UserError: the address is not safe or in use, the token or the folder cannot be used, or another service has it.
    """
    require_safe_address(settings.host, token_named)
    if not settings.directory.is_dir():
        raise UserError(f"--directory {settings.directory} is no folder; make it, or name another")
    try:
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"{settings.state} cannot be made: {error.strerror}; name another with --state") from error
    lock = locks.try_lock(settings.state / "lock", "serve")
    if lock is None:
        holder = locks.holder(settings.state / "lock")
        raise UserError(f"{settings.state} is in use by {holder}; stop it, or name another with --state")
    try:
        token = read_or_make_token(settings.token_file)
        with listening(settings) as listener:
            service = Service(settings, log)
            log(f"http://{_shown(settings.host)}:{listener.getsockname()[1]}/  token: {settings.token_file}")
            _server(service, token).run(sockets=[listener])
    finally:
        locks.release(lock)


def _server(service: Service, token: str) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(service, token),
        http=_Protocol,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # nobody stands in front of it, so nobody may say who called
        ws="none",
        h11_max_incomplete_event_size=16 * 1024,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
        limit_concurrency=1000,
    )
    return _Server(config, service)


class _Protocol(H11Protocol):
    """Closes a connection on which no request is made, or none is made whole, for REQUEST_S.

    Connections are counted before anyone shows a token: those that say nothing would keep everybody else out.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_idle and self._late is not None:
            self._late.cancel()
            self._late = None
        elif is_idle and self._late is None:
            self._late = self.loop.call_later(REQUEST_S, self.transport.close)


class _Server(uvicorn.Server):
    """Ends event streams first: a stop would wait for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.ending = True
        await super().shutdown(sockets)


def listening(settings: Settings) -> socket.socket:
    """A socket on the service's address; raises UserError when it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends small answers at once (TCP_NODELAY) only where the protocol is named; without it each takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host.strip("[]"), settings.port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        said = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{settings.host}:{settings.port} cannot be used: {said}; name another --port") from error
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
