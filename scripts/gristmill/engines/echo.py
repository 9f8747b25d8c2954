"""The echo engine: no model, the last message comes back. Real and selectable, for dry plumbing and tests.

It takes the true path through shards, journal and merge, counts words as tokens, honours max_new_tokens and
on_overflow. To look at a running pipeline, to interrupt it or to see what failed rows do, it can be slowed down
(GRISTMILL_ECHO_SECONDS, seconds a row) and made to fail (GRISTMILL_ECHO_FAILS, a regular expression of row ids).

Asked for the likelihood of labels it gives numbers that follow from a hash of the request, whose mass is below 1; asked
for an answer by a JSON Schema it writes the smallest document of a simple one (echo_json.py).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Iterator, Sequence

from gristmill.codec import request_to_json
from gristmill.engines.echo_json import smallest
from gristmill.engines.overflow import new_tokens, overflows, shorten
from gristmill.errors import UserError
from gristmill.files import canonical
from gristmill.types import Completion, Failure, FinishReason, Outcome, Request

#: A word with the white space before it.
_WORD = re.compile(r"\s*\S+")


class EchoEngine:
    """Answers with the words of the last message."""

    name = "echo"
    #: For whoever watches.
    batch_rows = 1

    def __init__(self, context_tokens: int | None = None, on_overflow: str = "error") -> None:
        """Read the delay once; the context and the policy are those of the model's config."""
        self._delay_s = float(os.environ.get("GRISTMILL_ECHO_SECONDS", "0"))
        fails = os.environ.get("GRISTMILL_ECHO_FAILS")
        self._fails = re.compile(fails) if fails else None
        self._context_tokens = context_tokens
        self._on_overflow = on_overflow
        self._stopped = False

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Words in each request's messages and its longest label."""
        return [
            sum(len(message["content"].split()) for message in request.messages) + _label_words(request)
            for request in requests
        ]

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

    def _answer(self, request: Request, tokens: int, start: float) -> Completion:
        words, cut_tokens = _WORD.findall(request.messages[-1]["content"]), 0
        if self._context_tokens is not None and overflows(request, tokens, self._context_tokens):
            room = self._context_tokens - new_tokens(request) - _label_words(request)
            if self._on_overflow == "skip":
                return Completion(*request.rid, None, "skipped", tokens, 0, 0.0)
            if self._on_overflow == "error" or room < 1:
                raise UserError(f"{request.rid}: {tokens} words, but {room} fit; see models.*.on_overflow")
            words = shorten(words, room, self._on_overflow)
            cut_tokens = tokens - _label_words(request) - room
        prompt_tokens = tokens - _label_words(request) - cut_tokens
        if request.labels:
            scores = pseudo_likelihoods(request)
            best = request.labels[scores.index(max(scores))]
            seconds = time.perf_counter() - start
            return Completion(*request.rid, best, "stop", prompt_tokens, 0, seconds, cut_tokens, scores)
        content = request.messages[-1]["content"] if not cut_tokens else "".join(words)
        if schema := request.sampling.json_schema:
            content = smallest(schema)
            words = _WORD.findall(content)
        limit = request.sampling.max_new_tokens
        whole = len(words) <= limit
        text = content if whole else "".join(words[:limit])
        finish: FinishReason = "stop" if whole else "length"
        sizes = (prompt_tokens, min(limit, len(words)))
        return Completion(*request.rid, text, finish, *sizes, time.perf_counter() - start, cut_tokens)


def _label_words(request: Request) -> int:
    return max((len(label.split()) for label in request.labels), default=0)


def pseudo_likelihoods(request: Request) -> tuple[float, ...]:
    """Log probabilities of a request's labels by hashes of it and each label; together they have a mass below 1."""
    asked = canonical(request_to_json(request))
    drawn = [_drawn(asked + canonical(label)) for label in request.labels]
    mass = 0.5 + 0.5 * _drawn(asked)
    return tuple(math.log(mass * weight / sum(drawn)) for weight in drawn)


def _drawn(data: bytes) -> float:
    """A number in (0, 1) that follows from the data."""
    return (int.from_bytes(hashlib.sha256(data).digest()[:4], "big") + 1) / (2**32 + 1)
