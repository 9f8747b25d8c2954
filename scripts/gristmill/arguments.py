"""Command-line arguments that several programs share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gristmill.errors import UserError


def named_paths(flag: str, pairs: Sequence[str], what: str = "FOLDER") -> dict[str, Path]:
    """`NAME=FOLDER` arguments as a mapping in their order.

    Raises:
        UserError: an argument is not of that form, or a name is given twice.
    """
    found: dict[str, Path] = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise UserError(f"{flag} {pair} is not NAME={what}")
        if name in found:
            raise UserError(f"{flag} {name} is given twice; give each name once")
        found[name] = Path(path)
    return found
