"""Facts about where weights are and what describes them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.weights import fingerprint, read_description, stored_dtype, weights_inputs

ECHO = ModelConfig(engine="echo")
REAL = ModelConfig(source="org/model", revision="v1")
DESCRIBED = {"name": "m", "source": "org/model", "revision": "v1", "folder": "/w", "weights_hash": "abc"}
DESCRIBED |= {"commit": "c", "dtype": "bfloat16", "context_tokens": 10, "parameters": 1, "weights_bytes": 2}


def safetensors(path: Path, dtype: str, value: bytes = b"\0\0\0\0") -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
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
