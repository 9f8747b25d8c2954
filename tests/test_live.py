"""Facts about what a run is seen to do: by journals and live files of the library's own writers, and by a real run."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ANSWERS, ROOT, Project, echo_config, wait_until
from tiny_teacher import make_teacher
from tiny_training import environment as environment_of
from tiny_training import make

from gristmill import locks
from gristmill.errors import UserError
from gristmill.files import dumps
from gristmill.journal import Segment
from gristmill.journal.upkeep import compact
from gristmill.live import Progress, Reader, UnitProgress
from gristmill.live import writing as live_writing
from gristmill.live.files import Ends, Growing
from gristmill.live.liveness import holder
from gristmill.live.writing import Live, outcome_numbers
from gristmill.progress import Progress as Counted
from gristmill.stopping import Interrupted
from gristmill.types import Completion, Failure

UNIT = "runs/plain"
UUIDS = ("GPU-aaaa", "GPU-bbbb")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with ten requests and nothing else."""
    made = tmp_path / "results" / UNIT
    (made / "journal").mkdir(parents=True)
    (made / "requests.jsonl").write_text('{"id":1}\n' * 10)
    return made


def reader_of(folder: Path) -> Reader:
    return Reader(folder.parents[1])


def only(progress: Progress) -> UnitProgress:
    (unit,) = progress.units
    return unit


def answer(number: int, tokens: int = 5) -> Completion:
    return Completion(f"r{number}", 0, "", 'says "completion_tokens":99', "stop", 10, tokens, 0.1)


def failure(number: int, detail: str = "a batch of one row") -> Failure:
    return Failure(f"r{number}", 0, "", "out_of_memory", detail)


def key(number: int) -> str:
    return f"{number:032x}"


def segment(folder: Path) -> Segment:
    return Segment(folder / "journal", {"unit": UNIT, "shard": "1-of-1", "engine": "echo"})


def live_file(folder: Path, shard: str = "1-of-1") -> Path:
    return folder / "live" / f"{shard}.jsonl"


def said(folder: Path, lines: list[dict[str, Any]], shard: str = "1-of-1", **about: Any) -> None:
    """A live file with these lines, as of a worker of this host."""
    path = live_file(folder, shard)
    path.parent.mkdir(exist_ok=True)
    known = {
        "gristmill_live": 1,
        "unit": UNIT,
        "shard": shard,
        "host": socket.gethostname(),
        "begun_unix_s": time.time(),
    }
    path.write_bytes(b"".join(dumps(line) + b"\n" for line in [known | about, *lines]))


def locked(folder: Path, shard: str = "1-of-1", **note: Any) -> None:
    """A lock file that names this process, from before it spoke."""
    known = {"pid": os.getpid(), "host": socket.gethostname(), "purpose": "generate", "since": time.time() - 5}
    (folder / "journal" / f"{shard}.lock").write_text(json.dumps(known | note))


# Journals without live files: results of an earlier version.


def test_a_journal_without_live_files_is_counted_by_key_and_a_failed_row_with_an_answer_has_not_failed(
    folder: Path,
) -> None:
    with segment(folder) as one, segment(folder) as two:
        for number in range(4):
            one.append(key(number), answer(number))
        one.append(key(7), failure(7))
        for path in (folder / "journal").glob("*.jsonl"):
            os.utime(path, (1e9, 1e9))  # two files of one tick of the clock have no order
        two.append(key(3), answer(3))  # an orphan answered it too
        two.append(key(7), answer(7))
        two.append(key(8), failure(8, "no room"))
        unit = only(reader_of(folder).read())
    assert (unit.done, unit.total, unit.failed) == (5, 10, 1)
    assert unit.errors == ("row r8#0 failed: out_of_memory: no room",)
    assert unit.tokens == 10  # of the newest job of the shard; an answer's text is no count


