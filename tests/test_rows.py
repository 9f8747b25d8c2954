"""Facts about the dataset readers (gristmill.rows)."""

import csv
import datetime
import decimal
import gzip
import hashlib
import io
import itertools
import json
import math
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from reading import fields, refusal

from gristmill.errors import UserError
from gristmill.files import write_jsonl
from gristmill.rows import SUFFIXES, count_up_to, format_of, from_json, from_parquet, read_rows, source

Save = Callable[[str, str | bytes], Path]
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(name: str, content: str | bytes) -> Path:
        data = content.encode("utf-8") if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def ids(path: Path, **options: Any) -> list[str]:
    return [row.id for row in read_rows(path, **options)]


def table(path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


# ---- formats and files


def test_every_format_gives_the_same_rows_plain_and_gzipped(save: Save, tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "é\nü"}, {"id": "b", "text": ""}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    packed = table(tmp_path / "x.parquet", id=["a", "b"], text=["é\nü", ""]).read_bytes()
    content: dict[str, str | bytes] = {
        ".json": json.dumps(rows, indent=1),
        ".jsonl": lines,
        ".ndjson": lines,
        ".csv": 'id,text\na,"é\nü"\nb,\n',
        ".tsv": 'id\ttext\na\t"é\nü"\nb\t\n',
        ".parquet": packed,
    }
    assert {suffix.removesuffix(".gz") for suffix in SUFFIXES} == set(content)
    for suffix in SUFFIXES:
        path = save(f"data{suffix}", content[suffix.removesuffix(".gz")])
        assert fields(path) == rows, suffix
        assert ids(path) == ["a", "b"]


def test_the_name_says_the_format_in_any_case() -> None:
    assert format_of(Path("a.b/C.JSONL.GZ")) == ".jsonl"
    assert format_of(Path("x.Csv")) == ".csv"


@pytest.mark.parametrize("name", ["data", "data.txt", "data.gz", "data.jsonl.zst", ".jsonl"])
def test_another_name_is_refused_with_the_endings_there_are(name: str) -> None:
    with pytest.raises(UserError, match=r"must end in one of \.json, .*\.parquet\.gz"):
        read_rows(Path(name))


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.csv.gz", "absent.parquet", "absent.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    assert "No such file" in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["folder.jsonl", "folder.json", "folder.csv.gz", "folder.parquet"])
def test_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert "Is a directory" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.jsonl", BOM), ("a.jsonl.gz", "")],
        *[("a.json", ""), ("a.json", " \n"), ("a.json", "[ ]"), ("a.json", "{}\n"), ("a.json", BOM)],
        *[("a.csv", ""), ("a.csv", "id,x\n"), ("a.csv", BOM), ("a.tsv", "\r\n")],
    ],
)
def test_a_file_without_rows_is_an_error(save: Save, name: str, content: str | bytes) -> None:
    assert "has no rows" in refusal(save(name, content))
    with pytest.raises(UserError, match="has no rows"):
        count_up_to(save(name, content), 3)


def test_a_parquet_file_without_rows_is_an_error(tmp_path: Path) -> None:
    assert "has no rows" in refusal(table(tmp_path / "a.parquet", id=pa.array([], pa.string())))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_a_file_that_is_something_else_is_named_for_what_it_is(save: Save, name: str) -> None:
    assert "gzip" in refusal(save(name, gzip.compress(b'{"a":1}')))
    assert "UTF-16" in refusal(save(name, '{"a":1}'.encode("utf-16")))
    assert "zip file" in refusal(save(name, b"PK\x03\x04rest"))
    assert "git lfs pull" in refusal(save(name, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"))


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix.endswith(".gz")])
def test_a_gzip_file_that_is_cut_or_none_is_refused(tmp_path: Path, suffix: str) -> None:
    whole = gzip.compress(b'{"id": "a"}\n' * 20)
    for data in (whole[:-9], whole[:15], b'{"id": "a"}\n', whole + b"trailing"):
        (tmp_path / f"data{suffix}").write_bytes(data)
        assert "damaged, cut short or not gzip" in refusal(tmp_path / f"data{suffix}", id_field=None)


def test_a_gzip_file_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'{"id": "a"}\n{"id": "b"}\n'))
    data[-8] ^= 1  # the checksum
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    assert "damaged" in refusal(tmp_path / "a.jsonl.gz")


