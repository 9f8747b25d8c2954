"""The texts of a teacher as token ids: windows, the unit in which they are scored, kept and stored.

- A plain text is tokenized as the tokenizer does it by itself; its first token has no position, since nothing stands
  before it.
- A chat is the prompt through the teacher's template and the answer's text behind it, tokenized by itself, so that the
  prompt's ids are those that were generated from. An answer that ended by itself, and a reference, ends with the token
  that ends a turn: a student must learn to stop. Only the answer has positions.
- A longer text is cut at its end, or split into windows that share one token: each token but the first has a position
  once. How many tokens were cut stands with the row.
- A text without a position (one token, an empty answer, a prompt that fills the window) is a window all the same, so
  that rows correspond; one that is not there (a failed row, no reference) is skipped, with the reason.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.config.schema import LogitsConfig, ModelConfig, SamplingConfig
from gristmill.config.specs import LogitsSpec, RequestsSpec
from gristmill.engines import context_limit
from gristmill.engines.chat import ChatEncoder
from gristmill.errors import UserError
from gristmill.files import LONE_SURROGATE, canonical, check_seal, read_jsonl
from gristmill.grading.text import alternatives
from gristmill.keys import model_identity
from gristmill.logits import LOGITS_VERSION
from gristmill.logits.storage import FORMAT_VERSION
from gristmill.merging import proven
from gristmill.rendering import dataset_rows, requests
from gristmill.types import JsonDict, Message

#: Longest text of a model that names no context.
DEFAULT_TOKENS = 4096
#: Texts that are tokenized at once.
CHUNK = 256
#: What of a model decides its logits for given tokens: the template has done its work, and engines differ by rounding.
_IDENTITY = ("weights", "dtype", "quantization")


class WindowId(NamedTuple):
    """Names a window among a teacher's texts."""

    id: str
    sample: int
    variant: str
    window: int

    def __str__(self) -> str:
        name = f"{self.id}#{self.sample}" + (f"/{self.variant}" if self.variant else "")
        return name + (f" window {self.window}" if self.window else "")


@dataclass(frozen=True, slots=True)
class Window:
    """What a teacher reads at once."""

    wid: WindowId
    #: Index of the first token that has a position.
    first: int
    tokens: Sequence[int]
    cut_tokens: int = 0

    @property
    def positions(self) -> int:
        """How many tokens have a position."""
        return max(0, len(self.tokens) - self.first)


@dataclass(frozen=True, slots=True)
class _Text:
    """One text before it is cut."""

    id: str
    sample: int
    variant: str
    #: None: a plain text.
    messages: Sequence[Message] | None
    text: str | None
    #: Whether the end of a turn stands behind it.
    ended: bool = False
    #: Why there is no text.
    reason: str = ""


def window_lines(
    spec: LogitsSpec, generations: Path | None, weights: JsonDict, chat: ChatEncoder
) -> Iterator[JsonDict]:
    """The lines of a teacher's requests.jsonl (docs/outputs.md), in the texts' order.

    Args:
        spec: which texts.
        generations: of the run, where the texts are a run's.
        weights: results/models/<model>.json of the teacher.
        chat: the teacher's tokenizer.

    Raises:
        UserError: a text is no text, or has half of a surrogate pair.
    """
    texts = itertools.islice(_texts(spec, generations), spec.texts.max_samples)
    most = longest(spec.texts, spec.teacher.model, weights)
    while chunk := list(itertools.islice(texts, CHUNK)):
        for text, (tokens, first) in zip(chunk, _encoded(chunk, chat), strict=True):
            yield from _lines(text, tokens, first, most, spec.texts.on_overflow == "split")


def longest(texts: LogitsConfig, model: ModelConfig, weights: JsonDict) -> int:
    """The most tokens of a window."""
    limits = [limit for limit in (texts.max_tokens, context_limit(model, weights)) if limit is not None]
    return min(limits, default=DEFAULT_TOKENS)


def windows(path: Path) -> Iterator[Window]:
    """The windows of a requests.jsonl; skipped texts are left out.

    Raises:
        UserError: the file was cut or edited.
    """
    check_seal(path)
    return (_window(line) for line in read_jsonl(path) if "skipped" not in line)


def skipped(path: Path) -> dict[str, int]:
    """Why texts have no window → how many."""
    found: dict[str, int] = {}
    for line in read_jsonl(path):
        if reason := line.get("skipped"):
            found[reason] = found.get(reason, 0) + 1
    return dict(sorted(found.items()))


def keys_of(identity: JsonDict, k: int | None) -> Callable[[Window], str]:
    """What gives a window's key: equal for the same tokens of the same teacher, asked for as many log-probabilities.

    Args:
        identity: keys.model_identity of the teacher.
        k: how many a position; None: all.
    """
    named = {name: identity[name] for name in _IDENTITY} | {"k": k}
    named |= {"engine": "vllm"} if identity["engine"] == "vllm" else {}  # its tails are rounded
    start = hashlib.sha256(canonical({**named, "format": FORMAT_VERSION, "logits_version": LOGITS_VERSION}))

    def key(window: Window) -> str:
        total = start.copy()
        total.update(f"{window.first};".encode())
        total.update(np.asarray(window.tokens, "<i8").tobytes())
        return total.hexdigest()[:32]

    return key