def test_a_second_look_reads_only_what_came_since(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(folder)
    seen: list[bytes] = []
    real = Growing._new
    monkeypatch.setattr(Growing, "_new", lambda self, fd: (seen.append(line) or line for line in real(self, fd)))
    with segment(folder) as journal:
        journal.append(key(1), answer(1))
        assert only(reader.read()).done == 1
        seen.clear()
        journal.append(key(2), answer(2))
        assert only(reader.read()).done == 2
    assert len(seen) == 1


def test_a_half_written_line_counts_when_it_is_whole_and_a_damaged_one_never(folder: Path) -> None:
    reader = reader_of(folder)
    with segment(folder) as journal:
        journal.append(key(1), answer(1))
        journal.append(key(2), answer(2))
    (path,) = (folder / "journal").glob("*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert only(reader.read()).done == 1
    with open(path, "ab") as handle:
        handle.write(whole[-40:])
    assert only(reader.read()).done == 2
    with open(path, "ab") as handle:
        handle.write(whole.splitlines(keepends=True)[-1].replace(key(2).encode(), key(3).encode()))
    assert only(reader.read()).done == 2


def test_segments_that_become_one_are_counted_once(folder: Path) -> None:
    reader = reader_of(folder)
    for numbers in ((0, 1, 2), (2, 3)):
        with segment(folder) as journal:
            for number in numbers:
                journal.append(key(number), answer(number))
    assert only(reader.read()).done == 4
    compact(folder / "journal", lambda _: None)
    assert len(list((folder / "journal").glob("*.jsonl"))) == 1
    assert only(reader.read()).done == 4


def test_a_file_that_another_takes_the_place_of_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "grows"
    path.write_bytes(b"one\ntwo\n")
    file = Growing(path)
    assert list(file.lines()[1]) == [b"one\n", b"two\n"]
    path.write_bytes(b"six\nten\nfour\n")  # the same inode, and longer
    anew, lines = file.lines()
    assert anew
    assert list(lines) == [b"six\n", b"ten\n", b"four\n"]


# What workers say.


def test_a_worker_says_how_far_it_is_and_the_reader_shows_it(folder: Path) -> None:
    progress = Counted(total=8)

    class Engine:
        batch_rows, retries = 32, 2

    lock = locks.try_lock(folder / "journal" / "1-of-1.lock", "generate")
    assert lock is not None
    with Live(live_file(folder), UNIT, "1-of-1") as live:
        live.tell("queued", total=10, known=2)
        assert (only(reader_of(folder).read()).workers[0].state, only(reader_of(folder).read()).done) == ("queued", 2)
        live.tell("loading", devices=[{"index": 3, "uuid": "GPU-x", "name": "H100", "memory_total_mib": 80000}])
        live.count(outcome_numbers(progress, Engine(), 10))
        progress.add(answer(1, 7))
        progress.add(failure(2, "\x1b[31m[bold]red"))
        live.tell("running", engine="static")
        unit = only(reader_of(folder).read())
    locks.release(lock)
    (worker,) = unit.workers
    assert (unit.state, unit.kind, unit.done, unit.total, unit.failed, unit.tokens) == ("running", "run", 3, 10, 1, 7)
    assert (worker.batch_rows, worker.retries, worker.engine, worker.host) == (32, 2, "static", socket.gethostname())
    assert [(device.index, device.name) for device in worker.devices] == [(3, "H100")]
    assert unit.errors == ("row r2#0 failed: out_of_memory: \x1b[31m[bold]red",)
    json.dumps(dataclasses.asdict(unit))


def test_how_a_job_ends_is_its_last_word(folder: Path) -> None:
    def end(error: BaseException | None) -> tuple[str, tuple[str, ...]]:
        with contextlib.suppress(BaseException), Live(live_file(folder), UNIT, "1-of-1") as live:
            live.tell("running", total=10, known=0)
            if error is not None:
                raise error
        unit = only(reader_of(folder).read())
        return unit.workers[0].state, unit.errors

    assert end(UserError("8 rows failed;\nrun again")) == ("failed", ("8 rows failed; run again",))
    assert end(RuntimeError("boom")) == ("failed", ("RuntimeError: boom",))
    assert end(Interrupted(signal.SIGTERM)) == ("stopped", ())
    assert end(None) == ("done", ())


def test_speeds_are_of_the_last_half_minute_and_of_all_and_the_time_left_follows_the_rows(folder: Path) -> None:
    now = time.time()
    rows = [(-100, 0, 0), (-40, 1, 1000), (-20, 3, 1600), (0, 5, 4000)]
    lines = [
        {"at": now + at, "phase": "running", "done": done, "failed": 0, "tokens": tokens, "seconds": 100.0 + at}
        for at, done, tokens in rows
    ]
    said(folder, lines, total=10, known=0)
    locked(folder)
    unit = only(reader_of(folder).read())
    assert unit.tokens_per_second_now == pytest.approx(3000 / 40)  # from the last line that is 30 s old
    assert unit.tokens_per_second_overall == pytest.approx(40)
    assert unit.seconds_left == pytest.approx(5 * 100 / 5)


def test_a_shard_that_waits_counts_in_the_total_and_in_the_time_left(folder: Path) -> None:
    cut = folder / "shards" / "2"
    cut.mkdir(parents=True)
    for shard, rows in (("1-of-2", 4), ("2-of-2", 6)):
        (cut / f"{shard}.jsonl").write_text("{}\n" * rows)
    line = {"at": time.time(), "phase": "running", "done": 2, "failed": 0, "tokens": 20, "seconds": 10.0}
    said(folder, [line], "1-of-2", total=4, known=0)
    locked(folder, "1-of-2")
    unit = only(reader_of(folder).read())
    assert [(worker.shard, worker.state, worker.total) for worker in unit.workers] == [
        ("1-of-2", "running", 4),
        ("2-of-2", "waiting", 6),
    ]
    assert (unit.done, unit.total, unit.seconds_left) == (2, 10, pytest.approx(40))


def test_what_was_said_before_the_requests_were_made_anew_does_not_count(folder: Path) -> None:
    said(folder, [{"at": time.time(), "phase": "done", "done": 10}], total=10, known=0)
    assert only(reader_of(folder).read()).done == 10
    old = time.time() - 60
    os.utime(live_file(folder), (old, old))
    assert (only(reader_of(folder).read()).done, only(reader_of(folder).read()).state) == (0, "stopped")


def test_a_unit_is_done_when_its_manifest_is_newer_than_all_else(folder: Path) -> None:
    said(folder, [{"at": time.time(), "phase": "done", "done": 9, "failed": 1}], total=10, known=0)
    manifest = {"requests": 10, "completion_tokens": 50, "finish_reasons": {"stop": 9, "out_of_memory": 1}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    unit = only(reader_of(folder).read())
    assert (unit.state, unit.done, unit.total, unit.failed, unit.tokens) == ("done", 9, 10, 1, 50)
    later = time.time() + 5
    os.utime(folder / "requests.jsonl", (later, later))
    assert only(reader_of(folder).read()).state == "stopped"


def test_a_worker_whose_process_is_gone_is_lost_and_the_last_line_of_its_log_says_why(folder: Path) -> None:
    said(folder, [{"at": time.time(), "phase": "running", "done": 3}], total=10, known=0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    locked(folder, pid=gone.pid)
    (folder / "logs").mkdir()
    (folder / "logs" / "generate-1-of-1.log").write_text("10:00:00 lease\nerror: Xid 79; set aside\n")
    unit = only(reader_of(folder).read())
    assert (unit.state, unit.workers[0].state, unit.done) == ("failed", "lost", 3)
    assert unit.errors == ("worker 1-of-1 is gone: error: Xid 79; set aside",)


def test_another_process_with_a_dead_workers_number_is_not_taken_for_it(folder: Path) -> None:
    locked(folder, since=time.time() - 10**9)
    found = holder(folder / "journal" / "1-of-1.lock")
    assert found is not None
    assert found.lives is False


@pytest.mark.parametrize(("age_s", "state"), [(5, "running"), (300, "silent")])
def test_a_worker_of_another_host_is_judged_by_the_age_of_its_last_word(folder: Path, age_s: int, state: str) -> None:
    at = time.time() - age_s
    said(folder, [{"at": at, "phase": "running", "done": 3}], total=10, known=0, host="node7", begun_unix_s=at)
    locked(folder, host="node7", since=at - 1)
    os.utime(live_file(folder), (at, at))
    os.utime(folder / "requests.jsonl", (at - 10, at - 10))
    assert only(reader_of(folder).read()).workers[0].state == state


def test_looking_takes_no_lock_that_a_worker_or_a_snakemake_could_miss(folder: Path) -> None:
    said(folder, [{"at": time.time(), "phase": "running", "done": 3}], total=10, known=0)
    own = folder.parents[1] / ".gristmill"
    own.mkdir()
    paths = [folder / "journal" / "1-of-1.lock", own / "lock"]
    for path in paths:
        path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
    reader, over = reader_of(folder), threading.Event()

    def look() -> None:
        while not over.is_set():
            reader.read()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            for path in paths:
                fd = locks.try_lock(path, "generate")
                assert fd is not None
                locks.release(fd)
    finally:
        over.set()
        thread.join()


def test_looking_changes_nothing_below_the_results(folder: Path) -> None:
    said(folder, [{"at": time.time(), "phase": "running", "done": 3}], total=10, known=0)
    with segment(folder) as journal:
        journal.append(key(1), answer(1))
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.parents[1].rglob("*"))
    for _ in range(2):
        reader_of(folder).read()
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.parents[1].rglob("*")) == before


def test_gpu_samples_stand_beside_the_worker_and_old_ones_are_not_now(folder: Path) -> None:
    device = {"index": 0, "uuid": "GPU-x", "name": "H100", "memory_total_mib": 80000}
    said(folder, [{"at": time.time(), "phase": "running", "done": 3}], total=10, known=0, devices=[device])
    locked(folder)
    sample = {"session": "a", "uuid": "GPU-x", "time_unix_s": time.time(), "utilization_ratio": 0.5}
    (folder / "gpu").mkdir()
    samples = folder / "gpu" / "1-of-1.jsonl"
    lines = [{"gristmill_gpu": 1, "session": "a"}, sample | {"memory_used_mib": 1}, sample | {"memory_used_mib": 2}]
    samples.write_bytes(b"".join(dumps(line) + b"\n" for line in lines) + b'{"session":"a","uuid":"GPU')
    (found,) = only(reader_of(folder).read()).workers[0].devices
    assert (found.utilization_ratio, found.memory_used_mib, found.memory_total_mib) == (0.5, 2, 80000)
    samples.write_bytes(dumps(lines[0]) + b"\n" + dumps(sample | {"time_unix_s": time.time() - 60}) + b"\n")
    (found,) = only(reader_of(folder).read()).workers[0].devices
    assert found.utilization_ratio is None


def test_a_training_is_seen_by_its_steps(tmp_path: Path) -> None:
    work = tmp_path / "results" / "trainings" / "small"
    work.mkdir(parents=True)
    (work / "task.json").write_text("{}")
    lock = locks.try_lock(work / "train.lock", "train small")
    assert lock is not None
    reader = Reader(tmp_path / "results")
    assert (only(reader.read()).state, only(reader.read()).workers[0].state) == ("running", "starting")
    with Live(work / "live" / "training.jsonl", "trainings/small", "training") as live:
        live.count(lambda: {"done": 30, "tokens": 2000, "seconds": 10.0})
        live.tell("running", total=100, known=10, batch_rows=8)
        unit = only(reader.read())
    locks.release(lock)
    assert (unit.kind, unit.done, unit.total, unit.tokens_per_second_overall) == ("training", 30, 100, 200.0)
    assert unit.seconds_left == pytest.approx(35.0)
    (work / "metrics.json").write_text(json.dumps({"steps": 100, "tokens": 9000}))
    assert (only(reader.read()).state, only(reader.read()).done) == ("done", 100)


# The file itself.


def test_a_live_file_stays_small_and_keeps_what_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_writing, "MOST_BYTES", 2000)
    with Live(live_file(folder), UNIT, "1-of-1") as live:
        live.tell("queued", total=10, known=2)
        for number in range(500):
            live.count(lambda number=number: {"done": number, "tokens": number})
            live.tell("running")
        assert live_file(folder).stat().st_size < 2500
        unit = only(reader_of(folder).read())
    assert (unit.workers[0].total, unit.workers[0].done) == (10, 499)


def test_a_job_beats_also_when_nothing_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_writing, "EVERY_S", 0.01)
    monkeypatch.setattr(live_writing, "BEAT_S", 0.02)
    with Live(live_file(folder), UNIT, "1-of-1") as live:
        live.tell("loading")
        wait_until(lambda: len(live_file(folder).read_bytes().splitlines()) > 4)


