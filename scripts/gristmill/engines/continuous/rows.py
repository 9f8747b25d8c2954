"""What of a row goes along with it through transformers' continuous batching: a seed's draws, and whether it is sound.

The batch there changes with every token, so a processor of logits cannot count on places. These get a value a row and
step from the host (`prepare_tensor_args`), in the same buffer as the token ids, so they work under CUDA graphs too.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from gristmill.engines.row_sampler import draw, only, row_stream
from gristmill.types import Sampling


@dataclass(slots=True)
class _Row:
    slot: int
    prompt_tokens: int
    stream: np.random.Generator
    draws: list[float] = field(default_factory=list)

    def uniform(self, step: int) -> float:
        """The number that decides new token `step` (from 0)."""
        while len(self.draws) <= step:
            self.draws.append(float(self.stream.random()))
        return self.draws[step]


class RowTable:
    """The rows that the manager holds, by request id; slot 0 belongs to none and takes what is padding.

    A request id says all that a row's draws need, so that the other processes of a model that is cut over several GPUs,
    which see the requests only as the manager hands them round, draw the same.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """Room for `most` rows at a time."""
        self.most = most
        self._rows: dict[str, _Row] = {}
        self._followed: OrderedDict[str, _Row] = OrderedDict()
        self._free = deque(range(1, most + 1))
        self._number = 0
        self._lock = threading.Lock()
        #: (most + 1,), 1 where a row's logits were not finite at some step.
        self.broken = torch.zeros(most + 1, dtype=torch.int32, device=device)

    def add(self, prompt_tokens: int, seed: int) -> str:
        """Take a row in, before the manager gets it; gives its request id."""
        with self._lock:
            self._number += 1
            request_id = f"{self._number}:{prompt_tokens}:{seed}"
            slot = self._free.popleft()
            self._rows[request_id] = _Row(slot, prompt_tokens, row_stream(seed))
            self.broken[slot] = 0
            return request_id

    def remove(self, request_ids: Sequence[str]) -> list[bool]:
        """Let rows go; tells of each whether its logits were finite throughout."""
        if not request_ids:
            return []
        marks = self.broken.tolist()
        with self._lock:
            slots = [self._rows.pop(request_id).slot for request_id in request_ids]
            self._free.extend(slots)
        return [not marks[slot] for slot in slots]

    def slots(self, requests: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(R,) the slots of the requests of a step; 0 for one that left, or that is another process's."""
        found = [self._rows.get(request.state.request_id) for request in requests]
        return np.array([row.slot if row else 0 for row in found], dtype=np.int32)

    def uniforms(self, requests: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """(R,) the numbers that decide each request's next token; its place counts from the end of the prompt."""
        values = np.zeros(len(requests), dtype=np.float64)
        for place, request in enumerate(requests):
            row = self._rows.get(request.state.request_id) or self._follow(request.state.request_id)
            if row is not None:
                values[place] = row.uniform(request.state.position_offset - row.prompt_tokens)
        return values

    def _follow(self, request_id: str) -> _Row | None:
        """A row that was not added here, from its id; None for the manager's own requests, which warm up."""
        _, _, rest = str(request_id).partition(":")
        tokens, _, seed = rest.partition(":")
        if not seed:
            return None
        if request_id not in self._followed:
            self._followed[request_id] = _Row(0, int(tokens), row_stream(int(seed)))
            if len(self._followed) > 2 * self.most:
                self._followed.popitem(last=False)
        return self._followed[request_id]


class _RowProcessor(ContinuousBatchingLogitsProcessor):
    """A processor with one int32 a row and step."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, rows: RowTable, most: int) -> None:
        """The table, and the most rows of a batch."""
        self._rows = rows
        self._most = most

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing, until a step brings its values."""
        int32_tensor.fill_(0)

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        """(most,) the values of a step, in the order of its rows."""
        values = np.zeros(self._most, dtype=np.int32)  # zeros behind the rows: places that are padding
        values[: len(requests_with_new_token)] = self.values(requests_with_new_token)
        return torch.from_numpy(values)

    @abstractmethod
    def values(self, requests: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(R,) the values of the requests of a step."""


class FiniteMarks(_RowProcessor):
    """Lets a row whose logits are not finite go on with zeros, and marks it in the table."""

    def values(self, requests: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(R,) the slots."""
        return self._rows.slots(requests)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Scores (B, V), slots (at least B,) to scores (B, V)."""
        broken = ~torch.isfinite(scores.amax(dim=-1))  # (B,); NaN wins amax
        slots = tensor_arg[: scores.shape[0]].long()
        self._rows.broken.scatter_reduce_(0, slots, broken.int(), "amax")
        return torch.where(broken.unsqueeze(-1), 0.0, scores)


class _LowHalf(_RowProcessor):
    """Carries the low 32 bits of each row's uniform number; changes nothing."""

    def values(self, requests: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(R,) the low halves; the high ones are kept for the processor that comes next."""
        halves = self._rows.uniforms(requests).view(np.int32).reshape(-1, 2)
        self.high = halves[:, 1]
        return halves[:, 0]

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Keep the bits for the processor that comes next."""
        self.kept = tensor_arg[: scores.shape[0]]
        return scores


class RowDraws(_RowProcessor):
    """Draws each row's token from its own stream; a greedy choice among the scores then takes it."""

    def __init__(self, rows: RowTable, most: int, sampling: Sampling, low: _LowHalf) -> None:
        """The sampling that all rows share, and the processor before this one."""
        super().__init__(rows, most)
        self._sampling = sampling
        self._low = low

    def values(self, requests: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(R,) the high halves of the numbers that the processor before this one has just taken."""
        return self._low.high

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Scores (B, V), high halves (at least B,) to scores (B, V) with one token possible a row."""
        halves = torch.stack([self._low.kept, tensor_arg[: scores.shape[0]]], dim=-1)  # (B, 2), little endian
        uniform = halves.contiguous().view(torch.float64).squeeze(-1)
        sampling = self._sampling
        return only(scores, draw(scores, uniform, sampling.temperature, sampling.top_k, sampling.top_p))


def row_processors(rows: RowTable, most: int, sampling: Sampling) -> list[Any]:
    """What a manager needs for these rows.

    Args:
        rows: the rows it will hold.
        most: the most rows of a batch.
        sampling: what they share.
    """
    found: list[Any] = [FiniteMarks(rows, most)]
    if sampling.temperature > 0:
        low = _LowHalf(rows, most)
        found += [low, RowDraws(rows, most, sampling, low)]
    return found
