"""95 % intervals for shares, honest about rows that were answered more than once.

- Scores lie in 0…1: right or wrong, or a pair's win, tie (0.5) and loss. The value is the mean of all scores.
- `wilson`: one 0/1 score per row. Never empty, never outside 0…1, also when every score is the same.
- `cluster_t`: several scores per row, or ties. Answers to one row are not independent, so the spread is that of the
  rows' sums around the mean (with equally many scores a row: the t interval of the row means), clipped to 0…1.
- Where all rows score alike (or there is one row) that spread is 0 and says nothing; Wilson over the rows stands in. It
  errs on the wide side, since no score in 0…1 varies more than a 0/1 score of the same mean.
- Nothing is held but sums, so a million rows need no memory: the scores of a row are added one after the other, as they
  stand in every file of a run. The order of the rows does not matter: sums are exact (halves are, in floating point).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

from gristmill.stats.intervals import t_half_width, wilson

Method = Literal["wilson", "cluster_t"]


class Interval(NamedTuple):
    """A 95 % interval and how it was made."""

    low: float
    high: float
    method: Method


class Summed:
    """How many scores there are, and their sum."""

    __slots__ = ("n", "total")

    def __init__(self) -> None:
        self.n = 0
        self.total = 0.0

    @property
    def value(self) -> float | None:
        """The mean of all scores; None when there is none."""
        return self.total / self.n if self.n else None


class RowScores(Summed):
    """The scores of each row, added up."""

    __slots__ = ("_binary", "_count", "_counts", "_products", "_row", "_rows", "_squares", "_sum")

    def __init__(self) -> None:
        super().__init__()
        self._binary = True
        self._rows = 0
        # Of the row whose scores are being added.
        self._row: str | None = None
        self._sum, self._count = 0.0, 0
        # Over all rows: sum², sum × count and count².
        self._squares = self._products = 0.0
        self._counts = 0

    def add(self, row_id: str, score: float) -> None:
        """Count one score (0 to 1) of a row; those of one row come one after the other."""
        if row_id != self._row:
            self._row, self._sum, self._count = row_id, 0.0, 0
            self._rows += 1
        before, count = self._sum, self._count
        self._sum, self._count = before + score, count + 1
        self._squares += score * (2 * before + score)
        self._products += before + score * (count + 1)
        self._counts += 2 * count + 1
        self._binary = self._binary and score in (0, 1)
        self.n += 1
        self.total += score

    def interval(self) -> Interval | None:
        """The value's 95 % interval; None when there is no score."""
        if self.value is None:
            return None
        rows = self._rows
        spread = self._spread()
        if rows < 2 or spread == 0 or (self._binary and rows == self.n):
            return wilson_interval(self.value, rows)
        # Deviations are in units of scores; dividing by n makes the error that of the mean of all scores.
        return t_interval(self.value, math.sqrt(rows / (rows - 1) * spread) / self.n, rows)

    def _spread(self) -> float:
        """Sum over the rows of (sum - value × count)²; in fractions, since its terms nearly cancel."""
        value = Fraction(self.total) / self.n
        products, counts = Fraction(self._products), self._counts
        return float(Fraction(self._squares) - 2 * value * products + value * value * counts)


def wilson_interval(value: float, n: int) -> Interval:
    """Wilson's interval of a share of n observations."""
    low, high = wilson(value * n, n)
    return _clipped(low, high, value, "wilson")


def t_interval(value: float, error: float, rows: int) -> Interval:
    """The t interval of a mean with this standard error over so many rows or clusters."""
    half = t_half_width(error, rows)
    return _clipped(value - half, value + half, value, "cluster_t")


def _clipped(low: float, high: float, value: float, method: Method) -> Interval:
    """Inside 0…1 and around the value, also where rounding would put an end a hair past it."""
    return Interval(min(max(low, 0.0), value), max(min(high, 1.0), value), method)
