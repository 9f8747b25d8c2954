"""Which worker takes which request: counts that follow the workers' speeds, long and short prompts dealt out evenly.

- Workers of one speed get counts that differ by at most one. There are never more shards than requests, and while there
  are enough requests no shard is empty, so no worker starts for nothing.
- Requests are ranked by length. Equal workers are dealt them in a snake (1 2 3 3 2 1 …), unlike ones in turns as
  frequent as their speed; then each shard is put back in the dataset's order: merging can then stream, reading every
  part once from front to back.
"""

from __future__ import annotations

from collections.abc import Sequence


def shard_count(workers: int, requests: int) -> int:
    """How many shards to make for so many requests: one a worker, and at least one."""
    return max(1, min(workers, requests))


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
    """How many requests each worker gets: as its speed says, by largest remainder, at least one if there are enough."""
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
