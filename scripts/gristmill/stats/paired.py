"""Two runs on the same rows: how far apart they are, and whether chance alone would put them there.

- Each row is compared with itself, so what makes a row hard for both runs drops out; the interval is of the difference,
  and is narrower than those of the two runs would suggest.
- 0/1 scores are tested by McNemar, which looks only at the rows on which the runs differ; others by t, clustered.
- Many comparisons find differences by chance; `holm` raises their p values so that one false finding in the whole
  family stays as rare as 1 in 20.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gristmill.stats.intervals import Bounds, Floats, bootstrap_mean, clustered_mean, t_p_value

#: With fewer rows on which the runs differ, McNemar's p is exact; the chi² approximation needs about as many.
EXACT_BELOW = 25
NO_ROWS = "no row has a score in both runs"
ONE_ROW = "only one independent row has a score in both runs, so nothing is known about the error"
NO_DIFFERENCE_SPREAD = "the runs differ by the same amount on every row, so the spread says nothing about the error"

Test = Literal["mcnemar_exact", "mcnemar_chi2", "paired_t"]


class McNemar(NamedTuple):
    """p of two runs that are right equally often, and how it was found."""

    p: float
    test: Test


class Discordant(NamedTuple):
    """Rows on which only one of the two runs is right."""

    only_first: int
    only_second: int


@dataclass(frozen=True, slots=True)
class Difference:
    """first − second over the rows they share; `reason` says why there is no interval."""

    first: float | None
    second: float | None
    difference: float | None
    standard_error: float | None
    ci95: Bounds | None
    bootstrap_ci95: Bounds | None
    n: int
    clusters: int
    test: Test | None
    p: float | None
    discordant: Discordant | None
    reason: str | None


def compare(
    first: Sequence[float] | Floats,
    second: Sequence[float] | Floats,
    clusters: Sequence[Hashable] | None = None,
    *,
    single: bool = True,
    seed: int = 0,
    resamples: int = 2000,
) -> Difference:
    """Compare the scores of two runs, given row by row.

    The difference is the mean of x_i − y_i. Its interval is the clustered t interval of those
    (intervals.clustered_mean), and beside it the percentile bootstrap. McNemar is used where all scores are single 0s
    or 1s and every row is a cluster of its own; it takes rows for independent, which scores of one cluster are not.

    Args:
        first: the first run's score of each row.
        second: the second run's, for the same rows in the same order.
        clusters: the cluster of each row (its id, or what its rows share); None: each row is one of its own.
        single: each score is that of one answer, and no mean of several.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Raises:
        ValueError: the lists are not equally long, or a score is not finite.
    """
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != other.shape:
        raise ValueError(f"{len(one)} scores beside {len(other)}; compare the rows that both runs have")
    if len(one) == 0:
        return Difference(None, None, None, None, None, None, 0, 0, None, None, None, NO_ROWS)
    plain = clustered_mean(one - other, clusters)
    drawn = bootstrap_mean(one - other, clusters, seed=seed, resamples=resamples)
    alone = single and plain.clusters == plain.n
    discordant = _discordant(one, other) if alone and _is_binary(one, other) else None
    tested = mcnemar(*discordant) if discordant else None
    p = tested.p if tested else t_p_value(plain)
    test: Test | None = tested.test if tested else (None if p is None else "paired_t")
    return Difference(
        first=float(one.mean()),
        second=float(other.mean()),
        difference=plain.value,
        standard_error=plain.standard_error,
        ci95=_inside(plain.ci95, one, other),
        bootstrap_ci95=drawn.ci95,
        n=plain.n,
        clusters=plain.clusters,
        test=test,
        p=p,
        discordant=discordant,
        reason=None if plain.ci95 else (ONE_ROW if plain.clusters < 2 else NO_DIFFERENCE_SPREAD),
    )


def mcnemar(only_first: int, only_second: int) -> McNemar:
    """The p of McNemar's test from the rows on which only one run is right.

    Exact (two-sided binomial with ½) below 25 such rows, else (|b − c| − 1)² / (b + c) against chi² with one degree of
    freedom (McNemar 1947, Psychometrika 12:153; Edwards' correction). Without such a row p is 1.
    """
    from statsmodels.stats.contingency_tables import mcnemar as tested

    exact = only_first + only_second < EXACT_BELOW
    found = tested([[0, only_first], [only_second, 0]], exact=exact, correction=True)
    return McNemar(min(float(found.pvalue), 1.0), "mcnemar_exact" if exact else "mcnemar_chi2")


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p values of one family, adjusted so that the chance of any false finding stays below the level.

    Holm 1979, Scandinavian Journal of Statistics 6:65: the smallest times m, the next times m − 1, …, never falling and
    at most 1. A None (a comparison without a test) stays None and is not part of the family.
    """
    from statsmodels.stats.multitest import multipletests

    tested = [p for p in p_values if p is not None]
    adjusted = iter(multipletests(tested, method="holm")[1] if tested else ())
    return [None if p is None else float(next(adjusted)) for p in p_values]


def _inside(bounds: Bounds | None, one: Floats, other: Floats) -> Bounds | None:
    """Cut to −1…1 where all scores lie in 0…1: no difference of them is further out."""
    if bounds is None or min(one.min(), other.min()) < 0 or max(one.max(), other.max()) > 1:
        return bounds
    return Bounds(max(bounds.low, -1.0), min(bounds.high, 1.0))


def _is_binary(*scores: Floats) -> bool:
    return all(bool(np.isin(each, (0.0, 1.0)).all()) for each in scores)


def _discordant(one: Floats, other: Floats) -> Discordant:
    return Discordant(int((one > other).sum()), int((one < other).sum()))
