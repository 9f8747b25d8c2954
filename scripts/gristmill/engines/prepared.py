"""Requests as an engine takes them: token ids that fit the context, and rows that the policy skips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gristmill.config.schema import ModelConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.overflow import new_tokens, overflows, refuse_empty, shorten
from gristmill.engines.tokens import tokenize
from gristmill.errors import UserError
from gristmill.types import Completion, Request, Sampling


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its prompt's token ids, shortened where the policy says so."""

    request: Request
    ids: list[int]
    cut_tokens: int
    #: The token ids of the request's labels.
    labels: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> int:
        """The most tokens that prompt and answer, or label, take together."""
        return len(self.ids) + new_tokens(self.request) + max(map(len, self.labels), default=0)


def prepare(
    requests: Sequence[Request], chat: ChatEncoder, model: ModelConfig, context_tokens: int | None
) -> Iterator[Prepared | Completion]:
    """Each request ready for the model, in order; a skipped one comes as the completion that says so.

    Raises:
        UserError: a prompt does not fit and the policy is `error`, or no room can be made.
    """
    for request, asked in zip(requests, tokenize(requests, chat), strict=True):
        ids = asked.prompt
        if not ids:
            refuse_empty([request])
        if not overflows(request, asked.tokens, context_tokens):
            yield Prepared(request, ids, 0, asked.labels)
            continue
        assert context_tokens is not None
        room = context_tokens - new_tokens(request) - (asked.tokens - len(ids))
        if model.on_overflow == "skip":
            yield Completion(request.id, request.sample, request.variant, None, "skipped", len(ids), 0, 0.0)
        elif model.on_overflow == "error" or room < 1:
            raise UserError(f"{request.rid}: {len(ids)} prompt tokens, but {room} fit; see models.*.on_overflow")
        else:
            kept = shorten(ids, room, model.on_overflow)
            yield Prepared(request, kept, len(ids) - len(kept), asked.labels)


def by_sampling(items: Sequence[Prepared]) -> list[list[Prepared]]:
    """Items grouped by their sampling settings, which one call of a model shares; groups in order of appearance."""
    groups: dict[Sampling, list[Prepared]] = {}
    for item in items:
        groups.setdefault(item.request.sampling, []).append(item)
    return list(groups.values())
