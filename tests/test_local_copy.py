"""Facts about copies of a model's files on a node's own disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, wait_until

from gristmill import local_copy, locks
from gristmill.errors import UserError
from gristmill.local_copy import local
from gristmill.types import JsonDict
from gristmill.weights import expanded, fingerprint, weights_inputs

#: Copies as a worker does, tells where it reads from, and reads until its input ends.
WORKER = """
import json, sys
from gristmill.local_copy import local
described = json.loads(sys.argv[1])
with local(described, sys.argv[2], lambda text: print(text, flush=True)) as found:
    print("reads", found["folder"], flush=True)
    sys.stdin.read()
"""

#: Copies the first file and then takes a minute for the next.
SLOW_COPIER = """
import json, shutil, sys, time
from gristmill.local_copy import local
copy = shutil.copyfile
shutil.copyfile = lambda source, target: (copy(source, target), print("copying", flush=True), time.sleep(60))
with local(json.loads(sys.argv[1]), sys.argv[2], print):
    pass
"""


def model_folder(folder: Path, content: bytes = b"w") -> JsonDict:
    """A folder that looks like a model's, and its description."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "blob").write_bytes(content * 100_000)
    (folder / "model.safetensors").symlink_to(folder / "blob")  # as in the hub's cache
    (folder / "vocabulary.tiktoken").write_text("a 1")
    (folder / "pytorch_model.bin").write_bytes(b"another form")
    files = {path.name: path.stat().st_size for path in weights_inputs(folder)}
    return {"name": "m", "folder": str(folder), "weights_hash": fingerprint(folder), "files": files}


@pytest.fixture
def described(tmp_path: Path) -> JsonDict:
    return model_folder(tmp_path / "shared")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def copies(disk: Path) -> list[Path]:
    return sorted(path for path in disk.iterdir() if "@" in path.name and not path.name.startswith("."))


def worker(described: JsonDict, disk: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(described), str(disk)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_worker_reads_from_a_copy_with_the_same_fingerprint(described: JsonDict, disk: Path) -> None:
    said: list[str] = []
    with local(described, str(disk), said.append) as found:
        folder = Path(found["folder"])
        assert found == described | {"folder": str(folder)}
        assert folder.parent == disk
        assert sorted(path.name for path in folder.iterdir()) == [
            *("blob", "config.json", "model.safetensors", "vocabulary.tiktoken"),
        ]
        assert not (folder / "model.safetensors").is_symlink()
        assert fingerprint(folder) == described["weights_hash"]
    assert [line.split(" to ")[0] for line in said] == ["copied 0.0 GB"]


def test_a_second_worker_copies_nothing(described: JsonDict, disk: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with local(described, str(disk), said.append):
            pass
    assert len(said) == 1


def test_two_workers_at_once_copy_once(described: JsonDict, disk: Path) -> None:
    workers = [worker(described, disk) for _ in range(3)]
    said = "".join(each.communicate("")[0] for each in workers)
    assert said.count("copied") == 1
    assert said.count(f"reads {disk}/m@") == 3


def test_a_copy_that_was_killed_is_made_again(described: JsonDict, disk: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_COPIER, json.dumps(described), str(disk)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "copying\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert copies(disk) == []
    with local(described, str(disk), print) as found:
        assert fingerprint(Path(found["folder"])) == described["weights_hash"]


def test_a_copy_that_was_damaged_is_made_again(described: JsonDict, disk: Path) -> None:
    with local(described, str(disk), print) as found:
        (Path(found["folder"]) / "model.safetensors").write_bytes(b"cut")
    with local(described, str(disk), print) as found:
        assert fingerprint(Path(found["folder"])) == described["weights_hash"]


def test_other_weights_replace_a_copy_that_nobody_reads(tmp_path: Path, described: JsonDict, disk: Path) -> None:
    with local(described, str(disk), print):
        pass
    trained = model_folder(tmp_path / "trained", b"v")
    with local(trained, str(disk), print) as found:
        assert copies(disk) == [Path(found["folder"])]


def test_a_copy_that_is_read_stays(tmp_path: Path, described: JsonDict, disk: Path) -> None:
    reader = worker(described, disk)
    wait_until(lambda: disk.exists() and len(copies(disk)) == 1)
    (old,) = copies(disk)
    assert reader.stdout is not None
    while not reader.stdout.readline().startswith("reads"):
        pass
    trained = model_folder(tmp_path / "trained", b"v")
    with local(trained, str(disk), print):
        assert old in copies(disk)
    reader.communicate("")
    with local(model_folder(tmp_path / "again", b"u"), str(disk), print):
        assert old not in copies(disk)


def test_without_room_the_original_is_read(described: JsonDict, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copy.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 999, 1))
    said: list[str] = []
    with local(described, str(disk), said.append) as found:
        assert found == described
    assert said == [f"no local copy: 0.0 GB, but {disk} has 0.0 GB; reading {described['folder']}"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB that says it has room."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_on_the_way_leaves_no_half_copy(
    described: JsonDict, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_copy.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 10**9))
    said: list[str] = []
    with local(described, str(small_disk), said.append) as found:
        assert found == described
    assert copies(small_disk) == []
    assert "no local copy" in said[0]
    assert f"reading {described['folder']}" in said[0]


def test_a_folder_that_cannot_be_made_is_said_and_the_original_read(described: JsonDict, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    with local(described, str(tmp_path / "file/below"), said.append) as found:
        assert found == described
    assert said == [f"no local copy in {tmp_path}/file/below: Not a directory; reading {described['folder']}"]


def test_a_copy_of_another_user_is_not_trusted(described: JsonDict, disk: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    with local(described, str(disk), print) as found:
        folder = Path(found["folder"])
    os.chown(folder, 12345, 12345)
    with local(described, str(disk), print) as found:
        assert Path(found["folder"]).stat().st_uid == 0


def test_a_model_without_weights_has_nothing_to_copy(disk: Path) -> None:
    echo: JsonDict = {"name": "echo", "folder": None, "weights_hash": "echo"}
    with local(echo, str(disk), print) as found:
        assert found == echo
    assert not disk.exists()


def test_variables_and_the_home_are_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_DISK", "/local/7")
    monkeypatch.setenv("HOME", "/home/ann")
    assert expanded("$SCRATCH_DISK/models", "key") == Path("/local/7/models")
    assert expanded("${SCRATCH_DISK}/models", "key") == Path("/local/7/models")
    assert expanded("~/models", "key") == Path("/home/ann/models")


def test_a_variable_that_is_not_set_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    with pytest.raises(
        UserError, match=r"^models.m.local_copy is '\$SLURM_TMPDIR/m', but \$SLURM_TMPDIR is not set on"
    ):
        expanded("$SLURM_TMPDIR/m", "models.m.local_copy")


def test_a_lock_that_nobody_gives_back_in_time_is_no_error(
    described: JsonDict, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_copy, "COPY_WAIT_S", 0.0)
    disk.mkdir()
    target = disk / f"m@{described['weights_hash'][:16]}"
    fd = locks.try_lock(target.with_name(f".{target.name}.copying"), "another")
    assert fd is not None
    said: list[str] = []
    start = time.monotonic()
    with local(described, str(disk), said.append) as found:
        assert found == described
    assert time.monotonic() - start < 60
    assert "is held by pid" in said[0]
    locks.release(fd)
