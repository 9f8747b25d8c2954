"""Facts about copies of a model's files on a node's own disk."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_llama
from conftest import ROOT, Project, echo_config, wait_until

from gristmill import local_copy, locks
from gristmill.config.schema import ModelConfig
from gristmill.config.specs import ModelSpec, encode_placements
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
import json, os, sys, time
from gristmill.local_copy import local
os.fsync = lambda fd: (print("copied a file", flush=True), time.sleep(60))
with local(json.loads(sys.argv[1]), sys.argv[2], lambda text: None):
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
    assert [line.split(" to ")[0] for line in said] == ["copying 0.0 GB", "copied 0.0 GB"]


def test_a_second_worker_copies_nothing(described: JsonDict, disk: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        with local(described, str(disk), said.append):
            pass
    assert len(said) == 2


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
    assert process.stdout.readline() == "copied a file\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert copies(disk) == []
    assert len(list(disk.glob(".m@*.tmp"))) == 1
    with local(described, str(disk), print) as found:
        assert fingerprint(Path(found["folder"])) == described["weights_hash"]
    assert list(disk.glob(".m@*.tmp")) == []


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
    with local(trained, str(disk), print):  # nothing is copied, and the old one goes all the same
        assert old not in copies(disk)


def test_without_room_the_original_is_read(described: JsonDict, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copy.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 999, 1))
    said: list[str] = []
    with local(described, str(disk), said.append) as found:
        assert found == described
    assert said == [f"no local copy: 0.0 GB, but {disk} has 0.0 GB; reading {described['folder']}"]


def room_for_one(monkeypatch: pytest.MonkeyPatch, described: JsonDict) -> None:
    """A disk that what is on it leaves room for one copy only if nothing else is there."""
    size = sum(path.stat().st_size for path in Path(described["folder"]).iterdir()) + 50_000

    def usage(folder: Path) -> object:
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return shutil._ntuple_diskusage(size, used, size - used)

    monkeypatch.setattr(local_copy.shutil, "disk_usage", usage)


def large_file(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(150_000))
    return folder


@pytest.mark.parametrize("whose", ["own", "other weights"])
def test_what_a_killed_copy_left_takes_no_room_from_the_next(
    described: JsonDict, disk: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    room_for_one(monkeypatch, described)
    fingerprinted = described["weights_hash"][:16] if whose == "own" else "0123456789abcdef"
    left = large_file(disk / f".m@{fingerprinted}.left.tmp")
    os.utime(left, (1, 1))
    with local(described, str(disk), print) as found:
        assert copies(disk) == [Path(found["folder"])]
    assert not left.exists()


def test_what_was_left_this_second_takes_no_room_either(
    described: JsonDict, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for_one(monkeypatch, described)
    left = large_file(disk / f".m@{described['weights_hash'][:16]}.left.tmp")
    with local(described, str(disk), print) as found:
        assert copies(disk) == [Path(found["folder"])]
    assert not left.exists()


def test_a_damaged_copy_takes_no_room_from_the_next(
    described: JsonDict, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for_one(monkeypatch, described)
    damaged = large_file(disk / f"m@{described['weights_hash'][:16]}")
    with local(described, str(disk), print) as found:
        assert found["folder"] == str(damaged)
        assert fingerprint(damaged) == described["weights_hash"]


def test_a_copy_that_another_job_makes_of_other_weights_is_left_alone(described: JsonDict, disk: Path) -> None:
    left = large_file(disk / ".m@0123456789abcdef.busy.tmp")
    fd = os.open(left, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    os.utime(left, (1, 1))
    with local(described, str(disk), print):
        assert left.exists()
    os.close(fd)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_in_a_copys_place_is_said_before_anything_is_copied(
    described: JsonDict, disk: Path, tmp_path: Path, kind: str
) -> None:
    disk.mkdir()
    place = disk / f"m@{described['weights_hash'][:16]}"
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(described["folder"])
    said: list[str] = []
    with local(described, str(disk), said.append) as found:
        assert found == described
    assert len(said) == 1
    assert f"{place} is in the way and cannot be removed; move it away or name another folder" in said[0]
    assert os.path.lexists(place)


def test_models_whose_names_begin_alike_keep_their_copies(tmp_path: Path, described: JsonDict, disk: Path) -> None:
    with local(described | {"name": "m-large"}, str(disk), print) as found:
        large = Path(found["folder"])
    with local(described, str(disk), print), local(model_folder(tmp_path / "new", b"v"), str(disk), print):
        assert large in copies(disk)


def test_a_description_without_its_files_is_copied_as_well(described: JsonDict, disk: Path) -> None:
    old = {key: value for key, value in described.items() if key != "files"}
    with local(old, str(disk), print) as found:
        assert found == old | {"folder": str(copies(disk)[0])}


def test_a_long_copy_says_how_far_it_is(described: JsonDict, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copy, "_LOG_EVERY_S", -1.0)
    monkeypatch.setattr(local_copy, "_CHUNK_BYTES", 40_000)
    monkeypatch.setattr(local_copy, "_GB", 100_000)
    said: list[str] = []
    with local(described, str(disk), said.append):
        pass
    assert said[0] == f"copying 2.0 GB to {disk}/m@{described['weights_hash'][:16]}"
    assert said[1:4] == [f"copied {done} of 2.0 GB to {disk}" for done in (0.4, 0.8, 1.0)]


def test_weights_that_changed_since_they_were_prepared_are_refused_before_a_copy(
    described: JsonDict, disk: Path
) -> None:
    (Path(described["folder"]) / "config.json").write_text("[]")
    with (
        pytest.raises(UserError, match="no longer holds the weights of m that were prepared"),
        local(described, str(disk), print),
    ):
        pass
    assert copies(disk) == []


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
    assert list(small_disk.glob(".m@*.tmp")) == []
    assert "no local copy" in said[-1]
    assert f"reading {described['folder']}" in said[-1]


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${UNSET_DISK}/m", "but $UNSET_DISK is not set on"),
        ("${HOME:-/tmp}/m", "but $HOME:-/tmp is not set on"),
        ("$EMPTY_DISK/m", "but $EMPTY_DISK is not set on"),
        ("~nobody.of.this.name/m", "but ~nobody.of.this.name has no home on"),
    ],
)
def test_a_folder_that_means_nothing_here_is_one_line(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.delenv("UNSET_DISK", raising=False)
    monkeypatch.setenv("EMPTY_DISK", "")
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        expanded(text, "models.m.local_copy")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["cache_dir", "local_copy"])
def test_an_empty_folder_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ModelConfig.model_validate({"source": "org/model", key: ""})


@pytest.mark.parametrize("key", ["cache_dir", "local_copy"])
def test_neither_key_reaches_a_rules_params(key: str) -> None:
    model = ModelConfig.model_validate({"source": "org/model", key: "$A/b"})
    bare = ModelSpec.unplaced("m", model)
    assert bare == ModelSpec.unplaced("m", ModelConfig(source="org/model"))
    assert bare.placed(encode_placements({"m": model})).model == model


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


# ---- the whole workflow


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = {"model": "tiny", "dataset": "rows", "text_field": "question", "top_k": 4}


def answers(project: Project) -> list[tuple[str, str]]:
    return [(line["id"], line["text"]) for line in project.lines("runs/a/generations.jsonl")]


def keys(project: Project) -> set[str]:
    """Of all answers in the journal."""
    lines = [line for path in project.folder.glob("results/runs/a/journal/*.jsonl") for line in path.open()]
    return {json.loads(line)["key"] for line in lines if line.startswith('{"key"')}


@pytest.mark.slow
def test_workers_and_teachers_load_from_the_copy_and_answer_the_same_under_the_same_keys(project: Project) -> None:
    pytest.importorskip("torch")
    small_llama.make_model(project.folder / "tiny", small_llama.SIZES | TINY)
    node, model = project.folder / "node 7", {"source": "tiny", "dtype": "float32"}
    run = {"dataset": "rows", "model": "tiny", "prompt": "ask", "sampling": {"max_new_tokens": 2}}
    plain = echo_config(models={"tiny": model}, runs={"a": run}, logits={"t": TEXTS})
    copied = plain | {"models": {"tiny": model | {"local_copy": "${NODE_DISK}/models"}}}
    targets = ("results/runs/a/generations.jsonl", "results/logits/t/manifest.json")

    project.write_config(copied)
    project.done(*targets, gpu=2, NODE_DISK=str(node))
    (copy,) = copies(node / "models")
    assert fingerprint(copy) == project.value("models/tiny.json")["weights_hash"]
    assert project.value("models/tiny.json")["folder"] == "tiny"
    logs = {path.name: path.read_text() for path in project.folder.glob("results/*/*/logs/*-of-*.log")}
    assert {name.partition("-")[0] for name in logs} == {"generate", "logits"}
    assert sum(f"copied 0.0 GB to {copy}" in text for text in logs.values()) == 1
    with_copy, keys_with_copy = answers(project), keys(project)

    project.write_config(plain)
    assert "Nothing to be done" in project.done(*targets, gpu=2)
    shutil.rmtree(project.folder / "results/runs")
    project.done(targets[0], gpu=2)
    assert answers(project) == with_copy
    assert keys(project) == keys_with_copy != set()

    project.write_config(copied)
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(13))
    result = project.run(targets[0], gpu=2)
    assert result.returncode == 1
    said = "".join(path.read_text() for path in project.folder.glob("results/runs/a/logs/generate-*.log"))
    assert "models.tiny.local_copy is '${NODE_DISK}/models', but $NODE_DISK is not set on" in said
    assert "Traceback" not in said