def either_key(model: ModelConfig, weights: JsonDict, k: int | None) -> Callable[[Window], set[str]]:
    """The keys of a window, made on a GPU or not: the merge does not see where it was."""
    places = [keys_of(model_identity(model, weights, on_gpu), k) for on_gpu in (False, True)]
    return lambda window: {key(window) for key in places}


def _window(line: Mapping[str, Any]) -> Window:
    named = WindowId(line["id"], line["sample"], line["variant"], line["window"])
    return Window(named, line["first"], line["tokens"], line["cut_tokens"])


def _texts(spec: LogitsSpec, generations: Path | None) -> Iterator[_Text]:
    if generations is not None:
        return _answers(proven(generations), spec.ends_with_token)
    assert spec.dataset is not None
    if spec.prompt is None:
        return _plain(spec)
    asked = RequestsSpec(
        dataset=spec.dataset, prompt=spec.prompt, sampling=SamplingConfig.model_validate({}), examples=spec.examples
    )
    return _references(requests(asked))


def _answers(generations: Iterable[JsonDict], ends_with_token: bool) -> Iterator[_Text]:
    """A run's prompts and answers; a row that failed or was skipped has none."""
    for line in generations:
        ended = ends_with_token and line["finish_reason"] == "stop"
        reason = "" if line["text"] is not None else str(line["finish_reason"])
        yield _Text(line["id"], line["sample"], line["variant"], line["messages"], line["text"], ended, reason)


def _references(asked: Iterable[JsonDict]) -> Iterator[_Text]:
    """A dataset's rows as prompts and their references, the first where there are several."""
    for line in asked:
        answers = alternatives(line["reference"])
        text, reason = (answers[0], "") if answers else (None, "no_reference")
        yield _Text(line["id"], line["sample"], line["variant"], line["messages"], text, True, reason)


def _plain(spec: LogitsSpec) -> Iterator[_Text]:
    assert spec.dataset is not None
    for row in dataset_rows(spec.dataset, spec.dataset.max_rows):
        text = row.fields.get(spec.texts.text_field or "")
        if text is not None and not isinstance(text, str):
            shown = repr(text)[:80]
            raise UserError(f"row {row.id}: {spec.texts.text_field} is {shown}, not a text; name a column of texts")
        yield _Text(row.id, 0, "", None, text, reason="" if text is not None else "no_text")


def _encoded(texts: Sequence[_Text], chat: ChatEncoder) -> Iterator[tuple[list[int], int]]:
    """Token ids of each text, and the index of the first with a position."""
    for text in texts:
        _refuse_surrogates(text)
    prompt_ids = chat.encode_prompts([_prompt(text, chat) for text in texts])
    plain_ids = _ids(chat, [text.text or "" for text in texts], special=True)
    answers = [_unopened(text.text or "", ids, chat) for text, ids in zip(texts, prompt_ids, strict=True)]
    answer_ids = _ids(chat, answers, special=False)
    end = chat.answer_end()
    for text, prompt, plain, answer in zip(texts, prompt_ids, plain_ids, answer_ids, strict=True):
        if text.messages is None:
            yield plain, 1
        else:
            yield prompt + answer + ([end] if text.ended and end is not None else []), max(1, len(prompt))


def _prompt(text: _Text, chat: ChatEncoder) -> str:
    return "" if text.messages is None or text.text is None else chat.render(text.messages)


def _unopened(answer: str, prompt: Sequence[int], chat: ChatEncoder) -> str:
    """The answer without the tag that its prompt has opened: its tokens are the prompt's (engines/answers.py)."""
    opened = chat.opened_thinking(prompt) if prompt else ""
    return answer.removeprefix(opened)


def _ids(chat: ChatEncoder, texts: list[str], *, special: bool) -> list[list[int]]:
    found: list[list[int]] = chat.tokenizer(texts, add_special_tokens=special, return_attention_mask=False)["input_ids"]
    return found


def _refuse_surrogates(text: _Text) -> None:
    for piece in (text.text or "", *(message["content"] for message in text.messages or ())):
        if half := LONE_SURROGATE.search(piece or ""):
            raise UserError(
                f"row {text.id}: the text holds {half[0]!r}, half of a surrogate pair, which no tokenizer reads; "
                "correct the row"
            )


def _lines(text: _Text, tokens: list[int], first: int, most: int, split: bool) -> Iterator[JsonDict]:
    named = {"id": text.id, "sample": text.sample, "variant": text.variant}
    if text.text is None:
        yield named | {"window": 0, "skipped": text.reason}
        return
    if not split or len(tokens) <= most:
        kept = tokens[:most]
        cut = len(tokens) - len(kept)
        yield named | {"window": 0, "first": min(first, len(kept)), "tokens": kept, "cut_tokens": cut}
        return
    for number, start in enumerate(range(0, len(tokens) - 1, most - 1)):
        yield named | {"window": number, "first": 1, "tokens": tokens[start : start + most], "cut_tokens": 0}
