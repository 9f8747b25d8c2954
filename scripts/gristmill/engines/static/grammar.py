"""Answers that follow a JSON Schema: which tokens may come next, by llguidance.

- A schema is compiled once; each row has a matcher of its own, which is told the row's tokens and says what may follow.
- When the document is complete only the model's end tokens may come, so an answer ends as any other does. One that
  max_new_tokens cuts is no whole document.
- White space is what json.dumps writes, ", " and ": ": a model that may write as much of it as it likes can go on with
  that for ever. Properties come in the schema's order.
- The next mask depends on the last token, so these rows are waited for at each step, unlike others.

B rows, V tokens known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.engines.chat import ChatEncoder
from gristmill.errors import UserError

if TYPE_CHECKING:
    import torch

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """A JSON Schema over one model's vocabulary."""

    def __init__(self, schema: str, chat: ChatEncoder, tokens: int) -> None:
        """Compile it.

        Args:
            schema: JSON text.
            chat: the model's tokenizer.
            tokens: how many the model's logits have; those that the tokenizer does not know never come.

        Raises:
            UserError: llguidance refuses the schema or the tokenizer.
        """
        from llguidance import LLExecutor, LLMatcher

        self.ends = chat.ends
        self.tokenizer = _tokenizer(chat, tokens)
        self._first = _matcher(LLMatcher, schema, self.tokenizer)
        self.executor = LLExecutor(_threads())

    def matcher(self) -> Any:
        """What follows one row from its answer's beginning."""
        return self._first.deep_copy()


class Matchers:
    """The matchers of a batch's rows; None for a row whose answer has ended."""

    def __init__(self, grammar: Grammar, rows: int) -> None:
        """One a row, at its answer's beginning."""
        self._grammar = grammar
        self._rows = [grammar.matcher() for _ in range(rows)]

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) in which only what may come is possible.

        Raises:
            UserError: a schema turns out to be too complex.
        """
        import torch
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        bits = allocate_token_bitmask(len(self._rows), self._grammar.tokenizer.vocab_size)  # (B, V / 32), all ones
        running = [(matcher, place) for place, matcher in enumerate(self._rows) if matcher is not None]
        if not running:
            return scores
        fill_next_token_bitmask_par(self._grammar.executor, running, bits)
        for matcher, _ in running:
            _refuse_error(matcher)
        words = torch.from_numpy(bits).to(scores.device)
        shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
        allowed = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : scores.shape[-1]].bool()  # (B, V)
        return scores.masked_fill(~allowed, -torch.inf)

    def take(self, tokens: Sequence[int]) -> None:
        """Tell each matcher its row's token; the negative token of a broken row ends it, as an end token does."""
        for place, (matcher, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if matcher is None:
                continue
            if token < 0 or token in self._grammar.ends:
                self._rows[place] = None
            elif not matcher.consume_token(token):
                _refuse_error(matcher)

    def rearrange(self, keep: Sequence[int], joining: Matchers | None) -> None:
        """Keep these rows, and put those of another batch below."""
        self._rows = [self._rows[row] for row in keep] + (joining._rows if joining else [])


class GrammarProcessor:
    """A logits processor of transformers that keeps the rows of a batch to a grammar."""

    def __init__(self, grammar: Grammar, rows: int, prompt_tokens: int) -> None:
        """The width of the batch's prompts tells prompts from answers."""
        self._matchers = Matchers(grammar, rows)
        self._width = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) in which only what may come is possible."""
        if input_ids.shape[-1] > self._width:
            self._matchers.take(input_ids[:, -1].tolist())
        return self._matchers.mask(scores)


def _tokenizer(chat: ChatEncoder, tokens: int) -> Any:
    from llguidance.hf import from_tokenizer

    if not chat.ends:
        raise UserError("a json_schema needs a model with an end token, and this one names none; leave json_schema out")
    try:
        return from_tokenizer(chat.tokenizer, max(tokens, len(chat.tokenizer)), list(chat.stop_ids()))
    except ValueError as error:
        raise UserError(f"a json_schema cannot be followed with this tokenizer: {_line(str(error))}") from error


def _matcher(kind: Any, schema: str, tokenizer: Any) -> Any:
    try:
        matcher = kind(tokenizer, kind.grammar_from_json_schema(schema, overrides=_STYLE), log_level=0)
    except ValueError as error:
        raise UserError(f"json_schema is no JSON Schema: {_line(str(error))}; correct it") from error
    _refuse_error(matcher)
    return matcher


def _refuse_error(matcher: Any) -> None:
    if matcher.is_error():
        raise UserError(f"json_schema cannot be followed: {_line(matcher.get_error())}; simplify it")


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _threads() -> int:
    """As many as torch may use: those of the job."""
    import torch

    return torch.get_num_threads()