def test_results_that_are_removed_meanwhile_do_not_come_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_writing, "EVERY_S", 0.01)
    results, reader = folder.parents[1], reader_of(folder)
    count = iter(range(10**9))
    with Live(live_file(folder), UNIT, "1-of-1") as live:
        live.count(lambda: {"done": next(count)})
        live.tell("running")
        assert reader.read().units
        shutil.rmtree(results)
        assert (reader.read().units, reader.read().exists) == ((), False)
        live.tell("running", engine="echo")
        assert not reader.read().exists
    assert not results.exists()


def test_a_live_file_that_cannot_be_written_is_said_once_and_stops_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "live").write_text("a file in the folder's place")
    with Live(live_file(folder), UNIT, "1-of-1") as live:
        live.tell("queued")
        live.tell("running")
    assert capsys.readouterr().err.count("cannot be written") == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n\n",
        b"\xff\xfe\x00 no text\n" * 3,
        b"[]\n[]\n",
        b'{"gristmill_live":1}\n{"at":"now"}\n',
        b'{"gristmill_live":2}\n{"at":1}\n',
        b'{"gristmill_live":1,"total":"many","devices":[1,{}],"host":[]}\n{"at":1,"phase":7,"done":-1,"tokens":"x"}\n',
        b'{"gristmill_live":1,"total":' + b"[" * 100_000 + b"\n",
        b'{"gristmill_live":1}\n' + b"x" * 100_000,
    ],
)
def test_a_live_file_with_anything_in_it_raises_nothing(folder: Path, data: bytes) -> None:
    said(folder, [])
    live_file(folder).write_bytes(data)
    unit = only(reader_of(folder).read())
    json.dumps(dataclasses.asdict(unit))