def test_a_gzip_file_of_several_members_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "a"}\n{"i') + gzip.compress(b'd": "b"}\n') + gzip.compress(b""))
    assert ids(path) == ["a", "b"]


def bomb(prefix: bytes, mebibytes: int) -> bytes:
    squeezer = zlib.compressobj(level=1, wbits=31)
    parts = [squeezer.compress(prefix), *(squeezer.compress(b"x" * 2**20) for _ in range(mebibytes)), squeezer.flush()]
    return b"".join(parts)


@pytest.mark.parametrize(("name", "prefix"), [("a.jsonl.gz", b'{"id": "'), ("a.csv.gz", b"id\n"), ("b.csv.gz", b'"')])
def test_a_line_over_64_mib_is_refused_instead_of_filling_the_memory(tmp_path: Path, name: str, prefix: bytes) -> None:
    (tmp_path / name).write_bytes(bomb(prefix, 70))
    assert "67,108,864 bytes" in refusal(tmp_path / name)


def test_a_csv_row_that_never_ends_is_refused(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.rows.from_csv.MAX_ROW_BYTES", 1000)
    many_cells = "id,x\n1,2\n" + '"\n",' * 500
    assert "line 3: a row of more than 1,000 characters" in refusal(save("a.csv", many_cells))
    assert "line 2: a row of more than 1,000 characters" in refusal(save("b.csv", 'id,x\n"1,2\n' + "3,4\n" * 500))


def test_a_document_over_the_limit_is_refused_with_the_way_out(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 1000)
    for name in ("a.json", "a.json.gz"):
        assert "over 1,000 bytes" in refusal(save(name, json.dumps([{"x": "y" * 1000}])))
    lines = "".join(json.dumps({"id": n}) + "\n" for n in range(500))
    assert len(ids(save("lines.json", lines))) == 500


def test_an_unpacked_parquet_file_over_the_limit_is_refused(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_parquet, "MAX_DOCUMENT_BYTES", 1000)
    assert "gunzip" in refusal(save("a.parquet.gz", b"PAR1" * 1000))


# ---- text


def test_jsonl_keeps_u2028_u0085_and_escaped_carriage_returns_inside_a_string(save: Save) -> None:
    text = "a\u2028b\u2029c\u0085d\re\x0bf\x0cg\x1ch"
    line = json.dumps({"id": "x", "text": text}, ensure_ascii=False)
    assert "\u2028" in line
    assert fields(save("a.jsonl", line + "\n" + line.replace('"x"', '"y"'))) == [
        {"id": "x", "text": text},
        {"id": "y", "text": text},
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "b.json", "a.csv", "a.tsv"])
def test_a_bom_belongs_to_no_row(save: Save, name: str) -> None:
    content = {"a.jsonl": '{"id": "7"}', "a.json": '[{"id": "7"}]', "b.json": '{"id": "7"}\n{"id": "8"}'}
    path = save(name, BOM + content.get(name, 'id\n"7"\n').encode())
    assert fields(path)[0] == {"id": "7"}


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "a.csv"])
def test_crlf_line_ends_are_read(save: Save, name: str) -> None:
    content = "id,x\r\n1,2\r\n3,4\r\n" if name == "a.csv" else '{"id": "1"}\r\n\r\n{"id": "3"}\r\n'
    assert ids(save(name, content)) == ["1", "3"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_invalid_utf8_is_refused_with_line_and_byte(save: Save, name: str) -> None:
    content = b'[{"id": 1,\n"x": "caf\xe9"}]' if name == "a.json" else b'"id"\n"x": "caf\xe9"\n'
    if name == "a.jsonl":
        content = content.replace(b'"id"\n', b'{"id": 1}\n')
    assert "line 2: byte 10 of the line (0xe9) is not UTF-8" in refusal(save(name, content))


# ---- JSON


def test_jsonl_keeps_every_json_type(save: Save) -> None:
    line = '{"id": "a", "i": 123456789012345678901234567890, "f": 1.0, "t": true, "n": null, "s": "", "l": [{"x": []}]}'
    (row,) = fields(save("a.jsonl", line))
    assert row == json.loads(line)
    assert [type(row[name]) for name in "iftns"] == [int, float, bool, type(None), str]


def test_jsonl_keeps_lone_surrogate_escapes(save: Save) -> None:
    assert fields(save("a.jsonl", r'{"id": "a", "x": "\ud800"}'))[0]["x"] == "\ud800"


def test_jsonl_skips_blank_lines_but_counts_them(save: Save) -> None:
    assert "line 4" in refusal(save("a.jsonl", '\n{"id": 1}\n  \n{"id": 2\n'))
    assert ids(save("b.jsonl", '\n{"id": 1}\n  \n\n{"id": 2}')) == ["1", "2"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id": 1,}', "column 10"),
        ("{'id': 1}", "column 2"),
        ('{"id": 1} {"id": 2}', "Extra data at column 11"),
        ('{"id": "a\tb"}', "Invalid control character"),
        ('["id"]', "a list, not an object"),
        ('"id"', "text, not an object"),
        ("17", "a number, not an object"),
        ("null", "null, not an object"),
        ("true", "true, not an object"),
        ('{"id": 1, "x": NaN}', "NaN is not JSON"),
        ('{"id": 1, "x": -Infinity}', "-Infinity is not JSON"),
        ('{"id": 1, "x": 1e999}', "1e999 is too large"),
        ('{"id": 1, "x": {"k": 1, "k": 2}}', "the key 'k' is there twice"),
        ('{"id": 1, "x": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"id": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ],
)
def test_a_broken_line_is_refused_with_line_and_reason(save: Save, line: str, reason: str) -> None:
    for name in ("a.jsonl", "a.json"):
        message = refusal(save(name, f'{{"id": 0}}\n{line}\n'))
        assert "line 2: " in message
        assert reason in message


def test_rows_before_a_broken_line_come_out(save: Save) -> None:
    rows = read_rows(save("a.jsonl", '{"id": 1}\n{"id": 2}\nbroken\n'))
    assert [row.id for row in itertools.islice(rows, 2)] == ["1", "2"]
    with pytest.raises(UserError, match="line 3"):
        next(rows)


def test_an_array_in_a_jsonl_file_is_pointed_to_json(save: Save) -> None:
    assert "an array belongs in a .json file" in refusal(save("a.jsonl", '[\n{"id": 1}\n]\n'))


def test_json_lines_under_a_json_name_are_read(save: Save) -> None:
    assert ids(save("a.json", '\n{"id": 1}\n\n{"id": 2}\n')) == ["1", "2"]


def test_json_lines_that_hold_objects_of_objects_are_no_keyed_object(save: Save) -> None:
    assert fields(save("a.json", '{"a": {"x": 1}}\n{"a": {"x": 2}}\n')) == [{"a": {"x": 1}}, {"a": {"x": 2}}]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_keyed_by_id_gives_its_keys_as_ids(save: Save, indent: int | None) -> None:
    path = save("a.json", json.dumps({"q1": {"x": 1}, "q2": {}}, indent=indent))
    assert ids(path) == ["q1", "q2"]
    assert fields(path) == [{"x": 1}, {}]


def test_a_keyed_row_with_an_id_of_its_own_keeps_it(save: Save) -> None:
    path = save("a.json", '{"0": {"id": "first"}, "1": {"id": null}}')
    assert ids(path) == ["first", "1"]
    assert all(name.startswith("row-") for name in ids(path, id_field=None))


def test_one_json_object_on_one_line_is_one_row(save: Save) -> None:
    assert fields(save("a.json", '{"id": "only", "x": {"y": 1}}\n')) == [{"id": "only", "x": {"y": 1}}]


def test_one_json_object_on_several_lines_is_refused(save: Save) -> None:
    assert "the value of 'b' is a number" in refusal(save("a.json", '{\n"a": {},\n"b": 2}'))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"id": 1}, 7]', "item 2: a number, not an object"),
        ("[null]", "item 1: null, not an object"),
        ('[{"id": 1},\n{"id": 2},\n]', "item 3 (from line 3): Expecting value at line 3 column 1"),
        ('[{"id": 1}\n{"id": 2}]', "line 2: expecting ',' or ']'"),
        ('[{"id": 1}', "line 1: expecting ',' or ']'"),
        ('[{"id": 1}]\n[]', "line 2: more data after the array"),
        ('[{"id": 1},\n {"id": 2, "x": NaN}]', "item 2 (from line 2): NaN"),
        ("[", "item 1 (from line 1): Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ('{"id": 1,\n"x" 2}', "Expecting ':' delimiter at line 2 column 5"),
        ('{"a": {},\n"a": {}}', "the key 'a' is there twice"),
        ('{\n"id": 1}\n{\n"id": 2}', "Extra data at line 3 column 1"),
        ("7", "a number, not an object"),
    ],
)
def test_a_broken_document_is_refused_with_its_place(save: Save, content: str, reason: str) -> None:
    assert reason in refusal(save("a.json", content))


