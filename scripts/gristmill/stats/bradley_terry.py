"""Ratings of many runs from pairwise results: the Bradley–Terry model by maximum likelihood.

P(i beats j) = p_i / (p_i + p_j) (Bradley & Terry 1952, Biometrika 39:324). A tie counts as half a win for each. Ratings
are on Elo's scale, 400 · log₁₀ p: 400 points more are odds of 10 to 1. Only differences have a meaning, so the ratings
are shifted: their mean is 1000, or the baseline's is.

- The fit exists where every run can be reached from every other along wins (Ford 1957). Where a run won or lost
  everything against the rest its strength has no bound: it has no rating, and is said to be `above` or `below`. The
  others are rated from the pairs among themselves, which is the limit of the whole fit. Runs that no chain of pairs
  connects have no common scale.
- Intervals are percentiles over rows drawn with replacement, all pairs of a row together.
- Ratings updated game by game (Elo) are not offered: the result depends on the order of the games, which has no meaning
  for verdicts that were all given at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.stats.intervals import LEVEL, Bounds, Floats

SCALE = 400 / np.log(10)
MEAN = 1000.0
#: Resamples in which the fit does not exist are left out; with more of them the interval would be too narrow.
MAX_UNBOUNDED_RATIO = 0.01

Place = Literal["rated", "above", "below", "unconnected"]


class Game(NamedTuple):
    """One verdict: two runs, the first one's score (1, ½ or 0), and the row it is about."""

    first: str
    second: str
    score: float
    row: str


@dataclass(frozen=True, slots=True)
class Rating:
    """A run's rating; `reason` says why it, or its interval, is None."""

    run: str
    rating: float | None
    ci95: Bounds | None
    place: Place
    reason: str | None


def win_matrix(runs: Sequence[str], games: Sequence[Game]) -> Floats:
    """(runs, runs): how often the run of a row of the matrix beat that of a column; a tie is ½ on both sides.

    Raises:
        ValueError: a game names a run that is not there, or a score outside 0…1.
    """
    return _Games(runs, games).wins()


def bradley_terry(
    runs: Sequence[str],
    games: Sequence[Game],
    *,
    baseline: str | None = None,
    seed: int = 0,
    resamples: int = 1000,
) -> list[Rating]:
    """The ratings of the runs, in the order in which they are given.

    Args:
        runs: all runs.
        games: the verdicts.
        baseline: the run whose rating is 1000; None, or one that cannot be rated: the mean of the rated ones is.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Raises:
        ValueError: a game names a run that is not there, or a score outside 0…1.
    """
    played = _Games(runs, games)
    wins = played.wins()
    rated = rated_together(wins)
    anchor = runs.index(baseline) if baseline is not None and baseline in runs else None
    ratings = fit(wins, rated, anchor)
    bounds, why = _intervals(played, rated, anchor, seed, resamples)
    places = [_place(wins, rated, index) for index in range(len(runs))]
    return [
        Rating(run, rating=float(ratings[index]), ci95=bounds[index], place="rated", reason=why)
        if places[index] == "rated"
        else Rating(run, None, None, places[index], _REASONS[places[index]] if len(rated) else _none_reason(wins))
        for index, run in enumerate(runs)
    ]


_REASONS: dict[Place, str] = {
    "above": "it won everything against the rated runs, so its rating has no upper bound",
    "below": "it lost everything against the rated runs, so its rating has no lower bound",
    "unconnected": "no chain of readable pairs connects it with the rated runs",
}


def fit(wins: Floats, rated: npt.NDArray[np.intp], anchor: int | None = None) -> Floats:
    """Maximum likelihood ratings of the rated runs from their win matrix; NaN for the others.

    Raises:
        ArithmeticError: the fit did not converge, which the rated runs' connection rules out.
    """
    ratings = np.full(len(wins), np.nan)
    if len(rated):
        strengths = _strengths(wins[np.ix_(rated, rated)]) * SCALE
        at = np.nonzero(rated == anchor)[0]
        ratings[rated] = strengths - (strengths[at[0]] if len(at) else strengths.mean()) + MEAN
    return ratings


def _strengths(wins: Floats) -> Floats:
    """Log p of each run, the last one's 0: the zero of the gradient of the mean log-likelihood, which is concave."""
    from scipy.optimize import minimize, root
    from scipy.special import expit, log_expit

    games, total = wins + wins.T, wins.sum()

    def apart(free: Floats) -> Floats:
        strengths = np.append(free, 0.0)
        return np.asarray(strengths[:, None] - strengths)  # (runs, runs)

    def loss(free: Floats) -> float:
        return float(-(wins * log_expit(apart(free))).sum() / total)

    def gradient(free: Floats) -> Floats:
        return np.asarray((games * expit(apart(free)) - wins).sum(axis=1)[:-1] / total)

    def hessian(free: Floats) -> Floats:
        chance = expit(apart(free))
        weights = games * chance * (1 - chance)
        return np.asarray((np.diag(weights.sum(axis=1)) - weights)[:-1, :-1] / total)

    near = minimize(loss, np.zeros(len(wins) - 1), jac=gradient, hess=hessian, method="Newton-CG").x
    free = root(gradient, near, jac=hessian, tol=1e-13).x
    if not np.abs(gradient(free)).max() < 1e-8:
        raise ArithmeticError(f"the ratings of {len(wins)} runs did not converge")
    return np.append(free, 0.0)


