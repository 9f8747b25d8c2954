"""A judge's numbers, counted as its verdicts pass: judges/<judge>/<target>/metrics.json.

- Pointwise accuracy is the share of all answers judged correct: what is unreadable, or had no answer, is not correct.
  Both are counted beside it.
- The win rate is of the first run of the pair over the pairs with a winner or a tie; a tie is a half.
- wins, ties (both orders said so), disagreements, identical, unreadable_pairs and no_answer add up to n.
- Intervals are those of intervals.py: Wilson where each row has one 0/1 score, else t over rows.
- Agreement takes the answers that have both a verdict and a grade. Kappa is null, with a note, where judge and metric
  are constant and equal: it is 0/0 there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from gristmill.clusters import ClusterScores, Scores
from gristmill.config.schema import JudgeConfig
from gristmill.config.specs import VerdictSpec
from gristmill.errors import UserError
from gristmill.intervals import RowScores
from gristmill.judging import reliability
from gristmill.judging.agreement import HumanAgreement, agreeing
from gristmill.judging.items import answer_of
from gristmill.judging.pairs import TIE
from gristmill.judging.reliability import Share
from gristmill.judging.verdicts import Judged
from gristmill.stats.agreement import kappa_of
from gristmill.types import JsonDict

KAPPA_UNDEFINED = "judge and metric say the same of every answer, so kappa is undefined"


class Questions:
    """What came back from the judge model, question by question."""

    def __init__(self, judge: JudgeConfig) -> None:
        self._retries = judge.retries
        self._labels: Counter[str] = Counter({label: 0 for label in judge.meanings()})
        self._asked_again = self._unreadable_attempts = 0
        self._asked = self._truncated = 0
        self._mass, self._masses = 0.0, 0
        self._reasons: Counter[str] = Counter()

    def add(self, answer: JsonDict) -> None:
        """Count one answer of the judge (a pointwise verdict, or one order of a pair)."""
        self._asked += 1
        self._truncated += answer["truncated"]
        self._asked_again += answer.get("attempt", 1) > 1
        self._unreadable_attempts += answer.get("unreadable_attempts", 0)
        if answer["label"] is not None:
            self._labels[answer["label"]] += 1
        else:
            self._reasons[answer["reason"]] += 1
        if answer.get("label_mass") is not None:
            self._mass += answer["label_mass"]
            self._masses += 1

    def numbers(self) -> JsonDict:
        """The keys of metrics.json about labels."""
        readable = self._labels.total()
        top, count = self._labels.most_common(1)[0] if readable else (None, 0)
        return {
            "asked": self._asked,
            "unreadable": self._unreadable.part,
            "unreadable_ratio": self._unreadable.ratio,
            "truncated": self._truncated,
            "label_counts": dict(self._labels),
            "top_label": top,
            "top_label_share": Share(count, readable).ratio,
            "unreadable_reasons": dict(sorted(self._reasons.items())),
            "label_mass": self._mass / self._masses if self._masses else None,
            **self._attempts(),
        }

    def _attempts(self) -> JsonDict:
        """Of a judge that is asked again: how many questions were, and how many answers in all could not be read."""
        counted = {"asked_again": self._asked_again, "unreadable_attempts": self._unreadable_attempts}
        return counted if self._retries else {}

    def doubts(self, judge: JudgeConfig) -> list[str | None]:
        """Why the labels alone make the judge unreliable."""
        return [
            reliability.nothing_readable(self._unreadable),
            reliability.too_unreadable(self._unreadable, judge.reliability),
            reliability.too_uniform(self._labels, judge.meanings(), judge.reliability),
        ]

    @property
    def _unreadable(self) -> Share:
        return Share(self._asked - self._labels.total(), self._asked)


class Agreement:
    """Pointwise verdicts beside the run's own grades, as a 2 × 2 table."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self._table: Counter[tuple[bool, bool]] = Counter()

    def add(self, verdict: str | None, line: JsonDict) -> None:
        """Count an answer that has both a verdict and a grade."""
        if self.metric not in line["grades"]:
            raise UserError(f"--metric {self.metric} is not among the grades: {', '.join(line['grades']) or 'none'}")
        grade = line["grades"][self.metric]
        if verdict is not None and grade is not None:
            self._table[verdict == "correct", grade] += 1

    def numbers(self) -> JsonDict:
        """The `agreement` object of metrics.json."""
        n, kappa = self._table.total(), self.kappa()
        note = KAPPA_UNDEFINED if n > 0 and kappa is None else None
        return {"metric": self.metric, "n": n, "percent": agreeing(self._table), "kappa": kappa, "note": note}

    def kappa(self) -> float | None:
        """Cohen's kappa; None without answers, or where both raters are constant and equal."""
        return kappa_of(self._table)


