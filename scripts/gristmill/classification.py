"""Precision, recall, F1 and the confusion matrix of a labelled run, from counts: no rows are held.

- An answer that gave no label of the run is `invalid`: never a class, and a miss for the class it belonged to.
- A score of 0/0 (a class that was never predicted, or never true) is 0, as scikit-learn's zero_division=0 makes it, and
  `undefined` names it.
- Macro means are over all labels of the run.
- `majority` is what answering every row with the most frequent true label would have scored: the accuracy to beat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gristmill.types import JsonDict

INVALID = "invalid"
SCORES = ("precision", "recall", "f1")


class Confusion:
    """Counts of (true label, label that was read)."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        self._counts: Counter[tuple[str, str | None]] = Counter()

    def add(self, true: str, read: str | None) -> None:
        """Count one answer; `read` is None for an invalid one."""
        self._counts[true, read] += 1

    def summary(self) -> JsonDict:
        """The `classification` section of metrics.json; scores are null when there is no answer."""
        total = self._counts.total()
        invalid = sum(count for (_, read), count in self._counts.items() if read is None)
        right = sum(count for (true, read), count in self._counts.items() if true == read)
        per_class = self._per_class() if total else {}
        return {
            "labels": self.labels,
            "n": total,
            "accuracy": right / total if total else None,
            "majority": self._majority() if total else None,
            "macro": {name: _mean([per_class[label][name] for label in per_class]) for name in SCORES},
            "per_class": per_class,
            "undefined": self._undefined() if total else {},
            "confusion": [[self._counts[true, read] for read in (*self.labels, None)] for true in self.labels],
            "confusion_columns": [*self.labels, INVALID],
            INVALID: invalid,
            "invalid_ratio": invalid / total if total else None,
        }

    def _majority(self) -> JsonDict:
        """The most frequent true label, of equals the first, and its share."""
        support = {
            label: sum(count for (true, _), count in self._counts.items() if true == label) for label in self.labels
        }
        label = max(support, key=support.__getitem__)
        return {"label": label, "accuracy": support[label] / self._counts.total()}

    def _per_class(self) -> JsonDict:
        from sklearn.metrics import precision_recall_fscore_support

        numbers = {label: number for number, label in enumerate(self.labels)}
        cells = [(numbers[true], numbers.get(read or "", len(numbers)), n) for (true, read), n in self._counts.items()]
        true, read, counts = zip(*cells, strict=True)
        scores = precision_recall_fscore_support(
            true, read, labels=list(numbers.values()), sample_weight=counts, zero_division=0
        )
        return {
            label: {name: float(column[number]) for name, column in zip(SCORES, scores[:3], strict=True)}
            | {"support": int(scores[3][number])}
            for label, number in numbers.items()
        }

    def _undefined(self) -> dict[str, list[str]]:
        """The labels whose score is 0/0."""
        true = {label for (label, _), count in self._counts.items() if count}
        read = {label for (_, label), count in self._counts.items() if count}
        found = {
            "precision": [label for label in self.labels if label not in read],
            "recall": [label for label in self.labels if label not in true],
            "f1": [label for label in self.labels if label not in read and label not in true],
        }
        return {name: labels for name, labels in found.items() if labels}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
