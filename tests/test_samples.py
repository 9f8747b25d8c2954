"""Facts about rows that were answered several times, and about rows that belong together."""

import random
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import answer, tallied

from gristmill.clusters import ClusterScores, RowMeans
from gristmill.errors import UserError
from gristmill.samples import pass_at_k, sizes

Row = tuple[str, list[str]]


def sampled(rows: list[Row], metric: str = "exact_match", reference: Any = "x", **settings: Any) -> dict[str, Any]:
    """The metric's numbers of rows of several answers, each right where it is the reference."""
    lines = [answer(name, text, reference, n) for name, texts in rows for n, text in enumerate(texts)]
    found: dict[str, Any] = tallied(lines, metrics=[metric], samples=len(rows[0][1]), **settings)[1]["metrics"][metric]
    return found


# pass@k


def test_pass_at_k_is_told_for_powers_of_two_and_all() -> None:
    assert [sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_pass_at_k_is_the_share_of_the_ways_to_pick_k_that_hold_a_right_one() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == pytest.approx([1 / 4, 1 / 2, 1])
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)


@given(st.data())
def test_pass_at_k_grows_with_k_and_with_the_right_answers(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 300))
    c, k = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n - 1))
    assert 0 <= pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1) + 1e-12
    assert pass_at_k(n, c, k) <= pass_at_k(n, c + 1, k) + 1e-12 <= 1 + 1e-12
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_of_the_impossible_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(n, c, k)


def test_a_run_of_several_samples_tells_pass_at_k_over_its_rows() -> None:
    found = sampled([("a", ["x", "y", "y", "y"]), ("b", ["y"] * 4), ("c", ["x"] * 4), ("d", ["x", "x", "y", "y"])])
    passes = found["pass_at_k"]
    assert {k: entry["value"] for k, entry in passes.items()} == pytest.approx(
        {"1": 7 / 16, "2": (1 / 2 + 0 + 1 + 5 / 6) / 4, "4": 3 / 4}
    )
    assert passes["1"]["value"] == pytest.approx(found["value"])
    assert {entry["n"] for entry in passes.values()} == {4}
    assert passes["2"]["ci95"][0] < passes["2"]["value"] < passes["2"]["ci95"][1]


def test_one_sample_tells_no_pass_at_k() -> None:
    assert not {"pass_at_k", "maj_at_k"} & set(sampled([("a", ["x"])]))


# Majority


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        (["y", "X", "x."], True),
        (["x", "y", "y"], False),
        (["x", "y", "z"], True),
        (["y", "x", "z"], False),
        (["", "", "x"], True),
        (["", "", ""], False),
    ],
)
def test_the_majority_is_the_most_frequent_answer_and_of_equals_the_first(texts: list[str], right: bool) -> None:
    assert sampled([("a", texts)])["maj_at_k"]["3"]["value"] == right


def test_an_extracted_answer_votes_by_what_was_read() -> None:
    found = sampled([("a", ["so 7", "A: 5.0", "#### 5", "none"])], "number", 5)
    assert found["maj_at_k"]["4"]["value"] == 1
    assert (found["value"], found["unread"]) == (0.5, 1)


def test_contains_has_no_majority() -> None:
    assert "maj_at_k" not in sampled([("a", ["x", "y"])], "contains")


# Clusters


def reference_error(clusters: list[list[float]]) -> float:
    """CR1 by the textbook, in numpy."""
    mean, n, count = numpy.mean(numpy.concatenate(clusters)), sum(map(len, clusters)), len(clusters)
    residuals = [numpy.sum(numpy.array(scores) - mean) for scores in clusters]
    return float(numpy.sqrt(count / (count - 1) * numpy.sum(numpy.square(residuals))) / n)


CLUSTERS = st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=1, max_size=5), min_size=2, max_size=8)