def test_a_file_that_is_rewritten_just_now_keeps_what_was_seen(tmp_path: Path) -> None:
    path = tmp_path / "live"
    path.write_bytes(b"first\nlast\n")
    ends = Ends(path)
    ends.look()
    path.write_bytes(b"")
    ends.look()
    assert (ends.first, ends.last) == (b"first\n", (b"last",))


def test_results_that_come_and_go_while_they_are_read_raise_nothing(folder: Path) -> None:
    results, over = folder.parents[1], threading.Event()

    def churn() -> None:
        while not over.is_set():
            for shard in ("1-of-2", "2-of-2"):
                (folder / "journal").mkdir(parents=True, exist_ok=True)
                said(folder, [{"at": time.time(), "phase": "running", "done": 3}], shard, total=5, known=0)
                locked(folder, shard)
                with segment(folder) as journal:
                    journal.append(key(1), answer(1))
            (folder / "requests.jsonl").write_text("{}\n" * 10)
            (folder / "manifest.json").write_text('{"requests":"ten","finish_reasons":{"timeout":null},"failed":7}')
            shutil.rmtree(results)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        reader, seen = reader_of(folder), set()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            seen.add(len(reader.read().units))
        assert seen == {0, 1}
    finally:
        over.set()
        thread.join()


# The real workflow.


