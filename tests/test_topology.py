"""Facts about choosing the GPUs of a group, on fake topologies."""

import itertools

from gristmill.gpu.nvml import NVLINK
from gristmill.gpu.topology import groups_of, nearest
from gristmill.types import Gpu

Links = dict[frozenset[str], int]


def gpus(count: int) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index}", "H100", 81559, 0) for index in range(count)]


def links(*pairs: tuple[int, int, int]) -> Links:
    return {frozenset((f"GPU-{one}", f"GPU-{other}")): near for one, other, near in pairs}


def chosen(there: list[Gpu], count: int, known: Links) -> list[int]:
    return [gpu.index for gpu in nearest(there, count, known)]


#: Four pairs with a bridge each, on two sockets: 0-2, 1-3 on one, 4-6, 5-7 on the other.
PAIRS = links(
    *[
        (one, other, 20)
        for one, other in [*itertools.combinations(range(4), 2), *itertools.combinations(range(4, 8), 2)]
    ],
) | links(*[(one, one + 2, NVLINK + 30) for one in (0, 1, 4, 5)])


def test_bridged_pairs_come_before_neighbours_in_number() -> None:
    assert chosen(gpus(8), 2, PAIRS) == [0, 2]
    assert chosen(gpus(8)[1:], 2, PAIRS) == [1, 3]
    assert [[gpu.index for gpu in group] for group in groups_of(gpus(8), 2, PAIRS)] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_group_of_four_stays_on_one_socket() -> None:
    assert chosen(gpus(8), 4, PAIRS) == [0, 1, 2, 3]
    assert chosen([gpu for gpu in gpus(8) if gpu.index != 1], 4, PAIRS) == [4, 5, 6, 7]


def test_the_slowest_link_decides_before_the_sum() -> None:
    known = links((0, 1, 130), (1, 2, 130), (0, 2, 0), (3, 4, 20), (4, 5, 20), (3, 5, 20))
    assert chosen(gpus(6), 3, known) == [3, 4, 5]


def test_where_all_are_linked_alike_or_nothing_is_known_the_order_decides() -> None:
    switch = links(*[(one, other, NVLINK) for one, other in itertools.combinations(range(8), 2)])
    assert chosen(gpus(8)[::-1], 3, switch) == [7, 6, 5]
    assert chosen(gpus(8)[::-1], 3, {}) == [7, 6, 5]


def test_fewer_gpus_than_asked_for_make_no_group() -> None:
    assert chosen(gpus(3), 4, PAIRS) == []
    assert groups_of(gpus(3), 4, {}) == []


def test_what_does_not_make_a_whole_group_is_left_over() -> None:
    assert [len(group) for group in groups_of(gpus(8), 3, PAIRS)] == [3, 3]


def test_many_gpus_are_grouped_without_trying_every_combination() -> None:
    boards = [
        (one, other, 50)
        for board in range(8)
        for one, other in itertools.combinations(range(board * 8, board * 8 + 8), 2)
    ]
    assert chosen(gpus(64)[3:], 8, links(*boards)) == list(range(8, 16))
