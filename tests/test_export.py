"""Facts about the tables beside generations.jsonl: every character and type comes back."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from gristmill.errors import UserError
from gristmill.export import COLUMNS, export
from gristmill.files import write_jsonl
from gristmill.types import JsonDict

TEXTS = [
    "plain",
    "",
    " spaces ",
    "a\nb",
    "a\r\nb\rc",
    'say "hi"',
    '""',
    "a,b;c\td",
    "nul \x00 and \x1a",
    "\u2028\u2029\x85\x0b\x0c",
    "é中😀",
    "\ufeffbom",
    "'=1+1",
    "null",
    "\\N",
]
REFERENCES = [None, "", "text", "7", 7, 2**70, 0.1, True, ["a", None], {"a": {"b": [1.5]}}]


def line(number: int, text: str | None = "answer", reference: Any = None, **changes: Any) -> JsonDict:
    return {
        "id": f"r{number}", "sample": 0, "variant": "", "messages": [{"role": "user", "content": text or ""}],
        "reference": reference, "row": {"text": text, "number": 7, "nested": {"x": [None, 1.5, True]}},
        "text": text, "finish_reason": "stop" if text is not None else "skipped", "prompt_tokens": 3,
        "completion_tokens": 2, "prompt_cut_tokens": 0, "seconds": 0.1 + number, "key": "0" * 32,
    } | changes  # fmt: skip


def exported(folder: Path, suffix: str, lines: list[JsonDict]) -> Path:
    write_jsonl(folder / "generations.jsonl", lines)
    export(folder / "generations.jsonl", folder / f"generations{suffix}")
    return folder / f"generations{suffix}"


def read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(10**8)
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def read_parquet(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


READERS = {".csv": read_csv, ".parquet": read_parquet}
BOTH = pytest.mark.parametrize("suffix", READERS)


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_every_character_comes_back(tmp_path: Path, suffix: str, text: str) -> None:
    original = line(1, text, text, id=text)
    (found,) = READERS[suffix](exported(tmp_path, suffix, [original]))
    assert (found["id"], found["text"], found["reference"]) == (text, text, text)
    assert json.loads(found["messages"]) == original["messages"]
    assert json.loads(found["row"]) == original["row"]


@BOTH
def test_all_columns_are_there_in_order_and_all_rows_too(tmp_path: Path, suffix: str) -> None:
    rows = READERS[suffix](exported(tmp_path, suffix, [line(number) for number in range(3)]))
    assert [tuple(row) for row in rows] == [COLUMNS] * 3
    assert [row["id"] for row in rows] == ["r0", "r1", "r2"]
    assert set(line(0)) == set(COLUMNS)


@BOTH
@pytest.mark.parametrize("reference", REFERENCES, ids=repr)
def test_a_reference_is_text_as_it_is_and_anything_else_as_json(tmp_path: Path, suffix: str, reference: Any) -> None:
    (found,) = READERS[suffix](exported(tmp_path, suffix, [line(1, reference=reference)]))
    if reference is None:
        assert found["reference"] == (None if suffix == ".parquet" else "")
    elif isinstance(reference, str):
        assert found["reference"] == reference
    else:
        assert repr(json.loads(found["reference"])) == repr(reference)


def test_parquet_tells_null_from_empty_text(tmp_path: Path) -> None:
    lines = [line(1, None, None), line(2, "", "")]
    skipped, empty = read_parquet(exported(tmp_path, ".parquet", lines))
    assert (skipped["text"], skipped["reference"]) == (None, None)
    assert (empty["text"], empty["reference"]) == ("", "")


def test_csv_tells_a_skipped_answer_from_an_empty_one_by_its_finish_reason(tmp_path: Path) -> None:
    skipped, empty = read_csv(exported(tmp_path, ".csv", [line(1, None), line(2, "")]))
    assert (skipped["text"], empty["text"]) == ("", "")
    assert (skipped["finish_reason"], empty["finish_reason"]) == ("skipped", "stop")


@BOTH
def test_numbers_come_back_exact(tmp_path: Path, suffix: str) -> None:
    numbers = {
        "sample": 3,
        "prompt_tokens": 2**40,
        "completion_tokens": 0,
        "prompt_cut_tokens": 5,
        "seconds": 0.1 + 0.2,
    }
    (found,) = READERS[suffix](exported(tmp_path, suffix, [line(1, **numbers)]))
    assert {name: type(value)(found[name]) for name, value in numbers.items()} == numbers
    if suffix == ".parquet":
        assert {name: type(found[name]) for name in numbers} == {name: type(value) for name, value in numbers.items()}


def test_whole_seconds_stay_a_float_in_parquet(tmp_path: Path) -> None:
    (found,) = read_parquet(exported(tmp_path, ".parquet", [line(1, seconds=0)]))
    assert isinstance(found["seconds"], float)


@BOTH
def test_no_answers_make_a_table_with_its_columns(tmp_path: Path, suffix: str) -> None:
    path = exported(tmp_path, suffix, [])
    assert READERS[suffix](path) == []
    names = pq.read_schema(path).names if suffix == ".parquet" else path.read_text().strip().split(",")
    assert tuple(names) == COLUMNS


def test_more_rows_than_one_parquet_chunk_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.export.CHUNK", 2)
    rows = read_parquet(exported(tmp_path, ".parquet", [line(number) for number in range(5)]))
    assert [row["id"] for row in rows] == ["r0", "r1", "r2", "r3", "r4"]


@BOTH
@pytest.mark.parametrize("column", ["text", "reference", "id"])
def test_a_lone_surrogate_is_refused_by_row_and_leaves_no_file(tmp_path: Path, suffix: str, column: str) -> None:
    lines = [line(1), line(2) | {column: "x\ud800"}]
    with pytest.raises(UserError) as caught:
        exported(tmp_path, suffix, lines)
    message = str(caught.value)
    assert message.endswith(f": {column} holds a lone surrogate; read the .jsonl instead")
    assert message.startswith("row 'x\\ud800'" if column == "id" else "row 'r2'")
    message.encode("utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["generations.jsonl"]


@BOTH
def test_a_lone_surrogate_inside_json_text_survives(tmp_path: Path, suffix: str) -> None:
    original = line(1, row={"x": "\ud800"})
    (found,) = READERS[suffix](exported(tmp_path, suffix, [original]))
    assert json.loads(found["row"]) == {"x": "\ud800"}


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"generations\.xlsx is neither \.csv nor \.parquet"):
        exported(tmp_path, ".xlsx", [line(1)])
    assert [path.name for path in tmp_path.iterdir()] == ["generations.jsonl"]


def test_likelihoods_are_columns_where_there_are_any_as_json_text(tmp_path: Path) -> None:
    labels = ["yes", "né, \ud800"]
    skipped = line(1, None, labels=labels)
    lines = [line(0, "yes", labels=labels, label_logprobs=[-0.1, -25.000000000000004]), skipped]
    for suffix, read, missing in ((".csv", read_csv, ""), (".parquet", read_parquet, None)):
        first, second = read(exported(tmp_path, suffix, lines))
        assert (json.loads(first["labels"]), json.loads(first["label_logprobs"])) == (
            labels,
            [-0.1, -25.000000000000004],
        )
        assert (json.loads(second["labels"]), second["label_logprobs"]) == (labels, missing)
        assert list(read(exported(tmp_path, suffix, [line(0)]))[0]) == list(COLUMNS)
