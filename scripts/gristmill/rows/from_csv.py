r"""Records out of CSV and TSV, as RFC 4180 has it: a header, then commas (tabs in .tsv) and double quotes.

- A cell is text, kept character by character: 007 stays "007", 1.50 stays "1.50", true stays "true". An empty cell is
  "", because CSV has no null. A cell may hold line ends, and as many characters as a row may have.
- A column without a name becomes column_<position from 1> (pandas writes its index as a first column without one).
- A row with more or fewer cells than the header is refused, and so are two columns of one name, a stray quote, a lone
  \r outside quotes, and a header (with its first row, where it has several columns) that looks as if it used another
  delimiter than the file's name says. A delimiter that is named is taken at its word.
- A NUL is kept in a cell; in the header it means UTF-16, and is refused.
- Blank lines are skipped, so a file of one column must write its empty cells as "".
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.rows.source import MAX_ROW_BYTES, Record, opened, refusal, repeated, shown, text_lines

_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars (|)"}
#: What Python's csv module says, in the words of the file.
_REASONS = {
    "unexpected end of data": "a quote that opens in this row is never closed",
    "new-line character seen in unquoted field": "a lone carriage return outside quotes; lines end with \\n or \\r\\n",
}


def csv_rows(path: Path, usual: str, delimiter: str | None = None) -> Iterator[Record]:
    """One record a row, under the header's names, at the line where the row starts.

    Args:
        path: the file.
        usual: the delimiter of its format, which the header may contradict.
        delimiter: the one that the user named, which is used whatever the header looks like.
    """
    with opened(path) as stream:
        rows = _rows(stream, path, delimiter or usual)
        line, header = next(rows, (0, []))
        names = _column_names(header, path, line)
        guess = None if delimiter else _other_delimiter(header, usual)
        if guess and len(header) == 1:
            _refuse_delimiter(header, guess, usual, path, line)
        for position, (line, cells) in enumerate(rows, 1):
            if guess and position == 1 and _count(cells, guess) == _count(header, guess):
                _refuse_delimiter(header, guess, usual, path, 1)
            if len(cells) != len(names):
                reason = f"the number of cells is {len(cells)}, and {len(names)} in the header"
                advice = f"quote cells that contain {_name(delimiter or usual)}, or name another delimiter"
                raise refusal(path, f"line {line}", reason, advice)
            yield Record("line", line, dict(zip(names, cells, strict=True)))


def _rows(stream: io.BufferedReader, path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    start, chars = 1, 0

    def lines() -> Iterator[str]:
        nonlocal chars
        for _, text in text_lines(stream, path):
            chars += len(text)
            if chars > MAX_ROW_BYTES:
                reason = f"a row of more than {MAX_ROW_BYTES:,} characters"
                raise refusal(path, f"line {start}", reason, "close the quote that is open")
            yield text

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while (cells := _next_cells(reader, path, start)) is not None:
        if cells:
            yield start, cells
        start, chars = reader.line_num + 1, 0


def _next_cells(reader: Any, path: Path, start: int) -> list[str] | None:
    # csv has one limit (131,072 characters a cell) for the whole process: raise it for this call only.
    before = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        cells: list[str] | None = next(reader, None)
        return cells
    except csv.Error as error:
        reason = _REASONS.get(str(error).split(" - ")[0], str(error))
        raise refusal(path, f"line {start}", reason, "quote the cell, and double each quote inside it") from None
    finally:
        csv.field_size_limit(before)


def _column_names(header: list[str], path: Path, line: int) -> list[str]:
    names = [name or f"column_{position}" for position, name in enumerate(header, 1)]
    if (twice := repeated(names)) is not None:
        places = " and ".join(str(position) for position, name in enumerate(names, 1) if name == twice)
        reason = f"the column {shown(twice)} is there twice, at positions {places}"
        raise refusal(path, f"line {line}", reason, "rename one")
    if any("\0" in name for name in names):
        raise refusal(path, f"line {line}", "the header has a NUL character, as UTF-16 has", "save the file as UTF-8")
    return names


def _other_delimiter(header: list[str], usual: str) -> str | None:
    """A delimiter that the header's cells hold at least as often as the usual one separated them."""
    least = max(1, len(header) - 1)
    return next((other for other in _DELIMITERS if other != usual and _count(header, other) >= least), None)


def _count(cells: list[str], delimiter: str) -> int:
    return sum(cell.count(delimiter) for cell in cells)


def _name(delimiter: str) -> str:
    return _DELIMITERS.get(delimiter, repr(delimiter))


def _refuse_delimiter(header: list[str], likely: str, usual: str, path: Path, line: int) -> None:
    columns = "one column" if len(header) == 1 else f"{len(header)} columns"
    reason = (
        f"the header is {columns}, {shown(usual.join(header))}; it seems to use {_name(likely)}, not {_name(usual)}"
    )
    named = {",": "name the file .csv, or ", "\t": "name the file .tsv, or "}.get(likely, "")
    advice = f"{named}set the dataset's delimiter to {json.dumps(likely)} ({json.dumps(usual)} keeps it as it is)"
    raise refusal(path, f"line {line}", reason, advice)