@given(clusters=CLUSTERS, seed=st.integers(0, 99))
def test_the_interval_of_clusters_is_the_textbooks_and_does_not_ask_for_an_order(
    clusters: list[list[float]], seed: int
) -> None:
    from scipy.stats import t

    pairs = [(str(number), score) for number, scores in enumerate(clusters) for score in scores]
    together, mixed = RowMeans(), ClusterScores()
    for cluster, score in pairs:
        together.add(cluster, score)
    random.Random(seed).shuffle(pairs)
    for cluster, score in pairs:
        mixed.add(cluster, score)
    error, count = reference_error(clusters), len(clusters)
    for scores in (together, mixed):
        interval, value = scores.interval(), scores.value
        assert interval is not None
        assert value is not None
        assert interval.method == ("cluster_t" if error > 1e-6 else "wilson")
        if error > 1e-6:
            half = t.ppf(0.975, count - 1) * error
            assert interval.low == pytest.approx(max(value - half, 0), abs=1e-9)
            assert interval.high == pytest.approx(min(value + half, 1), abs=1e-9)


def test_scores_that_are_all_alike_get_wilson_over_the_clusters() -> None:
    scores = ClusterScores()
    for n in range(30):
        scores.add(str(n % 3), 0.1)
    interval = scores.interval()
    assert interval is not None
    assert interval.method == "wilson"
    assert interval.high - interval.low > 0.3


def test_a_runs_cluster_widens_the_interval_of_rows_that_go_together() -> None:
    lines = [answer(str(n), "x" if n % 10 < 5 else "y", "x", row={"topic": n % 10}) for n in range(100)]
    _, alone = tallied(lines)
    _, together = tallied(lines, cluster="topic", slices=["topic"])
    assert together["cluster"] == "topic"
    assert together["accuracy"] == alone["accuracy"] == 0.5
    assert together["ci95"][0] < alone["ci95"][0] < 0.5 < alone["ci95"][1] < together["ci95"][1]
    assert together["slices"]["topic"]["0"]["exact_match"]["interval"] == "wilson"


def test_pass_at_k_is_clustered_too() -> None:
    rows: list[Row] = [(str(n), ["x", "y"] if n % 4 < 2 else ["y", "y"]) for n in range(40)]
    lines = [
        answer(name, text, "x", n, row={"t": int(name) % 4}) for name, texts in rows for n, text in enumerate(texts)
    ]
    passes = [
        tallied(lines, samples=2, cluster=cluster)[1]["metrics"]["exact_match"]["pass_at_k"]["2"]
        for cluster in (None, "t")
    ]
    assert [entry["value"] for entry in passes] == [0.5, 0.5]
    assert passes[1]["ci95"][0] < passes[0]["ci95"][0]


def test_a_row_without_the_cluster_is_refused() -> None:
    with pytest.raises(UserError, match=r"row b has no 'topic', which the run's cluster names"):
        tallied([answer("a", "x", "x", row={"topic": 1}), answer("b", "x", "x")], cluster="topic")


def test_each_turn_of_a_row_is_answered_anew_by_every_sample() -> None:
    """A sample's turns stand together, so the samples of one turn do not."""
    right = {("a", 1): [1, 0], ("a", 2): [0, 0], ("b", 1): [1, 1], ("b", 2): [0, 1]}
    lines = [
        answer(row, "x" if right[row, turn][sample] else "y", "x", sample) | {"variant": f"turn_{turn}"}
        for row in "ab"
        for sample in (0, 1)
        for turn in (1, 2)
    ]
    found = tallied(lines, metrics=["exact_match"], samples=2)[1]["metrics"]["exact_match"]
    assert (found["n"], found["value"]) == (8, 0.5)
    assert [found["pass_at_k"][k]["n"] for k in ("1", "2")] == [4, 4]
    assert [found["pass_at_k"][k]["value"] for k in ("1", "2")] == pytest.approx([0.5, 0.75])
    assert (found["maj_at_k"]["2"]["n"], found["maj_at_k"]["2"]["value"]) == (4, 0.5)