# ---- CSV


def test_csv_cells_stay_the_characters_they_are(save: Save) -> None:
    path = save("a.csv", "id,a,b,c,d\n007,1.50,true, x ,\n")
    assert fields(path) == [{"id": "007", "a": "1.50", "b": "true", "c": " x ", "d": ""}]
    assert ids(path) == ["007"]


def test_csv_cells_hold_line_ends_quotes_and_delimiters(save: Save) -> None:
    text = 'a\nb\rc\r\nd,e"f\u2028g\x85h'
    path = save("a.csv", 'id,x\r\n1,"a\nb\rc\r\nd,e""f\u2028g\x85h"\r\n2,y\r\n')
    assert [row["x"] for row in fields(path)] == [text, "y"]


def test_csv_cells_may_be_longer_than_the_csv_modules_limit(save: Save) -> None:
    csv.field_size_limit(131_072)  # the default
    rows = read_rows(save("a.csv", f"id,x\n1,{'y' * 200_000}\n2,z\n"))
    assert len(next(rows).fields["x"]) == 200_000
    assert csv.field_size_limit() == 131_072


def test_csv_errors_name_the_physical_line_where_the_row_starts(save: Save) -> None:
    assert "line 5: the number of cells is 1, and 2 in the header" in refusal(save("a.csv", 'id,x\n1,"a\nb"\n\n3\n'))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("id,x\n1\n", "line 2: the number of cells is 1, and 2 in the header"),
        ("id,x\n1,2,3\n", "line 2: the number of cells is 3, and 2 in the header"),
        ("id,x\n1,2\n  \n", "line 3: the number of cells is 1"),
        ('id,x\n1,"a\n2,b\n', "line 2: a quote that opens in this row is never closed"),
        ('id,x\n1,"a"b\n', "line 2: ',' expected after '\"'"),
        ("id,x\r1,2\r", "line 1: a lone carriage return outside quotes"),
        ("id,x,id\n1,2,3\n", "line 1: the column 'id' is there twice, at positions 1 and 3"),
        ("id,,column_2\n1,2,3\n", "the column 'column_2' is there twice, at positions 2 and 3"),
        ("id;x\n1;2\n", 'it seems to use semicolons, not commas; set the dataset\'s delimiter to ";"'),
        ("id\tx\n1\t2\n", "it seems to use tabs, not commas; name the file .tsv"),
        ("id|x\n1|2\n", "it seems to use bars (|), not commas"),
    ],
)
def test_a_broken_csv_is_refused_with_line_and_reason(save: Save, content: str, reason: str) -> None:
    assert reason in refusal(save("a.csv", content), id_field=None)


