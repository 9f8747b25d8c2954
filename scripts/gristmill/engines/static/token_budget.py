"""How many rows a batch may have: a budget of tokens (rows × columns of cache) from the memory that is left.

- What a row will need is not known before its answer ends. Until enough answers are seen it is max_new_tokens; then it
  is a high quantile of their lengths, since max_new_tokens is often far above them. A batch that grows past it runs out
  of memory at worst: then the budget is halved, and the smaller one is kept.
- The first answers to end are the short ones, so lengths count only once as many rows have ended as are running.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

#: Share of the free GPU memory that the key-value cache may take; the rest is for activations and fragmentation.
CACHE_SHARE = 0.6
#: Rows a batch on a CPU, where larger ones gain little and cost cache misses; and the most on a GPU.
CPU_BATCH_ROWS, GPU_BATCH_ROWS = 32, 256
#: Answers seen before their lengths are believed, and which of the sorted lengths the others are expected to have.
SEEN_ANSWERS, EXPECTED_QUANTILE = 32, 0.95
#: A row that is past the expected length is taken to go on for so many tokens.
FURTHER_TOKENS = 64


class TokenBudget:
    """Rows × tokens that a batch may take; `max_rows` whatever they need."""

    def __init__(self, max_rows: int | None, on_gpu: bool, log: Callable[[str], None]) -> None:
        """No limit but the config's max_rows is known yet."""
        self.max_rows = max_rows or (GPU_BATCH_ROWS if on_gpu else CPU_BATCH_ROWS)
        self._on_gpu = on_gpu
        self._log = log
        #: Rows in work now, and how often there was no memory for a batch: for whoever watches.
        self.running, self.halved = 0, 0
        #: Tokens that the memory had room for when it was last looked at; None: no limit is known.
        self._room: int | None = None
        #: Tokens of a batch after one that ran out of memory; None: none has.
        self._most: int | None = None

    def look(self, model: Any) -> None:
        """See what memory a loaded model leaves; call it when no row is running."""
        if self._on_gpu:
            self._room = _tokens_with_room(model)

    def rows(self, tokens: int) -> int:
        """How many rows of `tokens` tokens fit; a single one is always worth a try."""
        limits = [limit // max(1, tokens) for limit in (self._room, self._most) if limit is not None]
        return max(1, min([self.max_rows, *limits]))

    def halve(self, rows: int, tokens: int, running: int = 0) -> None:
        """So many rows of `tokens` tokens did not fit beside those running: from now on half of them."""
        self._most = (running + rows // 2) * tokens
        self.halved += 1
        tried = f"{rows} rows of {tokens} tokens" + (f" beside {running} others" if running else "")
        self._log(f"out of memory with {tried}; going on with at most {self._most} tokens in a batch")


class AnswerLengths:
    """What the answers of one sampling setting were long, to expect the others' lengths by."""

    def __init__(self, max_new_tokens: int) -> None:
        """No answer is seen yet."""
        self._most = max_new_tokens
        self._seen: list[int] = []  # ascending

    def add(self, tokens: int) -> None:
        """An answer has ended."""
        bisect.insort(self._seen, tokens)

    def expected(self, so_far: int, running: int) -> int:
        """How long an answer with `so_far` tokens is taken to become, while so many rows are running."""
        seen = len(self._seen)
        if seen < max(SEEN_ANSWERS, running):
            return self._most
        usual = self._seen[int(EXPECTED_QUANTILE * (seen - 1))]
        return min(self._most, max(usual, so_far + FURTHER_TOKENS))


def release_memory(on_gpu: bool) -> None:
    """Give what is no longer used back to the driver."""
    import gc

    import torch

    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def _tokens_with_room(model: Any) -> int:
    """How many tokens' keys and values fit into the cache's share of the free memory; layers lie evenly on the GPUs."""
    import torch

    count = torch.cuda.device_count()
    free = min(free_bytes(device) for device in range(count))
    return int(CACHE_SHARE * free * count / max(1, _cache_bytes_per_token(model)))


def _cache_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values of one token over all layers: 2 × layers × kv heads × head size × bytes."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)


def free_bytes(device: int) -> int:
    """Free memory of a device: what the driver has, and what torch holds without using it."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
