r"""Files that are never half there.

- Writing goes to a temporary name in the same folder, is fsynced, then renamed: a reader sees the old file or the new.
- Lines are split on \n only (str.splitlines would also split on U+2028, U+0085 and others that live inside strings).
- JSON is UTF-8 and exact: the standard library keeps integers over 64 bits (up to Python's 4,300 digits) and lone
  surrogates, which faster parsers round or refuse. A high and a low surrogate side by side become the one character
  that they spell: JSON has no other form for them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any


def dumps(value: Any) -> bytes:
    """One JSON value as UTF-8 bytes without a newline; every str, int and float comes back as it was.

    Raises ValueError for NaN and infinities, which JSON does not have.
    """
    try:
        return _ENCODER.encode(value).encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form; its \\u escape does
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def loads(data: bytes | str) -> Any:
    """Parse one JSON value; NaN, infinities and numbers that would become one (1e999) raise ValueError."""
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    return _DECODER.decode(text)


def canonical(value: Any) -> bytes:
    """A byte string that equal JSON values share, for hashing: sorted keys, ASCII, no spaces."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode("ascii")


@contextlib.contextmanager
def atomic_writer(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes `path` when the block ends well, and vanishes when it raises."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
        _fsync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_writer(path) as handle:
        handle.write(data)


def write_json(path: Path | str, value: Any) -> None:
    """Write one JSON value for people: indented, UTF-8, newline at the end."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        data = (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii")
    write_bytes(path, data)


def write_jsonl(path: Path | str, values: Iterable[Any]) -> int:
    """Write JSON lines atomically; returns how many."""
    count = 0
    with atomic_writer(path) as handle:
        for value in values:
            handle.write(dumps(value) + b"\n")
            count += 1
    return count


def read_json(path: Path | str) -> Any:
    """Read one JSON value."""
    return loads(Path(path).read_bytes())


def read_jsonl(path: Path | str) -> Iterator[Any]:
    """Read JSON lines that this project wrote, one value a line, in constant memory."""
    with open(path, "rb") as handle:
        for line in handle:
            yield loads(line)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a 64-bit float")
    return value


#: Made once: json.dumps and json.loads would make one for every line.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and the file is in place
            os.fsync(fd)
    finally:
        os.close(fd)
