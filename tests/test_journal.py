"""Facts about the journal: what a kill may cost, what is believed, and what is set aside."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from gristmill import locks
from gristmill.errors import UserError
from gristmill.journal import Segment, read_known, reading, workers
from gristmill.journal.lines import record
from gristmill.journal.reading import segments
from gristmill.journal.upkeep import LOCK, compact, contents, prune, unused
from gristmill.types import Completion, Failure, Outcome

SCRIPTS = Path(__file__).parents[1] / "scripts"
TEXT = 'line\nend \u2028 \ud800 é 😀 {"key":"x"}'


def key_of(number: int) -> str:
    return f"{number:032x}"


def completion(number: int, text: str = TEXT) -> Completion:
    return Completion(f"r{number}", 0, "", text, "stop", 3, 2, 0.25)


def failure(number: int) -> Failure:
    return Failure(f"r{number}", 0, "", "out_of_memory", "no room")


def write(folder: Path, records: Iterable[tuple[int, Outcome]], summary: dict[str, Any] | None = None) -> Path:
    """One segment with these records; its path."""
    before = set(folder.glob("*.jsonl"))
    with Segment(folder, {"unit": "runs/a", "shard": "1-of-1"}) as segment:
        for number, outcome in records:
            segment.append(key_of(number), outcome)
        if summary is not None:
            segment.summarize(summary)
    (path,) = set(folder.glob("*.jsonl")) - before
    return path


def named(path: Path, name: str) -> Path:
    """The segment under a name that decides which is read first."""
    return path.rename(path.with_name(name))


def known(folder: Path, numbers: Iterable[int] = range(100), log: list[str] | None = None) -> dict[int, Completion]:
    said: list[str] = []
    found = read_known(folder, {key_of(number) for number in numbers}, said.append)
    if log is None:
        assert said == []
    else:
        log += said
    return {int(key, 16): completion for key, completion in found.items()}


# ---- writing and reading


def test_what_was_written_is_read_back_as_it_was(tmp_path: Path) -> None:
    skipped = Completion("r2", 1, "second_first", None, "skipped", 9, 0, 0.0, prompt_cut_tokens=4)
    write(tmp_path, [(1, completion(1)), (2, skipped)])
    assert known(tmp_path) == {1: completion(1), 2: skipped}


def test_a_record_is_with_the_operating_system_before_append_returns(tmp_path: Path) -> None:
    with Segment(tmp_path, {}) as segment:
        for number in range(3):
            segment.append(key_of(number), completion(number))
            assert set(known(tmp_path)) == set(range(number + 1))


def test_failures_never_count(tmp_path: Path) -> None:
    write(tmp_path, [(1, failure(1)), (2, completion(2)), (3, failure(3))])
    write(tmp_path, [(3, completion(3))])
    assert set(known(tmp_path)) == {2, 3}


def test_only_wanted_keys_are_read(tmp_path: Path) -> None:
    write(tmp_path, [(number, completion(number)) for number in range(5)])
    assert set(known(tmp_path, [1, 3, 77])) == {1, 3}
    assert known(tmp_path, []) == {}


def test_an_answer_is_found_whichever_segment_has_it(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, [(number, completion(number))])
    assert set(known(tmp_path)) == {0, 1, 2}


def test_the_first_answer_wins(tmp_path: Path) -> None:
    named(write(tmp_path, [(1, completion(1, "second"))]), "b.jsonl")
    named(write(tmp_path, [(1, completion(1, "first")), (1, completion(1, "again"))]), "a.jsonl")
    assert known(tmp_path)[1].text == "first"


def test_a_journal_that_is_not_there_knows_nothing(tmp_path: Path) -> None:
    assert known(tmp_path / "journal") == {}
    assert workers(tmp_path / "journal", {key_of(1)}) == []


def test_a_job_without_a_record_leaves_no_segment(tmp_path: Path) -> None:
    with Segment(tmp_path / "journal", {}) as segment:
        segment.summarize({"load_seconds": 1})
        segment.sync()
    assert not (tmp_path / "journal").exists()


def test_two_jobs_of_one_second_write_two_segments(tmp_path: Path) -> None:
    with Segment(tmp_path, {}) as one, Segment(tmp_path, {}) as other:
        one.append(key_of(1), completion(1))
        other.append(key_of(2), completion(2))
    assert len(list(tmp_path.iterdir())) == 2
    assert set(known(tmp_path)) == {1, 2}


# ---- kills and torn ends


WRITER = """
import sys
from pathlib import Path
from gristmill.journal import Segment
from gristmill.types import Completion
with Segment(Path(sys.argv[1]), {}) as segment:
    for number in range(1_000_000):
        segment.append(f"{number:032x}", Completion(f"r{number}", 0, "", "word " * (number % 3000), "stop", 1, 1, 0.1))
        print(number, flush=True)
