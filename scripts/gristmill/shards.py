"""Which worker takes which request: balanced counts, long and short prompts dealt out evenly.

- Counts differ by at most one and there are never more shards than requests, so no worker starts for nothing.
- Requests are ranked by length and dealt in a snake (1 2 3 3 2 1 …), then each shard is put back in the dataset's
  order: merging can then stream, reading every part once from front to back.
"""

from __future__ import annotations

from collections.abc import Sequence


def shard_count(workers: int, requests: int) -> int:
    """How many shards to make for so many requests: one a worker, and at least one."""
    return max(1, min(workers, requests))


def assign(lengths: Sequence[int], shards: int) -> list[int]:
    """The shard (0-based) of each request, from the requests' lengths in tokens."""
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    assignment = [0] * len(lengths)
    for rank, index in enumerate(by_length):
        turn, place = divmod(rank, shards)
        assignment[index] = place if turn % 2 == 0 else shards - 1 - place
    return assignment
