"""An end for a batch that takes too long, so that one row that never stops does not hold up a night."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Deadline:
    """A stopping criterion of transformers: all rows end once the time is over; `passed` says whether it was."""

    def __init__(self, seconds: float | None) -> None:
        """The clock starts now; None: no limit."""
        self._end = None if seconds is None else time.monotonic() + seconds
        self.passed = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Which of the rows (B,) must end: all or none."""
        import torch

        self.passed = self.passed or (self._end is not None and time.monotonic() > self._end)
        return torch.full((input_ids.shape[0],), self.passed, device=input_ids.device)
