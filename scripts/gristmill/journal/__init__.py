"""The journal: an append-only record of finished requests, so that no row is computed twice.

- One segment file a job, written by that job alone: no shared writer, safe on NFS (segment.py).
- Every record is handed to the operating system when it is made. What a kill can cost is the rows in flight and a torn
  last line, which is dropped when read.
- A record is found by its key (keys.py), so the number of shards, the order of rows and the config's names may change.
- Every record has a checksum. A damaged one is not believed and named, and its row is asked again; the others of its
  segment stand, also below a damaged header. A segment of another format is set aside under another name; nothing is
  ever deleted for being broken.
- Failures are recorded for people and never count as answers.
- After a merge the segments of finished jobs become one (upkeep.py).

A segment is lines of JSON: {"gristmill_journal": 2}, then sections of a {"worker": …} line, records and a
{"summary": …} line. A job writes one section; a compacted segment has one for each job whose answers it keeps.
"""

from gristmill.journal.reading import read_known, workers
from gristmill.journal.segment import Segment

__all__ = ["Segment", "read_known", "workers"]
