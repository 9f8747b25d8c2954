"""The endpoint engine: a model behind an OpenAI-compatible server, asked by an event loop in a thread of its own.

- max_concurrent tasks take requests in order and hand each outcome on as it comes, so rows come out of order.
- `stop` gives up rows that wait for their turn or for another try; requests under way have the job's last seconds.
- An error that ends the job comes after the outcomes that were there before it: they are in the journal by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from gristmill.config.endpoint import EndpointConfig
from gristmill.engines.endpoint.client import Client, Stopped
from gristmill.engines.endpoint.messages import refuse_unasked
from gristmill.errors import UserError
from gristmill.types import Outcome, Request

_HEADER_VALUE = re.compile(r"[\x21-\x7e]+")
_HERE = {"localhost", "127.0.0.1", "::1"}


class EndpointEngine:
    """Answers through a server."""

    name = "endpoint"

    def __init__(self, endpoint: EndpointConfig, on_overflow: str, log: Callable[[str], None]) -> None:
        """Read the key; the server is first asked by `generate`.

        Raises:
            UserError: the key's variable is not set, or holds no key.
        """
        self._endpoint, self._on_overflow, self._log = endpoint, on_overflow, log
        self._key = _key(endpoint)
        if self._key and endpoint.base_url.startswith("http:") and urlsplit(endpoint.base_url).hostname not in _HERE:
            log(f"{endpoint.base_url}: the key travels without encryption; use https where the network is not yours")
        #: What the server says it is: model and system_fingerprint; in manifest.json.
        self.served: dict[str, list[str]] = {"model": [], "system_fingerprint": []}
        self._stopped = False
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def batch_rows(self) -> int:
        """Requests under way, for whoever watches."""
        return self._client.under_way if self._client is not None else 0

    @property
    def retries(self) -> int:
        """How many requests were sent again."""
        return self._client.sent_again if self._client is not None else 0

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Words in each request's messages: the tokenizer is at the server."""
        return [sum(len(message["content"].split()) for message in request.messages) for request in requests]

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Answer the requests, in the order in which the server does.

        Raises:
            UserError: the server, the key or the config does not do.
        """
        for request in requests:
            refuse_unasked(self._endpoint, request)
        found: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(requests, found), daemon=True, name="endpoint")
        self._thread.start()
        while (item := found.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        """Begin nothing new; rows that wait are given up."""
        self._stopped = True
        if self._loop is not None and self._client is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._client.end)

    def close(self) -> None:
        """Give up what is under way and close the connections."""
        self._stopped = True
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _serve(self, requests: Sequence[Request], found: queue.SimpleQueue[Outcome | BaseException | None]) -> None:
        """In the thread: run the loop to its end, and say how it ended."""
        try:
            asyncio.run(self._ask_all(requests, found))
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as group:
            found.put(_first(group))
        except BaseException as error:
            found.put(error)
        finally:
            found.put(None)

    async def _ask_all(
        self, requests: Sequence[Request], found: queue.SimpleQueue[Outcome | BaseException | None]
    ) -> None:
        waiting = iter(requests)

        async def take(client: Client) -> None:
            for request in waiting:
                if self._stopped:
                    return
                with contextlib.suppress(Stopped):
                    found.put(await client.ask(request))

        self._task = asyncio.current_task()
        client = Client(self._endpoint, self._key, self._on_overflow, self.served, self._log)
        self._client, self._loop = client, asyncio.get_running_loop()
        if self._stopped:
            return
        async with client, asyncio.TaskGroup() as tasks:
            for _ in range(min(self._endpoint.max_concurrent, len(requests))):
                tasks.create_task(take(client))


def _key(endpoint: EndpointConfig) -> str | None:
    """The key, from the variable that the config names; it is never quoted."""
    if endpoint.key_env is None:
        return None
    key = os.environ.get(endpoint.key_env, "").strip()
    if not key:
        raise UserError(f"{endpoint.key_env}, which endpoint.key_env names, is not set; export it and run again")
    if not _HEADER_VALUE.fullmatch(key):
        raise UserError(f"{endpoint.key_env} holds spaces or characters that no key has; set it to the key alone")
    return key


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error behind a group: when one task fails, the others are only cancelled."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
