"""95 % intervals for means of scores that are more than right or wrong, or whose rows belong together.

- `ClusterScores`: the scores of one cluster count as one observation of varying size. The variance is the
  cluster-robust one with the small-sample factor (CR1), C/(C−1) · Σ (sum_c − n_c · mean)² / n², with t of C − 1 degrees
  of freedom. Clusters may stand anywhere in the file, so one entry a cluster is held.
- `RowMeans`: the same where the scores of a cluster (a row) stand together: sums only, updated as Welford does, so that
  equal scores have a spread of exactly 0.
- Where the spread is 0, or there is one cluster, it says nothing; Wilson over the clusters stands in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from gristmill import files
from gristmill.errors import UserError
from gristmill.intervals import Interval, Summed, t_interval, wilson_interval

#: A standard error below this is rounding.
ROUNDING = 1e-7
NULL_SLICE = "null"


class Scores(Protocol):
    """Scores from 0 to 1, added one by one, each under the cluster (or row) it belongs to."""

    n: int
    total: float

    def add(self, row_id: str, score: float, /) -> None:
        """Count one score."""
        ...

    @property
    def value(self) -> float | None:
        """The mean; None when there is no score."""
        ...

    def interval(self) -> Interval | None:
        """The mean's 95 % interval; None when there is no score."""
        ...


class ClusterScores(Summed):
    """Scores of clusters that may stand anywhere: one entry a cluster."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, cluster: str, score: float, /) -> None:
        """Count one score (0 to 1)."""
        total, count = self._sums.get(cluster, (0.0, 0))
        self._sums[cluster] = total + score, count + 1
        self.n += 1
        self.total += score

    def interval(self) -> Interval | None:
        """The mean's 95 % interval; None when there is no score."""
        if self.value is None:
            return None
        spread = math.fsum((total - count * self.value) ** 2 for total, count in self._sums.values())
        return mean_interval(self.value, spread, len(self._sums), self.n)


class RowMeans(Summed):
    """Scores of rows, those of one row added one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._row: str | None = None
        self._sum, self._count = 0.0, 0
        # Over the rows that have ended: how many, the means of sum and count, and their co-moments.
        self._rows = 0
        self._mean_sum = self._mean_count = 0.0
        self._ss = self._sn = self._nn = 0.0

    def add(self, row_id: str, score: float, /) -> None:
        """Count one score (0 to 1)."""
        if row_id != self._row:
            self._end_row()
            self._row = row_id
        self._sum, self._count = self._sum + score, self._count + 1
        self.n += 1
        self.total += score

    def interval(self) -> Interval | None:
        """The mean's 95 % interval; None when there is no score."""
        self._end_row()
        if self.value is None:
            return None
        spread = self._ss - 2 * self.value * self._sn + self.value**2 * self._nn
        return mean_interval(self.value, max(spread, 0.0), self._rows, self.n)

    def _end_row(self) -> None:
        if not self._count:
            return
        self._rows += 1
        from_sum, from_count = self._sum - self._mean_sum, self._count - self._mean_count
        self._mean_sum += from_sum / self._rows
        self._mean_count += from_count / self._rows
        self._ss += from_sum * (self._sum - self._mean_sum)
        self._sn += from_sum * (self._count - self._mean_count)
        self._nn += from_count * (self._count - self._mean_count)
        self._row, self._sum, self._count = None, 0.0, 0


def mean_interval(value: float, spread: float, clusters: int, n: int) -> Interval:
    """The interval of a mean of n scores, from the clusters' squared deviations in units of scores."""
    if clusters < 2 or math.sqrt(spread) <= ROUNDING * n:
        return wilson_interval(value, clusters)
    return t_interval(value, math.sqrt(clusters / (clusters - 1) * spread) / n, clusters)


def cluster_name(row_id: str, values: Mapping[str, Any], column: str) -> str:
    """The cluster that a row belongs to.

    Raises:
        UserError: the row has none.
    """
    if values.get(column) is None:
        raise UserError(f"row {row_id} has no {column!r}, which the run's cluster names; give every row one")
    return slice_key(values[column])


def slice_key(value: Any) -> str:
    """A slice's name for a value; text that could be taken for a missing value, or for quoted text, gets quotes."""
    if isinstance(value, str) and value != NULL_SLICE and not value.startswith('"'):
        return value
    return files.dumps(value).decode("utf-8")