class PointwiseTally:
    """The numbers of a judge that looks at one answer at a time."""

    def __init__(self, spec: VerdictSpec, metric: str | None = None) -> None:
        self._spec = spec
        self._questions = Questions(spec.judge)
        self._scores = new_scores(self._spec.cluster)
        self._verdicts: Counter[str | None] = Counter()
        self._no_answer = 0
        self._agreement = Agreement(metric) if metric is not None else None
        self._human = human_of(spec)

    def counted(self, stream: Iterable[Judged], grades: Iterable[JsonDict] = ()) -> Iterator[JsonDict]:
        """The verdict lines, counted; `grades` are the lines of the run's grades.jsonl when there is a metric."""
        queue = iter(grades)
        for each in stream:
            self._count(each.line)
            if self._human is not None and each.line["reason"] != "no_answer":
                self._human.add(each.item, each.line["verdict"])
            if self._agreement is not None:
                self._agreement.add(each.line["verdict"], _grade_of(each.line, next(queue, None)))
            yield each.line

    def metrics(self) -> JsonDict:
        """The content of metrics.json."""
        agreement = self._agreement.numbers() if self._agreement is not None else None
        doubts = self._questions.doubts(self._spec.judge)
        if agreement is not None:
            bar = self._spec.judge.reliability
            doubts.append(reliability.too_far_from_metric(agreement["metric"], agreement["kappa"], bar))
        human = human_numbers(self._human, self._spec, doubts)
        return {
            **head(self._spec, self._scores.n, self._questions, doubts),
            "no_answer": self._no_answer,
            "correct": self._verdicts["correct"],
            "incorrect": self._verdicts["incorrect"],
            "partial": self._verdicts["partial"],
            "accuracy": self._scores.value,
            "ci95": bounds(self._scores),
            "agreement": agreement,
            "human": human,
        }

    def _count(self, line: JsonDict) -> None:
        self._scores.add(unit_of(line), float(line["verdict"] == "correct"))
        self._verdicts[line["verdict"]] += 1
        if line["reason"] == "no_answer":
            self._no_answer += 1
        else:
            self._questions.add(line)


