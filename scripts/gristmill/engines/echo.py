"""The echo engine: no model, the last message comes back. Real and selectable, for dry plumbing and tests.

It takes the true path through shards, journal and merge, counts words as tokens, honours max_new_tokens and
on_overflow. To look at a running pipeline, to interrupt it or to see what failed rows do, it can be slowed down
(GRISTMILL_ECHO_SECONDS, seconds a row) and made to fail (GRISTMILL_ECHO_FAILS, a regular expression of row ids).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence

from gristmill.engines.overflow import overflows, shorten
from gristmill.errors import UserError
from gristmill.types import Completion, Failure, FinishReason, Outcome, Request

#: A word with the white space before it.
_WORD = re.compile(r"\s*\S+")


class EchoEngine:
    """Answers with the words of the last message."""

    name = "echo"

    def __init__(self, context_tokens: int | None = None, on_overflow: str = "error") -> None:
        """Read the delay once; the context and the policy are those of the model's config."""
        self._delay_s = float(os.environ.get("GRISTMILL_ECHO_SECONDS", "0"))
        fails = os.environ.get("GRISTMILL_ECHO_FAILS")
        self._fails = re.compile(fails) if fails else None
        self._context_tokens = context_tokens
        self._on_overflow = on_overflow
        self._stopped = False

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Words in each request's messages."""
        return [sum(len(message["content"].split()) for message in request.messages) for request in requests]

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Echo the requests in order."""
        for request, prompt_tokens in zip(requests, self.prompt_tokens(requests), strict=True):
            if self._stopped:
                return
            start = time.perf_counter()
            if self._delay_s:
                time.sleep(self._delay_s)
            if self._fails is not None and self._fails.fullmatch(request.id):
                yield Failure(*request.rid, "out_of_memory", "GRISTMILL_ECHO_FAILS names it")
            else:
                yield self._answer(request, prompt_tokens, start)

    def stop(self) -> None:
        """The row in flight is the last."""
        self._stopped = True

    def close(self) -> None:
        """Nothing to free."""

    def _answer(self, request: Request, prompt_tokens: int, start: float) -> Completion:
        content, limit, cut_tokens = request.messages[-1]["content"], request.sampling.max_new_tokens, 0
        words = _WORD.findall(content)
        if self._context_tokens is not None and overflows(request, prompt_tokens, self._context_tokens):
            if self._on_overflow == "skip":
                return Completion(*request.rid, None, "skipped", prompt_tokens, 0, 0.0)
            room = self._context_tokens - limit
            if self._on_overflow == "error" or room < 1:
                raise UserError(f"{request.rid}: {prompt_tokens} words, but {room} fit; see models.*.on_overflow")
            words = shorten(words, room, self._on_overflow)
            content, cut_tokens = "".join(words), prompt_tokens - room
        whole = len(words) <= limit
        text = content if whole else "".join(words[:limit])
        finish: FinishReason = "stop" if whole else "length"
        seconds = time.perf_counter() - start
        sizes = (prompt_tokens - cut_tokens, min(limit, len(words)))
        return Completion(*request.rid, text, finish, *sizes, seconds, cut_tokens)
