"""Which GPUs make the best group: those that NVLink joins, then those that sit close together.

The slowest link holds a group back, so groups are compared by their farthest pair first, then by the sum of all pairs;
among equals the one that comes first in the given order wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from gristmill.gpu.nvml import Links
from gristmill.types import Gpu

#: Above this many combinations a group is grown one GPU at a time instead.
MOST_COMBINATIONS = 20_000


def nearest(gpus: Sequence[Gpu], count: int, links: Links) -> list[Gpu]:
    """The best `count` of the GPUs, in their order; an empty list when there are fewer."""
    if count > len(gpus):
        return []
    if count == 1 or not links:
        return list(gpus[:count])
    if math.comb(len(gpus), count) <= MOST_COMBINATIONS:
        return list(_best(itertools.combinations(gpus, count), links))
    return list(_best((_grown(gpus, first, count, links) for first in gpus), links))


def groups_of(gpus: Sequence[Gpu], count: int, links: Links) -> list[list[Gpu]]:
    """Whole groups, the best first: what workers get as they start one after the other on free GPUs."""
    left, found = list(gpus), []
    while group := nearest(left, count, links):
        found.append(group)
        left = [gpu for gpu in left if gpu not in group]
    return found


def _best(groups: Iterable[Sequence[Gpu]], links: Links) -> Sequence[Gpu]:
    return max(groups, key=lambda group: _closeness(group, links))  # the first of equals


def _closeness(group: Sequence[Gpu], links: Links) -> tuple[int, int]:
    pairs = [links.get(frozenset((one.uuid, other.uuid)), 0) for one, other in itertools.combinations(group, 2)]
    return min(pairs, default=0), sum(pairs)


def _grown(gpus: Sequence[Gpu], first: Gpu, count: int, links: Links) -> list[Gpu]:
    """A group grown from one GPU by the one that is nearest to the group."""
    group = [first]
    while len(group) < count:
        others = [gpu for gpu in gpus if gpu not in group]
        group.append(max(others, key=lambda gpu: _closeness([*group, gpu], links)))
    return [gpu for gpu in gpus if gpu in group]
