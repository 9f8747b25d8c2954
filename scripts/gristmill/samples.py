"""What several answers to a row say together: pass@k, and whether the most frequent answer is right.

- pass@k is the chance that at least one of k answers is right, estimated without bias from n ≥ k of them (Chen et al.
  2021, arXiv:2107.03374), and averaged over the rows.
- maj@n is right where the answer that most of a row's n samples give is; of equally frequent ones the first. An answer
  that could not be read has no vote; a row without votes is wrong.
- Nothing is held but one row's answers and sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from gristmill.clusters import Scores
from gristmill.grading import Grader, Mark
from gristmill.types import JsonDict


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k answers is right, when c of n are: 1 − C(n−c, k) / C(n, k), as a product.

    Raises:
        ValueError: not 0 ≤ c ≤ n, or not 1 ≤ k ≤ n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right among {n} is not defined; 0 ≤ c ≤ n and 1 ≤ k ≤ n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(n - c + 1, n + 1))


def sizes(n: int) -> list[int]:
    """The k of which pass@k is told: 1, 2, 4, … and n."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


class SampleScores:
    """pass@k and maj@n of one metric."""

    def __init__(self, samples: int, metric: Grader, new_scores: Callable[[], Scores]) -> None:
        """Begin.

        Args:
            samples: answers per row.
            metric: what graded them.
            new_scores: makes an empty sum with an interval.
        """
        self._samples = samples
        self._passes = {k: new_scores() for k in sizes(samples)}
        self._majority = new_scores() if metric.votes else None
        self._binary = True
        self._row: tuple[str, str] | None = None
        #: Turn (empty for a row without turns) → its samples' marks: a sample's turns stand between those of another.
        self._marks: dict[str, list[Mark]] = {}

    def add(self, row_id: str, turn: str, cluster: str, mark: Mark) -> None:
        """Count one answer; those of one row come one after the other. Each turn is answered anew by every sample."""
        if (row_id, cluster) != self._row:
            self._end_row()
            self._row = (row_id, cluster)
        self._marks.setdefault(turn, []).append(mark)

    def summary(self, describe: Callable[[Scores], JsonDict]) -> JsonDict:
        """`pass_at_k`, null where grades lie between right and wrong, and `maj_at_k` where answers can be counted."""
        self._end_row()
        passes = {str(k): describe(scores) for k, scores in self._passes.items()}
        found: JsonDict = {"pass_at_k": passes if self._binary else None}
        if self._majority is not None:
            found["maj_at_k"] = {str(self._samples): describe(self._majority)}
        return found

    def _end_row(self) -> None:
        if self._row is None:
            return
        for marks in self._marks.values():
            self._end_turn(marks, self._row[1])
        self._row, self._marks = None, {}

    def _end_turn(self, marks: list[Mark], cluster: str) -> None:
        n = len(marks)
        grades = [mark.grade for mark in marks]
        self._binary = self._binary and all(grade in (0, 1) for grade in grades)
        for k, scores in self._passes.items():
            if k <= n and self._binary:
                scores.add(cluster, pass_at_k(n, sum(map(bool, grades)), k))
        if self._majority is not None:
            self._majority.add(cluster, float(_majority_is_right(marks)))


def _majority_is_right(marks: list[Mark]) -> bool:
    votes = Counter(mark.vote for mark in marks if mark.vote)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]  # of equals, the one that was met first
    return next(bool(mark.grade) for mark in marks if mark.vote == winner)
