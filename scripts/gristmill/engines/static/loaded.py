"""A model that is loaded, with what every way of generating needs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.engines.answers import not_finite, read_answer, timed_out
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.prepared import Prepared
from gristmill.engines.static.grammar import Grammar
from gristmill.engines.static.token_budget import TokenBudget
from gristmill.types import Outcome


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model of transformers, its tokenizer, and its limits."""

    model: Any
    chat: ChatEncoder
    dtype: str
    #: models.*.timeout_seconds
    timeout_s: float | None
    on_gpu: bool
    budget: TokenBudget
    #: What the answers must follow (Sampling.json_schema).
    grammar: Grammar | None = None

    @property
    def pad_id(self) -> int:
        """What stands where a row has no token. Any id will do under a mask; 0 exists in every vocabulary."""
        pad = self.chat.tokenizer.pad_token_id
        return int(pad) if pad is not None else next(iter(self.chat.stop_ids()), 0)

    def outcome(
        self, item: Prepared, ids: Sequence[int], seconds: float, broken: int | None = None, late: bool = False
    ) -> Outcome:
        """What a row's generated ids come to.

        Args:
            item: the row.
            ids: what was generated; behind an end token may be padding.
            seconds: how long it took.
            broken: the first step whose logits were not finite, if it stands before the end.
            late: whether the time was over; an answer that has come to its end counts all the same.
        """
        if broken is not None:
            return not_finite(item, broken, self.dtype)
        completion = read_answer(item, ids, self.chat, seconds)
        if late and completion.finish_reason == "length" and len(ids) < item.request.sampling.max_new_tokens:
            return timed_out(item, len(ids), self.timeout_s)
        return completion
