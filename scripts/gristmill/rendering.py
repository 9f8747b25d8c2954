"""Dataset rows to requests: one rendered chat for each row and sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gristmill.codec import request_to_json
from gristmill.config.schema import DatasetConfig
from gristmill.config.specs import RequestsSpec
from gristmill.errors import UserError
from gristmill.prompts import PromptRenderer, run_variables
from gristmill.rows import read_rows
from gristmill.types import JsonDict, Request, Row


def requests(spec: RequestsSpec) -> Iterator[JsonDict]:
    """The lines of requests.jsonl (docs/outputs.md), in the dataset's order, a row's samples together.

    Raises:
        UserError: the dataset cannot be read, or a row lacks a column that the prompt uses.
    """
    renderer = PromptRenderer(spec.prompt)
    sampling = spec.sampling.for_requests()
    labels: JsonDict = {"labels": spec.labels} if spec.labels else {}
    for row in dataset_rows(spec.dataset, spec.dataset.max_rows):
        try:
            messages = renderer.render(run_variables(row.fields))
        except UserError as error:
            raise UserError(f"row {row.id}: {error}") from error
        others = {name: value for name, value in row.fields.items() if name != "reference"}
        for sample in range(spec.sampling.samples):
            request = Request(row.id, sample, "", messages, sampling)
            yield request_to_json(request) | labels | {"reference": row.fields.get("reference"), "row": others}


def dataset_rows(dataset: DatasetConfig, max_rows: int | None) -> Iterator[Row]:
    """The rows of a dataset as its config says, at most so many."""
    return read_rows(
        Path(dataset.path),
        id_field=dataset.id_field,
        rename=dataset.fields,
        max_rows=max_rows,
        delimiter=dataset.delimiter,
    )
