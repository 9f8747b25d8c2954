"""95 % intervals for shares, honest about rows that were answered more than once.

- Scores lie in 0…1: right or wrong, or a pair's win, tie (0.5) and loss. The value is the mean of all scores.
- `wilson`: one 0/1 score per row. Never empty, never outside 0…1, also when every score is the same.
- `cluster_t`: several scores per row, or ties. Answers to one row are not independent, so the spread is that of the
  rows' sums around the mean (with equally many scores a row: the t interval of the row means), clipped to 0…1.
- Where all rows score alike (or there is one row) that spread is 0 and says nothing; Wilson over the rows stands in. It
  errs on the wide side, since no score in 0…1 varies more than a 0/1 score of the same mean.
- The order of rows and scores does not matter: sums are exact (halves are, in floating point).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Method = Literal["wilson", "cluster_t"]


class Interval(NamedTuple):
    """A 95 % interval and how it was made."""

    low: float
    high: float
    method: Method


class RowScores:
    """The scores of each row, held as one sum and one count a row."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[float, int]] = {}
        self._binary = True
        self.n = 0
        self.total = 0.0

    def add(self, row_id: str, score: float) -> None:
        """Count one score (0 to 1) of a row."""
        before, count = self._rows.get(row_id, (0.0, 0))
        self._rows[row_id] = (before + score, count + 1)
        self._binary = self._binary and score in (0, 1)
        self.n += 1
        self.total += score

    @property
    def value(self) -> float | None:
        """The mean of all scores; None when there is none."""
        return self.total / self.n if self.n else None

    def interval(self) -> Interval | None:
        """The value's 95 % interval; None when there is no score."""
        if self.value is None:
            return None
        rows = len(self._rows)
        if self._binary and rows == self.n:
            return _wilson(self.value, rows)
        # Deviations are in units of scores; dividing by n makes the error that of the mean of all scores.
        spread = math.fsum((total - self.value * count) ** 2 for total, count in self._rows.values())
        if rows < 2 or spread < 1e-12:
            return _wilson(self.value, rows)
        return _t_interval(self.value, math.sqrt(rows / (rows - 1) * spread) / self.n, rows)


def _wilson(value: float, n: int) -> Interval:
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(value * n, n, alpha=0.05, method="wilson")
    return _clipped(float(low), float(high), value, "wilson")


def _t_interval(value: float, error: float, rows: int) -> Interval:
    from scipy.special import stdtrit

    half = float(stdtrit(rows - 1, 0.975)) * error
    return _clipped(value - half, value + half, value, "cluster_t")


def _clipped(low: float, high: float, value: float, method: Method) -> Interval:
    """Inside 0…1 and around the value, also where rounding would put an end a hair past it."""
    return Interval(min(max(low, 0.0), value), max(min(high, 1.0), value), method)
