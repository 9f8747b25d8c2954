"""The rows of the sample browser: answers, grades and verdicts joined by (id, sample, turn) within a dataset.

- The turns of a row stand under one row, in their order; the cap counts rows, not turns.
- Files are read only as far as the last row that is shown, and only those rows are kept: a run of any size costs the
  same. Verdicts of pairs are read to their end, to count what a swap changed.
- The cap is shared evenly among the datasets; within one, the first rows in the dataset's order are shown. The runs of
  a dataset answer the same rows; which ones and how many is said by the run with the most answers.
- Long answers are not cut; fewer rows are shown where they would take more than MAX_BYTES together.
- Values that are not text (numbers, lists, nulls) become their JSON text here: a browser would round large integers.
- A judge whose runs are not in the report has no rows here; its numbers are still shown.
- The prompts of one row are kept once when several runs share them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.clusters import slice_key
from gristmill.files import dumps
from gristmill.report.inputs import JudgeMetrics, RunMetrics, read_lines
from gristmill.report.lines import answer, pairwise, pointwise, turn_of
from gristmill.report.words import Swaps, as_text
from gristmill.types import JsonDict

#: Columns that commonly hold what was asked, for the list of rows; else the last user message stands there.
QUESTION_COLUMNS = ("question", "prompt", "instruction", "problem", "query", "input", "text")
PREVIEW_CHARACTERS = 180
#: Of all rows on the page, as JSON.
MAX_BYTES = 40_000_000

ANSWER_COLUMNS = ("id", "sample", "messages", "reference", "row", "text", "finish_reason")


class RowKey(NamedTuple):
    """Names a browser row."""

    dataset: str
    id: str
    sample: int


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run's folder and what its metrics say; its place in the list is its number on the page."""

    folder: Path
    metrics: RunMetrics


@dataclass(frozen=True, slots=True)
class JudgeFiles:
    """A judge target's folder and what its metrics say."""

    folder: Path
    metrics: JudgeMetrics


@dataclass(frozen=True, slots=True)
class Shown:
    """How many of a dataset's rows the page holds."""

    dataset: str
    shown: int
    total: int
    samples: bool


@dataclass(slots=True)
class Browser:
    """What the sample browser gets: the rows for the page, the counts, and each judge's swaps over all its pairs."""

    rows: list[JsonDict] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    swaps: list[Swaps] = field(default_factory=list)


