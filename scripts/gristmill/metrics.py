"""A run's numbers: accuracy with its interval, overall and per slice, and everything that a reader should doubt.

- One pass over the answers, of which only sums are held. A row's samples stand together, as in generations.jsonl.
- `n` counts the answers whose row has a reference. Skipped and empty ones are among them and count as wrong; `invalid`
  counts them over all answers, so that a run without references shows them too.
- A slice is one value of a column (or of `reference`), in the order of first appearance. Its key is the text itself, or
  the JSON of any other value; a column that a row lacks counts as null. `null` is always the missing value: the text
  "null" gets its quotes.
- A slice column that no row has is a mistake in the config, not an empty table; so is one with more values than
  MAX_SLICES, such as an id.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from gristmill import files
from gristmill.config.schema import MetricName
from gristmill.config.specs import MetricsSpec
from gristmill.errors import UserError, some
from gristmill.followups import turn_number
from gristmill.grading import alternatives, grade
from gristmill.intervals import RowScores
from gristmill.types import FAILURE_REASONS, NO_EARLIER_ANSWER, JsonDict

NULL_SLICE = "null"
MAX_SLICES = 10_000
#: Failed rows that metrics.json names; the count is of all.
MAX_NAMED = 100


class RunTally:
    """Grades answers as they pass and keeps count."""

    def __init__(self, spec: MetricsSpec) -> None:
        self._spec = spec
        self._overall = _Scores(spec.metrics)
        self._slices: dict[str, dict[str, _Scores]] = {column: {} for column in spec.slices}
        self._columns: dict[str, None] = {}
        self._counts: Counter[str] = Counter()
        self._samples = 0
        self._failed: list[JsonDict] = []

    def graded(self, lines: Iterable[JsonDict]) -> Iterator[JsonDict]:
        """The lines of grades.jsonl for those of generations.jsonl; every one that is taken is counted."""
        for line in lines:
            graded = grade(line, self._spec.metrics)
            self._count(line, graded)
            yield graded

    def metrics(self) -> JsonDict:
        """The content of metrics.json for what was counted.

        Raises:
            UserError: no row has a slice's column.
        """
        self._check_slices()
        headline = self._spec.metrics[0] if self._spec.metrics else None
        scores = self._overall.summary()
        top = scores[headline] if headline else {"value": None, "ci95": None}
        return {
            **self._spec.model_dump(include={"run", "dataset", "model", "prompt"}),
            "n": self._overall.n,
            "rows": self._counts["rows"],
            "samples": self._samples,
            "no_reference": self._counts["no_reference"],
            "metric": headline,
            "accuracy": top["value"],
            "ci95": top["ci95"],
            "invalid": self._invalid(),
            "failed_rows": self._failed,
            "truncated": self._counts["truncated"],
            "prompts_cut": self._counts["prompts_cut"],
            "prompt_tokens": self._counts["prompt_tokens"],
            "completion_tokens": self._counts["completion_tokens"],
            "metrics": scores,
            "slices": self._slice_summaries(),
        }

    def _invalid(self) -> dict[str, int]:
        """Reason → answers. Only a run of turns can have answers that are missing for want of an earlier one."""
        always = {reason: self._counts[reason] for reason in ("skipped", "empty", *FAILURE_REASONS)}
        return always | ({NO_EARLIER_ANSWER: found} if (found := self._counts[NO_EARLIER_ANSWER]) else {})

    def _count(self, line: JsonDict, graded: JsonDict) -> None:
        has_reference = bool(alternatives(line["reference"]))
        self._samples = max(self._samples, line["sample"] + 1)
        self._columns.update(dict.fromkeys(line["row"]))
        counts = self._counts
        counts["rows"] += line["sample"] == 0 and turn_number(line["variant"]) in (None, 1)
        counts["no_reference"] += not has_reference
        counts["truncated"] += graded["truncated"]
        counts["prompts_cut"] += line["prompt_cut_tokens"] > 0
        counts["prompt_tokens"] += line["prompt_tokens"]
        counts["completion_tokens"] += line["completion_tokens"]
        if graded["invalid"]:
            counts[graded["invalid"]] += 1
        if graded["invalid"] in FAILURE_REASONS and len(self._failed) < MAX_NAMED:
            variant = {"variant": line["variant"]} if line["variant"] else {}
            self._failed.append({"id": line["id"], "sample": line["sample"], **variant, "reason": graded["invalid"]})
        if has_reference:
            for scores in (self._overall, *self._slices_of(line)):
                scores.add(line["id"], graded["grades"])

    def _slices_of(self, line: JsonDict) -> Iterator[_Scores]:
        values = {**line["row"], "reference": line["reference"]}
        for column, slices in self._slices.items():
            key = slice_key(values.get(column))
            if key not in slices:
                if len(slices) == MAX_SLICES:
                    raise UserError(
                        f"runs.{self._spec.run}.slices: {column!r} has more than {MAX_SLICES:,} values; "
                        "name a column with fewer, or none"
                    )
                slices[key] = _Scores(self._spec.metrics)
            yield slices[key]

    def _slice_summaries(self) -> JsonDict:
        return {
            column: {key: {"n": scores.n, **scores.summary()} for key, scores in slices.items()}
            for column, slices in self._slices.items()
        }

    def _check_slices(self) -> None:
        known = [*self._columns, "reference"]
        for column in self._slices:
            if self._counts["rows"] and column not in known:
                near = difflib.get_close_matches(column, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the columns are {some(known, 20)}"
                raise UserError(f"runs.{self._spec.run}.slices: no row has a column {column!r}; {hint}")


class _Scores:
    """One RowScores per metric."""

    def __init__(self, metrics: list[MetricName]) -> None:
        self.n = 0
        self._scores = {name: RowScores() for name in metrics}

    def add(self, row_id: str, grades: dict[MetricName, bool]) -> None:
        self.n += 1
        for name, scores in self._scores.items():
            scores.add(row_id, float(grades[name]))

    def summary(self) -> dict[MetricName, JsonDict]:
        return {name: _summary(scores) for name, scores in self._scores.items()}


def slice_key(value: Any) -> str:
    """A slice's name for a value; text that could be taken for a missing value, or for quoted text, gets quotes."""
    if isinstance(value, str) and value != NULL_SLICE and not value.startswith('"'):
        return value
    return files.dumps(value).decode("utf-8")


def _summary(scores: RowScores) -> JsonDict:
    interval = scores.interval()
    return {
        "value": scores.value,
        "n": scores.n,
        "correct": int(scores.total),
        "ci95": [interval.low, interval.high] if interval else None,
        "interval": interval.method if interval else None,
    }
