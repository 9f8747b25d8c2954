"""Numbers in columns, for people."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under each other; the last column is not padded."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in rows)


def number(value: float | None) -> str:
    """Three digits that mean something: 6,830, 41.1 or 0.05."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A ratio in percent."""
    return "-" if value is None else f"{100 * value:.1f} %"
