"""How far a judge agrees with someone else: the run's metric, a person, or itself in the other order.

- A table counts (judge, other); None as the judge's part is a verdict that could not be read.
- Kappa is null where it is 0/0: both always said the same one thing, or nothing is there to compare.
- Numbers agree by how far they are apart: kappa is weighted quadratically for scores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from decimal import Decimal
from typing import Any, Literal

from gristmill.config.schema import JudgeConfig, number_text
from gristmill.errors import UserError
from gristmill.judging.items import Item
from gristmill.judging.pairs import SIDES, TIE
from gristmill.judging.reliability import Share
from gristmill.stats.agreement import kappa_of
from gristmill.types import JsonDict

Policy = Literal["wrong", "tie", "dropped"]
#: What an unreadable verdict is called where it is a class of its own; no label is empty.
UNREAD = ""
NUMBER = re.compile(r"[+-]?[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def agreeing(table: Counter[Any]) -> float | None:
    """The share of the pairs in which both say the same; None for an empty table."""
    return Share(sum(count for (one, other), count in table.items() if one == other), table.total()).ratio


def macro_f1(table: Counter[Any]) -> float | None:
    """The mean over all classes of F1, the other's word being the truth."""
    from sklearn.metrics import f1_score

    if not table.total():
        return None
    judge, truth = zip(*table, strict=True)
    return float(f1_score(truth, judge, average="macro", sample_weight=list(table.values()), zero_division=0.0))


def with_policy(table: Counter[Any], policy: Policy) -> Counter[Any]:
    """The table with unreadable verdicts as a class that is always wrong, as ties, or left out."""
    counted: Counter[tuple[Hashable, Hashable]] = Counter()
    for (judge, other), count in table.items():
        if judge is not None:
            counted[judge, other] += count
        elif policy != "dropped":
            counted[TIE if policy == "tie" else UNREAD, other] += count
    return counted


class HumanAgreement:
    """A judge's verdicts beside what people said, in a column of the dataset."""

    def __init__(self, judge: JudgeConfig, target: list[str]) -> None:
        self._judge = judge
        self._known = _spellings(judge, target)
        self._table: Counter[tuple[str | None, str]] = Counter()
        self._missing = 0

    def add(self, item: Item, verdict: str | None) -> None:
        """Count an answer or pair; a person who said nothing is counted as missing.

        Raises:
            UserError: the person's label is none that the judge could give.
        """
        value = {**item.row, "reference": item.reference}.get(str(self._judge.human))
        if value is None or value == "":
            self._missing += 1
            return
        text = _written(value)
        if text not in self._known and self._judge.kind == "score" and NUMBER.fullmatch(text):
            text = number_text(Decimal(text))  # a table's cells are text: 7.0
        if text not in self._known:
            raise UserError(
                f"row {item.id}: column {self._judge.human!r} holds {text!r}, which this judge cannot say; "
                f"use {', '.join(dict.fromkeys(self._known))}, name its meaning in human_labels, or leave it empty"
            )
        self._table[verdict, self._known[text]] += 1

    def numbers(self) -> JsonDict:
        """The `human` object of metrics.json."""
        policy = self._judge.human_unreadable
        scale = self._judge.scores()
        table = with_policy(self._table, policy)
        weights: Literal["quadratic"] | None = "quadratic" if scale else None
        return {
            "column": self._judge.human,
            "n": table.total(),
            "percent": agreeing(table),
            "kappa": kappa_of(self._steps(list(scale)) if scale else table, weights),
            "kappa_weights": weights,
            "macro_f1": None if scale else macro_f1(table),
            "policy": policy,
            "unreadable": sum(count for (verdict, _), count in self._table.items() if verdict is None),
            "missing": self._missing,
        }

    def _steps(self, scores: list[str]) -> Counter[tuple[int, int]]:
        """The scores that were read, as steps above the lowest; an unreadable one is no distance from anything."""
        read = with_policy(self._table, "dropped")
        return Counter({(scores.index(one), scores.index(other)): count for (one, other), count in read.items()})


def _written(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number_text(value) if number else str(value).strip()


def _spellings(judge: JudgeConfig, target: list[str]) -> dict[str, str]:
    """How a person may write it → what a verdict says; the config's own spellings win."""
    known = _own_spellings(judge, target)
    return known | {text: known[meaning] for text, meaning in judge.human_labels.items()}


def _own_spellings(judge: JudgeConfig, target: list[str]) -> dict[str, str]:
    if judge.kind == "pairwise":
        named = dict(zip(("first", "second", TIE), (*target, TIE), strict=True))
        meanings = {meaning: named[SIDES[meaning][0]] for meaning in SIDES}
        labels = {label: meanings[meaning] for label, meaning in judge.meanings().items()}
        return {**labels, **meanings, **{run: run for run in target}, TIE: TIE}
    meanings = judge.meanings()
    return {**meanings, **{meaning: meaning for meaning in meanings.values()}}
