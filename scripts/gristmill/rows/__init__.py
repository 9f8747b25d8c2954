"""Dataset files to rows: .json, .jsonl (.ndjson), .csv, .tsv, .parquet, each also .gz.

What a file of each format may hold is told in from_json.py, from_csv.py and from_parquet.py. What all have in common:

- Streaming: one record at a time (a .json document is the exception), and the ids seen so far, to refuse a duplicate.
- `rename` is applied first, then `id_field` is looked up among the new names. The id stays among the fields.
- An id is text, or a whole number that becomes text: 7 and "7" are the same id. A float (1.0 too: a float column rounds
  large ids), true/false, a list or an object is refused, and so is text that is blank, longer than MAX_ID_CHARS, or has
  control characters, line separators or lone surrogates, because ids go into logs and tables.
- A row whose id is null or absent gets its key in an object keyed by id, else `row-000017-<8 hex>`: its position from 1
  and the SHA-256 of the record as the file has it (before renaming). `id_field=None` always derives.
- Positions count from 1: `line` is a physical line, `item` an element of a JSON array or object, `row` a parquet row.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.errors import UserError, some
from gristmill.files import canonical
from gristmill.rows.from_csv import csv_rows
from gristmill.rows.from_json import json_any, json_lines
from gristmill.rows.from_parquet import parquet_rows
from gristmill.rows.source import Record, refusal, shown
from gristmill.types import JsonDict, Row

DEFAULT_ID_FIELD = "id"
MAX_ID_CHARS = 512

_Reader = Callable[[Path], Iterator[Record]]
_READERS: dict[str, Callable[..., Iterator[Record]]] = {
    ".json": json_any,
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".csv": functools.partial(csv_rows, usual=","),
    ".tsv": functools.partial(csv_rows, usual="\t"),
    ".parquet": parquet_rows,
}
#: Every ending of a dataset's name that can be read.
SUFFIXES = tuple(suffix + packed for suffix in _READERS for packed in ("", ".gz"))
#: Formats that a delimiter may be named for.
_DELIMITED = (".csv", ".tsv")
#: Formats whose first row has every column there is.
_FIXED_COLUMNS = {".csv", ".tsv", ".parquet"}
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def format_of(path: Path) -> str:
    """A dataset's format by its name, as the ending without .gz: `.jsonl`. Raises UserError for any other name."""
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    if suffix not in _READERS:
        raise UserError(f"{path}: the format is told by the name, which must end in one of {', '.join(SUFFIXES)}")
    return suffix


def read_rows(
    path: Path,
    *,
    id_field: str | None = DEFAULT_ID_FIELD,
    rename: Mapping[str, str] | None = None,
    max_rows: int | None = None,
    delimiter: str | None = None,
) -> Iterator[Row]:
    """Read a dataset's rows in order.

    Args:
        path: The file; its name says the format.
        id_field: The column with the ids (after renaming); None derives every id. Only the default may be absent.
        rename: {new name: column in the file}; a renamed column loses its old name.
        max_rows: Stop after so many rows, without reading on.
        delimiter: What separates the cells of a .csv or .tsv file; None: what its name says.

    Raises:
        UserError: The file, a row or an argument is not usable; while iterating for all that needs the file.
    """
    path = Path(path)
    reader = _reader(path, delimiter)
    if max_rows is not None:
        _refuse_below_one("max_rows", max_rows)
    return _rows(path, reader, id_field, dict(rename or {}), max_rows)


def count_up_to(path: Path, limit: int, delimiter: str | None = None) -> int:
    """min(limit, the number of rows), parsing no more rows than that.

    Raises:
        UserError: The file is unusable or has no rows, one of these rows is broken, or limit is below 1.
    """
    _refuse_below_one("limit", limit)
    path = Path(path)
    with contextlib.closing(_records(path, _reader(path, delimiter))) as records:
        return sum(1 for _ in itertools.islice(records, limit))


def _reader(path: Path, delimiter: str | None) -> _Reader:
    suffix = format_of(path)
    if delimiter is None:
        return _READERS[suffix]
    if suffix not in _DELIMITED:
        named = ", ".join(_DELIMITED)
        raise UserError(f"{path}: delimiter is {shown(delimiter)}, but only {named} files have one; remove it")
    return functools.partial(_READERS[suffix], delimiter=delimiter)


def _rows(
    path: Path, reader: _Reader, id_field: str | None, rename: dict[str, str], max_rows: int | None
) -> Iterator[Row]:
    ids = _Ids(path, id_field)
    with contextlib.closing(_records(path, reader)) as records:
        for position, record in enumerate(itertools.islice(records, max_rows), 1):
            if position == 1:
                _refuse_unknown_columns(rename, record, path)
            fields = _renamed(record, rename, path)
            yield Row(ids.name(position, record, fields), fields)
    ids.refuse_unknown_field()


