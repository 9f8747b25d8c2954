"""Is an answer right? Each metric of a run reads the answer's words and compares them with the row's `reference`.

    exact          the text as it stands               text.py
    exact_match    the text, normalized                text.py
    contains       the reference stands in the text    text.py
    number         the number that it ends with        number.py
    choice         the letter that it settles on       choice.py
    label          one of the run's labels             labels.py
    {regex: …}     what a pattern finds                custom.py
    {python: …}    a function of the user's own        custom.py

- A reasoning model's words up to `</think>` are not read (thinking.py).
- What cannot be read from an answer is wrong and counted, never dropped: its `extracted` is null.
- A row without a reference has no grade; only a Python function may grade it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gristmill.config.schema import Metric, metric_name
from gristmill.errors import UserError
from gristmill.grading import choice, custom, number
from gristmill.grading.labels import LabelReader
from gristmill.grading.text import alternatives, contains, exact, exact_match, normalize
from gristmill.thinking import UNCLOSED, spoken
from gristmill.types import JsonDict

__all__ = ["Grader", "Mark", "alternatives", "contains", "exact", "exact_match", "grade", "graders", "normalize"]

Grade = bool | float | None


class Mark(NamedTuple):
    """A grade, what was read from the answer, and what the answer votes for among a row's samples."""

    grade: Grade
    extracted: str | None = None
    vote: str | None = None
    #: Nothing could be read from an answer that is there.
    unread: bool = False


class Grader(Protocol):
    """One metric. `expected` is asked first; a row for which it is None has no grade."""

    @property
    def extracts(self) -> bool:
        """Whether `extracted` stands in grades.jsonl."""
        ...

    @property
    def votes(self) -> bool:
        """Whether the most frequent answer of a row's samples means anything."""
        ...

    @property
    def binary(self) -> bool:
        """Whether every grade is true or false."""
        ...

    def expected(self, reference: Any) -> Any | None:
        """What the reference says; None when there is none. Raises UserError for one that the metric cannot use."""
        ...

    def mark(self, text: str, expected: Any, line: JsonDict) -> Mark:
        """The mark of an answer's words."""
        ...


@dataclass(frozen=True, slots=True)
class _Compared:
    """The whole text, compared by a function that knows the reference's alternatives."""

    compare: Callable[[str, Any], bool | None]
    key: Callable[[str], str]
    votes: bool
    extracts: bool = False
    binary: bool = True

    def expected(self, reference: Any) -> Any | None:
        return reference if alternatives(reference) else None

    def mark(self, text: str, expected: Any, line: JsonDict) -> Mark:
        return Mark(self.compare(text, expected), vote=self.key(text) if self.votes else None)


@dataclass(frozen=True, slots=True)
class _Extracted:
    """What `read` finds in the text, compared with what `known` finds in the reference."""

    read: Callable[[str], str | None]
    known: Callable[[Any], tuple[str, ...]]
    extracts: bool = True
    votes: bool = True
    binary: bool = True

    def expected(self, reference: Any) -> Any | None:
        return self.known(reference) or None

    def mark(self, text: str, expected: Any, line: JsonDict) -> Mark:
        found = self.read(text)
        return Mark(found is not None and found in expected, found, found)


@dataclass(frozen=True, slots=True)
class _Regex:
    """What a pattern finds, compared normalized."""

    pattern: Any
    extracts: bool = True
    votes: bool = True
    binary: bool = True

    def expected(self, reference: Any) -> Any | None:
        return reference if alternatives(reference) else None

    def mark(self, text: str, expected: Any, line: JsonDict) -> Mark:
        found = custom.last_match(self.pattern, text)
        if found is None:
            return Mark(False)
        return Mark(exact_match(found, expected), found, normalize(found))


@dataclass(frozen=True, slots=True)
class Labelled:
    """One of the run's labels: read from the text, or the most likely one."""

    reader: LabelReader
    likelihood: bool
    extracts: bool = True
    votes: bool = True
    binary: bool = True

    def expected(self, reference: Any) -> str | None:
        """The reference's label."""
        return self.reader.expected(reference)

    def mark(self, text: str, expected: Any, line: JsonDict) -> Mark:
        """Right when the labels are one."""
        found = self._most_likely(line) if self.likelihood else self.reader.read(text)
        return Mark(found == expected, found, found)

    def _most_likely(self, line: JsonDict) -> str:
        scores = label_logprobs(line, len(self.reader.labels))
        return self.reader.labels[scores.index(max(scores))]