class PairwiseTally:
    """The numbers of a judge that compares two runs."""

    def __init__(self, spec: VerdictSpec) -> None:
        self._spec = spec
        self._questions = Questions(spec.judge)
        self._scores = new_scores(self._spec.cluster)
        self._n = 0
        self._wins: Counter[str] = Counter({run: 0 for run in spec.target})
        self._others: Counter[str] = Counter()
        self._agreed, self._asked_twice = 0, 0
        self._first, self._choices = 0, 0
        self._longer, self._unequal = 0, 0
        self._preferences = new_scores(self._spec.cluster)
        self._human = human_of(spec)

    def counted(self, stream: Iterable[Judged]) -> Iterator[JsonDict]:
        """The verdict lines, counted."""
        for each in stream:
            self._n += 1
            self._count_winner(each.line)
            self._count_orders(each.line["orders"])
            self._count_lengths(each)
            if each.line.get("preference") is not None:
                self._preferences.add(each.line["id"], each.line["preference"])
            if self._human is not None and each.line["reason"] != "no_answer":
                self._human.add(each.item, each.line["winner"])
            yield each.line

    def metrics(self) -> JsonDict:
        """The content of metrics.json."""
        agreed, first = Share(self._agreed, self._asked_twice), Share(self._first, self._choices)
        doubts = self._questions.doubts(self._spec.judge)
        doubts.append(reliability.too_inconsistent(agreed, first, self._spec.judge.reliability))
        human = human_numbers(self._human, self._spec, doubts)
        return {
            **head(self._spec, self._n, self._questions, doubts),
            "wins": dict(self._wins),
            "ties": self._others[TIE],
            "disagreements": self._others["orders_disagree"],
            "identical": self._others["identical"],
            "unreadable_pairs": self._others["unreadable"],
            "no_answer": self._others["no_answer"],
            "win_rate": self._scores.value,
            "win_rate_ci95": bounds(self._scores),
            "consistency": agreed.ratio,
            "first_position_share": first.ratio,
            "longer_wins_share": Share(self._longer, self._unequal).ratio,
            "self_preference": self._self_preference(),
            "preference": self._preferences.value,
            "preference_ci95": bounds(self._preferences),
            "human": human,
        }

    def _self_preference(self) -> float | None:
        """The share of the wins that went to the judge's own model, where exactly one run of the pair is of it."""
        own = [run for run in self._spec.target if self._spec.run_models.get(run) == self._spec.judge.model]
        return Share(self._wins[own[0]], self._wins.total()).ratio if len(own) == 1 else None

    def _count_winner(self, line: JsonDict) -> None:
        winner = line["winner"]
        if winner in self._wins:
            self._wins[winner] += 1
        else:
            self._others[line["reason"] or TIE] += 1
        if winner is not None:
            self._scores.add(unit_of(line), 0.5 if winner == TIE else float(winner == self._spec.target[0]))

    def _count_orders(self, orders: list[JsonDict]) -> None:
        choices = [order["choice"] for order in orders]
        for order in orders:
            self._questions.add(order)
            if order["choice"] not in (None, TIE):
                self._choices += 1
                self._first += order["choice"] == order["first"]
        if len(choices) == 2 and None not in choices:
            self._asked_twice += 1
            self._agreed += choices[0] == choices[1]

    def _count_lengths(self, each: Judged) -> None:
        """Lengths are in characters, surrounding whitespace left out."""
        lengths = [len((answer or "").strip()) for answer in each.item.answers]
        if each.line["winner"] in self._wins and lengths[0] != lengths[1]:
            longer = self._spec.target[lengths.index(max(lengths))]
            self._unequal += 1
            self._longer += each.line["winner"] == longer


def new_scores(cluster: str | None) -> Scores:
    """An empty sum of scores, of rows that stand together or of clusters that do not."""
    return RowScores() if cluster is None else ClusterScores()


def unit_of(line: JsonDict) -> str:
    """What a verdict's score is counted under: its cluster, or its row."""
    return str(line.get("cluster", line["id"]))


def human_of(spec: VerdictSpec) -> HumanAgreement | None:
    """The comparison with people, if the config names a column."""
    return HumanAgreement(spec.judge, spec.target) if spec.judge.human is not None else None


def human_numbers(human: HumanAgreement | None, spec: VerdictSpec, doubts: list[str | None]) -> JsonDict | None:
    """The `human` object of metrics.json; a judge too far from people gets another doubt."""
    if human is None:
        return None
    numbers = human.numbers()
    people, bar = f"people ({spec.judge.human})", spec.judge.reliability
    doubts.append(reliability.too_far_from_metric(people, numbers["kappa"], bar))
    return numbers


def head(spec: VerdictSpec, n: int, questions: Questions, doubts: Iterable[str | None]) -> JsonDict:
    """The keys that both kinds share."""
    because = [doubt for doubt in doubts if doubt is not None]
    return {
        "judge": spec.name,
        "kind": spec.judge.kind,
        "model": spec.judge.model,
        "target": "_vs_".join(spec.target),
        "runs": list(spec.target),
        "n": n,
        **questions.numbers(),
        "reliable": not because,
        "unreliable_because": because,
    }


def bounds(scores: Scores) -> list[float] | None:
    """The ends of the interval, if there is one."""
    interval = scores.interval()
    return [interval.low, interval.high] if interval else None


def _grade_of(line: JsonDict, grade: JsonDict | None) -> JsonDict:
    """The grade of the same answer; the two files list the same answers in the same order."""
    if grade is None or answer_of(grade) != answer_of(line):
        raise UserError(f"no grade for {line['id']}#{line['sample']} at its place; make the run's grades.jsonl again")
    return grade
