"""How far the units of a results folder are: rows asked for, answered and failed, read from their journals.

- A journal only grows, so a second look reads what came since the first.
- Records are told apart by key and by what they hold; a row that was asked again counts once, and once it has an answer
  it has not failed. Answers to an earlier prompt count until the journal is compacted, so `done` is at most `rows`.
- When a unit's merged file is there and newer than its requests, all its rows are done.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gristmill.types import JsonDict

_READ_BYTES = 1 << 22
#: {"key":"<32 hex digits>","crc32":"<8 hex digits>","completion":… or "failure":…  (journal/lines.py)
_KEY, _KIND = slice(8, 40), 62
#: Folders of units below results/, and the file that is there when one is whole.
_KINDS = {
    "runs/*": "generations.jsonl",
    "judges/*/*": "generations.jsonl",
    "logits/*": "manifest.json",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """A run, a judge on its target, a teacher's texts, or a training (whose rows are steps)."""

    unit: str
    rows: int
    done: int
    failed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """All units of a results folder."""

    units: tuple[Unit, ...] = ()

    def as_json(self) -> list[JsonDict]:
        """The units for a file."""
        return [asdict(unit) for unit in self.units]


@dataclass(slots=True)
class _Tail:
    """What was read of a file that grows by lines."""

    inode: int = 0
    offset: int = 0
    answered: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    lines: int = 0

    def read(self, path: Path) -> None:
        """Take the lines that came since, whole ones only."""
        with open(path, "rb") as handle:
            stat = os.fstat(handle.fileno())
            if stat.st_ino != self.inode or stat.st_size < self.offset:  # replaced, or cut
                self.answered, self.failed, self.lines, self.offset = set(), set(), 0, 0
                self.inode = stat.st_ino
            handle.seek(self.offset)
            while block := handle.read(_READ_BYTES):
                whole = block[: block.rfind(b"\n") + 1]
                if not whole:
                    if len(block) < _READ_BYTES:
                        break
                    block += handle.readline()  # a line longer than a block
                    if not block.endswith(b"\n"):
                        break
                    whole = block
                self._take(whole)
                self.offset += len(whole)
                handle.seek(self.offset)

    def _take(self, block: bytes) -> None:
        for line in block.split(b"\n")[:-1]:
            self.lines += 1
            if line.startswith(b'{"key":"'):
                kind = line[_KIND:]
                (self.failed if kind.startswith(b"failure") else self.answered).add(line[_KEY])


class Reader:
    """Reads a results folder again and again; not for several threads."""

    def __init__(self, results: Path) -> None:
        """Prepare; nothing is read yet."""
        self._results = results
        self._tails: dict[Path, _Tail] = {}

    def read(self) -> Progress:
        """The units as they are now; one that is being made or removed meanwhile is left out."""
        units = []
        for pattern, merged in _KINDS.items():
            for folder in sorted(self._results.glob(pattern)):
                with contextlib.suppress(OSError):
                    units.append(self._unit(folder, merged))
        return Progress((*units, *self._trainings()))

    def _unit(self, folder: Path, merged: str) -> Unit:
        name = folder.relative_to(self._results).as_posix()
        requests = folder / "requests.jsonl"
        asked = self._tail(requests).lines
        whole = folder / merged
        if whole.exists() and whole.stat().st_mtime_ns >= requests.stat().st_mtime_ns:
            return Unit(name, asked, asked, 0)
        answered: set[bytes] = set()
        failed: set[bytes] = set()
        for segment in sorted((folder / "journal").glob("*.jsonl")):
            with contextlib.suppress(FileNotFoundError):  # compacted meanwhile
                tail = self._tail(segment)
                answered |= tail.answered
                failed |= tail.failed
        return Unit(name, asked, min(asked, len(answered)), len(failed - answered))

    def _tail(self, path: Path) -> _Tail:
        tail = self._tails.setdefault(path, _Tail())
        try:
            tail.read(path)
        except FileNotFoundError:
            del self._tails[path]
            raise
        return tail

    def _trainings(self) -> list[Unit]:
        """Steps of trainings; how many there will be stands in metrics.json, which is there at the end."""
        found = []
        for path in sorted(self._results.glob("trainings/*/steps.jsonl")):
            with contextlib.suppress(OSError):
                done = self._tail(path).lines
                found.append(Unit(path.parent.relative_to(self._results).as_posix(), done, done, 0))
        return found
