"""The likelihood of labels: no token is generated, the model is asked what it holds of each label (types.Request).

- A batch of prompts goes through the model once. What follows a prompt in its first place decides the first token of
  every label, so labels of one token need no more.
- The labels' other tokens are read one label after the other, for all rows of the batch at once, over the prompts' keys
  and values; then these are cut back to the prompt. So a prompt is computed once and its cache is there once.
- A model whose cache cannot be cut (decodable.py) reads prompt and label as one row. Only rows of one length stand in a
  batch then: without padding that is exact for every model.
- Logits are made only where a label's token is looked up, and become float32 before the softmax over the vocabulary.
- Longest first, by the token budget; out of memory halves it, and a row that does not fit alone fails.

B rows, T prompt tokens (padded at the left), N label tokens, V tokens known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from gristmill.engines.answers import likelihood_not_finite, out_of_memory
from gristmill.engines.prepared import Prepared
from gristmill.engines.static.decodable import cache_argument, takes_logits_to_keep
from gristmill.engines.static.decoding import PREFILL_TOKENS
from gristmill.engines.static.loaded import Loaded
from gristmill.engines.static.token_budget import release_memory
from gristmill.types import Completion, Outcome

if TYPE_CHECKING:
    import torch

#: Rows → log probabilities of each row's labels.
Score = Callable[[Loaded, Sequence[Prepared]], list[list[float]]]


def likelihoods(loaded: Loaded, items: Sequence[Prepared], cut: bool, stopped: Callable[[], bool]) -> Iterator[Outcome]:
    """The outcome of each item, a batch at a time; after `stopped` the batch in flight is the last.

    Args:
        loaded: the model.
        items: requests with labels.
        cut: whether the model's cache can be cut (decodable.obstacle has nothing against it).
        stopped: whether nothing new shall begin.
    """
    score = _over_cache if cut else _whole_rows
    left = sorted(items, key=lambda item: (-item.tokens, -len(item.ids)))
    while left and not stopped():
        loaded.budget.look(loaded.model)
        batch = left[: _rows(loaded, left[0], score)]
        start = time.perf_counter()
        loaded.budget.running = len(batch)
        scores = _unless_out_of_memory(loaded, batch, score)
        if scores is None:  # out here, where no traceback holds on to the batch's memory
            release_memory(loaded.on_gpu)
            if len(batch) > 1:
                loaded.budget.halve(len(batch), batch[0].tokens)
                continue
            yield out_of_memory(batch[0])
        else:
            seconds = time.perf_counter() - start
            yield from (_outcome(loaded, *pair, seconds) for pair in zip(batch, scores, strict=True))
        left = left[len(batch) :]


def _rows(loaded: Loaded, longest: Prepared, score: Score) -> int:
    """How many rows the next batch may have; where they are whole, `score` itself divides them."""
    most = loaded.budget.rows(longest.tokens)
    return most if score is _whole_rows else max(1, min(most, PREFILL_TOKENS // longest.tokens))


def _unless_out_of_memory(loaded: Loaded, batch: Sequence[Prepared], score: Score) -> list[list[float]] | None:
    import torch

    try:
        with torch.inference_mode():
            return score(loaded, batch)
    except torch.OutOfMemoryError:
        return None


def _outcome(loaded: Loaded, item: Prepared, scores: list[float], seconds: float) -> Outcome:
    if not all(map(math.isfinite, scores)):
        return likelihood_not_finite(item, loaded.dtype)
    request = item.request
    best = request.labels[scores.index(max(scores))]
    counts = (len(item.ids), 0)
    return Completion(*request.rid, best, "stop", *counts, seconds, item.cut_tokens, tuple(scores))


def _over_cache(loaded: Loaded, batch: Sequence[Prepared]) -> list[list[float]]:
    """Prompts through the model once, then the labels' further tokens over the prompts' cache."""
    prompts = _Prompts(loaded, batch)
    scores = [
        [[first] for first in row]
        for row in _looked_up(prompts.logits, [[label[0] for label in item.labels] for item in batch])
    ]
    for place in range(max(len(item.labels) for item in batch)):
        tails = [item.labels[place] if place < len(item.labels) else () for item in batch]
        if max(map(len, tails)) < 2:
            continue
        logits = prompts.followed_by([list(tail[:-1]) for tail in tails])  # (B, N - 1, V)
        for column in range(logits.shape[1]):
            wanted = [[tail[column + 1]] if column + 1 < len(tail) else [] for tail in tails]
            for row, found in enumerate(_looked_up(logits[:, column], wanted)):
                if wanted[row]:
                    scores[row][place] += found
    return [[math.fsum(tokens) for tokens in row] for row in scores]


class _Prompts:
    """The prompts of a batch in the model's cache."""

    def __init__(self, loaded: Loaded, batch: Sequence[Prepared]) -> None:
        """Read them; `logits` (B, V) are those of the first token that follows."""
        import torch

        from gristmill.engines.static.kv_cache import new_cache

        model, device = loaded.model, loaded.model.device
        self._model, self._pad = model, loaded.pad_id
        self._lengths = [len(item.ids) for item in batch]
        self._width = max(self._lengths)
        columns = self._width + max(len(label) for item in batch for label in item.labels)
        self._cache = new_cache(model.config, columns)
        starts = torch.tensor([self._width - length for length in self._lengths], device=device)
        #: Ones from each row's first column on (B, C), also for those of the labels.
        self._mask = (torch.arange(columns, device=device) >= starts.unsqueeze(-1)).long()
        padded = [[self._pad] * (self._width - len(item.ids)) + item.ids for item in batch]
        positions = (self._mask[:, : self._width].cumsum(dim=-1) - 1).clamp(min=0)  # (B, T)
        self.logits = self._forward(torch.tensor(padded, device=device), positions, keep=1)[:, -1]

    def followed_by(self, tails: Sequence[list[int]]) -> torch.Tensor:
        """The logits (B, N, V) after each token of what follows the prompts; the cache is then as it was."""
        import torch

        from gristmill.engines.static.kv_cache import cut_back

        count, device = max(map(len, tails)), self._model.device
        padded = [tail + [self._pad] * (count - len(tail)) for tail in tails]
        lengths = torch.tensor(self._lengths, device=device).unsqueeze(-1)
        steps = torch.tensor([[min(n, max(0, len(tail) - 1)) for n in range(count)] for tail in tails], device=device)
        logits = self._forward(torch.tensor(padded, device=device), lengths + steps, keep=count)
        cut_back(self._cache, self._width)
        return logits

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, keep: int) -> torch.Tensor:
        """The logits of the last tokens (B, keep, V)."""
        width = self._cache.get_seq_length() + input_ids.shape[1]
        padded = min(self._lengths) < self._width
        output = self._model(
            input_ids=input_ids,
            attention_mask=self._mask[:, :width] if padded else None,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{cache_argument(self._model): self._cache},
            **({"logits_to_keep": keep} if takes_logits_to_keep(self._model) else {}),
        )
        logits: torch.Tensor = output.logits[:, -keep:]
        return logits


