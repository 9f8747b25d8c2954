"""Answers of a run or judge that was renamed: its journal lies under the old name, and the new one takes it over.

- Only journals of units that the config no longer names are looked at, and only when the unit's own lacks answers.
- A segment that holds a wanted answer becomes a hard link in the unit's own journal, so that the manifest says who made
  it (its section keeps the old name) and the old folder may be removed. Where links are impossible it is copied.
- Broken segments stay where they are: they are the old unit's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from gristmill.files import atomic_writer
from gristmill.journal.lines import ForeignSegment, read_lines
from gristmill.journal.reading import segments


def adopt(folder: Path, others: Sequence[Path], wanted: Collection[str], log: Callable[[str], None]) -> int:
    """Bring the segments of other journals that answer wanted keys into a unit's own; returns how many were brought.

    Args:
        folder: the unit's journal.
        others: journals to look into.
        wanted: the keys that the unit's own journal lacks.
        log: takes messages.
    """
    if not wanted:
        return 0
    keys = frozenset(key.encode() for key in wanted)
    brought = [path for other in others for path in segments(other) if _bring(path, folder, keys)]
    for path in brought:
        log(f"answers are taken over from {path}")
    return len(brought)


def _bring(path: Path, folder: Path, keys: frozenset[bytes]) -> bool:
    target = folder / path.name
    if target.exists() or not _answers(path, keys):
        return False
    try:
        os.link(path, target)
    except FileExistsError:  # another shard of this unit was faster
        return True
    except OSError:  # a file system without hard links
        with open(path, "rb") as source, atomic_writer(target) as handle:
            shutil.copyfileobj(source, handle)
    return True


def _answers(path: Path, keys: frozenset[bytes]) -> bool:
    try:
        return any(line.kind == "completion" for line in read_lines(path, keys))
    except (ForeignSegment, OSError):
        return False