"""


def test_a_killed_writer_costs_nothing_that_was_appended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(SCRIPTS)}) as writer:
        assert writer.stdout is not None
        while writer.stdout.readline().strip() != "300":
            assert writer.poll() is None
        reading = known(tmp_path, range(10_000))  # while the other process writes
        writer.kill()
        appended = [int(line) for line in writer.stdout]
    assert set(range(301)) <= set(reading)
    found = known(tmp_path, range(1_000_000))
    last = max(appended, default=300)
    assert set(range(last + 1)) <= set(found)
    assert len(found) <= last + 2  # the one record that was written and not yet told
    assert all(answer.text == "word " * (number % 3000) for number, answer in found.items())


def test_a_segment_cut_at_any_byte_loses_only_the_record_that_was_cut(tmp_path: Path) -> None:
    path = write(tmp_path, [(1, completion(1)), (2, failure(2)), (3, completion(3))], {"load_seconds": 1})
    data = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)  # lines: header, worker, r1, r2 failed, r3, summary
        assert set(known(tmp_path)) == {number for number, line in ((1, 3), (3, 5)) if line <= whole}
        assert sum(worker["rows"] for worker in workers(tmp_path, {key_of(1), key_of(2), key_of(3)})) == len(
            known(tmp_path)
        )


def test_an_empty_file_is_a_segment_without_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert known(tmp_path) == {}
    assert (tmp_path / "a.jsonl").exists()


# ---- segments that cannot be trusted


FOREIGN = {
    "a foreign header": (b'{"hello":1}\n', "it has no journal header"),
    "a later format": (b'{"gristmill_journal":3}\n', "its format is 3, not 2"),
    "an earlier format": (b'{"gristmill_journal":1,"pid":7}\n', "its format is 1, not 2"),
    "a header that is no object": (b"[1]\n", "it has no journal header"),
    "a header that is no JSON": (b"hello\n", "it has no journal header"),
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_a_foreign_segment_is_set_aside_and_named_and_the_others_are_used(tmp_path: Path, fault: str) -> None:
    header, reason = FOREIGN[fault]
    bad = named(write(tmp_path, [(1, completion(1)), (2, completion(2))]), "a.jsonl")
    lines = [header, *bad.read_bytes().splitlines(keepends=True)[1:]]
    lines = lines[:2] if "no journal header" in reason else lines  # records would prove what it is
    bad.write_bytes(b"".join(lines))
    good = named(write(tmp_path, [(4, completion(4))]), "b.jsonl")
    log: list[str] = []
    assert set(known(tmp_path, log=log)) == {4}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl.broken", good.name]
    assert (tmp_path / "a.jsonl.broken").read_bytes() == b"".join(lines)
    (said,) = log
    assert said == f"journal segment a.jsonl is not used: {reason}; kept as a.jsonl.broken"
    assert set(known(tmp_path)) == {4}


WHOLE = record(key_of(2), completion(2))
DAMAGED = {
    "a line that is no record": b"hello\n",
    "an empty line": b"\n",
    "a short key": b'{"key":"0","completion":{}}\n',
    "a record cut in the middle": WHOLE[: len(WHOLE) // 2] + b"\n",
    "a record glued to a torn one": WHOLE[: len(WHOLE) // 2] + WHOLE,
    "a record of another key": WHOLE.replace(key_of(2).encode(), key_of(3).encode()),
    "a letter of the text": WHOLE.replace(b"end", b"and"),
    "a number": WHOLE.replace(b'"prompt_tokens":3', b'"prompt_tokens":4'),
    "no checksum": b'{"key":"%s","completion":{}}\n' % key_of(2).encode(),
    "zeros from a power cut": b"\0" * 99 + b"\n",
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_record_is_named_and_not_believed_and_the_others_are(tmp_path: Path, fault: str) -> None:
    path = write(tmp_path, [(1, completion(1)), (2, completion(2)), (3, completion(3))])
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = DAMAGED[fault]
    path.write_bytes(b"".join(lines))
    log: list[str] = []
    assert known(tmp_path, log=log) == {1: completion(1), 3: completion(3)}
    assert log == [f"journal segment {path.name} is damaged in line 4: these rows are asked again"]
    found = contents(path)
    assert (found.answers, found.damaged, found.is_sound) == (2, [4], False)


def test_no_flipped_bit_changes_an_answer(tmp_path: Path) -> None:
    path = write(tmp_path, [(1, completion(1)), (2, completion(2))])
    data = path.read_bytes()
    start = data.index(b'{"key"')
    for place in range(start, len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        for number, answer in known(tmp_path, log=[]).items():
            assert answer == completion(number)


@pytest.mark.parametrize("header", [b'{"gristmill_jourmal":2}\n', b'{"gristmill_journal":2}K', b"\xff\n"])
def test_records_prove_themselves_under_a_damaged_header(tmp_path: Path, header: bytes) -> None:
    path = write(tmp_path, [(1, completion(1)), (2, completion(2))])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([header, *lines[1:]]))
    log: list[str] = []
    assert set(known(tmp_path, log=log)) == {1, 2}
    assert log == [f"journal segment {path.name} is damaged in line 1: these rows are asked again"]


def test_no_flipped_bit_costs_more_than_two_answers_or_stops_anybody(tmp_path: Path) -> None:
    write(tmp_path, [(number, completion(number)) for number in range(3)], {"generate_seconds": 1})
    write(tmp_path, [(number, completion(number)) for number in range(3, 6)], {"generate_seconds": 2})
    compact(tmp_path, lambda _: None)
    (path,) = tmp_path.glob("*.jsonl")
    data = path.read_bytes()
    other = tmp_path / "compacted"
    for place in range(len(data)):
        if data[place : place + 2] == b"2}" and place < 25:
            continue  # the number of the format: another one is another format
        flipped = bytearray(data)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        found = known(tmp_path, log=[])
        assert len(found) >= 4
        keys = {key_of(number) for number in found}
        assert sum(worker["rows"] for worker in workers(tmp_path, keys)) == len(found)
        if place % 31:
            continue
        shutil.copytree(tmp_path, other, ignore=shutil.ignore_patterns("compacted"))
        write(other, [(9, completion(9))])
        compact(other, lambda _: None)
        assert set(known(other)) == {*found, 9}
        shutil.rmtree(other)


def test_answers_below_a_damaged_workers_line_are_nobodys(tmp_path: Path) -> None:
    path = named(write(tmp_path, [(1, completion(1))]), "a.jsonl")
    later = write(tmp_path, [(2, completion(2))])
    path.write_bytes(path.read_bytes() + later.read_bytes().partition(b"\n")[2].replace(b'{"worker":{', b'{"worker":['))
    later.unlink()
    for _ in range(2):
        first, second = workers(tmp_path, {key_of(1), key_of(2)})
        assert (first["shard"], first["rows"], second) == ("1-of-1", 1, {"rows": 1})
        named(write(tmp_path, [(3, completion(3))]), "c.jsonl")
        compact(tmp_path, lambda _: None)


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_what_is_no_file_is_no_segment(tmp_path: Path, kind: str) -> None:
    write(tmp_path, [(1, completion(1))])
    write(tmp_path, [(2, completion(2))])
    if kind == "folder":
        (tmp_path / "0.jsonl").mkdir()
    else:
        (tmp_path / "0.jsonl").symlink_to("gone")
    assert set(known(tmp_path)) == {1, 2}
    assert sum(worker["rows"] for worker in workers(tmp_path, {key_of(1), key_of(2)})) == 2
    compact(tmp_path, lambda _: None)
    assert set(known(tmp_path)) == {1, 2}
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_a_segment_that_another_worker_has_just_set_aside_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [(1, completion(1))])
    gone = tmp_path / "a.jsonl"
    listed = iter([[gone, *segments(tmp_path)], segments(tmp_path)])  # listed, and not there when it is opened
    monkeypatch.setattr(reading, "segments", lambda _: next(listed))
    assert set(known(tmp_path)) == {1}


def _known_in_a_child(folder: Path) -> set[int]:
    return set(known(folder, log=[]))


def test_workers_that_find_the_same_broken_segments_at_once_do_not_trip_over_each_other(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}.jsonl").write_bytes(b"hello\n")
    write(tmp_path, [(1, completion(1))])
    with get_context("fork").Pool(4) as pool:
        assert pool.map(_known_in_a_child, [tmp_path] * 4, chunksize=1) == [{1}] * 4
    assert len(list(tmp_path.glob("*.broken"))) == 200


# ---- who made what


def test_workers_names_each_contributing_segment_with_its_summary_and_rows(tmp_path: Path) -> None:
    named(write(tmp_path, [(1, completion(1)), (2, completion(2))], {"load_seconds": 1.5}), "a.jsonl")
    named(write(tmp_path, [(3, completion(3))]), "b.jsonl")
    named(write(tmp_path, [(9, completion(9))], {"load_seconds": 2.5}), "c.jsonl")
    first, second = workers(tmp_path, {key_of(number) for number in (1, 2, 3)})
    assert (first["unit"], first["shard"], first["load_seconds"], first["rows"]) == ("runs/a", "1-of-1", 1.5, 2)
    assert (second["rows"], "load_seconds" in second) == (1, False)
    assert isinstance(first["pid"], int)
    assert "gristmill_journal" not in first


def test_workers_does_not_count_failures_or_answers_that_came_second(tmp_path: Path) -> None:
    named(write(tmp_path, [(1, failure(1)), (2, completion(2))]), "a.jsonl")
    named(write(tmp_path, [(1, completion(1)), (2, completion(2))]), "b.jsonl")
    named(write(tmp_path, [(1, completion(1)), (2, failure(2))]), "c.jsonl")
    assert [worker["rows"] for worker in workers(tmp_path, {key_of(1), key_of(2)})] == [1, 1]


# ---- compaction


def locked(folder: Path, shard: str = "1-of-2") -> int:
    folder.mkdir(exist_ok=True)
    fd = locks.try_lock(folder / f"{shard}.lock", "generate")
    assert fd is not None
    return fd


def test_many_segments_become_one_with_each_answer_once_and_who_made_it(tmp_path: Path) -> None:
    named(write(tmp_path, [(1, completion(1)), (2, failure(2)), (3, failure(3))], {"load_seconds": 1.5}), "a.jsonl")
    named(write(tmp_path, [(2, completion(2)), (1, completion(1, "again"))]), "b.jsonl")
    named(write(tmp_path, [(1, completion(1, "once more"))], {"load_seconds": 9}), "c.jsonl")
    before = workers(tmp_path, {key_of(1), key_of(2)})
    log: list[str] = []
    compact(tmp_path, log.append)
    (path,) = tmp_path.glob("*.jsonl")
    assert known(tmp_path) == {1: completion(1), 2: completion(2)}
    after = workers(tmp_path, {key_of(1), key_of(2)})
    assert [{name: value for name, value in one.items() if name != "doubles"} for one in after] == before
    found = contents(path)
    assert (found.answers, [row["id"] for row in found.failures], found.damaged) == (2, ["r3"], [])
    assert found.doubles == 2  # the row 1 of b and of c
    assert log == [f"journal {tmp_path}: 3 segments are one, 2 answers"]
    compact(tmp_path, log.append)  # one is nothing to do for
    assert len(log) == 1


def test_a_compacted_journal_is_compacted_again_with_what_came_later(tmp_path: Path) -> None:
    for round_ in range(3):
        write(tmp_path, [(round_, completion(round_))], {"load_seconds": round_})
        compact(tmp_path, lambda _: None)
    keys = {key_of(number) for number in range(3)}
    assert set(known(tmp_path)) == {0, 1, 2}
    assert sorted(worker["load_seconds"] for worker in workers(tmp_path, keys)) == [0, 1, 2]


def test_a_journal_that_a_job_writes_to_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, [(1, completion(1))])
    write(tmp_path, [(2, completion(2))])
    fd = locked(tmp_path)
    log: list[str] = []
    compact(tmp_path, log.append)
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert "not compacted, pid" in log[0]
    with pytest.raises(UserError, match=r"writes to it; wait for it, then prune"):
        prune(tmp_path, set(), log.append)
    locks.release(fd)
    compact(tmp_path, log.append)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_two_compactions_do_not_meet(tmp_path: Path) -> None:
    write(tmp_path, [(1, completion(1))])
    write(tmp_path, [(2, completion(2))])
    fd = locks.try_lock(tmp_path / LOCK, "compaction")
    assert fd is not None
    log: list[str] = []
    compact(tmp_path, log.append)
    assert "is at it" in log[0]
    locks.release(fd)


def test_a_compaction_keeps_what_is_damaged_or_foreign_under_another_name(tmp_path: Path) -> None:
    bad = named(write(tmp_path, [(1, completion(1)), (2, completion(2))]), "a.jsonl")
    bad.write_bytes(bad.read_bytes().replace(b'"r1"', b'"r9"'))
    named(write(tmp_path, [(3, completion(3))]), "b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(b"hello\n")
    compact(tmp_path, lambda _: None)
    assert set(known(tmp_path)) == {2, 3}
    assert sorted(path.name for path in tmp_path.glob("*.broken")) == ["a.jsonl.broken", "c.jsonl.broken"]


def test_what_a_killed_compaction_was_writing_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".20260101T000000-compacted-aaaaaa.jsonl.xyz.tmp"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    for number in range(2):
        write(tmp_path, [(number, completion(number))])
    compact(tmp_path, lambda _: None)
    assert not left.exists()
    assert set(known(tmp_path)) == {0, 1}


def test_a_compaction_cut_short_between_its_steps_loses_and_doubles_nothing(tmp_path: Path) -> None:
    old = [named(write(tmp_path, [(n, completion(n))], {"load_seconds": n}), f"{n}.jsonl") for n in range(3)]
    kept = [path.read_bytes() for path in old]
    compact(tmp_path, lambda _: None)
    for path, data in zip(old[1:], kept[1:], strict=True):  # killed after the first was removed
        path.write_bytes(data)
    keys = {key_of(number) for number in range(3)}
    assert set(known(tmp_path)) == {0, 1, 2}
    assert sum(worker["rows"] for worker in workers(tmp_path, keys)) == 3
    compact(tmp_path, lambda _: None)
    (path,) = tmp_path.glob("*.jsonl")
    assert contents(path).answers == 3


def test_readers_find_every_answer_while_a_journal_is_compacted(tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path, [(number, completion(number))])
    with get_context("fork").Pool(2) as pool:
        reading = [pool.apply_async(_known_in_a_child, (tmp_path,)) for _ in range(60)]
        compact(tmp_path, lambda _: None)
        assert all(found.get() == set(range(40)) for found in reading)


def test_prune_drops_what_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, [(1, completion(1)), (2, completion(2)), (3, failure(3))])
    assert unused(tmp_path, {key_of(1)}) == 1
    prune(tmp_path, {key_of(1)}, lambda _: None)
    assert set(known(tmp_path)) == {1}
    (path,) = tmp_path.glob("*.jsonl")
    assert contents(path).failures == []


# ---- a disk that does not take it


def test_a_full_disk_is_one_line_and_the_answers_before_it_are_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, 700

    def write_some(fd: int, data: bytes) -> int:
        """A disk with 700 bytes, which takes what it can of the last write."""
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[:room]
        room -= len(data)
        return real(fd, data)

    monkeypatch.setattr("os.write", write_some)
    with Segment(tmp_path, {}) as segment:
        segment.append(key_of(0), completion(0))
        segment.append(key_of(1), completion(1))
        for _ in range(2):
            with pytest.raises(UserError, match="No space left on device; make room"):
                segment.append(key_of(2), completion(2, "long " * 100))
    monkeypatch.undo()
    assert set(known(tmp_path)) == {0, 1}
    (path,) = tmp_path.glob("*.jsonl")
    assert path.read_bytes().endswith(b"\n")  # no half record to which another could be glued
