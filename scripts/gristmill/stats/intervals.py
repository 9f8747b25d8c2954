"""95 % intervals for one share or one mean.

- `wilson`: a share of independent 0/1 scores. Never empty, never outside 0…1.
- `clustered_mean`: any scores; those of one cluster (the answers to one row, the rows of one document) may depend on
  each other. With one score a cluster it is Student's interval of a mean.
- `bootstrap_mean`: the same without the assumption that the mean is normal; clusters are drawn, not scores.
- Where every cluster says the same, the spread is 0 and says nothing about the error, so there is no interval.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
#: Deviations below this, in units of the largest score (or 1), are rounding.
ROUNDING = 1e-12
#: Numbers that a batch of resamples may hold.
BATCH_NUMBERS = 4_000_000
ONE_CLUSTER = "an interval needs at least two independent rows"
NO_SPREAD = "all rows score alike, so their spread says nothing about the error"

Floats = npt.NDArray[np.float64]


class Bounds(NamedTuple):
    """The two ends of a 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error and interval; `reason` says why there is no interval, or no value."""

    value: float | None
    standard_error: float | None
    ci95: Bounds | None
    n: int
    clusters: int
    reason: str | None = None


def wilson(successes: float, n: int) -> Bounds:
    """The score interval of a share.

    (p̂ + z²/2n ± z·√(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n) with z = 1.96 (Wilson 1927, JASA 22:209).

    Raises:
        ValueError: n is 0, or there are more successes than n.
    """
    from statsmodels.stats.proportion import proportion_confint

    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} of {n} is no share")
    low, high = proportion_confint(successes, n, alpha=1 - LEVEL, method="wilson")
    return Bounds(float(low), float(high))


def t_half_width(standard_error: float, clusters: int) -> float:
    """Half of a t interval with clusters − 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(clusters - 1, (1 + LEVEL) / 2)) * standard_error


def clustered_mean(values: Sequence[float] | Floats, clusters: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of all values, with a standard error that lets the values of one cluster depend on each other.

    variance = C/(C−1) · Σ_c (Σ_{i in c} (x_i − mean))² / n², and t with C − 1 degrees of freedom for C clusters (Liang
    & Zeger 1986, Biometrika 73:13; for evaluations Miller 2024, arXiv:2411.00640). With one value a cluster the
    variance is s²/n. The t interval trusts that the mean is about normal: with few or very unequal clusters it is too
    narrow.

    Args:
        values: the scores.
        clusters: the cluster of each value; None: each value is one of its own.

    Raises:
        ValueError: a value is not finite, or there are more or fewer clusters than values.
    """
    scores, places = _checked(values, clusters)
    n, count = len(scores), int(places.max(initial=-1)) + 1
    if n == 0:
        return Estimate(None, None, None, 0, 0, "there is no score")
    mean = float(scores.mean())
    sums = np.bincount(places, weights=scores - mean)
    if count < 2:
        return Estimate(mean, None, None, n, count, ONE_CLUSTER)
    if np.abs(sums).max() <= ROUNDING * max(1.0, np.abs(scores).max()):
        return Estimate(mean, None, None, n, count, NO_SPREAD)
    error = float(np.sqrt(count / (count - 1) * np.square(sums).sum())) / n
    half = t_half_width(error, count)
    return Estimate(mean, error, Bounds(mean - half, mean + half), n, count)


def t_p_value(estimate: Estimate) -> float | None:
    """Two-sided p of a mean of 0, from the same error and degrees of freedom as the interval; None without those."""
    from scipy.special import stdtr

    if estimate.value is None or not estimate.standard_error:
        return None
    return 2 * float(stdtr(estimate.clusters - 1, -abs(estimate.value) / estimate.standard_error))


def bootstrap_mean(
    values: Sequence[float] | Floats,
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    resamples: int = 2000,
) -> Estimate:
    """The mean of all values, with the percentile interval of means over clusters drawn with replacement.

    Efron 1979, Annals of Statistics 7:1; clusters are drawn whole. `standard_error` is the resampled means' deviation.
    Clusters are drawn in the order of their names, so the order of the values does not matter when there are names.

    Raises:
        ValueError: as `clustered_mean`.
    """
    plain = clustered_mean(values, clusters)
    if plain.ci95 is None:
        return plain
    means = _resampled_means(*_checked(values, clusters), np.random.default_rng(seed), resamples)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(plain.value, float(means.std(ddof=1)), Bounds(float(low), float(high)), plain.n, plain.clusters)


def _resampled_means(scores: Floats, places: npt.NDArray[Any], rng: np.random.Generator, resamples: int) -> Floats:
    """The mean of each resample.

    Clusters with the same sum and size are one kind, and how often each kind is drawn is multinomial: for 0/1 scores a
    million rows are three kinds. Kinds stand in the order of the clusters' names, whatever their sums are.
    """
    order = np.lexsort((scores, places))  # also the last bit of a sum must not show the order of the values
    totals = np.column_stack([np.bincount(places[order], weights=scores[order]), np.bincount(places)])
    kinds, first, counts = np.unique(totals, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)
    kinds, shares = kinds[order], counts[order] / len(totals)
    batch = max(1, BATCH_NUMBERS // len(kinds))
    means = []
    for start in range(0, resamples, batch):
        draws = rng.multinomial(len(totals), shares, size=min(batch, resamples - start))  # (resamples, kinds)
        sums = draws @ kinds  # (resamples, 2): of scores, and how many
        means.append(sums[:, 0] / sums[:, 1])
    return np.concatenate(means)


def _checked(values: Sequence[float] | Floats, clusters: Sequence[Hashable] | None) -> tuple[Floats, npt.NDArray[Any]]:
    """The values, and for each the place of its cluster among the sorted names."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError(
            "scores must be one list of finite numbers; leave out what is missing, or say what it counts as"
        )
    if clusters is None:
        return scores, np.arange(len(scores))
    if len(clusters) != len(scores):
        raise ValueError(f"{len(scores)} scores but {len(clusters)} clusters; name one for each score")
    _, places = np.unique(np.asarray(clusters), return_inverse=True)
    return scores, places
