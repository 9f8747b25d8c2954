"""Simulations with fixed seeds: intervals cover at their rate, ratings and length-controlled rates find the truth.

The bounds are those that a true rate of 95 % leaves with a chance of about one in a thousand, and a little more where
an interval is known to be approximate; the seeds are fixed, so a result never changes by itself.
"""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from gristmill.stats.bradley_terry import Game, bradley_terry
from gristmill.stats.intervals import Bounds, bootstrap_mean, clustered_mean, wilson
from gristmill.stats.length_control import length_controlled_win_rate
from gristmill.stats.paired import compare

TIMES = 2000


def covered(hits: int, times: int = TIMES, slack: float = 0.0) -> bool:
    """Whether so many hits are what a rate of 95 % (give or take `slack`) gives."""
    low = binom.ppf(0.0005, times, 0.95 - slack)
    high = binom.ppf(0.9995, times, min(0.95 + slack, 0.999))
    return bool(low <= hits <= high)


def holds(bounds: Bounds | None, truth: float) -> bool:
    assert bounds is not None
    return bounds.low <= truth <= bounds.high


def test_the_bounds_of_these_tests_would_see_a_90_or_a_99_percent_interval() -> None:
    assert not covered(int(0.92 * TIMES), slack=0.01)
    assert not covered(int(0.985 * TIMES), slack=0.01)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_wilson_covers(share: float) -> None:
    counts = np.random.default_rng(1).binomial(60, share, TIMES)
    by_count = {int(count): holds(wilson(int(count), 60), share) for count in set(counts)}
    assert covered(sum(by_count[int(count)] for count in counts), slack=0.015)


def test_the_t_interval_of_a_mean_covers() -> None:
    rng = np.random.default_rng(2)
    assert covered(sum(holds(clustered_mean(rng.normal(3, 2, 12)).ci95, 3) for _ in range(TIMES)))


def correlated(rng: np.random.Generator, clusters: int, each: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Scores around 0 whose correlation within a cluster is one half: (clusters × each)."""
    shared = np.repeat(rng.normal(size=clusters), each)
    return np.asarray(shared + rng.normal(size=clusters * each))


def test_the_clustered_t_interval_covers_where_the_plain_one_does_not() -> None:
    rng, names = np.random.default_rng(3), [f"c{n}" for n in range(30) for _ in range(6)]
    samples = [correlated(rng, 30, 6) for _ in range(TIMES)]
    assert covered(sum(holds(clustered_mean(sample, names).ci95, 0) for sample in samples))
    assert sum(holds(clustered_mean(sample).ci95, 0) for sample in samples) < 0.8 * TIMES


def test_the_interval_of_a_paired_difference_covers() -> None:
    rng, hits = np.random.default_rng(4), 0
    for _ in range(TIMES):
        hardness = rng.normal(size=40)
        first, second = hardness + rng.normal(0.3, 1, 40), hardness + rng.normal(0, 1, 40)
        hits += holds(clustered_mean(first - second).ci95, 0.3)
    assert covered(hits)


def test_the_paired_interval_of_0_1_scores_covers() -> None:
    rng, hits = np.random.default_rng(5), 0
    for _ in range(TIMES):
        hardness = rng.random(150)
        first, second = (rng.random(150) < 0.8 * hardness + 0.1 * k for k in (1, 0))
        hits += holds(clustered_mean(first.astype(float) - second).ci95, 0.1)
    assert covered(hits, slack=0.01)


def test_the_bootstrap_of_clusters_covers() -> None:
    rng, names, times = np.random.default_rng(6), [f"c{n:02}" for n in range(60) for _ in range(3)], 600
    found = [bootstrap_mean(correlated(rng, 60, 3), names, seed=n, resamples=500).ci95 for n in range(times)]
    assert covered(sum(holds(bounds, 0) for bounds in found), times, slack=0.015)


def test_mcnemar_finds_a_difference_that_is_not_there_no_more_often_than_stated() -> None:
    rng, found = np.random.default_rng(7), 0
    for _ in range(500):
        first, second = (rng.random(80) < 0.6 for _ in range(2))
        p = compare(first, second, resamples=10).p
        assert p is not None
        found += p < 0.05
    assert found <= binom.ppf(0.9995, 500, 0.05)


STRENGTHS = {"weak": -0.8, "middle": 0.0, "good": 0.5, "best": 1.1}


def tournament(rng: np.random.Generator, rows: int) -> list[Game]:
    """Every two runs on every row, with wins as the model says."""
    names = list(STRENGTHS)
    return [
        Game(one, other, float(rng.random() < expit(STRENGTHS[one] - STRENGTHS[other])), f"r{row:04}")
        for row in range(rows)
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]


def truth(run: str) -> float:
    return float((STRENGTHS[run] - np.mean(list(STRENGTHS.values()))) * 400 / np.log(10) + 1000)


def test_bradley_terry_finds_known_strengths() -> None:
    for each in bradley_terry(list(STRENGTHS), tournament(np.random.default_rng(8), 3000), resamples=100):
        assert each.rating == pytest.approx(truth(each.run), abs=12)


def test_the_intervals_of_ratings_cover() -> None:
    rng, times = np.random.default_rng(9), 40
    found = [bradley_terry(list(STRENGTHS), tournament(rng, 60), seed=n, resamples=100) for n in range(times)]
    hits = sum(holds(each.ci95, truth(each.run)) for ratings in found for each in ratings)
    assert 0.90 <= hits / (times * len(STRENGTHS)) <= 0.99


def judged_by_length(rng: np.random.Generator, pairs: int, theta: float, slope: float) -> tuple[object, object]:
    """Verdicts of a judge that prefers the longer answer, of a run that writes longer ones: (won, differences)."""
    delta = rng.normal(80, 150, pairs)
    return (rng.random(pairs) < expit(theta + slope * np.tanh(delta / delta.std()))).astype(float), delta


@pytest.mark.parametrize("theta", [0.0, -0.7])
def test_the_controlled_rate_takes_a_pure_effect_of_length_out(theta: float) -> None:
    won, delta = judged_by_length(np.random.default_rng(10), 20_000, theta, 2.0)
    found = length_controlled_win_rate(won, delta)  # type: ignore[arg-type]
    assert found.value == pytest.approx(expit(theta), abs=0.02)
    assert found.length_effect == pytest.approx(2.0, abs=0.15)
    assert np.mean(won) > expit(theta) + 0.08  # type: ignore[call-overload]


def test_the_interval_of_the_controlled_rate_covers() -> None:
    rng, hits, times = np.random.default_rng(11), 0, 500
    for _ in range(times):
        won, delta = judged_by_length(rng, 300, 0.4, 1.0)
        hits += holds(length_controlled_win_rate(won, delta).ci95, float(expit(0.4)))  # type: ignore[arg-type]
    assert covered(hits, times, slack=0.01)


def test_without_an_effect_of_length_the_controlled_rate_is_the_raw_one() -> None:
    rng = np.random.default_rng(12)
    won, delta = (rng.random(20_000) < 0.6).astype(float), rng.normal(80, 150, 20_000)
    assert length_controlled_win_rate(won, delta).value == pytest.approx(0.6, abs=0.015)