def test_a_tsv_with_commas_is_refused(save: Save) -> None:
    assert "it seems to use commas, not tabs; name the file .csv" in refusal(save("a.tsv", "id,x\n1,2\n"))


def test_csv_columns_without_a_name_get_one_by_position(save: Save) -> None:
    path = save("a.csv", ",x,\n0,a,b\n")
    assert fields(path) == [{"column_1": "0", "x": "a", "column_3": "b"}]
    assert ids(path, id_field="column_1") == ["0"]


def test_csv_skips_blank_lines_and_keeps_quoted_empty_cells(save: Save) -> None:
    assert fields(save("a.csv", '\nx\na\n\n""\n\n\n')) == [{"x": "a"}, {"x": ""}]


# ---- parquet


def test_parquet_keeps_json_types_and_nesting(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "b": True, "f": 0.5, "s": "", "l": [{"x": ["a", None]}], "st": {"y": 2**62}, "e": None},
        {"id": 2, "b": None, "f": None, "s": None, "l": [], "st": None, "e": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert fields(tmp_path / "a.parquet") == rows
    assert ids(tmp_path / "a.parquet") == ["1", "2"]


def test_parquet_times_and_decimals_become_text_with_every_digit(tmp_path: Path) -> None:
    moment = 1577836800123456789
    columns = {
        "ns": pa.array([moment], pa.timestamp("ns")),
        "zone": pa.array([moment], pa.timestamp("ns", tz="UTC")),
        "nested": pa.array([[{"t": moment}]], pa.list_(pa.struct([("t", pa.timestamp("ns"))]))),
        "date": pa.array([datetime.date(2020, 1, 2)]),
        "time": pa.array([datetime.time(1, 2, 3, 4)]),
        "decimal": pa.array([decimal.Decimal("12345678901234567890.10")], pa.decimal128(30, 2)),
    }
    assert fields(table(tmp_path / "a.parquet", **columns)) == [
        {
            "ns": "2020-01-01 00:00:00.123456789",
            "zone": "2020-01-01 00:00:00.123456789Z",
            "nested": [{"t": "2020-01-01 00:00:00.123456789"}],
            "date": "2020-01-02",
            "time": "01:02:03.000004",
            "decimal": "12345678901234567890.10",
        }
    ]


def test_parquet_categories_maps_and_small_floats_become_json(tmp_path: Path) -> None:
    columns = {
        "category": pa.array(["a"]).dictionary_encode(),
        "map": pa.array([[(1, "x"), (2, None)]], pa.map_(pa.int64(), pa.string())),
        "single": pa.array([0.1], pa.float32()),
        "fixed": pa.array([[1, 2]], pa.list_(pa.int32(), 2)),
    }
    (row,) = fields(table(tmp_path / "a.parquet", **columns))
    assert row["category"] == "a"
    assert row["map"] == [{"key": 1, "value": "x"}, {"key": 2, "value": None}]
    assert row["single"] == pytest.approx(0.1)
    assert type(row["single"]) is float
    assert row["fixed"] == [1, 2]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([b"x"]), "binary"),
        (pa.array([[{"y": b"x"}]]), "binary"),
        (pa.array([1], pa.duration("s")), "duration"),
    ],
)
def test_parquet_bytes_and_durations_are_refused_by_column(tmp_path: Path, column: pa.Array, kind: str) -> None:
    assert f"the column 'image' holds {kind}" in refusal(table(tmp_path / "a.parquet", id=["a"], image=column))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parquet_nan_is_refused_with_row_and_column(tmp_path: Path, bad: float) -> None:
    flat = table(tmp_path / "a.parquet", x=pa.array([1.0, None, bad]))
    nested = table(tmp_path / "b.parquet", x=pa.array([[{"y": [1.0]}], None, [{"y": [bad]}]]))
    for path in (flat, nested):
        assert "row 3: the column 'x' holds NaN or an infinity" in refusal(path)


