"""Labelled runs and runs of several samples, as the page shows them.

- A score of 0/0 is shown as such, not as the 0 that stands for it in the means.
- A cell of the confusion matrix has its count and its share of the true label's row; the shade follows the share.
- Label mass below LOW_MASS is noted: the model wanted to say something that is no label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.report.data import Run
from gristmill.report.inputs import Classification, Score
from gristmill.report.words import NONE, decimal, percent

LOW_MASS = 0.5
#: Shades of a cell, from none to all of its row.
SHADES = 5
SCORES = ("precision", "recall", "f1")


@dataclass(frozen=True, slots=True)
class Cell:
    """One count of the confusion matrix."""

    n: int
    share: str
    shade: int
    right: bool
    invalid: bool


@dataclass(frozen=True, slots=True)
class Labelled:
    """One labelled run."""

    run: Run
    found: Classification

    @property
    def scores(self) -> list[tuple[str, list[str], int]]:
        """(label, precision, recall and F1 as text, support) of every class."""
        return [
            (label, [self._score(label, name) for name in SCORES], int(self.found.per_class[label]["support"]))
            for label in self.found.labels
            if label in self.found.per_class
        ]

    @property
    def undefined(self) -> list[str]:
        """`precision of praise`, for each score that is 0/0."""
        return [
            f"{name.replace('f1', 'F1')} of {label}" for name, all_ in self.found.undefined.items() for label in all_
        ]

    @property
    def macro(self) -> list[str]:
        """The macro means as text."""
        return [decimal(self.found.macro.get(name), 3) for name in SCORES]

    @property
    def rows(self) -> list[tuple[str, list[Cell]]]:
        """(true label, its cells), the invalid ones last."""
        return [
            (label, self._cells(number, counts))
            for number, (label, counts) in enumerate(zip(self.found.labels, self.found.confusion, strict=True))
        ]

    @property
    def low_mass(self) -> bool:
        """Whether most of the probability lay on no label."""
        mass = self.run.metrics.label_mass
        return mass is not None and mass < LOW_MASS

    def _score(self, label: str, name: str) -> str:
        return "0/0" if label in self.found.undefined.get(name, ()) else decimal(self.found.per_class[label][name], 3)

    def _cells(self, number: int, counts: Sequence[int]) -> list[Cell]:
        total = sum(counts)
        return [
            Cell(
                n=n,
                share=percent(n / total) if total else NONE,
                shade=-(-SHADES * n // total) if total else 0,
                right=column == number,
                invalid=column == len(counts) - 1,
            )
            for column, n in enumerate(counts)
        ]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One metric of a run with several answers a row."""

    run: Run
    metric: str
    score: Score

    def at(self, name: str) -> Score | None:
        """The number in the column `pass@4` or `maj@4`."""
        kind, _, k = name.partition("@")
        found = (self.score.pass_at_k or {}) if kind == "pass" else self.score.maj_at_k
        return found.get(k)

    @property
    def columns(self) -> list[str]:
        """`pass@1` …, `maj@n`."""
        passes = sorted(self.score.pass_at_k or {}, key=int)
        return [f"pass@{k}" for k in passes] + [f"maj@{k}" for k in self.score.maj_at_k]


def labelled(runs: Sequence[Run]) -> list[Labelled]:
    """The runs that have a classification."""
    return [Labelled(run, run.metrics.classification) for run in runs if run.metrics.classification is not None]


def sampled(runs: Sequence[Run]) -> list[Sampled]:
    """Every metric of every run that tells of several answers together."""
    return [
        Sampled(run, name, score)
        for run in runs
        for name, score in run.metrics.metrics.items()
        if "pass_at_k" in score.model_fields_set or score.maj_at_k
    ]


def sampled_columns(found: Sequence[Sampled]) -> list[str]:
    """All columns of the table, pass@k in the order of k before maj@k."""
    names = {name for each in found for name in each.columns}
    return sorted(names, key=lambda name: (not name.startswith("pass"), int(name.partition("@")[2])))
