"""Records out of JSON and JSON lines.

- A .json file is an array of objects; or one object a line; or one object whose values are all objects, keyed by id.
  One object with any other value is one record if it stands on one line, and refused otherwise. So one line like
  {"a": {"b": 1}} under a .json name is a row with the id "a"; name the file .jsonl to make it a record.
- JSON is strict: NaN, infinities, numbers like 1e999, a key that is twice in one object, raw control characters in a
  string and more than MAX_DEPTH lists and objects inside one another are refused.
- Integers over 64 bits (up to 4,300 digits, Python's limit) and lone surrogates are kept; a float is 64 bits wide.
- JSON lines stream. An array's text is read whole but parsed item by item, so that an error knows its item.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.errors import UserError
from gristmill.rows.source import (
    MAX_DEPTH,
    Record,
    byte_lines,
    document,
    opened,
    refusal,
    repeated,
    shown,
    text_lines,
)
from gristmill.types import JsonDict

_BLANK = re.compile(r"[ \t\n\r]*")
_JSONL_ADVICE = "write one JSON object a line (an array belongs in a .json file)"
_JSON_ADVICE = "write an array of objects, one object keyed by id, or one object a line"


def json_lines(path: Path) -> Iterator[Record]:
    """One object a line; blank lines are skipped."""
    with opened(path) as stream:
        for number, text in text_lines(stream, path):
            if not text.strip(" \t\r\n"):
                continue
            where = f"line {number}"
            try:
                value = _DECODER.decode(text)
                _refuse_depth(value, text, 0, len(text))
            except (ValueError, RecursionError) as error:
                raise _broken(error, path, where, _JSONL_ADVICE, one_line=True) from None
            yield Record("line", number, _as_object(value, path, where, _JSONL_ADVICE))


def json_any(path: Path) -> Iterator[Record]:
    """A .json file: JSON lines if its first line is a whole object and more lines follow, else one document."""
    if _is_json_lines(path):
        yield from json_lines(path)
        return
    with opened(path) as stream:
        text = document(stream, path)
    start = _after_blank(text, 0)
    if start < len(text):
        yield from _array(text, start, path) if text[start] == "[" else _object(text, path)


def _is_json_lines(path: Path) -> bool:
    with opened(path) as stream:
        filled = (data for data in byte_lines(stream) if not data.isspace())
        try:
            # Syntax only: what else may be wrong with this line is for json_lines to refuse, with its number.
            return isinstance(json.loads(next(filled, b"")), dict) and next(filled, None) is not None
        except (ValueError, RecursionError):
            return False


def _array(text: str, start: int, path: Path) -> Iterator[Record]:
    end = _after_blank(text, start + 1)
    number, more = 0, text[end : end + 1] != "]"
    while more:
        number += 1
        value, end = _array_item(text, end, path, number)
        yield Record("item", number, _as_object(value, path, f"item {number}", _JSON_ADVICE))
        end = _after_blank(text, end)
        more = text[end : end + 1] == ","
        end = _after_blank(text, end + 1) if more else end
    if text[end : end + 1] != "]":
        raise _array_error("expecting ',' or ']'", text, end, path)
    if (end := _after_blank(text, end + 1)) != len(text):
        raise _array_error("more data after the array", text, end, path)


def _array_item(text: str, start: int, path: Path, number: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, start)
        _refuse_depth(value, text, start, end)
        return value, end
    except (ValueError, RecursionError) as error:
        where = f"item {number} (from line {_line_of(text, start)})"
        raise _broken(error, path, where, _JSON_ADVICE) from None


def _object(text: str, path: Path) -> Iterator[Record]:
    try:
        value = _DECODER.decode(text)
        _refuse_depth(value, text, 0, len(text))
    except (ValueError, RecursionError) as error:
        raise _broken(error, path, "", _JSON_ADVICE) from None
    whole = _as_object(value, path, "", _JSON_ADVICE)
    other = next((key for key, entry in whole.items() if not isinstance(entry, dict)), None)
    if other is None:
        for number, (key, entry) in enumerate(whole.items(), 1):
            yield Record("item", number, entry, key)
    elif "\n" not in text.strip():
        yield Record("item", 1, whole)
    else:
        reason = f"one object, but not rows keyed by id: the value of {shown(other)} is {_kind(whole[other])}"
        raise refusal(path, "", reason, _JSON_ADVICE)


def _as_object(value: Any, path: Path, where: str, advice: str) -> JsonDict:
    if isinstance(value, dict):
        return value
    raise refusal(path, where, f"{_kind(value)}, not an object", advice)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return "text"
    return "a number" if isinstance(value, int | float) else "a list"


def _broken(
    error: ValueError | RecursionError, path: Path, where: str, advice: str, *, one_line: bool = False
) -> UserError:
    if isinstance(error, RecursionError):
        reason = f"nested too deeply, over {MAX_DEPTH} lists and objects inside one another"
        return refusal(path, where, reason, "write the inner part as text")
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        place = f"column {error.colno}" if one_line else f"line {error.lineno} column {error.colno}"
        reason = f"{error.msg.removesuffix(' at').rstrip(': ')} at {place}"
    return refusal(path, where, reason, advice)


def _refuse_depth(value: Any, text: str, start: int, end: int) -> None:
    if text.count("[", start, end) + text.count("{", start, end) <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, list | dict)]
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    if any(isinstance(item, list | dict) for item in level):
        raise RecursionError


def _array_error(reason: str, text: str, position: int, path: Path) -> UserError:
    return refusal(path, f"line {_line_of(text, position)}", reason, _JSON_ADVICE)


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _after_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON, null is")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large for a 64-bit float")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonDict:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = shown(repeated(name for name, _ in pairs))
        raise ValueError(f"the key {twice} is there twice in one object")
    return fields


#: As files.loads, but it also refuses what Python would change silently: 1e999 (to infinity), a key's first value.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique_keys)
