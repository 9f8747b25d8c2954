"""Keeping a journal small and sound: compaction at a merge, and what scripts/journal.py shows, checks and prunes.

A journal that a job writes to is left alone: its shard's lock says so. Segments go only after what replaces them is on
the disk under its name, so a kill at any point leaves every answer at least once; doubles are dropped the next time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gristmill import locks
from gristmill.errors import UserError
from gristmill.files import atomic_writer, sweep
from gristmill.journal.lines import HEADER, ForeignSegment, Line, note, read_lines
from gristmill.journal.reading import Log, believed, segments, sound_segments
from gristmill.types import JsonDict

LOCK = "upkeep.lock"


@dataclass(slots=True)
class Contents:
    """What one segment holds."""

    path: Path
    workers: list[JsonDict] = field(default_factory=list)
    answers: int = 0
    #: Answers that another job had given before, dropped by a compaction.
    doubles: int = 0
    failures: list[JsonDict] = field(default_factory=list)
    #: Lines that cannot be believed.
    damaged: list[int] = field(default_factory=list)
    #: Why it is no segment of this format; None for one that is.
    foreign: str | None = None

    @property
    def is_sound(self) -> bool:
        """Whether every line can be believed."""
        return self.foreign is None and not self.damaged


def contents(path: Path) -> Contents:
    """Read a segment to its end and check every line."""
    found = Contents(path)
    try:
        for line in read_lines(path):
            _count(found, line)
    except ForeignSegment as error:
        found.foreign = str(error)
    return found


def _count(found: Contents, line: Line) -> None:
    if line.kind == "worker":
        found.workers.append(line.value())
    elif line.kind == "damaged" or (line.kind != "summary" and not line.is_whole()):
        found.damaged.append(line.number)
    elif line.kind == "completion":
        line.completion()
        found.answers += 1
    elif line.kind == "failure":
        found.failures.append(line.value())
    else:
        found.doubles += line.value().get("doubles", 0)


def compact(folder: Path, log: Log) -> None:
    """Make one segment of many: each answer once, failures of rows that have an answer by now left out.

    Damaged segments are kept beside it under another name. Nothing happens while a job writes to the journal, and when
    there is no room: a journal in many segments serves as well.
    """
    if len(segments(folder)) < 2:
        return
    with _alone(folder) as busy:
        if busy is not None:
            log(f"journal {folder}: not compacted, {busy}")
            return
        try:
            _rewrite(folder, None, log)
        except OSError as error:
            log(f"journal {folder}: not compacted: {error.strerror}")


def prune(folder: Path, used: Collection[str], log: Log) -> None:
    """Drop the answers whose keys are not in `used` (of earlier prompts, models, rows), and all failures.

    Raises:
        UserError: a job writes to the journal.
    """
    with _alone(folder) as busy:
        if busy is not None:
            raise UserError(f"{folder}: {busy}; wait for it, then prune")
        _rewrite(folder, used, log)


def unused(folder: Path, used: Collection[str]) -> int:
    """How many answers no current request asks for."""
    wanted = frozenset(used)
    seen: set[str] = set()
    for path in segments(folder):
        seen.update(line.key for line in believed(path) if line.kind == "completion" and line.key not in wanted)
    return len(seen)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[str | None]:
    """Hold the journal's own lock; gives who else is at work, None when nobody is."""
    fd = locks.try_lock(folder / LOCK, "compaction")
    if fd is None:
        yield f"{locks.holder(folder / LOCK)} is at it"
        return
    try:
        held = [path for path in sorted(folder.glob("*.lock")) if path.name != LOCK and locks.is_held(path)]
        yield f"{locks.holder(held[0])} writes to it" if held else None
    finally:
        locks.release(fd)


def _rewrite(folder: Path, used: Collection[str] | None, log: Log) -> None:
    """Write one segment of all there are, then remove those."""
    sources, damaged = sound_segments(folder, log), set()
    left = _answered(sources, used)
    answered = frozenset(left)
    sweep(folder, "*-compacted-*.jsonl")  # of one that was killed: its name does not come again
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-compacted-{os.urandom(3).hex()}.jsonl"
    with atomic_writer(folder / name) as handle:
        handle.write(HEADER)
        for path in sources:
            section = _Section(handle)
            for line in read_lines(path):
                if line.kind in ("worker", "summary"):
                    section = section.pass_on(line)
                elif line.kind == "damaged" or not line.is_whole():
                    damaged.add(path)
                    section = section.pass_on(line.of_unknown_job()) if line.may_begin_section else section
                elif line.kind == "failure":
                    section.keep(line, used is None and line.key not in answered)
                elif line.key in answered:
                    section.keep(line, line.key in left)
                    left.discard(line.key)
            section.end()
    for path in sources:
        if path in damaged:
            os.replace(path, path.with_name(f"{path.name}.broken"))
        else:
            path.unlink()
    log(f"journal {folder}: {len(sources)} segments are one, {len(answered)} answers")


class _Section:
    """Writes one job's section of a compacted segment; one of which no answer was ever used is left out."""

    def __init__(self, handle: IO[bytes], worker: bytes = b"") -> None:
        self._handle = handle
        self._worker = worker
        self._doubles = 0

    def pass_on(self, line: Line) -> _Section:
        """A worker's line ends this section and begins another; a summary stays with the records before it."""
        if line.kind == "worker":
            self.end()
            return _Section(self._handle, line.raw)
        if not self._worker:
            self._handle.write(line.raw)
        return self

    def keep(self, line: Line, stays: bool) -> None:
        """Write a record, or count an answer that another job had given before."""
        self._doubles += line.kind == "completion" and not stays
        if stays or line.kind == "completion":
            self._handle.write(self._worker)
            self._worker = b""
        if stays:
            self._handle.write(line.raw)

    def end(self) -> None:
        """Say how many answers were doubles."""
        if self._doubles:
            self._handle.write(note("summary", {"doubles": self._doubles}))


def _answered(paths: Collection[Path], used: Collection[str] | None) -> set[str]:
    """The keys with a whole answer, of the used ones when given."""
    wanted = None if used is None else frozenset(used)
    found: set[str] = set()
    for path in paths:
        for line in read_lines(path):
            if line.kind == "completion" and (wanted is None or line.key in wanted) and line.is_whole():
                found.add(line.key)
    return found
