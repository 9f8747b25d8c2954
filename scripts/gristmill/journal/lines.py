"""The lines of a segment: how a record is written, and how a line that was read proves that it is whole."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gristmill.codec import completion_from_json, completion_to_json, failure_to_json
from gristmill.files import dumps, loads
from gristmill.types import Completion, Outcome

FORMAT = 2
HEADER = b'{"gristmill_journal":%d}\n' % FORMAT

Kind = Literal["worker", "summary", "completion", "failure", "damaged"]
_MARKS: dict[bytes, Kind] = {b'","completion":': "completion", b'","failure":': "failure"}
#: {"key":"<32 hex digits>","crc32":"<8 hex digits>","completion":…}
_RECORD = b'{"key":"'
_CRC_MARK = b'","crc32":"'
_KEY, _MARK, _CRC = slice(8, 40), slice(40, 51), slice(51, 59)
_NOTES: dict[bytes, Kind] = {b'{"worker":': "worker", b'{"summary":': "summary"}


class ForeignSegment(Exception):
    """A file that is no segment of this format; the text says why."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a segment behind its header."""

    kind: Kind
    #: Position in the file, from 1.
    number: int
    raw: bytes
    #: Of a completion or failure; empty otherwise.
    key: str = ""

    def is_whole(self) -> bool:
        """Whether a record's checksum is that of what stands there; a worker or summary has none."""
        return self.kind in _NOTES.values() or self.raw[_CRC] == _checksum(self.raw[_KEY], self.raw[_CRC.stop :])

    @property
    def may_begin_section(self) -> bool:
        """Whether a damaged line may be a worker's: it does not begin like a record. Who made the next is unknown."""
        return self.kind == "damaged" and not self.raw.startswith(_RECORD)

    def of_unknown_job(self) -> Line:
        """A worker's line in the place of this one, for a job of which nothing is known."""
        return Line("worker", self.number, note("worker", {}))

    def value(self) -> Any:
        """The JSON behind the key, or of the worker or summary."""
        found = loads(self.raw)
        return found[self.kind]

    def completion(self) -> Completion:
        """The answer of a completion's line."""
        return completion_from_json(self.value())


def record(key: str, outcome: Outcome) -> bytes:
    """The line of an outcome."""
    if isinstance(outcome, Completion):
        tail = b'","completion":' + dumps(completion_to_json(outcome)) + b"}\n"
    else:
        tail = b'","failure":' + dumps(failure_to_json(outcome)) + b"}\n"
    return b'{"key":"' + key.encode() + b'","crc32":"' + _checksum(key.encode(), tail) + tail


def note(kind: Literal["worker", "summary"], value: Any) -> bytes:
    """The line that begins a section, or ends it."""
    return dumps({kind: value}) + b"\n"


def read_lines(path: Path, wanted: Collection[bytes] | None = None) -> Iterator[Line]:
    """The lines of a segment, a torn last one left out. A record's checksum is not looked at: see Line.is_whole.

    Args:
        path: the segment.
        wanted: keys; when given, records of other keys are passed over, for a job looks through the answers of all.

    Raises:
        ForeignSegment: the header is missing or of another format.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as handle:
        header = handle.readline()
        if not header.endswith(b"\n"):
            return  # killed, or not yet done, while writing the header
        if header != HEADER:
            why = _why(header)
            if why is not None or not any(_is_record(number, raw) for number, raw in enumerate(handle, start=2)):
                raise ForeignSegment(why or "it has no journal header")
            yield Line("damaged", 1, header)  # its records prove themselves
            handle.seek(len(header))
        for number, raw in enumerate(handle, start=2):
            if not raw.endswith(b"\n"):
                return  # a torn tail: its row is asked again
            if wanted is not None and raw[_KEY] not in wanted and raw[_MARK] == _CRC_MARK:
                continue
            yield line_of(number, raw)


def line_of(number: int, raw: bytes) -> Line:
    """What a line behind the header is; it ends with its newline."""
    if raw.startswith(_RECORD):
        for mark, kind in _MARKS.items():
            if raw.startswith(mark, _CRC.stop) and raw[_MARK] == _CRC_MARK:
                return Line(kind, number, raw, raw[_KEY].decode("ascii", "replace"))
    for mark, kind in _NOTES.items():
        if raw.startswith(mark) and _is_note(raw, kind):
            return Line(kind, number, raw)
    return Line("damaged", number, raw)


def _is_note(raw: bytes, kind: Kind) -> bool:
    try:
        found = loads(raw)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == {kind} and isinstance(found[kind], dict)


def _is_record(number: int, raw: bytes) -> bool:
    line = line_of(number, raw)
    return line.kind in _MARKS.values() and line.is_whole()


def _checksum(key: bytes, tail: bytes) -> bytes:
    return b"%08x" % zlib.crc32(tail, zlib.crc32(key))


def _why(header: bytes) -> str | None:
    """Which other format a header names; None when it is no header."""
    try:
        version = loads(header)["gristmill_journal"]
    except (ValueError, KeyError, TypeError):
        return None
    return f"its format is {version}, not {FORMAT}"
