"""Requests as an engine takes them: token ids that fit the context, and rows that the policy skips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gristmill.config.schema import ModelConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.overflow import overflows, refuse_empty, shorten
from gristmill.errors import UserError
from gristmill.types import Completion, Request, Sampling


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its prompt's token ids, shortened where the policy says so."""

    request: Request
    ids: list[int]
    cut_tokens: int

    @property
    def tokens(self) -> int:
        """The most tokens that prompt and answer take together."""
        return len(self.ids) + self.request.sampling.max_new_tokens


def prepare(
    requests: Sequence[Request], chat: ChatEncoder, model: ModelConfig, context_tokens: int | None
) -> Iterator[Prepared | Completion]:
    """Each request ready for the model, in order; a skipped one comes as the completion that says so.

    Raises:
        UserError: a prompt does not fit and the policy is `error`, or no room can be made.
    """
    for request, ids in zip(requests, chat.encode([request.messages for request in requests]), strict=True):
        if not ids:
            refuse_empty([request])
        if not overflows(request, len(ids), context_tokens):
            yield Prepared(request, ids, 0)
            continue
        assert context_tokens is not None
        room = context_tokens - request.sampling.max_new_tokens
        if model.on_overflow == "skip":
            yield Completion(request.id, request.sample, request.variant, None, "skipped", len(ids), 0, 0.0)
        elif model.on_overflow == "error" or room < 1:
            raise UserError(f"{request.rid}: {len(ids)} prompt tokens, but {room} fit; see models.*.on_overflow")
        else:
            kept = shorten(ids, room, model.on_overflow)
            yield Prepared(request, kept, len(ids) - len(kept))


def by_sampling(items: Sequence[Prepared]) -> list[list[Prepared]]:
    """Items grouped by their sampling settings, which one call of a model shares; groups in order of appearance."""
    groups: dict[Sampling, list[Prepared]] = {}
    for item in items:
        groups.setdefault(item.request.sampling, []).append(item)
    return list(groups.values())