def test_parquet_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), tmp_path / "a.parquet")
    assert "the column 'x' is there twice" in refusal(tmp_path / "a.parquet")


def test_a_damaged_parquet_file_is_refused(save: Save, tmp_path: Path) -> None:
    whole = table(tmp_path / "whole.parquet", x=["y" * 50] * 1000).read_bytes()
    for data in (b"", b"PAR1", b"no parquet", whole[:-20], whole[:60] + b"\xff" * 60 + whole[120:]):
        assert "not readable as parquet" in refusal(save("a.parquet", data))


def test_parquet_reads_over_several_batches_in_order(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", id=list(range(1000)))
    assert ids(path) == [str(number) for number in range(1000)]
    assert count_up_to(path, 2000) == 1000


def test_parquet_gz_leaves_no_temporary_file(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    path = save("a.parquet.gz", table(tmp_path / "a.parquet", id=[1, 2, 3]).read_bytes())
    rows = read_rows(path)
    next(rows)
    assert list(temporary.iterdir()) != []
    rows.close()  # type: ignore[attr-defined]
    assert ids(path, max_rows=1) == ["1"]
    assert list(temporary.iterdir()) == []


# ---- ids


def test_an_int_id_becomes_text_and_stays_a_number_in_the_fields(save: Save) -> None:
    path = save("a.jsonl", '{"id": 7}')
    assert ids(path) == ["7"]
    assert fields(path) == [{"id": 7}]


@pytest.mark.parametrize("second", ['"7"', "7"])
def test_a_duplicate_id_is_refused_with_both_lines(save: Save, second: str) -> None:
    message = refusal(save("a.jsonl", f'{{"id": 7}}\n\n{{"id": 8}}\n{{"id": {second}}}\n'))
    assert "the id '7' is there twice, at line 1 and line 4" in message


def test_a_duplicate_id_in_an_array_or_parquet_is_refused_with_both_positions(save: Save, tmp_path: Path) -> None:
    assert "at item 1 and item 3" in refusal(save("a.json", '[{"id": "a"}, {"id": "b"}, {"id": "a"}]'))
    assert "at row 1 and row 3" in refusal(table(tmp_path / "a.parquet", id=["a", "b", "a"]))


def test_a_row_without_an_id_gets_one_from_position_and_content(save: Save) -> None:
    content = '{"x": 1, "y": 2}\n{"id": null, "x": 1}\n{"id": "own"}\n{"x": 1, "y": 2}\n'
    first, second, third, fourth = ids(save("a.jsonl", content))
    assert first == "row-000001-" + hashlib.sha256(b'{"x":1,"y":2}').hexdigest()[:8]
    assert second == "row-000002-" + hashlib.sha256(b'{"id":null,"x":1}').hexdigest()[:8]
    assert third == "own"
    assert fourth == first.replace("000001", "000004")


def test_a_derived_id_ignores_key_order_blank_lines_and_renaming(save: Save) -> None:
    first = ids(save("a.jsonl", '{"x": 1, "y": 2}\n{"x": 3}'))
    second = ids(save("b.jsonl", '\n{"y": 2, "x": 1}\n\n{"x": 3}'), rename={"z": "x"})
    assert first == second


def test_id_field_none_derives_every_id(save: Save) -> None:
    path = save("a.jsonl", '{"id": "same"}\n{"id": "same"}\n')
    first, second = ids(path, id_field=None)
    assert first.startswith("row-000001-")
    assert second.startswith("row-000002-")
    assert fields(path, id_field=None) == [{"id": "same"}, {"id": "same"}]


def test_a_given_id_that_equals_a_derived_one_is_refused(save: Save) -> None:
    derived = ids(save("a.jsonl", '{"x": 1}'))[0]
    assert "is there twice" in refusal(save("b.jsonl", f'{{"x": 1}}\n{{"id": "{derived}"}}\n'))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1.0", "is a float"),
        ("true", "is true or false"),
        ("[1]", "is a list"),
        ('{"a": 1}', "is an object"),
        ('""', "is blank"),
        ('" "', "is blank"),
        (json.dumps("x" * 513), "has 513 characters, more than 512"),
        (r'"a\nb"', "has a control character"),
        (r'"a\u0085b"', "has a control character"),
        (r'"a\u2028b"', "has a control character"),
        (r'"a\ud800"', "a lone surrogate"),
    ],
)
def test_an_unusable_id_is_refused_with_its_line(save: Save, value: str, reason: str) -> None:
    message = refusal(save("a.jsonl", f'{{"id": "ok"}}\n{{"id": {value}}}\n'))
    assert "line 2: the id" in message
    assert reason in message


