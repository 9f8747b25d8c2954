"""Reading a dataset in a test: its rows' columns, or the one line that it is refused with."""

from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UserError
from gristmill.rows import read_rows


def fields(path: Path, **options: Any) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in read_rows(path, **options)]


def refusal(path: Path, **options: Any) -> str:
    """The message that reading ends with: one line that names the file."""
    with pytest.raises(UserError) as caught:
        list(read_rows(path, **options))
    message = str(caught.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1
    return message
