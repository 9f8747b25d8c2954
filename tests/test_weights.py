"""Facts about where weights are and what describes them."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.weight_files import require_whole
from gristmill.weights import fingerprint, prepare, read_description, require_prepared, stored_dtype, weights_inputs

ECHO = ModelConfig(engine="echo")
REAL = ModelConfig(source="org/model", revision="v1")
DESCRIBED = {"name": "m", "source": "org/model", "revision": "v1", "folder": "/w", "weights_hash": "abc"}
DESCRIBED |= {"commit": "c", "dtype": "bfloat16", "context_tokens": 10, "parameters": 1, "weights_bytes": 2}


def safetensors(path: Path, dtype: str, value: bytes = b"\0\0\0\0", tensor: str = "a") -> None:
    header = json.dumps({tensor: {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


# ---- descriptions


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_a_whole_description_of_the_configs_model_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.json", DESCRIBED)
    assert read_description(path, "m", REAL) == read_description(path) == DESCRIBED


@pytest.mark.parametrize("text", ["", '{"name": "m", "fol', "[]", "null", "3", '{"name": "m"}'])
def test_a_torn_description_is_refused_with_the_next_step(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"m\.json is not whole .*; remove it and run again"):
        read_description(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "n"}, "name 'n', but the config's is 'm'"),
        ({"source": "org/other"}, "source 'org/other', but the config's is 'org/model'"),
        ({"revision": None}, "revision None, but the config's is 'v1'"),
        ({"weights_hash": "echo"}, "weights_hash 'echo', but the config's engine is 'auto'"),
    ],
)
def test_the_description_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "m.json", DESCRIBED | change)
    with pytest.raises(UserError, match=said):
        read_description(path, "m", REAL)


def test_an_echo_model_is_not_described_by_real_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "m.json", DESCRIBED | {"source": None, "revision": None})
    with pytest.raises(UserError, match="weights_hash 'abc', but the config's engine is 'echo'"):
        read_description(path, "m", ECHO)


# ---- what a folder holds


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ],
    ids=str,
)
def test_the_stored_dtype_is_the_configs_or_else_that_of_the_weights(
    folder: Path, config: dict[str, Any], dtype: str
) -> None:
    write(folder / "config.json", config)
    safetensors(folder / "model.safetensors", "F32")
    assert stored_dtype(folder) == dtype


def test_weights_that_name_no_dtype_have_none(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert stored_dtype(folder) is None


def test_pickled_weights_are_watched_where_there_are_no_others(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"one")
    before = fingerprint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"two")
    assert fingerprint(folder) != before
    safetensors(folder / "model.safetensors", "F32")
    assert [path.name for path in weights_inputs(folder)] == ["config.json", "model.safetensors"]


def test_the_fingerprint_does_not_depend_on_the_folders_place_or_dates(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "config.json", {})
        safetensors(tmp_path / name / "model.safetensors", "F32")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    safetensors(tmp_path / "b" / "model.safetensors", "F32", b"\0\0\0\1")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


# ---- whether the files are whole, before any worker


@pytest.fixture
def sharded(folder: Path) -> Path:
    """A model in two files and an index, as large ones are."""
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for tensor, name in places.items():
        safetensors(folder / name, "F32", tensor=tensor)
    write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return folder


SECOND = "model-00002-of-00002.safetensors"
DAMAGES: dict[str, tuple[Any, str]] = {
    "cut in the data": (lambda path: os.truncate(path, path.stat().st_size - 1), r"has 72 bytes, .* speaks of 73"),
    "cut in the header": (lambda path: os.truncate(path, 20), "is no whole safetensors file"),
    "empty": (lambda path: os.truncate(path, 0), "is no whole safetensors file"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has 74 bytes, .* speaks of 73"),
    "git lfs pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "is no whole"),
    "no offsets": (lambda path: path.write_bytes(b"\x0f\0\0\0\0\0\0\0" + b'{"b":{"dtype":1}}'[:15]), "is no whole"),
    "missing": (Path.unlink, "lacks model-00002-of-00002.safetensors, which .*index.json names"),
    "another's": (lambda path: safetensors(path, "F32", tensor="c"), "lacks the tensors b, which .*index.json names"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_prepare_model_finds_weights_that_are_not_whole_in_one_line_that_names_them(sharded: Path, damage: str) -> None:
    do, said = DAMAGES[damage]
    do(sharded / SECOND)
    spec = {"name": "m", "model": {"source": str(sharded)}}
    words = ["--spec", json.dumps(spec), "--out", str(sharded / "described.json")]
    command = [sys.executable, str(ROOT / "scripts" / "prepare_model.py"), *words]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert re.search(said, line)
    assert "model-00002-of-00002.safetensors" in line or "tensors b" in line
    assert line.endswith("fetch it again")


def test_whole_weights_pass_in_one_file_or_in_several(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    require_whole(sharded)
    single = tmp_path_factory.mktemp("single")
    safetensors(single / "model.safetensors", "F32")
    require_whole(single)


def test_files_of_which_nothing_says_whether_they_are_all_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        require_whole(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        UserError,
        match=r"index\.json has no readable weight_map; remove the folder",
    ):
        require_whole(sharded)


# ---- whether they are still those that were prepared


@pytest.fixture
def prepared(sharded: Path) -> dict[str, Any]:
    return prepare("m", ModelConfig(source=str(sharded)), print)


def test_files_that_are_as_they_were_prepared_are_loaded_whatever_their_dates(
    prepared: dict[str, Any], sharded: Path
) -> None:
    os.utime(sharded / SECOND, (0, 0))
    assert require_prepared(prepared) == sharded


CHANGES: dict[str, tuple[Any, str]] = {
    "gone": (Path.unlink, f"{SECOND} is gone"),
    "a link to nothing": (lambda path: (path.unlink(), path.symlink_to("no-blob")), "No such file or directory"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"xyz"), f"{SECOND} has 76 bytes, had 73"),
    "other numbers": (lambda path: safetensors(path, "F32", b"\0\0\0\1", "b"), "the content of a file is another"),
    "a new file": (lambda path: write(path.with_name("generation_config.json"), {}), "generation_config.json is new"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_changed_since_are_named_with_the_next_step(
    prepared: dict[str, Any], sharded: Path, change: str
) -> None:
    do, said = CHANGES[change]
    do(sharded / SECOND)
    with pytest.raises(UserError) as caught:
        require_prepared(prepared)
    assert "no longer holds the weights of m that were prepared (" in str(caught.value)
    assert said in str(caught.value)
    assert str(caught.value).endswith("; snakemake --forcerun prepare_model")
    assert "\n" not in str(caught.value)


def test_a_description_without_file_sizes_is_held_to_its_fingerprint(prepared: dict[str, Any], sharded: Path) -> None:
    del prepared["files"]
    assert require_prepared(prepared) == sharded
    (sharded / SECOND).unlink()
    with pytest.raises(UserError, match="the content of a file is another"):
        require_prepared(prepared)
