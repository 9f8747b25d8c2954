"""Chat messages to token ids, and the token ids that end an answer.

- The model's own chat template is applied; its output is tokenized without adding special tokens, so a template that
  writes the begin-of-text token does not get a second one. A model without a template is a base model: the messages
  are joined by blank lines and tokenized with its special tokens.
- A template that refuses the system role gets the system text at the head of the first user message.
- An answer ends at every end token that the generation config, the model config or the tokenizer names, and at the
  token the template itself puts after an assistant's turn (Llama 3's <|eot_id|>, ChatML's <|im_end|>).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.thinking import opening
from gristmill.types import Message

_PROBE = "gristmill-probe"
#: As many tokens as an opening tag and the space behind it can take.
_OPENING_TOKENS = 16


class ChatEncoder:
    """The tokenizer of one model, with its chat template."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Load the tokenizer; imports transformers, not the model."""
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=model.trust_remote_code, local_files_only=True, padding_side="left"
        )
        if model.chat_template:
            self.tokenizer.chat_template = Path(model.chat_template).read_text("utf-8")
        self._folder = folder

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """`stop_ids`, to look tokens up in."""
        return frozenset(self.stop_ids())

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; a base model has none."""
        return bool(self.tokenizer.chat_template)

    def encode(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """The prompt's token ids of each chat, ready for the model to go on."""
        return self.encode_prompts([self.render(chat) for chat in chats])

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts that are rendered, with the special tokens that the template leaves to them."""
        encoded = self.tokenizer(list(texts), add_special_tokens=not self.has_template, return_attention_mask=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def render(self, chat: Sequence[Message]) -> str:
        """The prompt's text as the template writes it."""
        if not self.has_template:
            return "\n\n".join(message["content"] for message in chat)
        return self._apply(chat, add_generation_prompt=True)

    def decode(self, ids: Sequence[int]) -> str:
        """An answer's text without special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def opened_thinking(self, prompt: Sequence[int]) -> str:
        """The tag with which a prompt's ids open a reasoning block for the model (`<think>\\n`); empty when none."""
        return opening(self.tokenizer.decode(list(prompt[-_OPENING_TOKENS:]), skip_special_tokens=False))

    def stop_ids(self) -> list[int]:
        """Every token id that ends an answer, ascending."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = self._folder / name
            if path.exists():
                found.update(_as_ids(read_json(path).get("eos_token_id")))
        found.update(_as_ids(self.tokenizer.eos_token_id))
        found.update(_as_ids(self._turn_end()))
        return sorted(found)

    def answer_end(self) -> int | None:
        """The token with which an answer ends by itself: that of the template, else the tokenizer's; None without."""
        found = self._turn_end()
        return found if found is not None else self.tokenizer.eos_token_id

    def _turn_end(self) -> int | None:
        """The special token that the template puts behind an assistant's message, if any."""
        if not self.has_template:
            return None
        chat: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        rendered = self._apply(chat, add_generation_prompt=False)
        tail = rendered.rpartition(_PROBE)[2]
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        ids: list[int] = self.tokenizer(tail, add_special_tokens=False)["input_ids"]
        return next((token for token in ids if token in special), None)

    def _apply(self, chat: Sequence[Message], *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._template(chat, add_generation_prompt)
        except TemplateError as error:
            if not any(message["role"] == "system" for message in chat):
                raise UserError(f"the chat template of {self._folder} refuses a chat: {error}") from error
        try:
            return self._template(_without_system(chat), add_generation_prompt)
        except TemplateError as error:
            raise UserError(f"the chat template of {self._folder} refuses a chat: {error}") from error

    def _template(self, chat: Sequence[Message], add_generation_prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(chat), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text


def _without_system(chat: Sequence[Message]) -> list[Message]:
    """The chat with its system text at the head of the first user message."""
    system = "\n\n".join(message["content"] for message in chat if message["role"] == "system")
    turns = [message for message in chat if message["role"] != "system"]
    return [{"role": turns[0]["role"], "content": f"{system}\n\n{turns[0]['content']}"}, *turns[1:]]


def _as_ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(item) for item in value]