def test_a_run_is_followed_from_waiting_to_done_through_a_kill(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n} and more", "reference": n} for n in range(24))
    project.write_config(echo_config())
    reader = Reader(project.folder / "results")
    assert not reader.read().exists
    words = project.command("results/runs/plain/generations.jsonl", gpu=2)

    def run(seconds: str) -> subprocess.Popen[bytes]:
        environment = project.environment(GRISTMILL_ECHO_SECONDS=seconds)
        return subprocess.Popen(words, cwd="/", env=environment, start_new_session=True, stderr=subprocess.DEVNULL)

    def plain() -> UnitProgress | None:
        return next((unit for unit in reader.read().units if unit.unit == "runs/plain"), None)

    def is_past(rows: int) -> bool:
        unit = plain()
        return unit is not None and unit.done > rows

    running = run("1")
    wait_until(lambda: is_past(3))
    unit = plain()
    assert unit is not None
    assert (unit.total, len(unit.workers), unit.failed) == (24, 2, 0)
    assert {worker.batch_rows for worker in unit.workers if worker.state == "running"} == {1}
    assert reader.read().owner == "running"
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    killed = plain()
    assert killed is not None
    assert (killed.state, {worker.state for worker in killed.workers}) == ("failed", {"lost"})
    assert (reader.read().owner, reader.read().is_live) == ("none", False)

    running = run("0.1")
    wait_until(lambda: is_past(killed.done))
    assert running.wait(timeout=120) == 0
    unit = plain()
    assert unit is not None
    assert (unit.state, unit.done, unit.total, unit.seconds_left) == ("done", 24, 24, 0.0)
    assert unit.tokens == 24 * 4


