r"""What the readers of all dataset formats share: the record, opening a file, its lines, and how a refusal reads.

- Lines end at \n only: U+2028, U+0085 and a lone \r live inside strings. UTF-8 with or without BOM; anything else is
  refused with its line and byte.
- A row has at most MAX_ROW_BYTES, and what is read whole at most MAX_DOCUMENT_BYTES after decompression: a gzip bomb or
  a quote that is never closed meets an error before it fills the memory.
- A file that is not what its name says (gzip, UTF-16, zip, a Git LFS pointer) is told from its first bytes.
- A pipe or a device is refused: a dataset is read more than once, and a pipe without a writer would be waited for.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gristmill.errors import UserError
from gristmill.types import JsonDict

MAX_ROW_BYTES = 64 * 2**20
MAX_DOCUMENT_BYTES = 2 * 2**30
#: Lists and objects inside one another. All later steps nest a row deeper, and Python's own limit is near 1,000.
MAX_DEPTH = 200
CHUNK_BYTES = 2**20

_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\x1f\x8b": "is gzip-compressed (twice, if its name ends in .gz); name it like data.jsonl.gz",
    b"\xff\xfe": "is UTF-16 or UTF-32; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"PK\x03\x04": "is a zip file (a spreadsheet is one too); unpack it, or export it as CSV",
    b"version https://git-lfs": "is a Git LFS pointer and not the data; run `git lfs pull`",
}


class Record(NamedTuple):
    """One record as the file has it. `unit` and `number` (from 1) say where; `key` is set in an object keyed by id."""

    unit: Literal["line", "item", "row"]
    number: int
    fields: JsonDict
    key: str | None = None

    @property
    def where(self) -> str:
        """The record's place for an error message: `line 17`."""
        return f"{self.unit} {self.number}"


def refusal(path: Path, where: str, reason: str, advice: str) -> UserError:
    """A one-line error: file, place (may be empty), reason, next step."""
    place = f"{path}, {where}" if where else str(path)
    return UserError(" ".join(f"{place}: {reason}; {advice}".splitlines()))


def shown(value: Any) -> str:
    """A value for an error message: its repr (which escapes line ends), cut at 60 characters."""
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def repeated(names: Iterable[str]) -> str | None:
    """The first name that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file to read its decompressed bytes; refuses one whose first bytes say that it is something else."""
    with _raw(path) as raw, io.BufferedReader(raw, CHUNK_BYTES) as stream:
        head = stream.peek(64)
        for magic, meaning in _FOREIGN.items():
            if head.startswith(magic):
                raise UserError(f"{path} {meaning}")
        if b"\0" in head[:4]:  # no text of any format begins so, and parquet begins with PAR1
            raise UserError(f"{path} is UTF-16 or UTF-32 without a byte order mark, or no text; save it as UTF-8")
        yield stream


def is_gzip(path: Path) -> bool:
    """Whether the name says that the file is gzipped."""
    return path.suffix.lower() == ".gz"


def byte_lines(stream: io.BufferedReader) -> Iterator[bytes]:
    """Each physical line with its end; one over the limit comes in pieces of MAX_ROW_BYTES + 1. The BOM is dropped."""
    read = functools.partial(stream.readline, MAX_ROW_BYTES + 1)
    first = read()
    if first:
        yield first.removeprefix(_BOM)
    yield from iter(read, b"")


def text_lines(stream: io.BufferedReader, path: Path) -> Iterator[tuple[int, str]]:
    """Each physical line with its number from 1."""
    for number, data in enumerate(byte_lines(stream), 1):
        if len(data) > MAX_ROW_BYTES:
            reason = f"longer than {MAX_ROW_BYTES:,} bytes, the most that one row may have"
            raise refusal(path, f"line {number}", reason, "end every row with \\n, or split this one")
        yield number, decoded(data, path, number)


def document(stream: io.BufferedReader, path: Path) -> str:
    """The whole file as text."""
    data = bytearray()
    while chunk := stream.read(CHUNK_BYTES):
        data += chunk
        if len(data) > MAX_DOCUMENT_BYTES:
            reason = f"over {MAX_DOCUMENT_BYTES:,} bytes, the most that is read as one JSON document"
            raise refusal(path, "", reason, "convert it to JSON lines: jq -c '.[]' data.json > data.jsonl")
    if data.startswith(_BOM):
        del data[: len(_BOM)]
    return decoded(data, path, 1)


def decoded(data: bytes | bytearray, path: Path, first_line: int) -> str:
    """Bytes as text, or the line and the byte that are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        byte = error.start - data.rfind(b"\n", 0, error.start)
        reason = f"byte {byte} of the line (0x{data[error.start]:02x}) is not UTF-8"
        raise refusal(path, f"line {line}", reason, "save the file as UTF-8") from None


def _raw(path: Path) -> Any:
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # open() says best that a folder is one
        raise refusal(path, "", "a pipe, a device or a socket, not a file", "write the rows to a file")
    return gzip.open(path, "rb") if is_gzip(path) else open(path, "rb", buffering=0)
