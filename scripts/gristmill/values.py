"""JSON values that may be anything, from files that others write or edit."""

from __future__ import annotations

#: Of any count or time; JSON may have numbers that no float holds.
MOST = 1 << 62


def number(value: object) -> float | None:
    """A JSON value that is a number of a size that anything here has; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not -MOST <= value <= MOST:
        return None
    return float(value)


def count(value: object) -> int | None:
    """A JSON value that is a number of things; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None