def _whole_rows(loaded: Loaded, batch: Sequence[Prepared]) -> list[list[float]]:
    """Each prompt with each label as a row of its own, those of one length together."""
    rows = [(number, place) for number, item in enumerate(batch) for place in range(len(item.labels))]

    def length(row: tuple[int, int]) -> int:
        return len(batch[row[0]].ids) + len(batch[row[0]].labels[row[1]]) - 1

    found: dict[tuple[int, int], float] = {}
    for tokens, alike in groupby(sorted(rows, key=length), key=length):
        group = list(alike)
        most = max(1, min(loaded.budget.rows(tokens), PREFILL_TOKENS // tokens))
        for begin in range(0, len(group), most):
            part = group[begin : begin + most]
            pairs = [(batch[number].ids, batch[number].labels[place]) for number, place in part]
            found |= zip(part, _rows_of_one_length(loaded, pairs), strict=True)
    return [[found[number, place] for place in range(len(item.labels))] for number, item in enumerate(batch)]


def _rows_of_one_length(loaded: Loaded, pairs: Sequence[tuple[list[int], tuple[int, ...]]]) -> list[float]:
    """The log probability of each prompt's tail; all are equally long together."""
    import torch

    tails = [tail for _, tail in pairs]
    keep = max(map(len, tails))
    ids = torch.tensor([[*prompt, *tail[:-1]] for prompt, tail in pairs], device=loaded.model.device)  # (B, T)
    wanted = {"logits_to_keep": keep} if takes_logits_to_keep(loaded.model) else {}
    output = loaded.model(input_ids=ids, return_dict=True, **wanted)
    logits, scores = output.logits[:, -keep:], [0.0 for _ in pairs]
    for column in range(keep):
        places = [column - (keep - len(tail)) for tail in tails]
        tokens = [[tail[place]] if place >= 0 else [] for tail, place in zip(tails, places, strict=True)]
        for row, found in enumerate(_looked_up(logits[:, column], tokens)):
            scores[row] += found[0] if tokens[row] else 0.0
    return scores


def _looked_up(logits: torch.Tensor, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log probabilities of each row's tokens by its logits (B, V)."""
    import torch

    count = max(map(len, tokens))
    padded = torch.tensor([[*row, *[0] * (count - len(row))] for row in tokens], device=logits.device)
    found = torch.log_softmax(logits.float(), dim=-1).gather(-1, padded).tolist()
    return [row[: len(wanted)] for row, wanted in zip(found, tokens, strict=True)]
