"""Facts about trainings that go wrong, with real processes that speak by gloo: what is said, left, and gone on from."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from tiny_training import Made, environment, make

pytestmark = pytest.mark.slow
FAULTY = Path(__file__).parent / "faulty_training.py"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A training on two processes that nothing happened to."""
    made = make(tmp_path_factory.mktemp("whole"), processes=2)
    made.forked()
    return made


def faulty(made: Made, fault: str, **placement: Any) -> "subprocess.CompletedProcess[str]":
    command = made.command(FAULTY, **placement)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = {**environment(made.folder), "FAULT": fault}
    return subprocess.run(command, env=env, timeout=240, check=False, **piped)  # type: ignore[call-overload,no-any-return]


def last_line(found: "subprocess.CompletedProcess[str]") -> str:
    return found.stdout.strip().splitlines()[-1]


def checkpoints(made: Made) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in made.work.glob("checkpoints/*/step-*"))


def same(one: Made, other: Made) -> None:
    """The same steps and the same weights, bit for bit."""
    keys = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    assert [[line[key] for key in keys] for line in one.steps()] == [
        [line[key] for key in keys] for line in other.steps()
    ]
    assert (one.model / "model.safetensors").read_bytes() == (other.model / "model.safetensors").read_bytes()


def left_behind(made: Made) -> list[int]:
    """Processes that still run this training."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(str(made.work).encode()) for word in words):
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_others_and_the_next_run_goes_on(
    tmp_path: Path, whole: Made, victim: int
) -> None:
    made = make(tmp_path, processes=2)
    found = faulty(made, f"kill:{victim}:4")
    assert found.returncode == 2
    assert last_line(found).startswith("error: ")
    assert last_line(found).endswith("3 steps were done, and the next run goes on from step 2")
    assert left_behind(made) == []
    assert "going on from step 2" in made.done()
    same(made, whole)


def test_a_process_that_is_killed_ends_those_that_cannot_hear_it(tmp_path: Path) -> None:
    made = make(tmp_path, processes=2)
    found = faulty(made, "deaf:1:4")
    assert found.returncode == 2
    assert last_line(found) == (
        "error: process 0 waited in vain: another one is gone without a word (killed, or out of host memory: see "
        "dmesg); 3 steps were done, and the next run goes on from step 2"
    )
    assert left_behind(made) == []


def test_a_training_that_is_started_inside_another_group_waits_for_none_of_it(tmp_path: Path) -> None:
    made = make(tmp_path, steps=1, warmup_steps=0)
    group = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "PMI_SIZE": "4"}
    accelerates = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_USE_DEEPSPEED": "true"}
    env = environment(made.folder) | group | accelerates
    found = subprocess.run(made.command(), env=env, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    (there,) = made.steps()
    plain = make(tmp_path / "plain", steps=1, warmup_steps=0)
    plain.forked()
    assert there["gradient_norm"] == plain.steps()[0]["gradient_norm"]


def test_a_process_that_hangs_ends_the_training_after_the_timeout(tmp_path: Path, whole: Made) -> None:
    made = make(tmp_path, processes=2, timeout_minutes=0.05)
    found = faulty(made, "hang:1:4")
    assert found.returncode == 2
    assert "process 0 waited in vain for the others: one of them died or hangs (timeout_minutes=0.05" in last_line(
        found
    )
    assert left_behind(made) == []
    made.forked(timeout_minutes=1)
    same(made, whole)


def test_a_loss_that_is_no_number_names_its_step_and_the_last_good_checkpoint(tmp_path: Path, whole: Made) -> None:
    made = make(tmp_path, processes=2)
    found = faulty(made, "nan:4")
    assert found.returncode == 2
    assert "step 4: the loss is nan, and the weights are as before it; the last good checkpoint is step 2" in last_line(
        found
    )
    assert (made.model.exists(), checkpoints(made)) == (False, [2])
    made.forked()
    same(made, whole)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_at_a_checkpoint_keeps_the_earlier_one(tmp_path: Path, processes: int) -> None:
    made = make(tmp_path, processes=processes)
    found = faulty(made, "full:4")
    assert found.returncode == 2
    assert (
        "the checkpoint of step 4 cannot be written: No space left on device; the earlier ones are kept"
        in last_line(found)
    )
    assert checkpoints(made) == [2]
    assert [path.name for path in made.work.glob("checkpoints/*/.step-*")] == []
    made.forked()
    assert made.losses() == sorted(made.losses(), reverse=True)
    assert len(made.losses()) == 6


def started(made: Made, fault: str) -> "subprocess.Popen[str]":
    env = {**environment(made.folder), "FAULT": fault}
    return subprocess.Popen(made.command(FAULTY), env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.fixture
def running(tmp_path: Path) -> "Iterator[tuple[Made, subprocess.Popen[str]]]":
    """A slow training on two processes, in its third step or later."""
    made = make(tmp_path, processes=2, checkpoint_every_steps=100)
    child = started(made, "slow")
    wait_until(lambda: len(made.losses()) >= 2)
    yield made, child
    child.kill()
    child.wait()


def test_a_signal_ends_the_step_writes_a_checkpoint_and_the_next_run_makes_the_same_steps(
    running: "tuple[Made, subprocess.Popen[str]]", whole: Made
) -> None:
    made, child = running
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    done = len(made.losses())
    assert done < 6
    assert checkpoints(made) == [done]
    assert "stopped by signal 15; run again to go on from the last checkpoint" in said
    assert left_behind(made) == []
    assert f"going on from step {done}" in made.forked()
    same(made, whole)


def test_processes_do_not_outlive_a_launcher_that_is_killed(
    running: "tuple[Made, subprocess.Popen[str]]", whole: Made
) -> None:
    made, child = running
    assert len(left_behind(made)) >= 3
    child.kill()
    child.wait()
    wait_until(lambda: left_behind(made) == [])
    made.forked()
    same(made, whole)


def test_a_signal_to_one_process_alone_stops_all_at_the_same_step(tmp_path: Path, whole: Made) -> None:
    made = make(tmp_path, processes=2, checkpoint_every_steps=100)
    found = faulty(made, "early:1")
    assert found.returncode == 128 + signal.SIGTERM
    assert (len(made.losses()), checkpoints(made)) == (3, [3])
    made.forked()
    same(made, whole)


@pytest.fixture
def alone(tmp_path: Path) -> "Iterator[tuple[Made, subprocess.Popen[str], int]]":
    """A slow training on one process, in its third step or later, and that process."""
    made = make(tmp_path, steps=20, checkpoint_every_steps=100)
    child = started(made, "slow")
    wait_until(lambda: len(made.losses()) >= 2)
    (process,) = set(left_behind(made)) - {child.pid}
    yield made, child, process
    child.kill()
    child.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("told", ["launcher", "process"])
def test_a_process_alone_stops_with_a_checkpoint_whichever_is_told(
    alone: "tuple[Made, subprocess.Popen[str], int]", told: str, number: signal.Signals
) -> None:
    made, child, process = alone
    os.kill(child.pid if told == "launcher" else process, number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + (number if told == "launcher" else signal.SIGTERM)
    assert checkpoints(made) == [len(made.losses())] != [20]
    assert left_behind(made) == []
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGRTMIN + 1])
def test_a_process_alone_that_a_signal_ended_is_no_want_of_memory(
    alone: "tuple[Made, subprocess.Popen[str], int]", number: int
) -> None:
    _, child, process = alone
    os.kill(process, number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 2
    assert f"error: the training was ended by signal {int(number)} (" in said
    assert "Traceback" not in said


def test_a_process_alone_does_not_outlive_its_launcher(alone: "tuple[Made, subprocess.Popen[str], int]") -> None:
    made, child, _ = alone
    child.kill()
    child.wait()
    wait_until(lambda: left_behind(made) == [])
    made.forked()


def test_a_signal_that_comes_while_processes_agree_counts_for_the_next_step(tmp_path: Path) -> None:
    made = make(tmp_path, checkpoint_every_steps=100)
    found = faulty(made, "late:3")
    assert found.returncode == 128 + signal.SIGTERM
    assert (len(made.losses()), checkpoints(made)) == (4, [4])


def test_a_second_launcher_waits_for_the_first(running: "tuple[Made, subprocess.Popen[str]]") -> None:
    made, child = running
    command = [*made.command(FAULTY), "--gpus", '{"wait_minutes": 0}']
    found = subprocess.run(
        command, env=environment(made.folder), capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 2
    assert f"pid {child.pid}" in found.stderr


def test_nothing_of_a_torn_checkpoint_is_used(tmp_path: Path, whole: Made) -> None:
    made = make(tmp_path, processes=2)
    assert faulty(made, "kill:0:5").returncode == 2
    (torn,) = made.work.glob("checkpoints/*/step-00000004")
    biggest = max(torn.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(biggest, biggest.stat().st_size // 2)
    said = made.forked()
    assert "step-00000004 is not whole" in said
    assert "going on from step 2" in said
    same(made, whole)


def test_torn_checkpoints_are_no_reason_to_remove_whole_ones(tmp_path: Path) -> None:
    made = make(tmp_path, checkpoint_every_steps=2)
    made.forked()
    (folder,) = made.work.glob("checkpoints/*")
    for path in folder.glob("step-*"):
        (path / "state.json").write_bytes(b"{")
    (folder / "step-00000400").mkdir()
    (folder / "step-00000300.bak").mkdir()
    assert last_line(faulty(made, "kill:0:6")) == (
        "error: the training was killed (SIGKILL), by the system when memory ran out (dmesg) or by someone; 5 steps "
        "were done, and the next run goes on from step 4"
    )
    there = sorted(path.name for path in folder.iterdir())
    assert there == ["step-00000002", "step-00000004", "step-00000300.bak"]
    assert "going on from step 4" in made.forked()


def test_an_update_that_destroys_the_weights_is_no_result(tmp_path: Path) -> None:
    made = make(tmp_path, steps=1, warmup_steps=0, learning_rate=0.5)
    found = faulty(made, "wreck:1")
    assert found.returncode == 2
    assert "step 1: its update left weights that are not finite; no checkpoint is there; lower learning_rate (0.5)" in (
        found.stdout
    )
    assert not made.model.exists()
    assert not list(made.work.glob("checkpoints/*/step-*"))


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    made = make(tmp_path, steps=2)
    made.forked()
    (folder,) = made.work.glob("checkpoints/*")
    (folder / ".step-00000003.tmp").mkdir()
    made.forked()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002"]
