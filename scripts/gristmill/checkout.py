"""Which gristmill this is."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit(root: Path = ROOT) -> str | None:
    """The checkout's commit, `-dirty` behind it where files were edited; None where no git knows it."""
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, another's checkout, a disk that does not answer
        return None
    return done.stdout.strip() or None
