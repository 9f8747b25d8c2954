"""Sampling whose draw belongs to the row: the same seed gives the same draw in any batch, on any worker.

torch has one random stream a device, so a row's answer would depend on its neighbours. Here every row has its own
stream of uniform numbers, one a step, and the token is found by inverting the cumulative distribution. The processor
leaves only the drawn token possible, so that generate() runs greedily over it.

Logits that are equal (common in bfloat16) are ordered by token, so that the draw among them does not depend on how a
device sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class RowSampler:
    """A logits processor of transformers: temperature, top-k, top-p, then one draw a row."""

    def __init__(self, seeds: Sequence[int], temperature: float, top_k: int, top_p: float) -> None:
        """One seed a row of the batch, in the batch's order; top_k=0 and top_p=1 switch those filters off."""
        self._streams = [row_stream(seed) for seed in seeds]
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) in which only each row's drawn token is finite.

        Raises:
            FloatingPointError: a row's scores hold a NaN, +inf or no finite value; there is nothing to draw from.
        """
        import torch

        if not torch.isfinite(scores.amax(dim=-1)).all():  # NaN wins amax
            raise FloatingPointError("the model's logits are not finite; try dtype bfloat16 or float32")
        uniform = uniforms(self._streams, scores.device)
        drawn = draw(scores, uniform, self._temperature, self._top_k, self._top_p)
        return only(scores, drawn)


def row_stream(seed: int) -> np.random.Generator:
    """A row's own stream of numbers in [0, 1), one a new token."""
    return np.random.Generator(np.random.Philox(seed))


def uniforms(rows: Sequence[np.random.Generator], device: torch.device) -> torch.Tensor:
    """The next number of each stream (B,) on a device that is not waited for."""
    import torch

    numbers = torch.tensor([stream.random() for stream in rows], dtype=torch.float64)
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def draw(scores: torch.Tensor, uniform: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The token (B, 1) that each row's number in [0, 1) falls on, from finite scores (B, V)."""
    import torch

    ordered, tokens = torch.sort(scores.double(), dim=-1, descending=True, stable=True)  # (B, V) each
    ordered = (ordered - ordered[:, :1]) / temperature  # the largest is 0: no overflow at any temperature
    if top_k > 0:
        ordered[:, top_k:] = -torch.inf
    probabilities = torch.softmax(ordered, dim=-1)  # (B, V), largest first
    cumulative = probabilities.cumsum(dim=-1)
    if top_p < 1.0:  # keep the smallest set that reaches top_p; its first token always stays
        kept = (cumulative - probabilities) < top_p
        probabilities = torch.where(kept, probabilities, 0.0)
        cumulative = probabilities.cumsum(dim=-1)
    target = uniform.unsqueeze(-1) * cumulative[:, -1:]  # (B, 1)
    # The first token whose cumulative probability exceeds the target, counting only tokens that can be drawn.
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=scores.shape[-1] - 1)
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(-1, torch.minimum(place, last))


def only(scores: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Scores (B, V) in which nothing but each row's drawn token (B, 1) is possible."""
    import torch

    return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)
