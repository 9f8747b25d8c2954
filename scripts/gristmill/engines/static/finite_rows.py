"""Notice rows whose logits are not finite: half precision can overflow, and argmax over NaN means nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class FiniteRows:
    """A logits processor of transformers that lets the sound rows of a batch go on and remembers the others."""

    def __init__(self, prompt_tokens: int) -> None:
        """The width of the batch's prompts, to count steps from."""
        self._width = prompt_tokens
        self._first: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) with zeros in the rows that cannot be drawn from; no device is waited for."""
        import torch

        broken = ~torch.isfinite(scores.amax(dim=-1))  # (B,); NaN wins amax, and an all -inf row is no choice either
        if self._first is None:
            self._first = torch.full_like(broken, -1, dtype=torch.long)
        step = input_ids.shape[-1] - self._width
        self._first = torch.where(broken & (self._first < 0), step, self._first)
        return torch.where(broken.unsqueeze(-1), 0.0, scores)

    def first_steps(self) -> list[int | None]:
        """For each row the first step (0-based) whose logits were not finite; None for a sound row."""
        steps = [] if self._first is None else self._first.tolist()
        return [None if step < 0 else step for step in steps]
