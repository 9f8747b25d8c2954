"""Dataset rows to requests: one rendered chat for each row and sample, or for each turn of one (`prompts.*.turns`).

The chat of a later turn has null where the answers before it go; followups.py fills them in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.codec import sampling_to_json
from gristmill.config.schema import DatasetConfig
from gristmill.config.specs import RequestsSpec
from gristmill.errors import UserError, some
from gristmill.followups import turn_variant
from gristmill.grading.text import alternatives
from gristmill.prompts import PromptRenderer, run_variables
from gristmill.rows import read_rows
from gristmill.types import JsonDict, Message, Row


def requests(spec: RequestsSpec) -> Iterator[JsonDict]:
    """The lines of requests.jsonl (docs/outputs.md), in the dataset's order, a row's samples together.

    Raises:
        UserError: the dataset cannot be read, or a row lacks a column that the prompt uses.
    """
    renderer = PromptRenderer(spec.prompt)
    examples = _examples(spec, renderer)
    own = spec.examples is not None and spec.examples.path == spec.dataset.path
    sampling = sampling_to_json(spec.sampling.for_requests())
    labels: JsonDict = {"labels": spec.labels} if spec.labels else {}
    for row in dataset_rows(spec.dataset, spec.dataset.max_rows):
        try:
            shown = [message for name, turn in examples.items() if not (own and name == row.id) for message in turn]
            chats = list(_chats(renderer, spec.prompt.turns, row, shown))
        except UserError as error:
            raise UserError(f"row {row.id}: {error}") from error
        others = {name: value for name, value in row.fields.items() if name != "reference"}
        for sample in range(spec.sampling.samples):
            for variant, messages, reference in chats:
                named = {"id": row.id, "sample": sample, "variant": variant}
                asked = named | {"messages": messages, "sampling": sampling} | labels
                yield asked | {"reference": reference, "row": others}


def _examples(spec: RequestsSpec, renderer: PromptRenderer) -> dict[str, list[Message]]:
    """The rows of few_shot_from, by id in the order of the config, each as a question and its answer.

    Raises:
        UserError: a row that is not in the dataset, or that has no reference.
    """
    wanted = spec.prompt.few_shot_from
    if wanted is None or spec.examples is None:
        return {}
    found: dict[str, list[Message]] = {}
    for row in dataset_rows(spec.examples, None):
        if row.id in wanted.rows:
            answers = alternatives(row.fields.get("reference"))
            if not answers:
                raise UserError(
                    f"row {row.id} of {wanted.dataset} has no reference to show as its answer; take another"
                )
            found[row.id] = [renderer.question(run_variables(row.fields)), {"role": "assistant", "content": answers[0]}]
        if len(found) == len(wanted.rows):
            return {name: found[name] for name in wanted.rows}
    missing = some([name for name in wanted.rows if name not in found])
    raise UserError(f"few_shot_from names rows that {wanted.dataset} does not have: {missing}; correct the ids")


def _chats(
    renderer: PromptRenderer, column: str | None, row: Row, examples: list[Message]
) -> Iterator[tuple[str, list[JsonDict], Any]]:
    """Variant, messages and reference of each turn of a row; of the row itself when the prompt has no turns."""
    variables = run_variables(row.fields)
    reference: Any = row.fields.get("reference")
    if column is None:
        yield "", [dict(message) for message in renderer.render(variables, examples)], reference
        return
    turns = _turns(column, row)
    for number, messages in enumerate(renderer.turns(variables, turns), start=1):
        its_own = isinstance(reference, list) and len(reference) == len(turns)
        yield turn_variant(number), list(messages), reference[number - 1] if its_own else reference


def _turns(column: str, row: Row) -> list[str]:
    turns = row.fields.get(column)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        shown = repr(turns)
        raise UserError(
            f"the turns in column {column!r} are {shown if len(shown) <= 80 else shown[:79] + '…'}; give a list of "
            "texts, one or more, or name another column with the prompt's turns"
        )
    return turns


def dataset_rows(dataset: DatasetConfig, max_rows: int | None) -> Iterator[Row]:
    """The rows of a dataset as its config says, at most so many."""
    return read_rows(
        Path(dataset.path),
        id_field=dataset.id_field,
        rename=dataset.fields,
        max_rows=max_rows,
        delimiter=dataset.delimiter,
    )