@pytest.mark.parametrize("value", ["HumanEval/0", "日本\u3000語", "a b", "-1", "x" * 512, "👩‍👩‍👧"])
def test_any_printable_text_is_an_id(save: Save, value: str) -> None:
    assert ids(save("a.jsonl", json.dumps({"id": value}))) == [value]


def test_a_float_id_column_in_parquet_is_refused(tmp_path: Path) -> None:
    assert "row 1: the id is a float" in refusal(table(tmp_path / "a.parquet", id=[1.0, None]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_named_id_field_that_no_row_has_is_refused_with_the_columns(save: Save, name: str) -> None:
    content = "x,y\n1,2\n" if name == "a.csv" else '{"x": 1, "y": 2}\n' * 2
    message = refusal(save(name, content), id_field="question_id")
    assert "no row has the id_field 'question_id'; the columns are 'x', 'y'" in message


def test_a_csv_without_the_named_id_field_is_refused_before_the_first_row(save: Save) -> None:
    with pytest.raises(UserError, match="question_id"):
        next(read_rows(save("a.csv", "x\n1\n2\n"), id_field="question_id"))


def test_a_named_id_field_may_be_missing_in_some_rows(save: Save) -> None:
    first, second = ids(save("a.jsonl", '{"x": 1}\n{"uid": "u", "x": 1}\n'), id_field="uid")
    assert first.startswith("row-000001-")
    assert second == "u"


# ---- rename, max_rows, counting


def test_a_renamed_column_replaces_the_old_name(save: Save) -> None:
    path = save("a.csv", "idx,question,answer\n1,q,a\n")
    (row,) = read_rows(path, rename={"id": "idx", "prompt": "question"})
    assert row.id == "1"
    assert row.fields == {"id": "1", "prompt": "q", "answer": "a"}


def test_two_columns_may_swap_names(save: Save) -> None:
    assert fields(save("a.jsonl", '{"a": 1, "b": 2}'), rename={"a": "b", "b": "a"}) == [{"a": 2, "b": 1}]


def test_a_column_absent_from_a_later_row_is_absent_under_its_new_name(save: Save) -> None:
    assert fields(save("a.jsonl", '{"a": 1}\n{"c": 2}'), rename={"b": "a"}) == [{"b": 1}, {"c": 2}]


def test_renaming_an_unknown_column_is_refused_with_the_columns_there_are(save: Save) -> None:
    message = refusal(save("a.jsonl", '{"question": 1, "answer": 2}'), rename={"prompt": "qestion"})
    assert "takes the column 'qestion', which is not there; the columns are 'question', 'answer'" in message


def test_renaming_onto_a_column_that_stays_is_refused(save: Save) -> None:
    path = save("a.jsonl", '{"q": 1}\n{"q": 1, "prompt": 2}')
    assert "line 2: rename 'prompt' would hide the column" in refusal(path, rename={"prompt": "q"})


def test_max_rows_stops_before_what_comes_after(save: Save) -> None:
    path = save("a.jsonl", '{"id": 1}\n{"id": 2}\nbroken\n')
    assert ids(path, max_rows=2) == ["1", "2"]
    assert ids(save("b.jsonl", '{"id": 1}\n'), max_rows=9) == ["1"]


@pytest.mark.parametrize("count", [0, -1])
def test_a_limit_below_one_is_refused(save: Save, count: int) -> None:
    path = save("a.jsonl", '{"id": 1}\n')
    with pytest.raises(UserError, match=f"max_rows={count}"):
        read_rows(path, max_rows=count)
    with pytest.raises(UserError, match=f"limit={count}"):
        count_up_to(path, count)


def test_counting_reads_no_further_than_the_limit(save: Save) -> None:
    path = save("a.jsonl", '{"id": 1}\n\n{"id": 1}\nbroken\n')
    assert count_up_to(path, 1) == 1
    assert count_up_to(path, 2) == 2
    with pytest.raises(UserError, match="line 4"):
        count_up_to(path, 3)
    assert count_up_to(save("b.csv", "id\n1\n2\n"), 10) == 2


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv.gz"])
def test_rows_stream_and_only_their_ids_stay_in_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    row = '{{"id": "question-{0}", "text": "{1}"}}\n' if suffix == ".jsonl.gz" else "question-{0},{1}\n"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("id,text\n" if suffix == ".csv.gz" else "")
        file.writelines(row.format(number, "x" * 2000) for number in range(100_000))
    program = (
        "import resource, sys; from pathlib import Path; from gristmill.rows import read_rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "count = sum(1 for _ in read_rows(Path(sys.argv[1])))\n"
        "print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    scripts = str(Path(from_json.__file__).parents[2])
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": scripts})
    count, grown_kib = map(int, done.stdout.split())
    assert count == 100_000
    assert grown_kib < 64 * 1024  # the text has 200 MB


def test_importing_the_readers_does_not_import_pyarrow_or_pandas() -> None:
    program = "import sys, gristmill.rows; print([m for m in ('pyarrow', 'pandas', 'torch') if m in sys.modules])"
    scripts = str(Path(from_json.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": scripts}
    )
    assert done.stdout.strip() == "[]"


# ---- round trips

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=6)
CELLS = st.text(st.characters(codec="utf-8") | st.sampled_from('\r\n",\t;\u2028\x85\ufeff'), max_size=12)


@settings(max_examples=100, deadline=None)
@given(rows=ROWS)
def test_json_rows_come_back_equal_and_in_order(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write_jsonl(folder / "a.jsonl", rows)
    (folder / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    for name in ("a.jsonl", "a.json"):
        back = fields(folder / name, id_field=None)
        assert back == rows
        assert repr(back) == repr(rows)  # 1 == 1.0 == True, but not in repr


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6), tabs=st.booleans(), bom=st.booleans())
def test_text_rows_come_back_from_csv(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], tabs: bool, bom: bool
) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t" if tabs else ",")
    writer.writerows([("a", "b"), *rows])
    path = tmp_path_factory.mktemp("rows") / ("a.tsv" if tabs else "a.csv")
    path.write_bytes(BOM * bom + buffer.getvalue().encode("utf-8"))
    assert [tuple(row.values()) for row in fields(path)] == rows
