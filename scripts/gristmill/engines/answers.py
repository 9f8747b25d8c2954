"""From generated token ids to a completion or a failure, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill.engines.chat import ChatEncoder
from gristmill.engines.prepared import Prepared
from gristmill.types import Completion, Failure, FailureReason, FinishReason

#: An answer in the making is looked through for stop texts after every so many tokens.
STOP_TEXT_TOKENS = 4


def read_answer(item: Prepared, row: Sequence[int], chat: ChatEncoder, seconds: float) -> Completion:
    """The answer in generated ids: up to the first token that ends an answer, then up to the first stop text.

    What stands behind either, the end token included, is padding of a batch or the engine's own. A reasoning block
    that the prompt opened gets its opening tag back, so that the text is whole; its tokens are the prompt's.
    """
    end = first_end(row, chat)
    ids = list(row if end is None else row[:end])
    finish: FinishReason = "length" if end is None else "stop"
    text = chat.decode(ids)
    for stop in item.request.sampling.stop:
        if stop in text:
            text, finish = text.partition(stop)[0], "stop"
    if finish == "stop" and end is None:  # tokens after a stop text are padding of the batch
        ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    text = chat.opened_thinking(item.ids) + text
    request = item.request
    return Completion(
        request.id, request.sample, request.variant, text, finish, len(item.ids), len(ids), seconds, item.cut_tokens
    )


def holds_stop_text(ids: Sequence[int], new: int, stops: Sequence[str], chat: ChatEncoder) -> bool:
    """Whether an answer in the making holds one of its stop texts, of which `new` tokens were not looked at yet.

    The newest tokens are looked at first, and the whole answer only when something is found there: the head of a tail
    may be cut in two, or tidied by the tokenizer.
    """
    if not stops:
        return False
    # A token holds a byte or more; as many again for those since the last look, and for a head cut in two.
    newest = chat.decode(ids[-(max(len(stop.encode()) for stop in stops) + 2 * new) :])
    return any(stop in newest for stop in stops) and any(stop in chat.decode(ids) for stop in stops)


def first_end(row: Sequence[int], chat: ChatEncoder) -> int | None:
    """Where the first token stands that ends an answer."""
    return next((place for place, token in enumerate(row) if token in chat.ends), None)


def out_of_memory(item: Prepared) -> Failure:
    """A row that does not fit even alone."""
    new = item.tokens - len(item.ids)
    return _failure(item, "out_of_memory", f"a batch of one row with {len(item.ids)} prompt tokens and {new} new ones")


def timed_out(item: Prepared, tokens: int, limit_s: float | None) -> Failure:
    """A row that models.*.timeout_seconds ended after so many new tokens."""
    new = item.request.sampling.max_new_tokens
    return _failure(item, "timeout", f"no end after {tokens} of {new} tokens in {limit_s:g} s (timeout_seconds)")


def not_finite(item: Prepared, step: int, dtype: str) -> Failure:
    """A row whose logits at a step (0-based) cannot be drawn from."""
    detail = f"the logits of new token {step + 1} are not finite in {dtype}; try dtype bfloat16 or float32"
    return _failure(item, "non_finite_logits", detail)


def likelihood_not_finite(item: Prepared, dtype: str) -> Failure:
    """A row whose labels have no likelihood that is a number."""
    detail = f"the log probability of a label is not finite in {dtype}; try dtype bfloat16 or float32"
    return _failure(item, "non_finite_logits", detail)


def _failure(item: Prepared, reason: FailureReason, detail: str) -> Failure:
    return Failure(item.request.id, item.request.sample, item.request.variant, reason, detail)
