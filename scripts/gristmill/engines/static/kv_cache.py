"""Keys and values of the running rows: written in place, with room to grow, and cut and joined by row.

- DynamicLayer of transformers concatenates, which copies the whole cache for every token. A GrowingLayer has columns to
  spare and gives attention a view of those in use; it copies only when they run out.
- Rows are aligned at the right: every row's newest token stands in the last column, what a row does not use stands at
  its left under the mask. Those columns are zeros, since 0 × NaN is NaN even under a mask.
- Each layer lies on its own device, so indices follow it there.

B rows, H key-value heads, W columns in use, C columns there are, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

#: Columns that a layer grows by when it is full.
GROWTH_COLUMNS = 64


class GrowingLayer(DynamicLayer):
    """A layer of full attention whose buffers (B, H, C, D) hold more columns than are in use."""

    def __init__(self, columns: int) -> None:
        """Room for so many columns from the first token on."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._columns = columns
        self._buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the columns of new tokens (B, H, T, D); keys and values in use, (B, H, W + T, D) each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [_room(part, len(part), self._columns) for part in (key_states, value_states)]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._buffers[0].shape[-2]:
            self._grow(start, end + GROWTH_COLUMNS)
        for buffer, part in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = part
        return self._show(end)

    def rearrange(self, keep: torch.Tensor, drop: int, joining: GrowingLayer | None, columns: int) -> None:
        """Keep some rows without their first columns, and put the rows of another layer, which is emptied, below.

        Args:
            keep: indices of rows, on any device.
            drop: columns at the left that no row of `keep` uses.
            joining: the layer of the rows that join; both are aligned at the right.
            columns: how many the layer shall have room for.
        """
        old = self.get_seq_length() - drop
        new = joining.get_seq_length() if joining else 0
        width, rows = max(old, new), keep.to(self._buffers[0].device)
        for place, buffer in enumerate(self._buffers):
            below = joining._buffers[place] if joining else buffer[:0]
            room = _room(buffer, len(rows) + len(below), max(columns, width))
            room[: len(rows), :, width - old : width] = buffer[rows, :, drop : drop + old]
            room[len(rows) :, :, width - new : width] = below[:, :, :new]
            self._buffers[place] = room
        if joining:
            joining._buffers, joining.keys, joining.values = [], None, None
            joining.is_initialized = False
        self._show(width)

    def cut_back(self, width: int) -> None:
        """Forget the newest columns, all but so many; what comes next is written over them."""
        self._show(width)

    def _grow(self, used: int, columns: int) -> None:
        for place, buffer in enumerate(self._buffers):
            room = _room(buffer, len(buffer), columns)
            room[:, :, :used] = buffer[:, :, :used]
            self._buffers[place] = room

    def _show(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns in use (B, H, W, D), kept where transformers looks for them."""
        keys, values = (buffer[:, :, :width] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


def new_cache(config: Any, columns: int) -> Any:
    """An empty cache for a model of this config, with room for so many columns in each layer."""
    return Cache(layers=[GrowingLayer(columns) for _ in DynamicCache(config=config).layers])


def cut_back(cache: Any, width: int) -> None:
    """GrowingLayer.cut_back in every layer."""
    for layer in cache.layers:
        layer.cut_back(width)


def rearrange(cache: Any, keep: torch.Tensor, drop: int, joining: Any, columns: int) -> None:
    """GrowingLayer.rearrange in every layer, one after the other: only one is there twice at a time."""
    for place, layer in enumerate(cache.layers):
        layer.rearrange(keep, drop, joining.layers[place] if joining else None, columns)


def _room(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return like.new_zeros((rows, like.shape[1], columns, like.shape[3]))  # (B, H, C, D)
