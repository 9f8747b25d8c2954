"""The journal: an append-only record of finished requests, so that no row is computed twice.

- One segment file a job, written by that job alone: no shared writer, safe on NFS. A header names the format.
- Every record is flushed when it is made. What a kill can cost is the rows in flight and a torn last line, which is
  dropped when read.
- A record is found by its key (keys.py), so the number of shards, the order of rows and the config's names may change.
- A segment with a foreign header or a broken line in its middle is set aside under another name and said; it is never
  used, and never deleted.
- Failures are recorded for people and never count as answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO

from gristmill.codec import completion_from_json, completion_to_json, failure_to_json
from gristmill.files import dumps, loads
from gristmill.types import Completion, JsonDict, Outcome

FORMAT = 1
_KEY_PREFIX = b'{"key":"'
_SUMMARY_PREFIX = b'{"summary":'
_COMPLETION_MARK = b'","completion":'
_KEY_LENGTH = 32


class BrokenSegment(Exception):
    """A segment that cannot be trusted; the text says why."""


class Segment:
    """The segment one job writes. Use as a context manager."""

    def __init__(self, folder: Path, worker: JsonDict) -> None:
        """Prepare a segment below `folder`; the file is made with the first record.

        Args:
            folder: the journal of a run or judge target.
            worker: what is known of this job (unit, shard, engine, devices …); it goes into the header.
        """
        self._folder = folder
        self._worker = worker
        self._handle: IO[bytes] | None = None

    def append(self, key: str, outcome: Outcome) -> None:
        """Write one outcome and hand it to the operating system before returning."""
        if isinstance(outcome, Completion):
            record = {"key": key, "completion": completion_to_json(outcome)}
        else:
            record = {"key": key, "failure": failure_to_json(outcome)}
        handle = self._handle or self._open()
        handle.write(dumps(record) + b"\n")
        handle.flush()

    def summarize(self, summary: JsonDict) -> None:
        """Note what the job did (times, counts) behind its last record."""
        if self._handle is not None:
            self._handle.write(_SUMMARY_PREFIX + dumps(summary) + b"}\n")
            self._handle.flush()

    def sync(self) -> None:
        """Force what was written to the disk."""
        if self._handle is not None:
            os.fsync(self._handle.fileno())

    def __enter__(self) -> Segment:
        """Start writing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Sync and close; records stay."""
        if self._handle is not None:
            self.sync()
            self._handle.close()
            self._handle = None

    def _open(self) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        host, stamp = socket.gethostname(), time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"{stamp}-{host}-{os.getpid()}-{os.urandom(3).hex()}.jsonl"
        self._handle = open(self._folder / name, "xb")  # noqa: SIM115 - closed by __exit__
        header = {"gristmill_journal": FORMAT, "host": host, "pid": os.getpid(), **self._worker}
        self._handle.write(dumps(header) + b"\n")
        return self._handle


def read_known(folder: Path, wanted: Collection[str], log: Callable[[str], None]) -> dict[str, Completion]:
    """The completions already there for the wanted keys; broken segments are set aside and named.

    When a key was answered twice (an orphan beside its successor) the first answer found is kept.
    """
    known: dict[str, Completion] = {}
    for path in sorted(folder.glob("*.jsonl")):
        found: dict[str, Completion] = {}
        try:
            for key, completion in read_segment(path, wanted):
                found.setdefault(key, completion)
        except BrokenSegment as error:
            _set_aside(path, error, log)
            continue
        except FileNotFoundError:  # another worker has just set it aside
            continue
        known.update({key: completion for key, completion in found.items() if key not in known})
    return known


def read_segment(path: Path, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Completion]]:
    """The (key, completion) records of one segment, of the wanted keys only when given.

    Raises:
        BrokenSegment: the header is missing or foreign, or a line other than a torn last one cannot be read.
    """
    with open(path, "rb") as handle:
        header = handle.readline()
        if not header.endswith(b"\n"):
            return  # killed, or not yet done, while writing the header
        _check_header(header)
        for number, line in enumerate(handle, start=2):
            if not line.endswith(b"\n"):
                return  # a torn tail: its row is asked again
            if line.startswith(_SUMMARY_PREFIX):
                continue
            key = _key_of(line, number)
            if wanted is not None and key not in wanted:
                continue
            try:
                record = loads(line)
                if "completion" in record:
                    yield key, completion_from_json(record["completion"])
            except (ValueError, KeyError, TypeError) as error:
                raise BrokenSegment(f"line {number} cannot be read ({type(error).__name__})") from error


def workers(folder: Path, used: Collection[str]) -> list[JsonDict]:
    """Who made the answers with the given keys: each contributing segment's header and summary, and its row count.

    An answer counts once, for the segment that `read_known` takes it from.
    """
    found = []
    left = set(used)
    for path in sorted(folder.glob("*.jsonl")):
        header, summary, keys = _outline(path)
        rows = len(left & keys)
        left -= keys
        if rows:
            info = {name: value for name, value in loads(header).items() if name != "gristmill_journal"}
            found.append({**info, **(loads(summary)["summary"] if summary else {}), "rows": rows})
    return found


def _outline(path: Path) -> tuple[bytes, bytes, set[str]]:
    """A segment's header and summary lines (empty: none), and the keys of its completions."""
    summary, keys = b"", set()
    with open(path, "rb") as handle:
        header = handle.readline()
        for line in handle:
            if not line.endswith(b"\n"):
                break
            if line.startswith(_SUMMARY_PREFIX):
                summary = line
            elif line.startswith(_KEY_PREFIX) and line.startswith(_COMPLETION_MARK, len(_KEY_PREFIX) + _KEY_LENGTH):
                keys.add(_key_of(line, 0))
    return header, summary, keys


def _set_aside(path: Path, error: BrokenSegment, log: Callable[[str], None]) -> None:
    aside = path.with_name(f"{path.name}.broken")
    with contextlib.suppress(FileNotFoundError):  # another worker was faster
        os.replace(path, aside)
    log(f"journal segment {path.name} is not used: {error}; kept as {aside.name}")


def _check_header(line: bytes) -> None:
    try:
        version = loads(line).get("gristmill_journal")
    except (ValueError, AttributeError) as error:
        raise BrokenSegment("it has no journal header") from error
    if version != FORMAT:
        raise BrokenSegment(f"its format is {version}, not {FORMAT}")


def _key_of(line: bytes, number: int) -> str:
    start, end = len(_KEY_PREFIX), len(_KEY_PREFIX) + _KEY_LENGTH
    if not line.startswith(_KEY_PREFIX) or line[end : end + 1] != b'"':
        raise BrokenSegment(f"line {number} is not a record")
    return line[start:end].decode("ascii", "replace")
