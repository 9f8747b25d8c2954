"""Requests as token ids: the prompt, and where labels are asked about, the tokens by which each goes on.

A label is tokenized together with the prompt's text, as the model would have read both, and not alone: in many
vocabularies a word is another token at the start of a text. Where that changes the prompt's last tokens (a prompt that
ends in a space, and the label's first word), the labels of the request all begin at the first token that changes for
one of them: only then are their likelihoods those of different goings-on of one and the same prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gristmill.engines.chat import ChatEncoder
from gristmill.errors import UserError
from gristmill.types import Request

#: Requests that are tokenized at once: each label is as long as its prompt for a moment.
CHUNK = 1000


@dataclass(frozen=True, slots=True)
class Tokens:
    """A request's token ids."""

    #: Of the prompt; where a label merges with its end, of what stands before.
    prompt: list[int]
    #: Of each label, in the request's order.
    labels: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> int:
        """How long the prompt is with its longest label."""
        return len(self.prompt) + max(map(len, self.labels), default=0)


def tokenize(requests: Sequence[Request], chat: ChatEncoder) -> Iterator[Tokens]:
    """The token ids of each request, in order.

    Raises:
        UserError: a label has no tokens of its own, or the same as another label.
    """
    for begin in range(0, len(requests), CHUNK):
        yield from _tokenize(requests[begin : begin + CHUNK], chat)


def _tokenize(requests: Sequence[Request], chat: ChatEncoder) -> Iterator[Tokens]:
    texts = [chat.render(request.messages) for request in requests]
    labelled = [text + label for request, text in zip(requests, texts, strict=True) for label in request.labels]
    prompts = chat.encode_prompts(texts)
    wholes = iter(chat.encode_prompts(labelled) if labelled else [])
    for request, prompt in zip(requests, prompts, strict=True):
        yield _cut(request, prompt, [next(wholes) for _ in request.labels]) if request.labels else Tokens(prompt)


def _cut(request: Request, prompt: list[int], wholes: Sequence[list[int]]) -> Tokens:
    """The prompt's and the labels' tokens, from the ids of the prompt with each label."""
    start = min(_shared(prompt, whole) for whole in wholes)
    labels = tuple(tuple(whole[start:]) for whole in wholes)
    seen: dict[tuple[int, ...], str] = {}
    for label, ids in zip(request.labels, labels, strict=True):
        if list(ids) == prompt[start:]:
            raise UserError(f"{request.rid}: label {label!r} has no tokens in this model's vocabulary; change it")
        if ids in seen:
            raise UserError(
                f"{request.rid}: labels {seen[ids]!r} and {label!r} are the same tokens in this model's vocabulary; "
                "change one"
            )
        seen[ids] = label
    return Tokens(prompt[:start], labels)


def _shared(prompt: list[int], whole: list[int]) -> int:
    """How many tokens both begin with."""
    if whole[: len(prompt)] == prompt:
        return len(prompt)
    return next(
        (place for place, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(whole)
    )
