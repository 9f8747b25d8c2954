"""A win rate without what the length of the answers does to it.

Judges favour longer answers. The model of Dubois et al. 2024 (Length-Controlled AlpacaEval, arXiv:2404.04475), without
its term for how hard an instruction is:

    P(first preferred) = logistic(θ + φ · tanh(Δ / s)),   Δ = length of first − length of second, s = deviation of Δ

The controlled win rate is logistic(θ): what the fit expects of two answers of equal length. tanh keeps a few very long
answers from deciding the slope. A tie counts as half a win. It is not defined where the lengths explain everything or
cannot vary, and answers None with the reason there.

It controls what the fit sees and no more: where one run's answers are always the longer ones, equal lengths were never
seen, and the value is an extrapolation (`overlap` is then false).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.stats.intervals import LEVEL, Bounds, Floats

NO_PAIRS = "no pair has a verdict"
ONE_SIDED = "every verdict is for the same run, so the fitted strength has no bound"
NO_VARIATION = "the difference in length is the same for every pair, so its effect cannot be told from the runs'"
SEPARATED = "the length difference decides every verdict, so the fit has no bound"
HARDLY_BOUND = "the verdicts hardly bound what the fit says of equal length, so it is not a number to go by"
FEW_ROWS = "an interval needs at least three independent rows"
ALL_TIED = "every verdict is a tie, so the spread says nothing about the error"
EXACT_FIT = "the fit meets every row exactly, so what is left says nothing about the error"
#: An error below this is rounding.
NO_ERROR = 1e-6
#: Odds of e¹² (160,000 to 1) are further than verdicts can tell.
MAX_LOG_ODDS = 12.0


@dataclass(frozen=True, slots=True)
class ControlledRate:
    """The first run's win rate at equal length, and the slope φ; `reason` says why the value or interval is None."""

    value: float | None
    ci95: Bounds | None
    length_effect: float | None
    n: int
    overlap: bool
    reason: str | None = None


def length_controlled_win_rate(
    preferences: Sequence[float] | Floats,
    length_differences: Sequence[float] | Floats,
    clusters: Sequence[Hashable] | None = None,
) -> ControlledRate:
    """The win rate of the first run at equal length, with a cluster-robust 95 % interval.

    Args:
        preferences: 1 where the first run won, 0 where it lost, 0.5 for a tie.
        length_differences: length of the first answer − length of the second.
        clusters: the row of each pair; None: each is one of its own.

    Raises:
        ValueError: the lists differ in length, or a preference is outside 0…1.
    """
    won, delta = np.asarray(preferences, dtype=np.float64), np.asarray(length_differences, dtype=np.float64)
    if won.shape != delta.shape or not ((won >= 0) & (won <= 1)).all():
        raise ValueError("give one length difference for each preference, and preferences from 0 to 1")
    overlap = bool(len(delta)) and bool(delta.min() <= 0 <= delta.max())
    reason = _undefined(won, delta)
    if reason is not None:
        return ControlledRate(None, None, None, len(won), overlap, reason)
    if won.min() == won.max():
        return ControlledRate(float(won[0]), None, 0.0, len(won), overlap, ALL_TIED)
    theta, phi, error = _fit(won, np.tanh(delta / delta.std()), clusters)
    if not abs(theta) + abs(phi) < MAX_LOG_ODDS:
        return ControlledRate(None, None, None, len(won), overlap, HARDLY_BOUND)
    if error is None or error < NO_ERROR:
        return ControlledRate(_logistic(theta), None, phi, len(won), overlap, FEW_ROWS if error is None else EXACT_FIT)
    bounds = Bounds(*(_logistic(theta + sign * _z() * error) for sign in (-1, 1)))
    return ControlledRate(_logistic(theta), bounds, phi, len(won), overlap)


def _undefined(won: Floats, delta: Floats) -> str | None:
    """Why the maximum likelihood fit does not exist (Albert & Anderson 1984); None where it does."""
    if not len(won):
        return NO_PAIRS
    if won.min() == won.max() and won[0] in (0, 1):
        return ONE_SIDED
    if delta.min() == delta.max():
        return NO_VARIATION
    wins, losses = delta[won > 0], delta[won < 1]
    return SEPARATED if losses.max() <= wins.min() or wins.max() <= losses.min() else None


def _fit(won: Floats, length: Floats, clusters: Sequence[Hashable] | None) -> tuple[float, float, float | None]:
    """θ and φ, NaN where the fit did not converge, and the standard error of θ, None with fewer than three clusters."""
    import statsmodels.api as sm

    groups = np.arange(len(won)) if clusters is None else np.unique(np.asarray(clusters), return_inverse=True)[1]
    design = np.column_stack([np.ones_like(length), length])  # (pairs, 2)
    model = sm.GLM(won, design, family=sm.families.Binomial())
    robust = {"cov_type": "cluster", "cov_kwds": {"groups": groups}} if len(np.unique(groups)) > 2 else {}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit without a bound, which the caller refuses
        try:
            found = model.fit(tol=1e-12, maxiter=200, **robust)
        except np.linalg.LinAlgError:  # rounding has made the lengths all alike
            return float("nan"), float("nan"), None
    theta, phi = map(float, found.params) if found.converged else (float("nan"), float("nan"))
    return theta, phi, float(np.nan_to_num(found.bse[0])) if robust else None


def _logistic(value: float) -> float:
    from scipy.special import expit

    return float(expit(value))


def _z() -> float:
    from scipy.special import ndtri

    return float(ndtri((1 + LEVEL) / 2))