def join_rows(runs: Sequence[RunFiles], judges: Sequence[JudgeFiles], max_rows: int) -> Browser:
    """The first rows of every dataset that fit under `max_rows` together, with what is known of them."""
    fullest = _fullest(runs)
    share = share_cap({dataset: answers(run.metrics) for dataset, run in fullest.items()}, max_rows)
    chosen = {key: _empty_row(key) for dataset, run in fullest.items() for key in _first_keys(run, share[dataset])}
    columns = slice_columns(run.metrics for run in runs)
    for number, run in enumerate(runs):
        _add_answers(chosen, number, run, columns)
    by_name = {run.metrics.run: run for run in runs}
    swaps = [_add_verdicts(chosen, number, judge, by_name) for number, judge in enumerate(judges)]
    shown = {dataset: _fitting(dataset, chosen, MAX_BYTES // len(fullest)) for dataset in fullest}
    counts = [
        Shown(dataset, len(shown[dataset]), answers(run.metrics), run.metrics.samples > 1)
        for dataset, run in fullest.items()
    ]
    return Browser([row for rows in shown.values() for row in rows], counts, swaps)


def answers(metrics: RunMetrics) -> int:
    """Rows × samples of a run; the turns of a row are one."""
    return metrics.rows * metrics.samples


def share_cap(totals: Mapping[str, int], cap: int) -> dict[str, int]:
    """Split `cap` among datasets as evenly as their sizes allow; what is left over goes to the first ones."""
    shares = dict.fromkeys(totals, 0)
    left = cap
    while left and (open_ones := [name for name in totals if shares[name] < totals[name]]):
        even = max(left // len(open_ones), 1)
        for name in open_ones:
            step = min(even, totals[name] - shares[name], left)
            shares[name] += step
            left -= step
    return shares


def _fullest(runs: Sequence[RunFiles]) -> dict[str, RunFiles]:
    """Dataset → its run with the most answers, which has every (id, sample) that the others have."""
    found: dict[str, RunFiles] = {}
    for run in runs:
        best = found.setdefault(run.metrics.dataset, run)
        if answers(run.metrics) > answers(best.metrics):
            found[run.metrics.dataset] = run
    return found


def _first_keys(run: RunFiles, count: int) -> list[RowKey]:
    lines = read_lines(run.folder / "generations.jsonl", ANSWER_COLUMNS)
    found: dict[RowKey, None] = {}
    while len(found) < count and (line := next(lines, None)) is not None:
        found[_row_key(run.metrics.dataset, line)] = None
    return list(found)


def _row_key(dataset: str, line: JsonDict) -> RowKey:
    """The row that a line of generations, grades or verdicts is about."""
    return RowKey(dataset, line["id"], line["sample"])


def _shown_lines(
    chosen: Mapping[RowKey, JsonDict], run: RunFiles, path: Path, columns: Sequence[str]
) -> Iterator[tuple[JsonDict, JsonDict]]:
    """(row, line) for each line about a run's answers whose row is shown; reads no further than the last of them.

    The turns of a row stand one after the other, so the last row's end is seen from the line after it.
    """
    dataset, samples = run.metrics.dataset, run.metrics.samples
    left = {key for key in chosen if key.dataset == dataset and key.sample < samples}
    for line in read_lines(path, columns) if left else ():
        key = _row_key(dataset, line)
        if key in chosen:
            left.discard(key)
            yield chosen[key], line
        if not left and (key not in chosen or not turn_of(line)):
            return


def _fitting(dataset: str, chosen: Mapping[RowKey, JsonDict], limit: int) -> list[JsonDict]:
    """The first of a dataset's rows that take no more than `limit` bytes together."""
    rows = [row for key, row in chosen.items() if key.dataset == dataset]
    sizes = itertools.accumulate(len(dumps(row)) for row in rows)
    return [row for row, size in zip(rows, sizes, strict=True) if size <= limit]


def _empty_row(key: RowKey) -> JsonDict:
    return {
        "dataset": key.dataset,
        "id": key.id,
        "sample": key.sample,
        "title": "",
        "fields": {},
        "slices": {},
        "reference": None,
        "prompts": [],
        "answers": [],
        "verdicts": [],
    }


def slice_columns(runs: Iterable[RunMetrics]) -> list[str]:
    """Every column that some run has scores for."""
    return list(dict.fromkeys(column for metrics in runs for column in metrics.slices))


def _add_answers(chosen: dict[RowKey, JsonDict], number: int, run: RunFiles, columns: Sequence[str]) -> None:
    lines = _shown_lines(chosen, run, run.folder / "generations.jsonl", ANSWER_COLUMNS)
    grades = _shown_lines(chosen, run, run.folder / "grades.jsonl", ("id", "sample", "grades"))
    graded = {_name(line): line for _, line in grades}
    for row, line in lines:
        if not row["answers"]:
            _describe(row, line, columns)
        if turn_of(line) and line["reference"] is not None:
            row.setdefault("references", {})[str(turn_of(line)["turn"])] = as_text(line["reference"])
        row["answers"].append(answer(number, row, line, graded.get(_name(line), {}), run.metrics.metric))


def _name(line: JsonDict) -> tuple[str, int, str]:
    return line["id"], line["sample"], line.get("variant") or ""


def _describe(row: JsonDict, line: JsonDict, columns: Sequence[str]) -> None:
    """Fill in what belongs to the row, from the first answer to it."""
    values = {**line["row"], "reference": line["reference"]}
    row["slices"] = {column: slice_key(values[column]) for column in columns if column in values}
    row["fields"] = {name: as_text(value) for name, value in line["row"].items()}
    row["reference"] = None if line["reference"] is None else as_text(line["reference"])
    row["title"] = _preview(line["row"], line["messages"])


def _preview(fields: Mapping[str, Any], messages: Iterable[Mapping[str, str]]) -> str:
    columns = [fields[name] for name in QUESTION_COLUMNS if isinstance(fields.get(name), str)]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    text = " ".join((columns[:1] or asked[-1:] or [""])[0].split())
    return text if len(text) <= PREVIEW_CHARACTERS else text[: PREVIEW_CHARACTERS - 1] + "…"


def _add_verdicts(
    chosen: dict[RowKey, JsonDict], number: int, judge: JudgeFiles, runs: Mapping[str, RunFiles]
) -> Swaps:
    """Attach a judge target's verdicts to their rows, and count over all pairs what a swap changed."""
    path, swaps = judge.folder / "verdicts.jsonl", Swaps()
    run = runs.get(judge.metrics.runs[0]) if judge.metrics.runs else None
    if judge.metrics.kind != "pairwise":
        needed = ("id", "sample", "run", "score" if judge.metrics.kind == "score" else "verdict")
        for row, line in _shown_lines(chosen, run, path, needed) if run is not None else ():
            row["verdicts"].append(pointwise(number, line))
        return swaps
    for line in read_lines(path, ("id", "sample", "orders", "winner")):
        swaps = _counted(swaps, line["orders"], judge.metrics.top_label)
        key = _row_key(run.metrics.dataset, line) if run is not None else None
        if key in chosen:
            chosen[key]["verdicts"].append(pairwise(number, line))
    return swaps


def _counted(swaps: Swaps, orders: Sequence[JsonDict], top_label: str | None) -> Swaps:
    labels = [order.get("label") for order in orders]
    if len(labels) != 2 or None in labels:
        return swaps
    same = labels[0] == labels[1]
    return Swaps(swaps.pairs + 1, swaps.same_label + same, swaps.top_label_twice + (same and labels[0] == top_label))
