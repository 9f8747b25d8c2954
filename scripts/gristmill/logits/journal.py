"""What is scored already: parquet segments that jobs add to results/logits/<name>/journal, found again by key.

- A job collects rows and writes them as a segment, whole or not at all; the first after a second, later ones after up
  to EVERY_S. So a killed job loses no more than that, and nobody writes to another's file.
- A segment that cannot be read is named, renamed to `.broken` and not believed: its rows are scored again.
- After a merge the data files are linked into the journal, and segments that hold nothing else go: rows lie on the disk
  once, and Snakemake, which removes a rule's outputs before it runs again, takes nothing away.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.files import atomic_writer, write_json
from gristmill.logits.storage import DamagedLogits, LogitsFile, LogitsRow, LogitsWriter, file_rows
from gristmill.types import JsonDict

FIRST_S, EVERY_S = 1.0, 30.0
#: Values of rows that wait for their segment: 64 million take 384 MB at 6 bytes each.
MOST_VALUES = 64_000_000
#: A segment's rows are looked up one by one, in another order than they were written.
SEGMENT_GROUP_VALUES = 65_536
OPEN_FILES = 32
SUFFIX = ".parquet"
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Where:
    """A row's place in the journal."""

    path: Path
    group: int
    row: int


def find(folder: Path, log: Log) -> dict[str, Where]:
    """Key → place of every row that is scored; damaged segments are set aside."""
    found: dict[str, Where] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            for line in file_rows(path, ["key"]):
                found[line["key"]] = Where(path, line["_group"], line["_row"])
        except FileNotFoundError:  # merged into another, or set aside by another job
            continue
        except DamagedLogits as error:
            set_aside(path, str(error), log)
    return found


def set_aside(path: Path, why: str, log: Log) -> None:
    """Keep a damaged segment for people, where no job looks."""
    log(f"segment {path.name} is not used: {why}")
    with contextlib.suppress(FileNotFoundError):
        path.replace(path.with_suffix(f"{SUFFIX}.broken"))


class Lookup:
    """Rows of a journal, by place; the files that were used last stay open."""

    def __init__(self) -> None:
        """Open nothing yet."""
        self._files: OrderedDict[Path, LogitsFile] = OrderedDict()

    def row(self, where: Where) -> LogitsRow:
        """One row.

        Raises:
            DamagedLogits: its segment cannot be read.
        """
        return self._file(where.path).row(where.group, where.row)

    def metadata(self, where: Where) -> JsonDict:
        """What a row's segment says of its teacher."""
        return self._file(where.path).metadata

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, path: Path) -> LogitsFile:
        if path not in self._files:
            self._files[path] = LogitsFile(path)
            while len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(path)
        return self._files[path]


class Segments:
    """What one job adds to the journal; call `flush` at its end."""

    def __init__(self, folder: Path, name: str, metadata: Mapping[str, Any], info: JsonDict) -> None:
        """Begin; `info` says who the job is, and stands in `<segment>.json` beside its segments."""
        self._stem = f"{name}-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self._folder, self._metadata, self._info = folder, metadata, info
        self._waiting: list[LogitsRow] = []
        self._values, self._written, self._wait_s = 0, 0, FIRST_S
        self._since = self._start = time.monotonic()
        self._rows = self._positions = 0

    def add(self, row: LogitsRow) -> None:
        """Take a finished row; now and then a segment is written."""
        self._waiting.append(row)
        self._values += row.top_logprobs.size
        if time.monotonic() - self._since >= self._wait_s or self._values >= MOST_VALUES:
            self.flush()
            self._wait_s = min(EVERY_S, 2 * self._wait_s)

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            path = self._folder / f"{self._stem}-{self._written:05d}{SUFFIX}"
            with (
                atomic_writer(path, fenced=False) as handle,
                LogitsWriter(handle, self._metadata, SEGMENT_GROUP_VALUES) as writer,
            ):
                writer.write(self._waiting)
            self._rows += len(self._waiting)
            self._positions += sum(row.positions for row in self._waiting)
            self._written += 1
            self._waiting, self._values = [], 0
            seconds = round(time.monotonic() - self._start, 3)
            done = {"rows": self._rows, "positions": self._positions, "score_seconds": seconds}
            write_json(self._folder / f"{self._stem}.json", self._info | done)
        self._since = time.monotonic()


def link_merged(folder: Path, files: list[Path], merged: set[str], log: Log) -> None:
    """Let the merged files stand in for the segments that they hold all rows of."""
    stem = f"merged-{uuid.uuid4().hex[:8]}"
    links = [folder / f"{stem}-{path.name}" for path in files]
    try:
        for path, link in zip(files, links, strict=True):
            os.link(path, link)
    except OSError as error:  # a file system without links: the segments stay
        log(f"the merged files are not linked into the journal ({error.strerror}); its segments stay beside them")
        for link in links:
            link.unlink(missing_ok=True)
        return
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(DamagedLogits, FileNotFoundError):
            if path not in links and all(line["key"] in merged for line in file_rows(path, ["key"])):
                path.unlink()
