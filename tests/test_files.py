"""Facts about writing and reading files: whole or not at all, and every JSON value as it was."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill import files
from gristmill.errors import UserError

SCRIPTS = Path(__file__).parents[1] / "scripts"


def has_pair(text: str) -> bool:
    """A high and a low surrogate side by side: JSON can only write them as the one character they spell."""
    return any("\ud800" <= high <= "\udbff" and "\udc00" <= low <= "\udfff" for high, low in itertools.pairwise(text))


TEXTS = st.text(st.characters()).filter(lambda text: not has_pair(text))  # lone surrogates included
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8)
ODD_TEXTS = [
    "",
    "a\nb",
    "\r\n",
    "\u2028\u2029\x85\x0b\x0c\x1c",
    "\x00",
    '"\\',
    "é中😀",
    "\ud800",
    "x\udfff y",
    "\ufeff",
]


def same(left: Any, right: Any) -> bool:
    """Equal in value and type: 1, 1.0 and True are three values, and so are 0.0 and -0.0."""
    return repr(left) == repr(right)


# ---- values


@given(VALUES)
def test_any_json_value_comes_back_as_it_was(value: Any) -> None:
    assert same(files.loads(files.dumps(value)), value)


@given(VALUES)
def test_a_value_is_one_line_of_utf_8(value: Any) -> None:
    assert b"\n" not in files.dumps(value)
    files.dumps(value).decode("utf-8")


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_survives_lines_and_documents(tmp_path: Path, text: str) -> None:
    files.write_jsonl(tmp_path / "lines.jsonl", [{text: text}, text])
    files.write_json(tmp_path / "one.json", {text: text})
    assert list(files.read_jsonl(tmp_path / "lines.jsonl")) == [{text: text}, text]
    assert files.read_json(tmp_path / "one.json") == {text: text}


def test_text_that_has_a_utf_8_form_is_not_escaped() -> None:
    assert files.dumps("é中😀\u2028") == '"é中😀\u2028"'.encode()


def test_integers_over_64_bits_are_exact() -> None:
    for value in (2**63, 2**64 + 1, -(10**300) + 7):
        assert same(files.loads(files.dumps(value)), value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), [{"x": float("nan")}]])
def test_nan_and_infinities_are_not_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.dumps(value)
    with pytest.raises(ValueError, match="JSON"):
        files.canonical(value)
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", value)
    with pytest.raises(ValueError, match="JSON"):
        files.write_jsonl(tmp_path / "x.jsonl", [1, value])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "[1e999]", '{"x":-1e400}'])
def test_nan_and_infinities_are_not_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|too large"):
        files.loads(text)


@given(st.dictionaries(TEXTS, SCALARS))
def test_canonical_bytes_do_not_depend_on_the_order_of_keys(value: dict[str, Any]) -> None:
    backwards = dict(reversed(list(value.items())))
    assert files.canonical(value) == files.canonical(backwards)
    assert same(json.loads(files.canonical(value)), {key: value[key] for key in sorted(value)})


def test_canonical_bytes_tell_text_from_number_and_list_from_text() -> None:
    values = ["1", 1, True, None, "null", [1], "[1]", {"a": 1}, [["a", 1]], "é", "\\u00e9"]
    assert len({files.canonical(value) for value in values}) == len(values)


# ---- files


def test_a_crash_in_the_block_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_bytes(path, b"old")

    def crash() -> None:
        with files.atomic_writer(path) as handle:
            handle.write(b"new" * 100_000)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        crash()
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["a.txt"]


def test_a_crash_while_lines_are_made_leaves_no_file(tmp_path: Path) -> None:
    def lines() -> Any:
        yield 1
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        files.write_jsonl(tmp_path / "a.jsonl", lines())
    assert list(tmp_path.iterdir()) == []


def test_the_name_appears_only_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "a.txt"
    with files.atomic_writer(path) as handle:
        handle.write(b"all")
        handle.flush()
        assert not path.exists()
    assert path.read_bytes() == b"all"


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_bytes(path, b"old")
    program = (
        "import os, signal, sys; from gristmill.files import atomic_writer\n"
        "with atomic_writer(sys.argv[1]) as handle:\n"
        "    handle.write(b'new'); handle.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], env={"PYTHONPATH": str(SCRIPTS)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_a_new_file_has_the_rights_that_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_bytes(tmp_path / "a.txt", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_files_that_a_library_keeps_to_itself_may_be_read_in_a_finished_folder_as_the_umask_allows(
    tmp_path: Path,
) -> None:
    before = os.umask(0o027)
    try:
        with files.atomic_folder(tmp_path / "model") as folder:
            (folder / "training").mkdir()
            for name, mode in {"model.safetensors": 0o600, "training/run": 0o750}.items():
                (folder / name).touch()
                (folder / name).chmod(mode)
            (folder / "link").symlink_to(tmp_path / "nowhere")
    finally:
        os.umask(before)
    made = tmp_path / "model"
    assert (made / "model.safetensors").stat().st_mode & 0o777 == 0o640
    assert (made / "training/run").stat().st_mode & 0o777 == 0o750


def test_writing_lines_says_how_many(tmp_path: Path) -> None:
    assert files.write_jsonl(tmp_path / "a.jsonl", iter([1, None, ""])) == 3
    assert (tmp_path / "a.jsonl").read_bytes() == b'1\nnull\n""\n'
    assert files.write_jsonl(tmp_path / "b.jsonl", []) == 0
    assert list(files.read_jsonl(tmp_path / "b.jsonl")) == []


def test_a_document_for_people_is_indented_and_ends_with_a_newline(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"é": [1]})
    assert (tmp_path / "a.json").read_text("utf-8") == '{\n  "é": [\n    1\n  ]\n}\n'


# ---- a disk that says no, and what the killed leave behind


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_does_not_take_a_file_is_one_line_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, 1)

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(UserError, match=rf"a\.json cannot be written: {os.strerror(number)}; "):
        files.write_json(path, 2)
    assert files.read_json(path) == 1
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_temporaries_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    for name in (".a[1].json.dead.tmp", ".b.json.other.tmp"):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (0, 0))
    with files.atomic_writer(path) as handle:
        (mine,) = (found for found in tmp_path.iterdir() if found.name.startswith(".a") and "dead" not in found.name)
        os.utime(mine, (0, 0))
        with files.atomic_writer(path) as other:
            other.write(b"2")
        handle.write(b"1")
    assert sorted(found.name for found in tmp_path.iterdir()) == [".b.json.other.tmp", "a[1].json"]
    assert path.read_bytes() == b"1"


def test_a_folder_takes_the_place_of_another_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    with files.atomic_folder(path) as folder:
        (folder / "1").write_text("first")
    with pytest.raises(IsADirectoryError), files.atomic_folder(path) as folder:
        folder.write_text("not a file")
    assert [found.name for found in tmp_path.rglob("*")] == ["shards", "1"]
    with files.atomic_folder(path) as folder:
        (folder / "3").write_text("third")
    assert [found.name for found in tmp_path.rglob("*")] == ["shards", "3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a":1}\n{"a"', "line 2 is no JSON"),
        (b'{"a":1}\n{"a":2}', "line 2 has no end"),
        (b"\n", "line 1 is no JSON"),
        (b'{"a":NaN}\n', "line 1 is no JSON"),
        (b"[" * 200_000 + b"\n", "line 1 is no JSON"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_named_with_the_line(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    with pytest.raises(UserError, match=rf"a\.jsonl {said}.*remove it and run again"):
        list(files.read_jsonl(path))
