"""Facts about locks, with real processes: one holder, named while it lives, gone when it dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gristmill import locks
from gristmill.errors import UserError

SCRIPTS = Path(__file__).parents[1] / "scripts"
HOLDER = """
import sys
from pathlib import Path
from gristmill import locks
print(locks.try_lock(Path(sys.argv[1]), "generate direct 1-of-4"), flush=True)
sys.stdin.read()
"""

Hold = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts a process that holds a lock until its stdin ends or it is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-c", HOLDER, str(path)], subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={"PYTHONPATH": str(SCRIPTS)})
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline().strip().isdigit()
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def silent(message: str) -> None:
    raise AssertionError(f"nothing to say, but: {message}")


def test_two_processes_never_hold_one_lock(tmp_path: Path, hold: Hold) -> None:
    child = hold(tmp_path / "a.lock")
    assert locks.try_lock(tmp_path / "a.lock", "mine") is None
    child.communicate("")
    fd = locks.try_lock(tmp_path / "a.lock", "mine")
    assert fd is not None
    assert locks.try_lock(tmp_path / "a.lock", "mine again") is None
    locks.release(fd)


def test_locks_of_two_names_are_two_locks(tmp_path: Path, hold: Hold) -> None:
    hold(tmp_path / "a.lock")
    with locks.held(tmp_path / "b.lock", "mine", 0, silent):
        pass


def test_a_killed_holder_frees_its_lock(tmp_path: Path, hold: Hold) -> None:
    child = hold(tmp_path / "a.lock")
    child.kill()
    assert child.wait() == -signal.SIGKILL
    with locks.held(tmp_path / "a.lock", "mine", 0, silent):
        pass


def test_a_lock_does_not_pass_on_to_a_program_that_the_holder_starts(tmp_path: Path) -> None:
    with locks.held(tmp_path / "a.lock", "mine", 0, silent):
        command = [sys.executable, "-c", "input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False)
    try:  # not at once: the kernel lets the parent go on a moment before it closes the child's copy
        with locks.held(tmp_path / "a.lock", "mine", 10, print):
            assert child.poll() is None
    finally:
        child.communicate(b"\n")


def test_the_holder_is_named_by_pid_purpose_and_host(tmp_path: Path, hold: Hold) -> None:
    child = hold(tmp_path / "a.lock")
    note = json.loads((tmp_path / "a.lock").read_text())
    assert locks.holder(tmp_path / "a.lock") == f"pid {child.pid} (generate direct 1-of-4) on {note['host']}"


def test_a_shorter_note_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    for purpose in ("a very long purpose", "short"):
        fd = locks.try_lock(tmp_path / "a.lock", purpose)
        assert fd is not None
        locks.release(fd)
    assert f"pid {os.getpid()} (short) on" in locks.holder(tmp_path / "a.lock")


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_holder_whose_note_cannot_be_read_is_another_process(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "a.lock").write_bytes(note)
    assert locks.holder(tmp_path / "a.lock") == "another process"
    assert locks.holder(tmp_path / "gone.lock") == "another process"


def test_a_wait_names_the_holder_once_and_ends_when_it_does(tmp_path: Path, hold: Hold) -> None:
    child = hold(tmp_path / "a.lock")
    said: list[str] = []

    def log(message: str) -> None:
        said.append(message)
        child.communicate("")

    with locks.held(tmp_path / "a.lock", "mine", 60, log):
        assert locks.try_lock(tmp_path / "a.lock", "other") is None
    (message,) = said
    assert f"pid {child.pid} (generate direct 1-of-4)" in message
    assert str(tmp_path / "a.lock") in message


def test_a_wait_that_runs_out_is_an_error_that_names_the_holder(tmp_path: Path, hold: Hold) -> None:
    child = hold(tmp_path / "a.lock")
    said: list[str] = []
    with pytest.raises(UserError, match=rf"held by pid {child.pid} \(generate direct 1-of-4\).*run again"):
        locks.held(tmp_path / "a.lock", "mine", 0.3, said.append).__enter__()
    assert len(said) == 1


def test_a_lock_is_given_back_when_the_block_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with locks.held(tmp_path / "a.lock", "mine", 0, silent):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    with locks.held(tmp_path / "a.lock", "mine", 0, silent):
        pass


@pytest.mark.parametrize("target_exists", [True, False])
def test_a_symbolic_link_is_no_lock_and_its_target_is_not_touched(tmp_path: Path, target_exists: bool) -> None:
    target = tmp_path / "precious"
    if target_exists:
        target.write_text("keep")
    (tmp_path / "a.lock").symlink_to(target)
    with pytest.raises(UserError, match=r"a\.lock cannot be used as a lock"):
        locks.try_lock(tmp_path / "a.lock", "mine")
    assert target.exists() is target_exists
    assert not target_exists or target.read_text() == "keep"


def test_a_file_with_a_second_name_is_no_lock_and_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "a.lock").hardlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"a\.lock cannot be used as a lock: it is not a plain file"):
        locks.try_lock(tmp_path / "a.lock", "mine")
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_pipe_is_no_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.lock")
    with pytest.raises(UserError, match="not a plain file"):
        locks.try_lock(tmp_path / "a.lock", "mine")


def test_a_lock_is_held_while_its_holder_lives_and_looking_makes_no_file(tmp_path: Path, hold: Hold) -> None:
    assert not locks.is_held(tmp_path / "a.lock")
    assert not (tmp_path / "a.lock").exists()
    child = hold(tmp_path / "a.lock")
    assert locks.is_held(tmp_path / "a.lock")
    child.communicate("")
    assert not locks.is_held(tmp_path / "a.lock")


def test_a_folder_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "a.lock").mkdir()
    with pytest.raises(UserError, match=r"a\.lock cannot be used as a lock"):
        locks.try_lock(tmp_path / "a.lock", "mine")


def test_a_lock_in_a_folder_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.lock cannot be made.*writable"):
        locks.try_lock(tmp_path / "gone" / "a.lock", "mine")


def test_a_lock_file_is_open_to_every_user_of_the_host_and_stays(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with locks.held(tmp_path / "a.lock", "mine", 0, silent):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "a.lock").stat().st_mode & 0o777 == 0o666
