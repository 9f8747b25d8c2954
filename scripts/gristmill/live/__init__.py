"""What a run is doing, read from its results folder alone while it runs.

    reader = Reader(Path("results"))
    progress = reader.read()          # again and again: only what is new is read

- Workers say how far they are in small files of their own (writing.py): results/<unit>/live/<shard>.jsonl. Where those
  are missing, as in results of an earlier version, the journal is counted instead (journals.py).
- The reader writes nothing and takes no lock: that a worker lives is seen from its process on this host, and elsewhere
  from the age of what it said last. It may start and end at any time, and files may come and go meanwhile.
"""

from gristmill.live.reading import Reader
from gristmill.live.snapshot import Device, Progress, UnitProgress, WorkerProgress

__all__ = ["Device", "Progress", "Reader", "UnitProgress", "WorkerProgress"]
