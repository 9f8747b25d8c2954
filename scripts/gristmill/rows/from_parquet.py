"""Records out of parquet files, with every value made JSON without losing anything.

- Integers, booleans, text, null, lists and structs are kept; a map becomes a list of {key, value}, a category its
  value.
- Timestamps, dates and times become ISO 8601 text with all the column's digits: 2020-01-01 00:00:00.123456789, with Z
  or the offset where the column has a time zone. Decimals become text with all their digits.
- float16 and float32 become the 64-bit float of the same value. NaN and infinities are refused with row and column, as
  in JSON: nobody but the writer knows whether they meant null (pandas writes its missing floats as null).
- Bytes, durations and other types that JSON cannot hold are refused with the column's name before the first row.
- Conversion runs in Arrow, 256 rows at a time, and needs no pandas. A .parquet.gz is unpacked to a temporary file.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.errors import UserError
from gristmill.rows.source import CHUNK_BYTES, MAX_DOCUMENT_BYTES, Record, is_gzip, opened, refusal, repeated, shown
from gristmill.types import JsonDict

_BATCH_ROWS = 256


def parquet_rows(path: Path) -> Iterator[Record]:
    """One record a row."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow; install it, or convert the file to .jsonl") from None
    with _unpacked(path) as plain:
        try:
            yield from _rows(plain, path)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            raise refusal(path, "", f"not readable as parquet ({error})", "write it again, or as .jsonl") from None


def _rows(plain: Path, path: Path) -> Iterator[Record]:
    from pyarrow import RecordBatch, parquet

    with parquet.ParquetFile(plain, pre_buffer=False) as file:
        schema = file.schema_arrow
        _refuse_same_names(schema.names, path)
        targets = [_json_type(field.type, field.name, path) for field in schema]
        floats = [name for name, target in zip(schema.names, targets, strict=True) if _has_float(target)]
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            columns = [column.cast(target) for column, target in zip(batch.columns, targets, strict=True)]
            converted = RecordBatch.from_arrays(columns, names=schema.names)
            for fields in converted.to_pylist():
                number += 1
                _refuse_nan(fields, floats, path, number)
                yield Record("row", number, fields)


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """The file itself, or a temporary copy without the gzip."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(opened(path))
        if not is_gzip(path):
            yield path
            return
        copy = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".parquet"))
        while chunk := stream.read(CHUNK_BYTES):
            copy.write(chunk)
            if copy.tell() > MAX_DOCUMENT_BYTES:
                raise refusal(path, "", f"over {MAX_DOCUMENT_BYTES:,} bytes unpacked", "unpack it with gunzip")
        copy.flush()
        yield Path(copy.name)


def _refuse_same_names(names: list[str], path: Path) -> None:
    if (twice := repeated(names)) is not None:
        raise refusal(path, "", f"the column {shown(twice)} is there twice", "rename one")


def _json_type(kind: Any, column: str, path: Path) -> Any:
    """The Arrow type whose Python values are JSON, to cast a column to."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_decimal(kind) or types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind):
        return pa.string()
    if types.is_floating(kind):
        return pa.float64()
    if types.is_dictionary(kind):
        return _json_type(kind.value_type, column, path)
    if types.is_map(kind):
        pair = {"key": kind.key_type, "value": kind.item_type}
        return pa.large_list(pa.struct([(name, _json_type(part, column, path)) for name, part in pair.items()]))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.large_list(_json_type(kind.value_type, column, path))
    if types.is_struct(kind):
        return pa.struct([(field.name, _json_type(field.type, column, path)) for field in kind])
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind) or _is_text(kind):
        return kind
    raise refusal(path, "", f"the column {shown(column)} holds {kind}, which JSON cannot", "drop it or make it text")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _has_float(kind: Any) -> bool:
    """Whether a type that _json_type gave has floats anywhere in it."""
    from pyarrow import types

    if types.is_large_list(kind):
        return _has_float(kind.value_type)
    if types.is_struct(kind):
        return any(_has_float(field.type) for field in kind)
    return bool(types.is_floating(kind))


def _refuse_nan(fields: JsonDict, columns: list[str], path: Path, number: int) -> None:
    for column in columns:
        if not _is_finite(fields[column]):
            reason = f"the column {shown(column)} holds NaN or an infinity, which JSON cannot"
            raise refusal(path, f"row {number}", reason, "write null")


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list) else True
