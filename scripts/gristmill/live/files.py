r"""Reading files that others write: what is new of one that grows, both ends of one, the lines of one that is replaced.

- A file may be absent, vanish, be cut, replaced or rewritten between two looks: then it is read anew, or is empty. A
  last line without its \n is half written and left for the next look.
- Nothing is locked and nothing is written; no more than BLOCK_BYTES and one line are held.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.files import loads
from gristmill.types import JsonDict

BLOCK_BYTES = 1 << 20
#: Of the beginning of a file that grows, to notice that another one was written in its place.
MARK_BYTES = 256
HEAD_BYTES, END_BYTES = 1 << 16, 1 << 15


@dataclass(slots=True)
class Growing:
    """A file that is appended to, read line by line across many looks."""

    path: Path
    _offset: int = 0
    _inode: tuple[int, int] = (0, 0)
    _mark: bytes = b""

    def lines(self) -> tuple[bool, Iterator[bytes]]:
        """Whether it begins anew (what was counted is void), and the whole lines that came since the last look.

        Raises:
            FileNotFoundError: it is not there.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            stat = os.fstat(fd)
            head = os.pread(fd, MARK_BYTES, 0)
        except BaseException:
            os.close(fd)
            raise
        inode = (stat.st_dev, stat.st_ino)
        anew = inode != self._inode or stat.st_size < self._offset or not head.startswith(self._mark)
        if anew:
            self._offset = 0
        self._inode, self._mark = inode, head[: min(len(head), self._offset or MARK_BYTES)]
        return anew, self._new(fd)

    def _new(self, fd: int) -> Iterator[bytes]:
        with os.fdopen(fd, "rb", buffering=BLOCK_BYTES) as handle:
            handle.seek(self._offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for who writes, should a pipe stand in a file's place."""
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(slots=True)
class Ends:
    """The first line and the last ones of a file that may be long; read again only when it changed."""

    path: Path
    _seen: tuple[int, int, int] | None = None
    first: bytes = b""
    last: tuple[bytes, ...] = ()
    #: When it was last written, by its file system's clock; 0: it is not there.
    mtime: float = 0.0

    def look(self) -> None:
        """Read it, if it changed. One that is being rewritten keeps what it had."""
        try:
            with open(self.path, "rb", opener=_at_once) as handle:
                stat = os.fstat(handle.fileno())
                seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if seen == self._seen:
                    return
                first = handle.readline(HEAD_BYTES)
                handle.seek(max(len(first), stat.st_size - END_BYTES))
                end = handle.read(END_BYTES)
                after = os.fstat(handle.fileno())
        except OSError:
            self._seen, self.first, self.last, self.mtime = None, b"", (), 0.0
            return
        if not first.endswith(b"\n") or after.st_size < stat.st_size:
            return
        self._seen, self.first, self.mtime = seen, first, stat.st_mtime
        lines = end.split(b"\n")[:-1]  # behind the last newline is nothing, or a torn line
        self.last = tuple(lines if stat.st_size - END_BYTES <= len(first) else lines[1:])


@dataclass(slots=True)
class Counts:
    """How many lines files have that are only ever replaced as a whole; counted once."""

    _known: dict[Path, tuple[tuple[int, int, int], int]] = field(default_factory=dict)

    def lines(self, path: Path, without: bytes | None = None) -> int | None:
        """A file's lines, those that hold `without` left out; None when it is not there."""
        try:
            with open(path, "rb", opener=_at_once) as handle:
                stat = os.fstat(handle.fileno())
                seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if path not in self._known or self._known[path][0] != seen:
                    self._known[path] = seen, _lines(handle, without)
        except OSError:
            self._known.pop(path, None)
            return None
        return self._known[path][1]


def _lines(handle: Any, without: bytes | None) -> int:
    if without is not None:
        return sum(without not in line for line in handle)
    found = 0
    while block := handle.read(BLOCK_BYTES):
        found += block.count(b"\n")
    return found


def mtime(path: Path) -> float | None:
    """When a file was last written; None when it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def json_object(line: bytes) -> JsonDict | None:
    """A line's JSON object; None for what is none, such as a line that was torn."""
    try:
        value = loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
