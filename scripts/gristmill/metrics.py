"""A run's numbers: accuracy with its interval, overall and per slice, and everything that a reader should doubt.

- One pass over the answers, of which only sums are held. A row's samples stand together, as in generations.jsonl.
- `n` counts the answers whose row has a reference. Skipped and empty ones are among them and count as wrong; `invalid`
  counts them over all answers, so that a run without references shows them too.
- A slice is one value of a column (or of `reference`), in the order of first appearance. Its key is the text itself, or
  the JSON of any other value; a column that a row lacks counts as null. `null` is always the missing value: the text
  "null" gets its quotes.
- `unread` counts, for a metric that reads something from the answer, those it could read nothing from: they count as
  wrong, and are not among `invalid`. A labelled run has a classification besides, and several samples pass@k and maj@n.
- With a cluster column every interval is that of clusters, not of rows (clusters.py).
- A slice column that no row has is a mistake in the config, not an empty table; so is one with more values than
  MAX_SLICES, such as an id.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from gristmill.classification import Confusion
from gristmill.clusters import ClusterScores, RowMeans, Scores, cluster_name, slice_key
from gristmill.config.specs import MetricsSpec
from gristmill.errors import UserError, some
from gristmill.followups import turn_number
from gristmill.grading import Grader, Labelled, Mark, alternatives, grade, graders, label_logprobs
from gristmill.intervals import RowScores
from gristmill.samples import SampleScores
from gristmill.thinking import UNCLOSED
from gristmill.types import FAILURE_REASONS, NO_EARLIER_ANSWER, JsonDict

MAX_SLICES = 10_000
#: Why answers count as wrong without being read.
INVALID_REASONS = ("skipped", "empty", UNCLOSED, *FAILURE_REASONS)
#: Failed rows that metrics.json names; the count is of all.
MAX_NAMED = 100


class RunTally:
    """Grades answers as they pass and keeps count."""

    def __init__(self, spec: MetricsSpec) -> None:
        """Begin; a metric that is a user's function is imported here."""
        self._spec = spec
        self._graders = graders(spec.metrics, spec.labels, spec.readout)
        self._overall = _Tally(self._graders, spec)
        self._slices: dict[str, dict[str, _Tally]] = {column: {} for column in spec.slices}
        self._samples = {
            name: SampleScores(spec.samples, metric, _new_scores(spec, fractions=True))
            for name, metric in self._graders.items()
            if spec.samples > 1
        }
        self._labelled = next((item for item in self._graders.values() if isinstance(item, Labelled)), None)
        self._confusion = Confusion(list(spec.labels))
        self._label_mass = _Mean()
        self._columns: dict[str, None] = {}
        self._counts: Counter[str] = Counter()
        self._sample_count = 0
        self._failed: list[JsonDict] = []

    def graded(self, lines: Iterable[JsonDict]) -> Iterator[JsonDict]:
        """The lines of grades.jsonl for those of generations.jsonl; every one that is taken is counted."""
        for line in lines:
            graded, marks = grade(line, self._graders)
            self._count(line, graded)
            cluster = self._cluster_of(line)
            self._score(line, graded, marks, cluster)
            yield graded | ({"cluster": cluster} if self._spec.cluster is not None else {})

    def metrics(self) -> JsonDict:
        """The content of metrics.json for what was counted.

        Raises:
            UserError: no row has a slice's column.
        """
        self._check_slices()
        headline = next(iter(self._graders), None)
        scores = self._overall.summary()
        for name, samples in self._samples.items():
            scores[name] |= samples.summary(_score)
        top = scores[headline] if headline else {"value": None, "ci95": None}
        return {
            **self._spec.model_dump(include={"run", "dataset", "model", "prompt"}),
            "n": scores[headline]["n"] if headline else self._overall.n,
            "rows": self._counts["rows"],
            "samples": self._sample_count,
            "no_reference": self._counts["no_reference"],
            "metric": headline,
            "accuracy": top["value"],
            "ci95": top["ci95"],
            "cluster": self._spec.cluster,
            "invalid": self._invalid(),
            "failed_rows": self._failed,
            "truncated": self._counts["truncated"],
            "prompts_cut": self._counts["prompts_cut"],
            "prompt_tokens": self._counts["prompt_tokens"],
            "completion_tokens": self._counts["completion_tokens"],
            "metrics": scores,
            **self._classification(),
            "slices": self._slice_summaries(),
        }

    def _classification(self) -> JsonDict:
        """`classification` of a run that is graded by labels, and `label_mass` of one that asks for likelihoods."""
        found: JsonDict = {"classification": self._confusion.summary()} if self._labelled else {}
        return found | ({"label_mass": self._label_mass.value} if self._spec.readout == "likelihood" else {})

    def _invalid(self) -> dict[str, int]:
        """Reason → answers. Only a run of turns can have answers that are missing for want of an earlier one."""
        always = {reason: self._counts[reason] for reason in INVALID_REASONS}
        return always | ({NO_EARLIER_ANSWER: found} if (found := self._counts[NO_EARLIER_ANSWER]) else {})

    def _count(self, line: JsonDict, graded: JsonDict) -> None:
        self._sample_count = max(self._sample_count, line["sample"] + 1)
        self._columns.update(dict.fromkeys(line["row"]))
        counts = self._counts
        counts["rows"] += line["sample"] == 0 and turn_number(line["variant"]) in (None, 1)
        counts["no_reference"] += not alternatives(line["reference"])
        counts["truncated"] += graded["truncated"]
        counts["prompts_cut"] += line["prompt_cut_tokens"] > 0
        counts["prompt_tokens"] += line["prompt_tokens"]
        counts["completion_tokens"] += line["completion_tokens"]
        if graded["invalid"]:
            counts[graded["invalid"]] += 1
        if graded["invalid"] in FAILURE_REASONS and len(self._failed) < MAX_NAMED:
            variant = {"variant": line["variant"]} if line["variant"] else {}
            self._failed.append({"id": line["id"], "sample": line["sample"], **variant, "reason": graded["invalid"]})

    def _score(self, line: JsonDict, graded: JsonDict, marks: dict[str, Mark], cluster: str) -> None:
        if self._spec.readout == "likelihood" and line["text"] is not None:
            self._label_mass.add(sum(map(math.exp, label_logprobs(line, len(self._spec.labels)))))
        if not alternatives(line["reference"]) and all(mark.grade is None for mark in marks.values()):
            return
        invalid = graded["invalid"] is not None
        for tally in (self._overall, *self._slices_of(line)):
            tally.add(cluster, marks, invalid)
        for name, samples in self._samples.items():
            if marks[name].grade is not None:
                samples.add(line["id"], line["variant"], cluster, marks[name])
        if self._labelled:
            true = self._labelled.expected(line["reference"])
            if true is not None:
                self._confusion.add(true, marks["label"].extracted)

    def _cluster_of(self, line: JsonDict) -> str:
        """What the answer's score is counted under: its row, or the value of the cluster column."""
        column = self._spec.cluster
        if column is None:
            return str(line["id"])
        return cluster_name(line["id"], {**line["row"], "reference": line["reference"]}, column)

    def _slices_of(self, line: JsonDict) -> Iterator[_Tally]:
        values = {**line["row"], "reference": line["reference"]}
        for column, slices in self._slices.items():
            key = slice_key(values.get(column))
            if key not in slices:
                if len(slices) == MAX_SLICES:
                    raise UserError(
                        f"runs.{self._spec.run}.slices: {column!r} has more than {MAX_SLICES:,} values; "
                        "name a column with fewer, or none"
                    )
                slices[key] = _Tally(self._graders, self._spec)
            yield slices[key]

    def _slice_summaries(self) -> JsonDict:
        return {
            column: {key: {"n": tally.n, "invalid": tally.invalid, **tally.summary()} for key, tally in slices.items()}
            for column, slices in self._slices.items()
        }

    def _check_slices(self) -> None:
        known = [*self._columns, "reference"]
        for column in self._slices:
            if self._counts["rows"] and column not in known:
                near = difflib.get_close_matches(column, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the columns are {some(known, 20)}"
                raise UserError(f"runs.{self._spec.run}.slices: no row has a column {column!r}; {hint}")


class _Tally:
    """The scores of each metric, of all answers or of a slice's."""

    def __init__(self, metrics: dict[str, Grader], spec: MetricsSpec) -> None:
        self.n = self.invalid = 0
        self._metrics = metrics
        self._scores = {name: _new_scores(spec, fractions=not metric.binary)() for name, metric in metrics.items()}
        self._unread: Counter[str] = Counter()
        self._fractions: set[str] = set()

    def add(self, cluster: str, marks: dict[str, Mark], invalid: bool) -> None:
        self.n += 1
        self.invalid += invalid
        for name, mark in marks.items():
            if mark.grade is not None:
                self._scores[name].add(cluster, float(mark.grade))
                self._unread[name] += mark.unread
                if mark.grade not in (0, 1):
                    self._fractions.add(name)

    def summary(self) -> dict[str, JsonDict]:
        return {name: self._summary(name, scores) for name, scores in self._scores.items()}

    def _summary(self, name: str, scores: Scores) -> JsonDict:
        metric = self._metrics[name]
        described = _score(scores)
        correct = None if name in self._fractions else int(scores.total)
        unread = {"unread": self._unread[name]} if metric.extracts or not metric.binary else {}
        return {"value": described["value"], "n": scores.n, "correct": correct, **described, **unread}


class _Mean:
    """The mean of values that come one by one."""

    def __init__(self) -> None:
        self._n, self._total = 0, 0.0

    def add(self, value: float) -> None:
        self._n, self._total = self._n + 1, self._total + value

    @property
    def value(self) -> float | None:
        return self._total / self._n if self._n else None


def _new_scores(spec: MetricsSpec, *, fractions: bool) -> Callable[[], Scores]:
    """What adds up scores: by cluster where the run names a column, else by row."""
    if spec.cluster is not None:
        return ClusterScores
    return RowMeans if fractions else RowScores


def _score(scores: Scores) -> JsonDict:
    interval = scores.interval()
    return {
        "value": scores.value,
        "n": scores.n,
        "ci95": [interval.low, interval.high] if interval else None,
        "interval": interval.method if interval else None,
    }
