"""generations.jsonl as a table for spreadsheets (.csv) or data frames (.parquet), every character kept.

- messages, row, and a reference that is no text stand as JSON text, so that reading them back gives the same values.
- labels and label_logprobs are columns where the first row has labels, and stand as JSON text, too.
- CSV cannot tell a missing text from an empty one: finish_reason `skipped` does.
- Text with a lone surrogate has no UTF-8 form; it is refused by name rather than changed.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from gristmill.errors import UserError
from gristmill.files import atomic_writer, dumps
from gristmill.merging import proven
from gristmill.types import JsonDict

TEXT = ("id", "variant", "messages", "reference", "row", "text", "finish_reason", "key")
WHOLE = ("sample", "prompt_tokens", "completion_tokens", "prompt_cut_tokens")
COLUMNS = (
    *("id", "sample", "variant", "messages", "reference", "row", "text", "finish_reason"),
    *("prompt_tokens", "completion_tokens", "prompt_cut_tokens", "seconds", "key"),
)
LIKELIHOOD = ("labels", "label_logprobs")
CHUNK = 5000


def export(generations: Path, out: Path) -> None:
    """Write the table that `out`'s suffix names.

    Raises:
        UserError: a text that cannot be written as UTF-8; the row is named.
    """
    lines = proven(generations)
    first = list(itertools.islice(lines, 1))
    columns = COLUMNS + (LIKELIHOOD if any("labels" in line for line in first) else ())
    rows = (_flat(line, columns) for line in itertools.chain(first, lines))
    with atomic_writer(out) as handle:
        if out.suffix == ".csv":
            _write_csv(rows, columns, handle)
        elif out.suffix == ".parquet":
            _write_parquet(rows, columns, handle)
        else:
            raise UserError(f"{out} is neither .csv nor .parquet; choose one of the two")


def _flat(line: JsonDict, columns: Sequence[str]) -> JsonDict:
    flat = {name: _cell(name, line[name] if name in COLUMNS else line.get(name)) for name in columns}
    for name in TEXT:
        try:
            (flat[name] or "").encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"row {line['id']!r}: {name} holds a lone surrogate; read the .jsonl instead") from error
    return flat


def _cell(name: str, value: Any) -> Any:
    if name in {"messages", "row"} or (
        name in {"reference", *LIKELIHOOD} and value is not None and not isinstance(value, str)
    ):
        return dumps(value).decode()
    return value


def _write_csv(rows: Iterator[JsonDict], columns: Sequence[str], handle: IO[bytes]) -> None:
    text = io.TextIOWrapper(handle, encoding="utf-8", newline="", write_through=True)
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    text.detach()


def _write_parquet(rows: Iterator[JsonDict], columns: Sequence[str], handle: IO[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = (
        {name: pa.string() for name in TEXT + LIKELIHOOD}
        | {name: pa.int64() for name in WHOLE}
        | {"seconds": pa.float64()}
    )
    schema = pa.schema([(name, kinds[name]) for name in columns])
    with pq.ParquetWriter(handle, schema, compression="zstd") as writer:
        while chunk := list(itertools.islice(rows, CHUNK)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
