"""The numbers of judges that give a score, or sort answers into classes: judges/<judge>/<target>/metrics.json.

- A mean is over the answers that have a score; those without are counted, and in no mean.
- Its interval is that of the scores brought to 0…1 (intervals.py) and back, by row. They are counted in steps
  over a power of two, exactly: scores that are all alike have no spread, not one of rounding.
- The shares of the classes are of all answers that were read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from gristmill.config.specs import VerdictSpec
from gristmill.judging.tallies import Questions, bounds, head, human_numbers, human_of, new_scores, unit_of
from gristmill.judging.verdicts import Judged
from gristmill.types import JsonDict


class ScoreTally:
    """The numbers of a judge that scores one answer at a time."""

    def __init__(self, spec: VerdictSpec) -> None:
        self._spec = spec
        self._low, self._high = spec.judge.range or (0.0, 1.0)
        self._step = spec.judge.step
        self._steps = 1 << (len(spec.judge.scores()) - 1).bit_length()
        self._questions = Questions(spec.judge)
        self._scores = new_scores(spec.cluster)
        self._n = self._no_answer = 0
        self._human = human_of(spec)

    def counted(self, stream: Iterable[Judged]) -> Iterator[JsonDict]:
        """The verdict lines, counted."""
        for each in stream:
            self._n += 1
            if each.line["score"] is not None:
                self._scores.add(unit_of(each.line), self._share(each.line["score"]))
            if each.line["reason"] == "no_answer":
                self._no_answer += 1
            else:
                self._questions.add(each.line)
                if self._human is not None:
                    self._human.add(each.item, each.line["label"])
            yield each.line

    def metrics(self) -> JsonDict:
        """The content of metrics.json."""
        doubts = self._questions.doubts(self._spec.judge)
        human = human_numbers(self._human, self._spec, doubts)
        mean, ends = self._scores.value, bounds(self._scores)
        return {
            **head(self._spec, self._n, self._questions, doubts),
            "no_answer": self._no_answer,
            "range": [self._low, self._high],
            "scored": self._scores.n,
            "mean": None if mean is None else self._back(mean),
            "ci95": None if ends is None else [self._back(end) for end in ends],
            "human": human,
        }

    def _share(self, score: float) -> float:
        steps = (score - self._low) / self._step
        whole = round(steps)
        return (whole if math.isclose(steps, whole, abs_tol=1e-9) else steps) / self._steps

    def _back(self, share: float) -> float:
        return min(self._low + share * self._steps * self._step, self._high)


class ClassTally:
    """The numbers of a judge that sorts answers into classes."""

    def __init__(self, spec: VerdictSpec) -> None:
        self._spec = spec
        self._questions = Questions(spec.judge)
        self._classes = {name: new_scores(spec.cluster) for name in dict.fromkeys(spec.judge.meanings().values())}
        self._counts: Counter[str] = Counter({name: 0 for name in self._classes})
        self._n = self._no_answer = 0
        self._human = human_of(spec)

    def counted(self, stream: Iterable[Judged]) -> Iterator[JsonDict]:
        """The verdict lines, counted."""
        for each in stream:
            self._n += 1
            self._count(each.line)
            if each.line["reason"] == "no_answer":
                self._no_answer += 1
            else:
                self._questions.add(each.line)
                if self._human is not None:
                    self._human.add(each.item, each.line["verdict"])
            yield each.line

    def metrics(self) -> JsonDict:
        """The content of metrics.json."""
        doubts = self._questions.doubts(self._spec.judge)
        human = human_numbers(self._human, self._spec, doubts)
        return {
            **head(self._spec, self._n, self._questions, doubts),
            "no_answer": self._no_answer,
            "classes": {
                name: {"n": self._counts[name], "share": scores.value, "ci95": bounds(scores)}
                for name, scores in self._classes.items()
            },
            "human": human,
        }

    def _count(self, line: JsonDict) -> None:
        if line["verdict"] is None:
            return
        self._counts[line["verdict"]] += 1
        for name, scores in self._classes.items():
            scores.add(unit_of(line), float(name == line["verdict"]))
