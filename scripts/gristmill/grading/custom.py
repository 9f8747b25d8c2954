"""Metrics that a user writes: a regular expression that finds the answer, or a Python function that grades it.

- The expression is one of the `regex` package, a superset of Python's; a search may take MAX_SEARCH_SECONDS, so a
  pattern that backtracks without end stops the job with one line and does not hang it.
- The function is `(text, row) -> bool | float | None`. It is imported here and nowhere else, from the working directory
  or PYTHONPATH. `row` has the dataset's columns and `reference`. A number lies in 0…1; None says that nothing could be
  read.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from gristmill.errors import UserError
from gristmill.grading.text import last_of

MAX_SEARCH_SECONDS = 10.0
_GRADES = "true, false, a number from 0 to 1, or None"


def compiled(pattern: str) -> Any:
    """The pattern, compiled.

    Raises:
        ValueError: it is no regular expression.
    """
    import regex

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"{pattern!r} is no regular expression ({error}); correct it") from None


def last_match(pattern: Any, text: str) -> str | None:
    """What the last match has in group 1, or all of it where there is no group; None without a match.

    Raises:
        UserError: the search takes too long.
    """
    try:
        last = last_of(pattern.finditer(text, timeout=MAX_SEARCH_SECONDS))
    except TimeoutError:
        raise UserError(
            f"the pattern {pattern.pattern!r} searched for over {MAX_SEARCH_SECONDS:g} s; it backtracks without end, "
            "so write it without nested repeats"
        ) from None
    if last is None:
        return None
    found: str | None = last[1] if pattern.groups else last[0]
    return found


Function = Callable[[str, dict[str, Any]], Any]


def module_file(path: str) -> str:
    """The file, below the working directory, of a function `package.module:function`."""
    return path.partition(":")[0].replace(".", "/") + ".py"


def imported(path: str) -> Function:
    """The function at `package.module:function`; the working directory is searched first.

    Raises:
        UserError: it cannot be imported, or is no function.
    """
    module_name, _, name = path.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a module is a program: whatever it raises is its author's to mend
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"metrics: python: {path} cannot be imported ({reason}); it is looked for in {os.getcwd()} and PYTHONPATH"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise UserError(f"metrics: python: {path} is a {type(found).__name__}; name a function (text, row)")
    return found  # type: ignore[no-any-return]


def called(function: Function, path: str, text: str, row: dict[str, Any]) -> bool | float | None:
    """What the function says of one answer.

    Raises:
        UserError: it raises, or gives anything else than a grade.
    """
    try:
        value = function(text, row)
    except (Exception, SystemExit) as error:  # whatever it raises is its author's to mend
        raise UserError(
            f"{path} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}; correct the function"
        ) from error
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and 0 <= value <= 1:
        return bool(value) if value in (0, 1) else float(value)
    raise UserError(f"{path} gave {repr(value)[:80]}; return {_GRADES}")
