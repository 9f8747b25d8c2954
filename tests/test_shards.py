"""Facts about dealing requests to workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.planning.workers import Worker, worker_of
from gristmill.shards import assign, requests_to_count, shard_count, shares

LENGTHS = st.lists(st.integers(0, 9000), max_size=200)


def counts(lengths: list[int], shards: int) -> list[int]:
    dealt = assign(lengths, shards)
    return [dealt.count(shard) for shard in range(shards)]


def loads(lengths: list[int], shards: int) -> list[int]:
    total = [0] * shards
    for length, shard in zip(lengths, assign(lengths, shards), strict=True):
        total[shard] += length
    return total


def test_80_rows_on_3_workers_make_27_27_26() -> None:
    assert shard_count([1.0] * 3, 80) == 3
    assert counts([100] * 80, 3) == [27, 27, 26]


@pytest.mark.parametrize(("workers", "requests", "shards"), [(5, 2, 2), (5, 5, 5), (4, 100, 4), (1, 100, 1), (8, 0, 1)])
def test_there_is_a_shard_a_worker_but_none_without_a_request(workers: int, requests: int, shards: int) -> None:
    assert shard_count([1.0] * workers, requests) == shards


@given(LENGTHS, st.integers(1, 40))
def test_counts_differ_by_one_at_most(lengths: list[int], shards: int) -> None:
    dealt = counts(lengths, shards)
    assert sum(dealt) == len(lengths)
    assert max(dealt) - min(dealt) <= 1


@given(LENGTHS, st.integers(1, 40))
def test_no_worker_has_more_than_one_longest_prompt_beyond_another(lengths: list[int], shards: int) -> None:
    total = loads(lengths, shards)
    assert max(total) - min(total) <= max(lengths, default=0)


def test_long_prompts_are_dealt_out_where_cutting_the_file_would_not() -> None:
    lengths = [4000] * 4 + [10] * 12
    assert loads(lengths, 4) == [4030] * 4


def test_lengths_in_order_are_balanced_too() -> None:
    total = loads(list(range(1, 101)), 4)
    assert max(total) - min(total) <= 4


@given(LENGTHS, st.integers(1, 40))
def test_dealing_is_the_same_every_time_and_names_only_shards_there_are(lengths: list[int], shards: int) -> None:
    dealt = assign(lengths, shards)
    assert dealt == assign(list(lengths), shards)
    assert all(0 <= shard < shards for shard in dealt)


# ---- workers of unlike speeds

SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("requests", "speeds", "expected"),
    [(100, [1, 1, 0.5], [40, 40, 20]), (7, [1, 0.4], [5, 2]), (3, [1, 1, 0.001], [1, 1, 1]), (2, [1, 1, 1], [1, 1, 0])],
)
def test_counts_follow_the_speeds_by_largest_remainder(requests: int, speeds: list[float], expected: list[int]) -> None:
    assert shares(requests, speeds) == expected


@given(st.integers(0, 500), SPEEDS)
def test_all_requests_are_shared_out_and_no_worker_is_without_while_there_are_enough(
    requests: int, speeds: list[float]
) -> None:
    counts = shares(requests, speeds)
    assert sum(counts) == requests
    assert min(counts) >= (1 if requests >= len(speeds) else 0)
    exact = [requests * speed / sum(speeds) for speed in speeds]
    if min(exact) >= 1:
        assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))


@given(LENGTHS, SPEEDS)
def test_each_shard_gets_as_many_requests_as_its_share(lengths: list[int], speeds: list[float]) -> None:
    dealt = assign(lengths, len(speeds), speeds)
    counted = [dealt.count(shard) for shard in range(len(speeds))]
    if len(set(speeds)) > 1:
        assert counted == shares(len(lengths), speeds)
    else:
        assert max(counted) - min(counted) <= 1


def test_long_prompts_follow_the_speeds_too() -> None:
    lengths = [5000] * 30 + [10] * 270
    dealt = assign(lengths, 3, [1.0, 1.0, 0.5])
    assert [dealt[:30].count(shard) for shard in range(3)] == [12, 12, 6]


# ---- several shards a worker


@pytest.mark.parametrize(
    ("speeds", "requests", "shards"),
    [
        ([1, 1], 100, 8),
        ([1, 1], 12, 8),
        ([1, 1], 7, 6),
        ([1, 1], 5, 4),
        ([1, 1], 1, 1),
        ([1, 1], 0, 1),
        ([1, 0.25], 100, 8),
        ([1, 0.25], 10, 4),
        ([1, 0.25], 3, 2),
    ],
)
def test_every_worker_has_as_many_shards_as_asked_for_and_fewer_where_requests_are_few(
    speeds: list[float], requests: int, shards: int
) -> None:
    assert shard_count(speeds, requests, shards_per_worker=4) == shards


@given(LENGTHS, SPEEDS, st.integers(1, 20))
def test_a_workers_shards_together_are_its_share_and_none_is_empty(
    lengths: list[int], speeds: list[float], each: int
) -> None:
    workers = [Worker(1, speed) for speed in sorted(speeds, reverse=True)]
    shards = shard_count(speeds, len(lengths), each)
    owners = [worker_of(workers, shard) for shard in range(1, shards + 1)]
    dealt = assign(lengths, shards, [worker.speed for worker in owners])
    counted = [dealt.count(shard) for shard in range(shards)]
    assert 1 <= shards <= max(1, len(lengths))
    assert min(counted) >= min(1, len(lengths))
    per_worker = shards // len(workers)
    share = [len(lengths) * worker.speed / sum(speeds) for worker in workers]
    if min(share) >= 1:
        assert shards == per_worker * len(workers)
        of_worker = [sum(counted[first :: len(workers)]) for first in range(len(workers))]
        assert all(abs(count - wanted) <= per_worker for count, wanted in zip(of_worker, share, strict=True))


@given(st.integers(0, 3000), SPEEDS, st.integers(1, 50))
def test_requests_need_not_be_counted_beyond_those_that_decide_the_number_of_shards(
    requests: int, speeds: list[float], each: int
) -> None:
    counted = min(requests, requests_to_count(speeds, each))
    assert shard_count(speeds, counted, each) == shard_count(speeds, requests, each)
