"""Facts about the fence: one Snakemake a results folder, and no writing by what a killed one left behind."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gristmill import fence, locks
from gristmill.errors import UserError
from gristmill.files import atomic_folder, write_json

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(fence.RUN, raising=False)
    return tmp_path


def test_a_second_claim_names_the_first_and_a_third_follows_when_it_has_ended() -> None:
    lock = fence.claim("one")
    with pytest.raises(UserError, match=rf"results/ is in use by pid {os.getpid()} \(snakemake\).*wait for it or stop"):
        fence.claim("two")
    locks.release(lock)
    locks.release(fence.claim("two"))


def test_a_disk_that_is_full_when_a_run_starts_is_one_line_and_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match=r"fence cannot be written: No space left on device; make room") as caught:
            fence.claim("one")
    assert "\n" not in str(caught.value)
    locks.release(fence.claim("one"))
    assert (fence.FOLDER / "fence").read_text() == "one"


def test_a_claim_ends_with_a_killed_process(here: Path) -> None:
    program = "import time; from gristmill import fence; fence.claim('one'); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=here, env={"PYTHONPATH": str(SCRIPTS)}, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(UserError, match=f"in use by pid {child.pid}"):
            fence.claim("two")
        child.send_signal(signal.SIGKILL)
        child.wait()
        locks.release(fence.claim("two"))


def test_a_job_of_an_earlier_run_may_not_write_a_result(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks.release(fence.claim("old"))
    monkeypatch.setenv(fence.RUN, "old")
    write_json(here / "a.json", 1)
    assert not fence.is_lost()
    locks.release(fence.claim("new"))
    assert fence.is_lost()
    with pytest.raises(UserError, match=r"a\.json is not written: the Snakemake of this job is gone"):
        write_json(here / "a.json", 2)
    with pytest.raises(UserError, match="shards is not written"), atomic_folder(here / "shards"):
        pass
    assert (here / "a.json").read_text() == "1\n"
    assert sorted(path.name for path in here.iterdir()) == ["a.json", "results"]


def test_a_program_started_by_hand_may_write(here: Path) -> None:
    locks.release(fence.claim("new"))
    write_json(here / "a.json", 1)
    assert not fence.is_lost()


def test_a_run_waits_for_a_result_that_is_taking_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks.release(fence.claim("old"))
    monkeypatch.setenv(fence.RUN, "old")
    claimed = threading.Event()

    def claim() -> None:
        locks.release(fence.claim("new"))
        claimed.set()

    with fence.passed(here / "a.json"):
        thread = threading.Thread(target=claim)
        thread.start()
        assert not claimed.wait(0.3)
    thread.join()
    assert fence.is_lost()


def test_a_lost_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    locks.release(fence.claim("old"))
    monkeypatch.setenv(fence.RUN, "old")
    noticed: list[int] = []
    ended = threading.Event()
    thread = threading.Thread(target=fence.watch, args=(ended.wait, lambda: noticed.append(1), 0.01))
    thread.start()
    locks.release(fence.claim("new"))
    thread.join()
    assert noticed == [1]


def test_results_that_cannot_be_written_to_are_said(here: Path) -> None:
    (here / "results").write_text("a file")
    with pytest.raises(UserError, match=r"results/\.gristmill cannot be made: .*make results/ a writable folder"):
        fence.claim("one")