def _records(path: Path, reader: _Reader) -> Generator[Record, None, None]:
    """The file's records; what goes wrong below (missing, cut, not gzip) becomes a UserError, and so does no record."""
    empty = True
    try:
        for record in reader(path):
            empty = False
            yield record
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise refusal(path, "", f"damaged, cut short or not gzip ({error})", "copy or compress it again") from None
    except OSError as error:
        raise refusal(path, "", f"cannot be read ({error.strerror or error})", "check the path and the disk") from None
    if empty:
        raise UserError(f"{path} has no rows; check that it is the right file")


def _refuse_below_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name}={value} is not a number of rows; use 1 or more")


# ---- columns


def _refuse_unknown_columns(rename: dict[str, str], record: Record, path: Path) -> None:
    for new, old in rename.items():
        if old not in record.fields:
            reason = f"rename {shown(new)} takes the column {shown(old)}, which is not there"
            raise refusal(path, record.where, reason, _there_are(record.fields))


def _renamed(record: Record, rename: dict[str, str], path: Path) -> JsonDict:
    if not rename:
        return record.fields
    gone = set(rename.values())
    kept = {name: value for name, value in record.fields.items() if name not in gone}
    moved = {new: record.fields[old] for new, old in rename.items() if old in record.fields}
    hidden = next((name for name in moved if name in kept), None)
    if hidden is not None:
        reason = f"rename {shown(hidden)} would hide the column of that name"
        raise refusal(path, record.where, reason, "choose another name, or rename that column too")
    return kept | moved


def _there_are(fields: Mapping[str, Any]) -> str:
    return f"the columns are {some([shown(name) for name in fields], 12) or '(none)'}"


# ---- ids


class _Ids:
    """Names the rows of one file, and remembers the names."""

    def __init__(self, path: Path, field: str | None) -> None:
        self._path = path
        self._field = field
        self._found = False
        self._columns: JsonDict = {}
        self._seen: dict[str, int] = {}

    def name(self, position: int, record: Record, fields: JsonDict) -> str:
        """The row's id; refuses one that is not usable or was there before."""
        if self._field is None:
            return _derived_id(position, record, self._path)
        self._note_field(position, fields)
        value = fields.get(self._field)
        value = record.key if value is None else value
        name = _derived_id(position, record, self._path) if value is None else self._checked(value, record)
        first = self._seen.setdefault(name, record.number)
        if first != record.number:
            places = f"{record.unit} {first} and {record.unit} {record.number}"
            advice = "make the ids unique, choose another id_field, or set it to null to derive ids"
            raise refusal(self._path, "", f"the id {shown(name)} is there twice, at {places}", advice)
        return name

    def refuse_unknown_field(self) -> None:
        """An id field that was asked for by name must be in the file somewhere."""
        if self._field not in (None, DEFAULT_ID_FIELD) and not self._found:
            reason = f"no row has the id_field {shown(self._field)}"
            raise refusal(self._path, "", reason, _there_are(self._columns))

    def _note_field(self, position: int, fields: JsonDict) -> None:
        self._found = self._found or self._field in fields
        if position == 1:
            self._columns = dict.fromkeys(fields)
            if format_of(self._path) in _FIXED_COLUMNS:
                self.refuse_unknown_field()

    def _checked(self, value: Any, record: Record) -> str:
        problem = _id_problem(value)
        if problem:
            advice = "give another id, choose another id_field, or set it to null to derive ids"
            raise refusal(self._path, record.where, f"the id {problem}", advice)
        return str(value)


def _id_problem(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        kind = {bool: "true or false", float: "a float", list: "a list", dict: "an object"}[type(value)]
        return f"is {kind}, not text or a whole number"
    text = str(value)
    if not text.strip():
        return f"{shown(text)} is blank"
    if len(text) > MAX_ID_CHARS:
        return f"{shown(text)} has {len(text):,} characters, more than {MAX_ID_CHARS}"
    if _UNPRINTABLE.search(text):
        return f"{shown(text)} has a control character, a line end or a lone surrogate"
    return None


def _derived_id(position: int, record: Record, path: Path) -> str:
    try:
        content = canonical(record.fields)
    except RecursionError:
        raise refusal(path, record.where, "nested too deeply", "flatten the row") from None
    return f"row-{position:06d}-{hashlib.sha256(content).hexdigest()[:8]}"
