"""Writing: the one segment of a job."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from gristmill.errors import UserError
from gristmill.journal.lines import HEADER, note, record
from gristmill.types import JsonDict, Outcome

#: Records are with the operating system at once; they are forced to the disk this often, for the day a node dies.
SYNC_S = 5.0


class Segment:
    """The segment one job writes. Use as a context manager."""

    def __init__(self, folder: Path, worker: JsonDict) -> None:
        """Prepare a segment below `folder`; the file is made with the first record.

        Args:
            folder: the journal of a run or judge target.
            worker: what is known of this job (unit, shard, engine, devices …).
        """
        self._folder = folder
        self._worker = worker
        self._path: Path | None = None
        self._fd: int | None = None
        self._size = 0
        self._synced = 0.0

    def append(self, key: str, outcome: Outcome) -> None:
        """Write one outcome and hand it to the operating system before returning.

        Raises:
            UserError: the disk is full, or the file cannot be written; what was written before is safe.
        """
        self._write(record(key, outcome))

    def summarize(self, summary: JsonDict) -> None:
        """Note what the job did (times, counts) behind its last record."""
        if self._fd is not None:
            self._write(note("summary", summary))

    def sync(self) -> None:
        """Force what was written to the disk."""
        if self._fd is not None:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def __enter__(self) -> Segment:
        """Start writing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Sync and close; records stay."""
        if self._fd is not None:
            try:
                self.sync()
            finally:
                os.close(self._fd)
                self._fd = None

    def _write(self, data: bytes) -> None:
        """All of the data or, on an error, none of it: the next record must not be glued to half a line."""
        try:
            if self._fd is None:
                self._open()
                data = HEADER + note("worker", self._about()) + data
            assert self._fd is not None
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            self._size += len(data)
            if time.monotonic() - self._synced > SYNC_S:
                self.sync()
        except OSError as error:
            if self._fd is not None:
                os.ftruncate(self._fd, self._size)
            raise UserError(
                f"{self._path or self._folder}: an answer cannot be written: {error.strerror}; make room or make it "
                "writable and run again (the answers before it are safe)"
            ) from error

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        host, stamp = socket.gethostname(), time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._path = self._folder / f"{stamp}-{host}-{os.getpid()}-{os.urandom(3).hex()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o666)
        self._synced = time.monotonic()

    def _about(self) -> JsonDict:
        return {"host": socket.gethostname(), "pid": os.getpid(), **self._worker}