def test_a_gpu_worker_shows_its_devices_and_what_they_do(project: Project) -> None:
    gpus = [{"index": n, "uuid": uuid, "name": "Fake H100", "memory_total_mib": 80000} for n, uuid in enumerate(UUIDS)]
    (project.folder / "gpus.json").write_text(json.dumps(gpus))
    fake = {"FAKE_NVML": json.dumps({uuid: {} for uuid in UUIDS}), "PYTHONPATH": str(ROOT / "tests" / "fake_nvml")}
    inventory = {"GRISTMILL_INVENTORY": str(project.folder / "gpus.json"), "GRISTMILL_ECHO_SECONDS": "1"}
    words = project.command("results/runs/plain/generations.jsonl", gpu=2)
    environment = project.environment(**fake, **inventory)
    running = subprocess.Popen(words, cwd="/", env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    reader = Reader(project.folder / "results")

    def used() -> set[tuple[str, int, float, int]]:
        workers = [worker for unit in reader.read().units for worker in unit.workers]
        return {
            (device.uuid, device.index or 0, device.utilization_ratio, device.memory_used_mib or 0)
            for worker in workers
            for device in worker.devices
            if device.utilization_ratio is not None
        }

    try:
        wait_until(lambda: used() == {(uuid, index, 0.9, 1024) for index, uuid in enumerate(UUIDS)})
        assert running.wait(timeout=120) == 0
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert used() == set()  # what is over is not now


@pytest.mark.slow
def test_a_real_training_is_followed_and_one_that_is_stopped_says_so(tmp_path: Path) -> None:
    made = make(tmp_path, steps=2000, checkpoint_every_steps=500)
    work = tmp_path / "results" / "trainings" / "t"
    work.parent.mkdir(parents=True)
    made.work.symlink_to(work)
    work.mkdir()
    reader = Reader(tmp_path / "results")
    process = subprocess.Popen(made.command(), env=environment_of(tmp_path), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(unit.done > 20 for unit in reader.read().units))
        unit = only(reader.read())
        assert (unit.state, unit.total, unit.kind, unit.workers[0].batch_rows) == ("running", 2000, "training", 8)
        assert unit.tokens > 0
        assert unit.seconds_left
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    finally:
        process.kill()
    unit = only(reader.read())
    assert (unit.state, unit.workers[0].state) == ("stopped", "stopped")
    assert unit.done == max(line["step"] for line in made.steps())


@pytest.mark.slow
def test_a_real_engine_and_a_teacher_say_their_batches_and_their_windows(project: Project) -> None:
    make_teacher(project.folder / "teacher", padding=0)
    project.write_rows({"id": f"r{n}", "question": f"w{n} w3"} for n in range(8))
    model = {"source": "./teacher", "engine": "static", "dtype": "float32"}
    run = {"dataset": "rows", "model": "tiny", "prompt": "ask", "sampling": {"max_new_tokens": 6}}
    logits = {"texts": {"model": "tiny", "dataset": "rows", "text_field": "question", "top_k": 4}}
    project.write_config(echo_config(models={"tiny": model}, runs={"plain": run}, logits=logits))
    project.done(ANSWERS, "results/logits/texts/manifest.json")
    units = {unit.unit: unit for unit in Reader(project.folder / "results").read().units}
    plain, texts = units["runs/plain"], units["logits/texts"]
    assert (plain.state, plain.done, texts.state, texts.done, texts.kind) == ("done", 8, "done", 8, "logits")
    assert [worker.batch_rows in range(1, 9) for worker in plain.workers] == [True]
    assert [(worker.done, worker.engine) for worker in texts.workers] == [(8, "transformers")]
    assert texts.tokens == 8  # a position a window of two tokens
