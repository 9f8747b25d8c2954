"""Facts about leases, with real processes: a GPU has one holder, and a group is whole or not held at all."""

import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from gristmill import lease, locks
from gristmill.errors import UserError
from gristmill.lease import lease_folder, leased
from gristmill.types import Gpu

SCRIPTS = Path(__file__).parents[1] / "scripts"
GPUS = [Gpu(index, f"GPU-{index}{index}", "H100", 81559, 0) for index in range(4)]
PRELUDE = """
import os, sys, time
from gristmill.lease import leased
from gristmill.types import Gpu
GPUS = [Gpu(index, f"GPU-{index}{index}", "H100", 81559, 0) for index in range(4)]
"""
HOLDER = f"""{PRELUDE}
with leased(GPUS, int(sys.argv[1]), "generate direct 1-of-4", 60, print) as held:
    print(*[gpu.index for gpu in held], flush=True)
    sys.stdin.read()
"""
#: Takes groups of mixed sizes, one after the other, and notes from when to when it held each GPU.
STRESS = f"""{PRELUDE}
seed, folder = int(sys.argv[1]), sys.argv[2]
with open(f"{{folder}}/{{seed}}.txt", "w") as notes:
    for round in range(20):
        with leased(GPUS, (1, 2, 1, 4, 3)[(seed + round) % 5], "stress", 60, lambda message: None) as held:
            start = time.monotonic_ns()
            time.sleep(0.002)
            shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
            notes.writelines(f"{{uuid}} {{start}} {{time.monotonic_ns()}}\\n" for uuid in shown)
"""

Start = Callable[[int], subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leases of this test alone, in a process that seems not to have imported torch."""
    monkeypatch.setenv("GRISTMILL_LEASES", str(tmp_path / "leases"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return tmp_path / "leases"


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(SCRIPTS), "GRISTMILL_LEASES": str(folder)}


@pytest.fixture
def hold(folder: Path) -> Iterator[Start]:
    """Starts a process that holds a group until its stdin ends or it is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(count: int) -> subprocess.Popen[str]:
        command, pipe = [sys.executable, "-c", HOLDER, str(count)], subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment(folder))
        started.append(child)
        assert child.stdout is not None
        assert len(child.stdout.readline().split()) == count
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def take(count: int, wait_s: float = 0, log: Callable[[str], None] = print, gpus: list[Gpu] = GPUS) -> list[int]:
    """The indices of a group, held for a moment."""
    with leased(gpus, count, "mine", wait_s, log) as held:
        return [gpu.index for gpu in held]


def free(folder: Path) -> set[int]:
    """The GPUs that nobody holds."""
    found = set()
    for gpu in GPUS:
        if (fd := locks.try_lock(folder / f"{gpu.uuid}.lock", "look")) is not None:
            locks.release(fd)
            found.add(gpu.index)
    return found


# ---- one holder


def test_a_group_is_the_first_free_gpus_in_order(folder: Path, hold: Start) -> None:
    assert take(2) == [0, 1]
    hold(1)
    assert take(2) == [1, 2]
    assert take(1, gpus=GPUS[::-1]) == [3]


def test_two_processes_never_hold_one_gpu(folder: Path, hold: Start) -> None:
    hold(1)
    hold(2)
    assert free(folder) == {3}
    assert take(1) == [3]


def test_a_group_that_is_not_whole_is_not_held_at_all(folder: Path, hold: Start) -> None:
    hold(1)
    with pytest.raises(UserError):
        take(4)
    assert free(folder) == {1, 2, 3}


def test_a_killed_holder_frees_its_whole_group(folder: Path, hold: Start) -> None:
    child = hold(3)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert take(4) == [0, 1, 2, 3]


def test_a_lease_ends_with_its_block(folder: Path) -> None:
    with leased(GPUS, 3, "mine", 0, print):
        assert free(folder) == {3}
    assert free(folder) == {0, 1, 2, 3}


