"""Facts that hold for any rows: what is in the dataset is in the merged file, once, unchanged and in its order."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from whole_way import expected, rows_of, whole_way

Folder = Callable[[], Path]
_SURROGATE = re.compile("[\ud800-\udfff]")

#: Any text that JSON can spell, lone surrogates too. A high and a low one side by side are one character in JSON.
TRAPS = st.sampled_from('\ud800\udbff\udc00\udfff\u2028\u2029\x85\r\n\0\ufeff\\"{}')
ANY_TEXT = st.text(st.characters(exclude_categories=()) | TRAPS, max_size=20).map(
    lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)
UTF8_TEXT = st.text(st.characters(codec="utf-8") | TRAPS.filter(str.isascii), max_size=20)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXT | st.sampled_from(["{{ 7*7 }}", "{% for %}", "\u2028\x85\r", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
COLUMNS = ANY_TEXT | st.sampled_from(["reference", "id", "row", "self", "items", "loop", "answer", "__class__"])
ROWS = st.lists(st.dictionaries(COLUMNS, VALUES, max_size=4), min_size=1, max_size=7)
IDS = st.integers() | st.text(
    st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=30
).filter(lambda text: text.strip() != "")
PARQUET = pa.schema(
    {
        "whole": pa.int64(),
        "float": pa.float64(),
        "truth": pa.bool_(),
        "text": pa.string(),
        "texts": pa.list_(pa.string()),
        "object": pa.struct({"a": pa.string(), "{b}": pa.list_(pa.int64())}),
    }
)
SHARDS = st.integers(1, 5)
COMMON = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Makes a folder for each example; no GPU is looked for."""
    inventory = tmp_path_factory.mktemp("machine") / "gpus.json"
    inventory.write_text("[]")
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(inventory))
    return lambda: tmp_path_factory.mktemp("example")


@COMMON
@given(rows=ROWS, shards=SHARDS, samples=st.integers(1, 2), indent=st.sampled_from([None, "\t"]), raw=st.booleans())
@example(rows=[{}], shards=5, samples=1, indent=None, raw=True)
def test_any_json_rows_reach_the_merged_file_once_unchanged_and_in_order(
    folder: Folder, rows: list[Any], shards: int, samples: int, indent: str | None, raw: bool
) -> None:
    place = folder()
    escaped = not raw or _SURROGATE.search(json.dumps(rows, ensure_ascii=False)) is not None
    lines = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows)
    (place / "a.jsonl").write_text(lines, encoding="utf-8", newline="")
    (place / "a.json").write_text(json.dumps(rows, ensure_ascii=escaped, indent=indent), encoding="utf-8", newline="")
    for name in ("a.jsonl", "a.json"):
        generations = whole_way(place / name, shards, samples, id_field=None)
        assert rows_of(generations) == [row for row in expected(rows) for _ in range(samples)]
        assert all(line["text"] == line["messages"][-1]["content"] for line in generations)
        assert [line["sample"] for line in generations] == list(range(samples)) * len(rows)


@COMMON
@given(ids=st.lists(IDS, min_size=1, max_size=12, unique_by=str), shards=SHARDS)
@example(ids=["../x", "a/b", "^", "=", ",", "a b", "{x}", "-x", "x" * 512, "é", "e\u0301", "A", "a", "#1/AB"], shards=3)
def test_any_ids_name_their_rows_to_the_end(folder: Folder, ids: list[int | str], shards: int) -> None:
    place = folder()
    (place / "a.jsonl").write_text("".join(json.dumps({"id": name, "n": n}) + "\n" for n, name in enumerate(ids)))
    generations = whole_way(place / "a.jsonl", shards)
    assert [line["id"] for line in generations] == [str(name) for name in ids]
    assert [line["row"] for line in generations] == [{"id": name, "n": n} for n, name in enumerate(ids)]
    assert [line["text"] for line in generations] == [f"{name}|{n}|" for n, name in enumerate(ids)]


@COMMON
@given(
    header=st.lists(
        UTF8_TEXT.filter(lambda name: name != "" and "\0" not in name), min_size=1, max_size=4, unique=True
    ),
    data=st.data(),
    shards=SHARDS,
    delimiter=st.sampled_from(",;\t| :§"),
    bom=st.booleans(),
)
def test_any_cells_of_a_csv_file_reach_the_merged_file_with_any_delimiter(
    folder: Folder, header: list[str], data: st.DataObject, shards: int, delimiter: str, bom: bool
) -> None:
    cells = st.lists(UTF8_TEXT, min_size=len(header), max_size=len(header))
    rows = data.draw(st.lists(cells, min_size=1, max_size=5))
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=delimiter).writerows([header, *rows])
    path = folder() / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf" * bom + buffer.getvalue().encode("utf-8"))
    generations = whole_way(path, shards, id_field=None, delimiter=delimiter)
    assert rows_of(generations) == expected([dict(zip(header, row, strict=True)) for row in rows])


@COMMON
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "whole": st.none() | st.integers(-(2**63), 2**63 - 1),
                "float": st.none() | st.floats(allow_nan=False, allow_infinity=False),
                "truth": st.none() | st.booleans(),
                "text": st.none() | UTF8_TEXT,
                "texts": st.none() | st.lists(st.none() | UTF8_TEXT, max_size=3),
                "object": st.none() | st.fixed_dictionaries({"a": UTF8_TEXT, "{b}": st.lists(st.integers(0, 9))}),
            }
        ),
        min_size=1,
        max_size=6,
    ),
    shards=SHARDS,
)
def test_any_values_of_a_parquet_file_reach_the_merged_file(folder: Folder, rows: list[Any], shards: int) -> None:
    path = folder() / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(rows, schema=PARQUET), path)
    assert rows_of(whole_way(path, shards, id_field=None)) == expected(rows)
