"""Reading: what is known, and who found it out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from gristmill.errors import some
from gristmill.journal.lines import ForeignSegment, Line, read_lines
from gristmill.types import Completion, JsonDict

Log = Callable[[str], None]


def segments(folder: Path) -> list[Path]:
    """A journal's segments, the oldest first; a folder, a pipe and a dangling link are none.

    A file that is compacted away while this looks stays in the list: whoever opens it must notice.
    """
    return sorted(path for path in folder.glob("*.jsonl") if path.is_file() or not (path.exists() or path.is_symlink()))


def sound_segments(folder: Path, log: Log) -> list[Path]:
    """A journal's segments of this format; others are set aside and named."""
    found: list[Path] = []
    for path in segments(folder):
        try:
            next(read_lines(path), None)
            found.append(path)
        except ForeignSegment as error:
            set_aside(path, str(error), log)
    return found


def believed(path: Path) -> Iterator[Line]:
    """The lines of a segment that can be believed; none of a foreign one.

    A damaged line that may have begun a section comes as a worker's line of a job that nothing is known of.
    """
    with contextlib.suppress(ForeignSegment):
        for line in read_lines(path):
            if line.may_begin_section:
                yield line.of_unknown_job()
            elif line.kind != "damaged" and line.is_whole():
                yield line


def read_known(folder: Path, wanted: Collection[str], log: Log) -> dict[str, Completion]:
    """The completions already there for the wanted keys.

    Foreign segments are set aside, and damaged records passed over; both are named in the log. When a key was answered
    twice (an orphan beside its successor) the first answer found is kept.
    """
    found: dict[str, Completion] = {}
    keys = frozenset(key.encode() for key in wanted)
    for path in segments(folder):
        try:
            _read(path, keys, found, log)
        except FileNotFoundError:
            if not os.path.lexists(path):  # compacted or set aside meanwhile: the answers may be elsewhere now
                return read_known(folder, wanted, log)
    return found


def _read(path: Path, keys: frozenset[bytes], found: dict[str, Completion], log: Log) -> None:
    damaged: list[int] = []
    try:
        for line in read_lines(path, keys):
            if line.kind == "damaged":
                damaged.append(line.number)
            elif line.kind == "completion" and line.key not in found:
                if line.is_whole():
                    found[line.key] = line.completion()
                else:
                    damaged.append(line.number)
    except ForeignSegment as error:
        set_aside(path, str(error), log)
    if damaged:
        numbers = some([str(number) for number in damaged])
        log(f"journal segment {path.name} is damaged in line {numbers}: these rows are asked again")


def workers(folder: Path, used: Collection[str]) -> list[JsonDict]:
    """Who made the answers with the given keys: each contributing job's worker and summary, and its row count.

    An answer counts once, for the job that `read_known` takes it from.
    """
    left = set(used)
    found: list[JsonDict] = []
    for path in segments(folder):
        current: JsonDict = {}
        for line in believed(path):
            if line.kind == "worker":
                current = {**line.value(), "rows": 0}
                found.append(current)
            elif line.kind == "summary":
                current.update(line.value())
            elif line.kind == "completion" and line.key in left:
                left.remove(line.key)
                current["rows"] += 1
    return [worker for worker in found if worker["rows"]]


def set_aside(path: Path, why: str, log: Log) -> None:
    """Rename a segment that is not used, and say so; it is never deleted."""
    aside = path.with_name(f"{path.name}.broken")
    with contextlib.suppress(FileNotFoundError):  # another worker was faster
        os.replace(path, aside)
    log(f"journal segment {path.name} is not used: {why}; kept as {aside.name}")