def test_eight_processes_with_groups_of_mixed_sizes_never_overlap(folder: Path, tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", STRESS, str(seed), str(tmp_path)] for seed in range(8)]
    children = [subprocess.Popen(command, env=environment(folder)) for command in commands]
    assert [child.wait() for child in children] == [0] * 8
    held: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for path in tmp_path.glob("*.txt"):
        for line in path.read_text().splitlines():
            uuid, start, end = line.split()
            held[uuid].append((int(start), int(end)))
    assert set(held) == {gpu.uuid for gpu in GPUS}
    assert sum(map(len, held.values())) == 8 * 4 * (1 + 2 + 1 + 4 + 3)
    for spans in held.values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(spans)))


# ---- waiting


def test_a_wait_names_pid_and_purpose_of_the_holder_and_ends_when_it_does(hold: Start) -> None:
    child = hold(4)
    said: list[str] = []

    def log(message: str) -> None:
        said.append(message)
        child.communicate("")

    assert take(2, 60, log) == [0, 1]
    assert said[0].startswith("waiting for 2 of 4 GPUs; held: GPU 0 by pid ")
    assert f"GPU 3 by pid {child.pid} (generate direct 1-of-4)" in said[0]


def test_a_wait_that_runs_out_is_an_error_that_names_the_holder(hold: Start) -> None:
    child = hold(3)
    with pytest.raises(UserError) as caught:
        take(2)
    message = str(caught.value)
    assert "no group of 2 free GPUs" in message
    assert f"GPU 0 by pid {child.pid} (generate direct 1-of-4)" in message
    assert "gpus.wait_minutes" in message


def test_more_gpus_than_may_be_used_are_refused_at_once(folder: Path) -> None:
    with pytest.raises(UserError, match="gpus_per_model=5 but 4 GPUs may be used here; use 4 or fewer"):
        take(5, 60)
    assert not folder.exists()


# ---- what CUDA sees


def test_cuda_sees_the_uuids_of_the_group_and_what_it_saw_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    with leased(GPUS[2:], 2, "mine", 0, print):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-22,GPU-33"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with leased(GPUS, 1, "mine", 0, print):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-00"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_cuda_sees_what_it_saw_before_after_a_failure(folder: Path) -> None:
    def fail() -> None:
        with leased(GPUS, 1, "mine", 0, print):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert free(folder) == {0, 1, 2, 3}


def test_a_lease_after_torch_is_imported_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with pytest.raises(AssertionError, match="before torch is imported"):
        take(1)
    assert not folder.exists()


# ---- the folder


def test_a_link_in_place_of_a_lock_file_is_refused_and_nothing_stays_held(folder: Path) -> None:
    lease_folder()
    (folder / "GPU-11.lock").symlink_to(folder / "elsewhere")
    with pytest.raises(UserError, match=r"GPU-11\.lock cannot be used as a lock"):
        take(2)
    assert sorted(path.name for path in folder.iterdir()) == ["GPU-00.lock", "GPU-11.lock"]
    with locks.held(folder / "GPU-00.lock", "look", 0, print):
        pass


def test_the_folder_is_open_to_every_user_and_sticky(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        assert lease_folder() == folder
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o1777
    assert lease_folder() == folder


def test_the_folder_is_the_hosts_own_unless_the_environment_names_one(tmp_path: Path) -> None:
    assert lease_folder({"GRISTMILL_LEASES": str(tmp_path / "mine")}) == tmp_path / "mine"
    assert lease_folder({}).name == "gristmill-leases"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_or_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "file":
        folder.write_text("")
    else:
        folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"is not a folder.*GRISTMILL_LEASES"):
        lease_folder()


def test_a_folder_that_cannot_be_made_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be made.*GRISTMILL_LEASES"):
        lease_folder({"GRISTMILL_LEASES": str(tmp_path / "file" / "leases")})


def test_a_part_of_a_group_goes_back_before_waiting(folder: Path, hold: Start) -> None:
    hold(1)
    held, busy = lease._try_group(lease_folder(), GPUS, 4, "mine")
    assert held == []
    assert busy.startswith("GPU 0 by pid")
    assert free(folder) == {1, 2, 3}
