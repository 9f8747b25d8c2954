"""Facts about leases, with real processes: a GPU has one holder, and a group is whole or not held at all."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gristmill import locks
from gristmill.errors import UserError
from gristmill.gpu import health, lease
from gristmill.gpu.gpus import read_inventory
from gristmill.gpu.lease import lease_folder, leased
from gristmill.types import Gpu

SCRIPTS = Path(__file__).parents[1] / "scripts"
GPUS = [Gpu(index, f"GPU-{index}{index}", "H100", 81559, 0) for index in range(4)]
PRELUDE = """
import os, sys, time
from gristmill.gpu.lease import leased
from gristmill.types import Gpu
GPUS = [Gpu(index, f"GPU-{index}{index}", "H100", 81559, 0) for index in range(4)]
"""
HOLDER = f"""{PRELUDE}
with leased(GPUS, int(sys.argv[1]), "generate direct 1-of-4", 60, print) as held:
    print(*[gpu.index for gpu in held], flush=True)
    sys.stdin.read()
"""
#: Forks processes that take groups of mixed sizes, round after round, of eight GPUs, and note what overlaps. A GPU's
#: holder makes a file of its own that must not exist yet; those of killed holders are expected, by their pid.
STRESS = f"""{PRELUDE}
import contextlib, signal
from pathlib import Path
GPUS = [Gpu(index, f"GPU-{{index}}", "H100", 81559, 0) for index in range(8)]
SIZES = (1, 2, 1, 4, 3, 1, 2, 1, 3, 1, 2, 1, 8)
processes, rounds, folder, killed = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "kill"

def work(seed):
    for round in range(rounds):
        with leased(GPUS, SIZES[(seed + round) % 13], "stress", 120, lambda message: None) as held:
            if os.environ["CUDA_VISIBLE_DEVICES"] != ",".join(gpu.uuid for gpu in held):
                os._exit(3)
            for gpu in held:
                mark = folder / gpu.uuid
                if mark.exists() and not gone(int(mark.read_text() or 0)):
                    os._exit(4)
                mark.write_text(str(os.getpid()))
            time.sleep(0.0002)
            for gpu in held:
                if (folder / gpu.uuid).read_text() != str(os.getpid()):
                    os._exit(5)
                (folder / gpu.uuid).unlink()

def gone(pid):
    with contextlib.suppress(OSError):
        return open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] == "Z"
    return True

children = []
for seed in range(processes):
    child = os.fork()
    if child == 0:
        work(seed)
        os._exit(0)
    children.append(child)
if killed:
    for child in children[::2]:
        time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
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


def stress(folder: Path, tmp_path: Path, *arguments: str) -> list[int]:
    """Exit codes of the processes: 3, 4 and 5 are overlaps."""
    marks = tmp_path / "marks"
    marks.mkdir()
    processes, rounds, kill = arguments
    command = [sys.executable, "-c", STRESS, processes, rounds, str(marks), kill]
    result = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=300, check=True)
    return [int(code) for code in result.stdout.split()]


@pytest.mark.slow
def test_32_processes_with_200_groups_of_mixed_sizes_never_overlap_and_all_come_to_an_end(
    folder: Path, tmp_path: Path
) -> None:
    assert stress(folder, tmp_path, "32", "200", "") == [0] * 32


@pytest.mark.slow
def test_when_half_of_32_processes_are_killed_the_others_come_to_an_end_without_an_overlap(
    folder: Path, tmp_path: Path
) -> None:
    codes = stress(folder, tmp_path, "32", "200", "kill")
    assert codes[1::2] == [0] * 16
    assert set(codes[::2]) <= {0, -signal.SIGKILL}
    assert codes[::2].count(-signal.SIGKILL) > 4


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


# ---- which GPUs

LINKED = {frozenset({"GPU-00", "GPU-33"}): 100, frozenset({"GPU-11", "GPU-22"}): 100}


