"""A model's files on a node's own disk: copied there once a node, read by all of its workers.

- One job copies, under a lock; the others of the node wait for it. The copy is made beside its name, compared with what
  prepare_model described (sizes and fingerprint) and takes its name whole: `<model>@<fingerprint>`.
- Whoever loads from a copy holds a shared lock on it. Copies of a model's earlier weights are removed when nobody does.
- What killed jobs left and what is damaged goes before the room is counted: a disk often has room for one copy only.
- A copy is a convenience: where there is no room, or no folder that can be written, the log says so and the original is
  read. A folder of another user is not trusted, since its weights could be anyone's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gristmill import locks
from gristmill.errors import UserError
from gristmill.files import atomic_folder, sweep
from gristmill.types import JsonDict
from gristmill.weights import expanded, require_prepared, weights_inputs

Log = Callable[[str], None]
#: How long a worker waits for another one of its node that copies.
COPY_WAIT_S = 7200.0
#: Other forms of the weights, which nothing here reads.
_UNREAD = {".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".ot", ".safetensors", ".zip", ".tar", ".gz"}
_LOG_EVERY_S = 10.0
_GB = 1_000_000_000
_CHUNK_BYTES = 16 << 20


@contextlib.contextmanager
def local(described: JsonDict, local_copy: str | None, log: Log) -> Iterator[JsonDict]:
    """The description that a worker loads by, for the block: of a copy on this node where the config wants one.

    Args:
        described: results/models/<model>.json.
        local_copy: models.<name>.local_copy.
        log: takes progress messages.

    Raises:
        UserError: a variable in local_copy is not set, or the weights are not those that were prepared.
    """
    if local_copy is None or not described.get("folder"):
        yield described
        return
    root = expanded(local_copy, f"models.{described['name']}.local_copy")
    target = root / f"{described['name']}@{described['weights_hash'][:16]}"
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_in_use(target))
            there = _made(described, target, log)
        except OSError as error:
            log(f"no local copy in {root}: {error.strerror or error}; reading {described['folder']}")
            there = False
        yield described | {"folder": str(target)} if there else described


def _made(described: JsonDict, target: Path, log: Log) -> bool:
    """Have the copy, made now if need be; False where it is not to be had."""
    if _is_whole(described, target):
        _remove_others(described["name"], target, log)
        return True
    source = require_prepared(described)
    try:
        with locks.held(_beside(target, "copying"), f"copy {source}", COPY_WAIT_S, log):
            if _is_whole(described, target):  # another worker was faster
                return True
            _remove_others(described["name"], target, log)
            _make_way(described["name"], target)
            files = _files_of(source)
            need, free = sum(path.stat().st_size for path in files), shutil.disk_usage(target.parent).free
            if need > free:
                log(
                    f"no local copy: {need / _GB:.1f} GB, but {target.parent} has {free / _GB:.1f} GB; reading {source}"
                )
                return False
            with atomic_folder(target) as temporary:
                log(f"copying {need / _GB:.1f} GB to {target}")
                _copy(files, temporary, need, log)
                require_prepared(described | {"folder": str(temporary)})
            log(f"copied {need / _GB:.1f} GB to {target}")
            return True
    except UserError as error:
        log(f"no local copy: {error}; reading {source}")
        return False


def _is_whole(described: JsonDict, target: Path) -> bool:
    if target.is_symlink() or not target.is_dir() or target.stat().st_uid not in (os.getuid(), 0):
        return False
    try:
        require_prepared(described | {"folder": str(target)})
    except UserError:
        return False
    return True


def _make_way(name: str, target: Path) -> None:
    """Remove what killed jobs left of the model's copies, and a damaged copy; the target's lock is held.

    Raises:
        UserError: something is in the copy's place and stays there.
    """
    sweep(target.parent, f"{name}@*")
    for left in target.parent.glob(f".{target.name}.*.tmp"):  # under the lock also one of this second is nobody's
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    if os.path.lexists(target):
        raise UserError(f"{target} is in the way and cannot be removed; move it away or name another folder")


def _files_of(source: Path) -> list[Path]:
    """The files that the fingerprint covers, and what else is small and may be read: a tokenizer of its own form."""
    covered = set(weights_inputs(source))
    found = [path for path in source.iterdir() if path.is_file()]
    return sorted(path for path in found if path in covered or path.suffix not in _UNREAD)


def _copy(files: list[Path], folder: Path, need: int, log: Log) -> None:
    """Copy files of `need` bytes, links followed, onto the disk."""
    said, done = time.monotonic(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for path in files:
        with open(path, "rb", buffering=0) as read, open(folder / path.name, "xb") as written:
            while count := read.readinto(buffer):
                written.write(buffer[:count])
                done += count
                if time.monotonic() - said > _LOG_EVERY_S:
                    said = time.monotonic()
                    log(f"copied {done / _GB:.1f} of {need / _GB:.1f} GB to {folder.parent}")
            written.flush()
            os.fsync(written.fileno())


def _remove_others(name: str, target: Path, log: Log) -> None:
    """Remove copies of the model's other weights that nobody reads."""
    for path in target.parent.glob(f"{name}@*"):
        if path == target or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        try:
            fd = locks.try_lock(_beside(path, "use"), "remove")
        except UserError as error:
            log(f"{path}, the copy of other weights, stays: {error}")
            continue
        if fd is None:
            continue
        shutil.rmtree(path, ignore_errors=True)
        locks.release(fd)
        log(f"{'could not remove' if path.exists() else 'removed'} {path}, the copy of other weights")


@contextlib.contextmanager
def _in_use(target: Path) -> Iterator[None]:
    """A shared lock on a copy, which keeps it where it is."""
    fd = os.open(_beside(target, "use"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")
