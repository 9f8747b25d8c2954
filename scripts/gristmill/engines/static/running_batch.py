"""The running rows as tensors. A prefill makes a batch, a step gives each row a token, rows go and come.

All rows are as wide as the widest, aligned at the right. B rows, T prompt tokens, W columns in use, V tokens known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gristmill.engines.prepared import Prepared
from gristmill.engines.static.decodable import cache_argument, takes_logits_to_keep
from gristmill.engines.static.loaded import Loaded
from gristmill.engines.static.next_token import NextToken

if TYPE_CHECKING:
    import torch

#: Columns that the mask grows by when they are used up.
GROWTH_COLUMNS = 64


class OnTheWay:
    """Tokens (B,) on their way to the host; the device is waited for only by `read`."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """Start the copy now: one that is started after the next step would wait for that, too."""
        import torch

        self._host = tokens.to("cpu", non_blocking=True)
        self._there: Any = torch.cuda.Event() if tokens.is_cuda else None  # type: ignore[no-untyped-call]
        if self._there is not None:
            self._there.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        """The tokens, once they are there."""
        if self._there is not None:
            self._there.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class RunningBatch:
    """Rows of one sampling setting with their cache."""

    def __init__(self, loaded: Loaded, items: Sequence[Prepared], columns: int) -> None:
        """Prefill the prompts; the cache gets room for so many columns. `tokens` are the first ones."""
        import torch

        from gristmill.engines.static.kv_cache import new_cache

        model, device = loaded.model, loaded.model.device
        self._model = model
        self._arguments: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if takes_logits_to_keep(model):
            self._arguments["logits_to_keep"] = 1
        #: How many columns each row uses, and the most of them: W.
        self._used = [len(item.ids) for item in items]
        self._width = max(1, *self._used)  # a base model may be asked with no text at all
        self._cache = new_cache(model.config, max(columns, self._width))
        self._arguments[cache_argument(model)] = self._cache
        self._next_token = NextToken(items[0].request.sampling, items, loaded.grammar)
        self._mask = self._new_mask(self._width)  # (B, C)
        padded = [[loaded.pad_id] * (self._width - len(item.ids)) + item.ids for item in items]
        positions = (self._mask.cumsum(dim=-1) - 1).clamp(min=0)  # (B, T)
        #: The position of each row's next token (B, 1), and its last: a row that has ended stays where a model has
        #: positions until it is taken out.
        self._positions = torch.tensor(self._used, device=device).unsqueeze(-1)
        limits = [item.tokens - 1 for item in items]
        self._last_positions = torch.tensor(limits, device=device).unsqueeze(-1)
        self._tokens = self._forward(torch.tensor(padded, device=device), positions)  # (B,)

    def tokens(self) -> OnTheWay:
        """The newest token of each row."""
        return OnTheWay(self._tokens)

    def step(self) -> OnTheWay:
        """Give each row its next token."""
        import torch

        self._width += 1
        self._used = [used + 1 for used in self._used]
        if self._width > self._mask.shape[-1]:
            self._mask = self._new_mask(self._width + GROWTH_COLUMNS)
        self._tokens = self._forward(self._tokens.clamp(min=0).unsqueeze(-1), self._positions)
        self._positions = torch.minimum(self._positions + 1, self._last_positions)
        return self.tokens()

    def rearrange(self, keep: Sequence[int], joining: RunningBatch | None, columns: int) -> None:
        """Keep these rows, put those of another batch below, and give the cache room for so many columns."""
        import torch

        from gristmill.engines.static.kv_cache import rearrange

        used = [self._used[row] for row in keep]
        drop, index = self._width - max(used), torch.tensor(keep)
        rearrange(self._cache, index, drop, joining._cache if joining else None, columns)
        self._next_token.rearrange(keep, joining._next_token if joining else None)
        index = index.to(self._tokens.device)
        for name in ("_tokens", "_positions", "_last_positions"):
            below = [getattr(joining, name)] if joining else []
            setattr(self, name, torch.cat([getattr(self, name)[index], *below]))
        self._used = used + (joining._used if joining else [])
        self._width = max(self._used)
        self._mask = self._new_mask(max(columns, self._width))

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The next tokens (B,) after new ones (B, T or 1)."""
        padded = min(self._used) < self._width
        mask = self._mask[:, : self._width] if padded else None  # without one, attention has faster kernels
        output = self._model(input_ids=input_ids, attention_mask=mask, position_ids=positions, **self._arguments)
        return self._next_token(output.logits[:, -1].to(input_ids.device))

    def _new_mask(self, columns: int) -> torch.Tensor:
        """Ones from each row's first column on (B, C), also for those that are still to come."""
        import torch

        starts = torch.tensor([self._width - used for used in self._used], device=self._model.device)
        return (torch.arange(columns, device=starts.device) >= starts.unsqueeze(-1)).long()
