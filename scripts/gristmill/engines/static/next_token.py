"""From logits to each row's next token, as generate() would pick it: penalty, grammar, argmax or the row's own draw.

What belongs to a row (the tokens it has seen, its stream of random numbers, its place in a grammar) goes and comes with
the row. Nothing here waits for the device, but for rows with a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.engines.prepared import Prepared
from gristmill.engines.row_sampler import draw, row_stream, uniforms
from gristmill.engines.static.grammar import Grammar, Matchers
from gristmill.keys import row_seed
from gristmill.types import Sampling

if TYPE_CHECKING:
    import torch

#: Stands for the token of a row whose logits are not finite: there is nothing to pick from.
BROKEN = -1


class NextToken:
    """Picks the next tokens of a batch of one sampling setting."""

    def __init__(self, sampling: Sampling, items: Sequence[Prepared], grammar: Grammar | None = None) -> None:
        """The rows of the batch, in its order, and what their answers must follow."""
        self._sampling = sampling
        self._prompts = [item.ids for item in items]
        self._streams = [row_stream(row_seed(item.request)) for item in items] if sampling.temperature > 0 else []
        self._matchers = Matchers(grammar, len(items)) if grammar is not None else None
        #: Which tokens each row's prompt and answer have (B, V); only with a penalty.
        self._seen: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row (B,), BROKEN where the logits (B, V) are not finite."""
        import torch

        sampling = self._sampling
        scores = logits.to(torch.float32)
        if sampling.repetition_penalty != 1.0:
            scores = self._penalized(scores)
        sound = torch.isfinite(scores.amax(dim=-1))  # (B,); NaN wins amax, and an all -inf row is no choice either
        if self._matchers is not None:
            scores = self._matchers.mask(scores)
            sound &= torch.isfinite(scores.amax(dim=-1))
        scores = torch.where(sound.unsqueeze(-1), scores, 0.0)
        if self._streams:
            uniform = uniforms(self._streams, scores.device)
            tokens = draw(scores, uniform, sampling.temperature, sampling.top_k, sampling.top_p).squeeze(-1)
        else:
            tokens = scores.argmax(dim=-1)
        if self._seen is not None:
            self._seen.scatter_(1, tokens.unsqueeze(-1), True)
        tokens = torch.where(sound, tokens, BROKEN)
        if self._matchers is not None:
            self._matchers.take(tokens.tolist())
        return tokens

    def rearrange(self, keep: Sequence[int], joining: NextToken | None) -> None:
        """Keep these rows, and put those of another batch below."""
        import torch

        self._streams = [self._streams[row] for row in keep if self._streams] + (joining._streams if joining else [])
        if self._matchers is not None:
            self._matchers.rearrange(keep, joining._matchers if joining else None)
        if self._seen is not None:
            kept = self._seen[torch.tensor(keep, device=self._seen.device)]
            below = [joining._seen] if joining and joining._seen is not None else []
            self._seen = torch.cat([kept, *below])

    def _penalized(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) with the repetition penalty on every token of the row's prompt and answer."""
        import torch

        if self._seen is None:
            self._seen = _marked(self._prompts, scores)
        penalty = self._sampling.repetition_penalty
        return torch.where(self._seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _marked(prompts: Sequence[Sequence[int]], scores: torch.Tensor) -> torch.Tensor:
    """Which tokens each prompt has (B, V); an embedding may know more tokens than can be picked."""
    import torch

    size = scores.shape[-1]
    rows = [number for number, ids in enumerate(prompts) for _ in ids]
    tokens = [min(token, size) for ids in prompts for token in ids]
    marked = torch.zeros((len(prompts), size + 1), dtype=torch.bool)
    marked[rows, tokens] = True
    return marked[:, :size].to(scores.device)