def rated_together(wins: Floats) -> npt.NDArray[np.intp]:
    """The largest set of two or more runs in which each reaches each along wins; of equal ones that of most games."""
    reach = reachable(wins)
    mutual = reach & reach.T
    sizes = [(int(row.sum()), float(wins[np.ix_(row, row)].sum()), -index) for index, row in enumerate(mutual)]
    best = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    if best is None or sizes[best][0] < 2:
        return np.array([], dtype=np.intp)
    return np.nonzero(mutual[best])[0]


def reachable(wins: Floats) -> npt.NDArray[np.bool_]:
    """(runs, runs): whether a chain of wins leads from one run to another; each run reaches itself."""
    from scipy.sparse.csgraph import shortest_path

    return np.asarray(np.isfinite(shortest_path((wins > 0).astype(float), unweighted=True)))


def _place(wins: Floats, rated: npt.NDArray[np.intp], index: int) -> Place:
    if index in rated:
        return "rated"
    if not len(rated):
        return "unconnected" if not (wins[index].any() or wins[:, index].any()) else _alone(wins, index)
    reach = reachable(wins)
    above, below = bool(reach[index, rated[0]]), bool(reach[rated[0], index])
    return "above" if above else "below" if below else "unconnected"


def _alone(wins: Floats, index: int) -> Place:
    """Where a run stands when no two can be rated together."""
    reach = reachable(wins)
    beats, loses = int(reach[index].sum()), int(reach[:, index].sum())
    return "above" if beats > loses else "below" if beats < loses else "unconnected"


def _none_reason(wins: Floats) -> str:
    if not wins.any():
        return "no pair has a verdict"
    return "of every two runs one won everything against the other, so no rating has a bound"


class _Games:
    """Verdicts as arrays: row of each, and its place in the flattened win matrix."""

    def __init__(self, runs: Sequence[str], games: Sequence[Game]) -> None:
        places = {run: index for index, run in enumerate(runs)}
        unknown = {run for game in games for run in game[:2]} - places.keys()
        if unknown or any(not 0 <= game.score <= 1 or game.first == game.second for game in games):
            raise ValueError(f"a game is of two of the runs and has a score from 0 to 1; unknown: {sorted(unknown)}")
        self._runs = len(runs)
        self._scores = np.array([game.score for game in games])
        self._first = np.array([places[game.first] for game in games], dtype=np.intp)
        self._second = np.array([places[game.second] for game in games], dtype=np.intp)
        names, self._rows = np.unique(np.array([game.row for game in games]), return_inverse=True)
        self.rows = len(names)

    def wins(self, draws: npt.NDArray[np.intp] | None = None) -> Floats:
        """The win matrix, where each row counts as often as it was drawn."""
        times = np.ones(len(self._scores)) if draws is None else draws[self._rows].astype(float)
        size = self._runs
        found = np.bincount(
            self._first * size + self._second, weights=times * self._scores, minlength=size * size
        ) + np.bincount(self._second * size + self._first, weights=times * (1 - self._scores), minlength=size * size)
        return np.asarray(found.reshape(size, size), dtype=np.float64)


def _intervals(
    games: _Games, rated: npt.NDArray[np.intp], anchor: int | None, seed: int, resamples: int
) -> tuple[list[Bounds | None], str | None]:
    """The interval of each run, or the reason why there is none."""
    none: list[Bounds | None] = [None] * games._runs
    if not len(rated):
        return none, None
    if games.rows < 2:
        return none, "an interval needs at least two independent rows"
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(resamples):
        draws = np.bincount(rng.integers(0, games.rows, games.rows), minlength=games.rows)
        wins = games.wins(draws)
        if set(rated) <= set(rated_together(wins)):
            found.append(fit(wins, rated, anchor))
    missing = resamples - len(found)
    if missing > MAX_UNBOUNDED_RATIO * resamples:
        why = f"in {missing} of {resamples} resamples some run won or lost everything, so no interval has a bound"
        return none, why
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.array(found), [tail, 1 - tail], axis=0)
    spread = [place for place in rated if place != anchor]
    if spread and all(low[place] == high[place] for place in spread):  # every game was a tie, or a row repeats
        return none, "every resample gives the same ratings, so their spread says nothing about the error"
    return [Bounds(float(a), float(b)) if np.isfinite(a) else None for a, b in zip(low, high, strict=True)], None
