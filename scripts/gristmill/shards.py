"""Which worker takes which request: counts that follow the workers' speeds, long and short prompts dealt out evenly.

- A worker has `shards_per_worker` shards, each a job (planning/workers.py says which shard is whose); all shards of a
  worker have its speed, so together they are its share of the requests.
- Shards of one speed get counts that differ by at most one. There are never more shards than requests, and while there
  are enough requests no shard is empty, so no job starts for nothing. Where requests are few, all workers have fewer
  shards: with one request in each, counts would follow the number of shards and no longer the speeds.
- Requests are ranked by length. Equal workers are dealt them in a snake (1 2 3 3 2 1 …), unlike ones in turns as
  frequent as their speed; then each shard is put back in the dataset's order: merging can then stream, reading every
  part once from front to back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Shares are floats; a share of 3.9999999996 requests is one of 4.
_ROUNDING = 1e-9


def shard_count(speeds: Sequence[float], requests: int, shards_per_worker: int = 1) -> int:
    """How many shards to make for so many requests: as many for every worker, at least one in all.

    Args:
        speeds: of each worker.
        requests: how many there are, or any number from `requests_to_count` on.
        shards_per_worker: how many a worker is to have, if the slowest one's share has that many requests.
    """
    smallest_share = requests * min(speeds) / sum(speeds)
    each = max(1, min(shards_per_worker, int(smallest_share + _ROUNDING)))
    return max(1, min(len(speeds) * each, requests))


def requests_to_count(speeds: Sequence[float], shards_per_worker: int) -> int:
    """With so many requests every worker has all its shards: more need not be counted."""
    return math.ceil(shards_per_worker * sum(speeds) / min(speeds))


def assign(lengths: Sequence[int], shards: int, speeds: Sequence[float] | None = None) -> list[int]:
    """The shard (0-based) of each request.

    Args:
        lengths: the requests' lengths in tokens.
        shards: how many shards there are.
        speeds: of each shard's worker; None: all alike.
    """
    by_length = sorted(
        range(len(lengths)), key=lengths.__getitem__, reverse=True
    )  # stable: equal ones keep their order
    alike = speeds is None or len(set(speeds)) <= 1
    order = _snake(len(lengths), shards) if alike else _turns(shares(len(lengths), speeds or []))
    assignment = [0] * len(lengths)
    for index, shard in zip(by_length, order, strict=True):
        assignment[index] = shard
    return assignment


def shares(requests: int, speeds: Sequence[float]) -> list[int]:
    """How many requests each shard gets: as its speed says, by largest remainder, at least one if there are enough."""
    exact = [requests * speed / sum(speeds) for speed in speeds]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda shard: (counts[shard] - exact[shard], shard))
    for shard in by_remainder[: requests - sum(counts)]:
        counts[shard] += 1
    while 0 in counts and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def _snake(requests: int, shards: int) -> list[int]:
    turns = (divmod(rank, shards) for rank in range(requests))
    return [place if turn % 2 == 0 else shards - 1 - place for turn, place in turns]


def _turns(counts: Sequence[int]) -> list[int]:
    """Each shard as often as it has requests, spread evenly over the ranks."""
    places = [((turn + 0.5) / count, shard) for shard, count in enumerate(counts) for turn in range(count)]
    return [shard for _, shard in sorted(places)]