def test_a_group_prefers_gpus_that_nvlink_joins(hold: Start) -> None:
    with leased(GPUS, 2, "mine", 0, print, LINKED) as held:
        assert [gpu.index for gpu in held] == [0, 3]
    hold(1)
    with leased(GPUS, 2, "mine", 0, print, LINKED) as held:
        assert [gpu.index for gpu in held] == [1, 2]


def test_a_gpu_that_a_process_without_a_lease_fills_is_passed_over(folder: Path) -> None:
    with leased(GPUS, 2, "mine", 0, print, None, lambda gpus: {"GPU-00": "pid 99 (python)"}) as held:
        assert [gpu.index for gpu in held] == [1, 2]
        assert free(folder) == {0, 3}


def test_a_wait_for_a_gpu_that_others_fill_names_them(folder: Path) -> None:
    full = {gpu.uuid: "pid 99 (python, 70000 MiB)" for gpu in GPUS}
    with pytest.raises(UserError, match=r"held: GPU 0 without a lease by pid 99 \(python, 70000 MiB\); GPU 1"):
        leased(GPUS, 1, "mine", 0, print, None, lambda gpus: full).__enter__()
    assert free(folder) == {0, 1, 2, 3}


def write_inventory(path: Path, *used_mib: int) -> list[Gpu]:
    items = [
        {"index": index, "uuid": f"GPU-{index}", "name": "H100", "memory_total_mib": 81559, "memory_used_mib": used}
        for index, used in enumerate(used_mib)
    ]
    path.write_text(json.dumps(items))
    return read_inventory(path)


def test_memory_in_use_above_the_limit_fills_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    gpus = write_inventory(tmp_path / "gpus.json", 0, 1024, 1025)
    assert lease.filled(gpus, 1024) == {"GPU-2": "1025 MiB of another process"}


def test_what_a_job_with_a_lease_fills_is_no_foreign_use(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    gpus = write_inventory(tmp_path / "gpus.json", 70_000, 70_000)
    with leased(gpus, 1, "mine", 0, print):
        assert set(lease.foreign_use(gpus, 1024)) == {"GPU-1"}
    assert set(lease.foreign_use(gpus, 1024)) == {"GPU-0", "GPU-1"}


def test_a_gpu_that_is_set_aside_is_passed_over_and_a_plan_leaves_it_out(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    gpus = write_inventory(tmp_path / "gpus.json", 0, 0)
    health.set_aside(lease_folder(), health.Fault((gpus[0],), "Xid 79"))
    with leased(gpus, 1, "mine", 0, print) as held:
        assert held == [gpus[1]]
    sick = lease_folder() / f"{gpus[0].uuid}.sick"
    assert lease.foreign_use(gpus, 1024) == {gpus[0].uuid: f"set aside: Xid 79; rm {sick} to use it"}


def test_a_group_that_is_not_fit_is_refused_at_once(folder: Path) -> None:
    health.set_aside(lease_folder(), health.Fault((GPUS[2],), "Xid 79"))
    with pytest.raises(UserError, match=r"gpus_per_model=4 but 3 of 4 GPUs are fit; GPU 2: Xid 79; rm "):
        leased(GPUS, 4, "mine", 3600, print).__enter__()


def test_a_process_holds_one_mig_device_and_no_more(folder: Path) -> None:
    slices = [Gpu(0, f"MIG-{n}", "H100 MIG 1g.10gb", 9728, 0) for n in range(2)]
    with leased(slices, 1, "mine", 0, print):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-0"
    with pytest.raises(UserError, match="one MIG device only; use 1"):
        leased(slices, 2, "mine", 0, print).__enter__()


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
    assert sorted(path.name for path in folder.iterdir()) == ["GPU-00.lock", "GPU-11.lock", "look.lock"]
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
    held, busy = lease._try_group(lease_folder(), lease.Wish(GPUS, 4, "mine", {}, lambda gpus: {}))
    assert held == []
    assert busy.startswith("GPU 0 by pid")
    assert free(folder) == {1, 2, 3}
