r"""Files that are never half there.

- Writing goes to a temporary name in the same folder, is fsynced, then renamed: a reader sees the old file or the new.
- Lines are split on \n only (str.splitlines would also split on U+2028, U+0085 and others that live inside strings).
- JSON is UTF-8 and exact: the standard library keeps integers over 64 bits (up to Python's 4,300 digits) and lone
  surrogates, which faster parsers round or refuse. A high and a low surrogate side by side become the one character
  that they spell: JSON has no other form for them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gristmill import fence
from gristmill.errors import UserError

#: What a disk can say no with, and what to do then.
_DISK_ERRORS = {
    errno.ENOSPC: "make room on that disk and run again; what is finished is kept",
    errno.EDQUOT: "make room within your quota and run again; what is finished is kept",
    errno.EROFS: "the disk is mounted read-only; use another folder, or mount it for writing",
    errno.EACCES: "make its folder writable and run again",
    errno.EPERM: "make its folder writable and run again",
    errno.EIO: "the disk fails; look at dmesg",
    errno.ENOTDIR: "a file stands where a folder must be; move it away",
}


#: Half of a surrogate pair: a Python str may hold one, UTF-8 may not.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
#: A temporary younger than this may not be locked by its writer yet.
NEW_S = 2.0


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
def atomic_writer(path: Path | str, fenced: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes `path` when the block ends well, and vanishes when it raises.

    Args:
        path: the file.
        fenced: whether only the run that owns the results may write it (fence.py); a journal takes what it is given.

    Raises:
        UserError: the disk does not take it (full, read-only, over quota), or the results belong to another run by now.
    """
    target = Path(path)
    with _temporary(target, lambda: _make_file(target)) as temporary:
        fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
        with os.fdopen(fd, "wb") as handle:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it is in use: see sweep
            yield handle
            handle.flush()
            os.fsync(fd)
            os.fchmod(fd, 0o666 & ~_umask())
            with fence.passed(target) if fenced else contextlib.nullcontext():
                os.replace(temporary, target)


@contextlib.contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A temporary folder that becomes `path`, in place of an earlier one, when the block ends well.

    Raises:
        UserError: as atomic_writer.
    """
    target = Path(path)
    with _temporary(target, lambda: Path(tempfile.mkdtemp(**_beside(target)))) as temporary, _held(temporary):
        yield temporary
        _readable(temporary)
        temporary.chmod(0o777 & ~_umask())
        with fence.passed(target):
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)


def _readable(folder: Path) -> None:
    """Let those read the files whom the umask lets: libraries that write by a temporary of their own leave 0600."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            if mode != (wanted := mode | (0o444 & ~_umask())):
                path.chmod(wanted)


@contextlib.contextmanager
def _temporary(target: Path, make: Callable[[], Path]) -> Iterator[Path]:
    """A temporary beside the target, gone when the block raises; what killed writers left there is removed."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent, glob.escape(target.name))
        temporary = make()
        yield temporary
        _fsync_folder(target.parent)
    except BaseException as error:
        if temporary is not None:
            _remove(temporary)
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise UserError(f"{target} cannot be written: {error.strerror}; {_DISK_ERRORS[error.errno]}") from error
        raise


def _make_file(target: Path) -> Path:
    fd, name = tempfile.mkstemp(**_beside(target))
    os.close(fd)
    return Path(name)


def _beside(target: Path) -> dict[str, Any]:
    return {"dir": target.parent, "prefix": f".{target.name}.", "suffix": ".tmp"}


@contextlib.contextmanager
def _held(temporary: Path) -> Iterator[None]:
    fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def sweep(folder: Path, names: str) -> None:
    """Remove the temporaries of writers that are gone, of targets whose names match: nobody holds a lock on them."""
    for left in folder.glob(f".{names}.*.tmp"):
        with contextlib.suppress(OSError):  # held, or swept by another
            if time.time() - left.stat().st_mtime < NEW_S:
                continue
            fd = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(left)
            finally:
                os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
    """Read JSON lines that this project wrote, one value a line, in constant memory.

    Raises:
        UserError: a line is torn or no JSON: the file is not as it was written.
    """
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                value = loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path} line {number} is no JSON ({error}); {_NOT_AS_WRITTEN}") from error
            if not line.endswith(b"\n"):
                raise UserError(f"{path} line {number} has no end; {_NOT_AS_WRITTEN}")
            yield value


_NOT_AS_WRITTEN = "the file was cut or edited; remove it and run again, and it is made anew"


def write_sealed(path: Path, values: Iterable[Any]) -> int:
    """Write JSON lines and, beside them, `<name>.sha256` as sha256sum does; returns how many lines.

    What is read later must be what was written: see check_seal.
    """
    with fence.passed(path):
        _seal_of(path).unlink(missing_ok=True)
    count = write_jsonl(path, values)
    write_bytes(_seal_of(path), f"{_sha256(path)}  {path.name}\n".encode())
    return count


def check_seal(path: Path) -> None:
    """Refuse a file that was cut or edited since it was sealed; one without a seal is taken as it is.

    Raises:
        UserError: it is not as it was written.
    """
    written = _seal_of(path)
    if written.exists() and written.read_text().split()[:1] != [_sha256(path)]:
        raise UserError(f"{path} is not what {written.name} says; {_NOT_AS_WRITTEN}")


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def with_checksum(line: dict[str, Any]) -> dict[str, Any]:
    """A line of a file between two jobs with a checksum of its columns."""
    return {"crc32": zlib.crc32(dumps(line)), **line}


def checked(line: Any) -> Any:
    """The columns of such a line.

    Raises:
        ValueError: they are not those that were written.
    """
    columns = {name: value for name, value in line.items() if name != "crc32"}
    if line.get("crc32") != zlib.crc32(dumps(columns)):
        raise ValueError("its checksum is not that of what stands there")
    return columns


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
