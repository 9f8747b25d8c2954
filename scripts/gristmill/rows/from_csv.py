r"""Records out of CSV and TSV, as RFC 4180 has it: a header, then commas (tabs in .tsv) and double quotes.

- A cell is text, kept character by character: 007 stays "007", 1.50 stays "1.50", true stays "true". An empty cell is
  "", because CSV has no null. A cell may hold line ends, and as many characters as a row may have.
- A column without a name becomes column_<position from 1> (pandas writes its index as a first column without one).
- A row with more or fewer cells than the header is refused, and so are two columns of one name, a stray quote, a lone
  \r outside quotes and a header that looks as if another delimiter was used.
- Blank lines are skipped, so a file of one column must write its empty cells as "".
"""

from __future__ import annotations

import csv
import io
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


def csv_rows(path: Path, delimiter: str) -> Iterator[Record]:
    """One record a row, under the header's names, at the line where the row starts."""
    with opened(path) as stream:
        rows = _rows(stream, path, delimiter)
        line, header = next(rows, (0, []))
        names = _column_names(header, path, line, delimiter)
        for line, cells in rows:
            if len(cells) != len(names):
                reason = f"the number of cells is {len(cells)}, and {len(names)} in the header"
                raise refusal(path, f"line {line}", reason, f"quote cells that contain {_DELIMITERS[delimiter]}")
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


def _column_names(header: list[str], path: Path, line: int, delimiter: str) -> list[str]:
    names = [name or f"column_{position}" for position, name in enumerate(header, 1)]
    if (twice := repeated(names)) is not None:
        places = " and ".join(str(position) for position, name in enumerate(names, 1) if name == twice)
        reason = f"the column {shown(twice)} is there twice, at positions {places}"
        raise refusal(path, f"line {line}", reason, "rename one")
    if len(names) == 1:
        _refuse_other_delimiter(names[0], path, line, delimiter)
    return names


def _refuse_other_delimiter(name: str, path: Path, line: int, delimiter: str) -> None:
    likely = next((other for other in _DELIMITERS if other != delimiter and other in name), None)
    if likely is not None:
        reason = f"the header is one column, {shown(name)}; it seems to use {_DELIMITERS[likely]}"
        named = {",": "name the file .csv", "\t": "name the file .tsv"}.get(likely, "save it with commas")
        raise refusal(path, f"line {line}", f"{reason}, not {_DELIMITERS[delimiter]}", named)
