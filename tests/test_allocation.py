"""Facts about the GPUs that a scheduler gave a job: taken as they are, or refused with what was found."""

import os
from pathlib import Path

import pytest

from gristmill.errors import UserError
from gristmill.gpu import allocation
from gristmill.gpu.gpus import usable
from gristmill.types import Gpu

GPUS = [Gpu(index, f"GPU-{index}", "H100", 81_559, 0) for index in range(4)]
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_GPUS": "2,3"}


@pytest.fixture(autouse=True)
def _own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")


def take(there: list[Gpu], count: int, foreign: dict[str, str] | None = None) -> list[Gpu]:
    return allocation.take(there, count, "SLURM job 17", lambda gpus: foreign or {}, print)


@pytest.mark.parametrize(
    ("environ", "owner"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "17"}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_GPUS": ""}, None),
        (JOB, "SLURM job 17"),
        ({"SLURM_JOB_ID": "17", "SLURM_STEP_GPUS": "0"}, "SLURM job 17"),
        (JOB | {"SLURM_SHARDS_ON_NODE": "2"}, None),
        (JOB | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, None),
    ],
)
def test_gpus_are_a_jobs_own_where_slurm_says_so_and_gives_whole_ones(
    environ: dict[str, str], owner: str | None
) -> None:
    assert allocation.owner(environ) == owner


def test_what_was_given_is_taken_without_a_lease_and_named_by_uuid(tmp_path: Path) -> None:
    there = usable(GPUS, {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert [gpu.index for gpu in take(there, 2)] == [2, 3]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3"
    assert not list((tmp_path / "leases").glob("*.lock"))


def test_under_cgroups_numbers_count_the_gpus_that_are_seen() -> None:
    seen = GPUS[2:]  # NVML shows the job's own
    assert [gpu.index for gpu in take(usable(seen, {"CUDA_VISIBLE_DEVICES": "0,1"}), 2)] == [2, 3]


@pytest.mark.parametrize(("given", "count"), [(1, 2), (2, 1), (4, 2)])
def test_another_number_than_the_workers_is_refused(given: int, count: int) -> None:
    numbers = ", ".join(map(str, range(given)))
    with pytest.raises(
        UserError, match=rf"^SLURM job 17 has {given} GPUs \({numbers}\), but the worker is of {count};"
    ):
        take(GPUS[:given], count)


def test_a_gpu_that_another_process_does_not_leave_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "GRACE_S", 0.0)
    with pytest.raises(UserError, match="others fill: GPU 3 by pid 9 \\(python\\);"):
        take(GPUS[2:], 2, {"GPU-3": "pid 9 (python)"})


def test_what_an_earlier_job_leaves_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation.time, "sleep", lambda seconds: None)
    looks = iter([{"GPU-2": "4000 MiB of another process"}, {}])
    said: list[str] = []
    assert allocation.take(GPUS[2:], 2, "SLURM job 17", lambda gpus: next(looks), said.append) == GPUS[2:]
    assert said == ["waiting for what fills the GPUs of SLURM job 17: GPU 2 by 4000 MiB of another process"]


def test_a_gpu_that_was_set_aside_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases/GPU-3.sick").touch()
    with pytest.raises(UserError, match="GPU 3"):
        take(GPUS[2:], 2)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, r"^this job sees no GPU on \S+ \(CUDA_VISIBLE_DEVICES is not set\); .*gpus.devices: none"),
        (
            {"SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "0"},
            r"^SLURM job 17 sees no GPU .*CUDA_VISIBLE_DEVICES is '0'",
        ),
    ],
)
def test_a_clusters_job_without_a_gpu_does_not_fall_back_to_the_cpu(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        allocation.require_some([], environ)
