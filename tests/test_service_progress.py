"""Facts about progress read from journals that grow, are torn, compacted and replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gristmill.journal.lines import HEADER, record
from gristmill.service.progress import Reader, Unit
from gristmill.types import Completion, Failure, Outcome


def outcome(n: int, failed: bool = False) -> Outcome:
    if failed:
        return Failure(f"r{n}", 0, "", "timeout", "too late")
    return Completion(f"r{n}", 0, "", "text", "stop", 1, 1, 0.1)


def line(n: int, failed: bool = False) -> bytes:
    return record(f"{n:032x}", outcome(n, failed))


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    (folder / "journal").mkdir(parents=True)
    (folder / "requests.jsonl").write_bytes(b'{"id":1}\n' * 5)
    return folder


def read(reader: Reader) -> tuple[int, int, int]:
    [found] = reader.read().units
    assert found.unit == "runs/a"
    return found.rows, found.done, found.failed


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as handle:
        handle.write(data)


def test_a_journal_is_followed_as_it_grows_and_a_torn_line_waits_for_its_end(unit: Path, tmp_path: Path) -> None:
    reader, segment = Reader(tmp_path), unit / "journal" / "one.jsonl"
    assert read(reader) == (5, 0, 0)
    append(segment, HEADER + b'{"worker":{}}\n' + line(0) + line(1)[:70])
    assert read(reader) == (5, 1, 0)
    append(segment, line(1)[70:] + line(1))
    assert read(reader) == (5, 2, 0)


def test_a_failed_row_that_is_answered_later_has_not_failed(unit: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    append(unit / "journal" / "one.jsonl", HEADER + line(0, failed=True) + line(1, failed=True))
    assert read(reader) == (5, 0, 2)
    append(unit / "journal" / "two.jsonl", HEADER + line(0))
    assert read(reader) == (5, 1, 1)


def test_segments_that_are_compacted_into_one_are_read_anew(unit: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for n in range(3):
        append(unit / "journal" / f"{n}.jsonl", HEADER + line(n))
    assert read(reader) == (5, 3, 0)
    append(unit / "new", HEADER + line(0) + line(1))
    for n in (1, 2):
        (unit / "journal" / f"{n}.jsonl").unlink()
    os.replace(unit / "new", unit / "journal" / "0.jsonl")
    assert read(reader) == (5, 2, 0)


def test_answers_to_earlier_prompts_do_not_make_more_rows_than_there_are(unit: Path, tmp_path: Path) -> None:
    append(unit / "journal" / "one.jsonl", HEADER + b"".join(line(n) for n in range(9)))
    assert read(Reader(tmp_path)) == (5, 5, 0)


def test_a_merged_file_means_all_rows_until_the_requests_are_newer(unit: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    (unit / "generations.jsonl").touch()
    assert read(reader) == (5, 5, 0)
    os.utime(unit / "generations.jsonl", (1, 1))
    assert read(reader) == (5, 0, 0)


def test_a_line_longer_than_a_block_is_one_line(unit: Path, tmp_path: Path) -> None:
    long = record(f"{7:032x}", Completion("r7", 0, "", "x" * 9_000_000, "stop", 1, 1, 0.1))
    append(unit / "journal" / "one.jsonl", HEADER + long + line(8))
    assert read(Reader(tmp_path)) == (5, 2, 0)


def test_folders_that_are_no_units_are_left_out_and_trainings_count_their_steps(tmp_path: Path) -> None:
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    (tmp_path / "trainings" / "t").mkdir(parents=True)
    (tmp_path / "trainings" / "t" / "steps.jsonl").write_text('{"step":1}\n{"step":2}\n{"st')
    assert Reader(tmp_path).read().units == (Unit("trainings/t", 2, 2, 0),)
    assert Reader(tmp_path / "none").read().units == ()