@dataclass(frozen=True, slots=True)
class _Python:
    """The user's own function. It says itself what a row without a reference is worth."""

    path: str
    function: custom.Function
    extracts: bool = False
    votes: bool = False
    binary: bool = False

    def expected(self, reference: Any) -> Any | None:
        return self

    def mark(self, text: str, expected: Any, line: JsonDict) -> Mark:
        row = {**line["row"], "reference": line["reference"]}
        return Mark(custom.called(self.function, self.path, text, row))


def label_logprobs(line: JsonDict, labels: int) -> list[float]:
    """The log-probabilities of a run's labels for one answer, in the labels' order.

    Raises:
        UserError: the answer has none, or not one for each label.
    """
    scores: list[float] | None = line.get("label_logprobs")
    if scores is None or len(scores) != labels:
        found = "no label_logprobs" if scores is None else f"{len(scores)} label_logprobs for {labels} labels"
        raise UserError(f"the answer has {found}; readout: likelihood needs one for each label: make the answers again")
    return scores


def graders(
    metrics: Iterable[Metric], labels: Mapping[str, Sequence[str]] | None = None, readout: str = "text"
) -> dict[str, Grader]:
    """The metrics by the names under which their grades stand.

    Raises:
        UserError: a function cannot be imported.
    """
    return {metric_name(metric): _grader(metric, labels or {}, readout == "likelihood") for metric in metrics}


def _grader(metric: Metric, labels: Mapping[str, Sequence[str]], likelihood: bool) -> Grader:
    if isinstance(metric, dict):
        if "regex" in metric:
            return _Regex(custom.compiled(metric["regex"]))
        return _Python(metric["python"], custom.imported(metric["python"]))
    if metric == "label":
        return Labelled(LabelReader(labels), likelihood)
    return _NAMED[metric]


_NAMED: dict[str, Grader] = {
    "exact": _Compared(exact, str.strip, votes=True),
    "exact_match": _Compared(exact_match, normalize, votes=True),
    "contains": _Compared(contains, normalize, votes=False),
    "number": _Extracted(number.read_number, number.expected_numbers),
    "choice": _Extracted(choice.read_choice, choice.expected_choices),
}


def grade(line: JsonDict, metrics: Mapping[str, Grader]) -> tuple[JsonDict, dict[str, Mark]]:
    """A line of grades.jsonl for a line of generations.jsonl, and the marks that it was made of.

    An answer that is missing or blank is wrong without being read, and `invalid` says why.

    Raises:
        UserError: a reference that a metric cannot use, or a function or pattern that fails; with the row's id.
    """
    said = None if line["text"] is None else spoken(line["text"])
    invalid = invalid_reason(line, said)
    try:
        marks = {name: _mark(metric, None if invalid else said, line) for name, metric in metrics.items()}
    except UserError as error:
        raise UserError(f"row {line['id']}: {error}") from error
    graded = {
        "id": line["id"],
        "sample": line["sample"],
        **({"variant": line["variant"]} if line["variant"] else {}),
        "grades": {name: mark.grade for name, mark in marks.items()},
        "extracted": {name: mark.extracted for name, mark in marks.items() if metrics[name].extracts},
        "invalid": invalid,
        "truncated": line["finish_reason"] == "length",
    }
    return graded, marks


def _mark(metric: Grader, said: str | None, line: JsonDict) -> Mark:
    expected = metric.expected(line["reference"])
    if said is None:
        return Mark(None if expected is None else False)
    if expected is None:
        return Mark(None)
    mark = metric.mark(said, expected, line)
    if mark.grade is None:  # by the user's function, of a row without a reference or of words that it cannot read
        return mark._replace(grade=False, unread=True) if alternatives(line["reference"]) else mark
    return mark._replace(unread=metric.extracts and mark.extracted is None)


def invalid_reason(line: JsonDict, said: str | None) -> str | None:
    """Why an answer is not read; None for one that is.

    `skipped` for a prompt that was, a failed row's reason, `unclosed_thinking`, or `empty` for a blank answer.
    """
    if line["text"] is None:
        return str(line["finish_reason"])
    if said is None:
        return UNCLOSED
    return None if said.strip() else "empty"
