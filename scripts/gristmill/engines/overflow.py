"""Prompts that do not fit: found before any generation, and shortened only when the config asks for it.

- A prompt fits when prompt and max_new_tokens together stay within the context. Where labels are asked about, nothing
  is generated: the longest of them counts as part of the prompt.
- truncate_left drops the oldest tokens, truncate_middle keeps the head (instructions) and the tail (the question's
  end). The first tokens of a template (begin of text, role header) are lost by truncate_left: prefer truncate_middle
  for chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError, some
from gristmill.types import Request

Token = TypeVar("Token")


def overflows(request: Request, prompt_tokens: int, context_tokens: int | None) -> bool:
    """Whether prompt and answer together exceed the context (None: no limit is known)."""
    return context_tokens is not None and prompt_tokens + new_tokens(request) > context_tokens


def new_tokens(request: Request) -> int:
    """The most tokens that are generated for a request."""
    return 0 if request.labels else request.sampling.max_new_tokens


def refuse_empty(requests: Sequence[Request]) -> None:
    """Stop before any generation when a prompt has no token at all: there is nothing that a model could go on from.

    Raises:
        UserError: names the rows.
    """
    if requests:
        names = some([str(request.rid) for request in requests])
        count = "1 prompt has" if len(requests) == 1 else f"{len(requests)} prompts have"
        raise UserError(f"{count} no tokens: {names}; drop the rows, or give the prompt a text of its own")


def refuse_overflow(requests: Sequence[tuple[Request, int]], context_tokens: int | None, model: ModelConfig) -> None:
    """Stop before any generation when a prompt is too long and the policy is `error`, or when no room can be made.

    Raises:
        UserError: names the rows, their length and the choices.
    """
    if context_tokens is None:
        return
    too_long = [(request, tokens) for request, tokens in requests if overflows(request, tokens, context_tokens)]
    if not too_long:
        return
    answer = max(new_tokens(request) for request, _ in too_long)
    if answer >= context_tokens and model.on_overflow != "skip":
        raise UserError(
            f"max_new_tokens={answer} leaves no room for a prompt in a context of {context_tokens}; lower it"
        )
    if model.on_overflow == "error":
        longest = max(tokens for _, tokens in too_long)
        names = some([str(request.rid) for request, _ in too_long])
        count = "1 prompt does" if len(too_long) == 1 else f"{len(too_long)} prompts do"
        if not answer:
            raise UserError(
                f"{count} not fit: the longest has {longest} tokens with its longest label, and the context has "
                f"{context_tokens}; rows: {names}; set models.*.on_overflow to truncate_left, truncate_middle or skip"
            )
        raise UserError(
            f"{count} not fit: the longest has {longest} tokens, and with max_new_tokens={answer} the context of "
            f"{context_tokens} leaves {context_tokens - answer}; rows: {names}; "
            "set models.*.on_overflow to truncate_left, truncate_middle or skip, or lower max_new_tokens"
        )


def shorten(ids: list[Token], room: int, policy: str) -> list[Token]:
    """Cut a prompt's token ids to `room` tokens by the policy."""
    if len(ids) <= room:
        return ids
    if policy == "truncate_left":
        return ids[len(ids) - room :]
    head = room // 2
    return ids[:head] + ids[len(ids) - (room - head) :]
