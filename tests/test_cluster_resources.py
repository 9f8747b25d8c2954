"""Facts about what jobs ask of a cluster, and what SLURM is asked before the first of them."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gristmill import slurm
from gristmill.config.resources import value_at
from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.errors import UserError
from gristmill.planning.resources import memory_mb
from gristmill.slurm import Wanted

GIB_8B = 16_060_522_496
SHARD = 4_976_698_592


def described(folder: Path, **more: Any) -> str:
    path = folder / "model.json"
    files = {f"model-0000{n}.safetensors": SHARD for n in range(1, 4)}
    path.write_text(json.dumps({"weights_bytes": GIB_8B, "dtype": "bfloat16", "files": files, **more}))
    return str(path)


def model(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"source": "org/8b", **keys})


def test_a_worker_on_a_gpu_holds_one_weights_file_and_not_the_model(tmp_path: Path) -> None:
    path = described(tmp_path)
    assert memory_mb(path, model(), 1) == 4000 + 3000 + 4976
    assert memory_mb(path, model(), 4) == 4000 + 12_000 + 4976


def test_what_may_be_offloaded_is_counted_whole(tmp_path: Path) -> None:
    expected = 4000 + 3000 + (GIB_8B + SHARD) // 1_000_000
    assert memory_mb(described(tmp_path), model(allow_offload=True), 1) == expected
    assert memory_mb(described(tmp_path), model(max_memory={"0": "10GiB", "cpu": "30GiB"}), 1) == expected


def test_on_a_cpu_the_weights_are_held_in_the_dtype_they_work_in(tmp_path: Path) -> None:
    path = described(tmp_path)
    assert memory_mb(path, model(), 0) == 4000 + int(1.5 * 2 * GIB_8B / 1e6)
    assert memory_mb(path, model(dtype="bfloat16"), 0) == 4000 + int(1.5 * GIB_8B / 1e6)


def test_a_worker_without_a_model_asks_for_a_gigabyte(tmp_path: Path) -> None:
    assert memory_mb(str(tmp_path / "none.json"), ModelConfig(engine="echo"), 2) == 1000


def test_a_model_that_is_still_to_be_prepared_is_asked_about_again(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError) as error:
        memory_mb(path, model(), 1)
    assert error.value.filename == path  # what Snakemake compares with the job's inputs


@pytest.mark.parametrize(
    ("name", "given", "values"),
    [
        ("runtime", 60, [60, 120, 180]),
        ("mem_mb", 1000, [1000, 2000, 3000]),
        ("mem_mb", [1000, 9000], [1000, 9000, 9000]),
        ("slurm_partition", ["short", "long"], ["short", "long", "long"]),
        ("constraint", "a100", ["a100", "a100", "a100"]),
        ("cpus_per_task", 8, [8, 8, 8]),
    ],
)
def test_time_and_memory_grow_with_the_attempt_and_a_list_has_one_for_each(
    name: str, given: Any, values: list[Any]
) -> None:
    assert [value_at(name, given, attempt) for attempt in (1, 2, 3)] == values


@pytest.mark.parametrize("name", ["gpu", "nodes", "gres", "threads", "_cores", "gpu_group_0"])
def test_a_resource_that_the_plan_decides_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"resources.{name} is decided by"):
        model(resources={name: 1})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mem_mb", "64GB", "resources.mem_mb is '64GB'; it is a whole number of MB from 1"),
        ("mem_mb", [1000, "x"], "resources.mem_mb is 'x'; it is a whole number of MB from 1"),
        ("runtime", "4h", "resources.runtime is '4h'; it is a whole number of minutes from 1"),
        ("runtime", 0, "resources.runtime is 0; it is a whole number of minutes from 1"),
        ("cpus_per_task", "8", "resources.cpus_per_task is '8'; it is a whole number from 1"),
        ("partition", "gpu", "resources.partition is called slurm_partition here; rename it"),
        ("mem", "64GB", "resources.mem is called mem_mb here; rename it"),
    ],
)
def test_a_resource_that_snakemake_would_stumble_over_later_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        model(resources={name: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, [], "", {"a": 1}])
def test_a_resource_is_a_whole_number_or_text(value: Any) -> None:
    with pytest.raises(ValidationError):
        model(resources={"runtime": value})


def test_no_devices_is_a_choice_of_its_own() -> None:
    assert GpusConfig.model_validate({"devices": "none"}).wanted() == "none"


def answering(**answers: tuple[int, str, str]) -> Callable[[list[str]], "subprocess.CompletedProcess[str]"]:
    """SLURM's commands by name: exit status, stdout, stderr."""

    def run(argv: list[str]) -> "subprocess.CompletedProcess[str]":
        code, out, err = answers.get(argv[0], (0, "", ""))
        return subprocess.CompletedProcess(argv, code, out, err)

    return run


def test_jobs_are_asked_about_as_they_will_be_submitted() -> None:
    resources = {"slurm_partition": "gpu", "runtime": 60, "mem_mb": 9000, "nodes": 1, "gpu": 2, "gpu_model": "a100"}
    resources |= {"slurm_extra": "--signal=TERM@60", "tmpdir": "<TBD>"}
    assert Wanted("rule generate", 8, resources).options() == [
        *("--partition=gpu", "--time=60", "--mem=9000", "--nodes=1"),
        *("--gpus=a100:2", "--cpus-per-task=8", "--signal=TERM@60"),
    ]


def test_memory_that_is_not_known_yet_is_left_out() -> None:
    assert Wanted("rule generate", 4, {"mem_mb": "<TBD>", "gpu": 1}).options() == ["--gpus=1", "--cpus-per-task=4"]


def test_a_refusal_is_one_line_for_each_kind_of_job() -> None:
    jobs = [
        Wanted(f"rule {name}", 4, {"slurm_partition": "x", "gpu": 1})
        for name in ("generate", "generate", "judge_generate")
    ]
    refused = answering(
        sbatch=(
            1,
            "",
            "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified\n",
        )
    )
    with pytest.raises(UserError) as error:
        slurm.require_accepted(jobs, print, run=refused)
    (line,) = str(error.value).splitlines()
    assert line.startswith(
        "SLURM refuses rule generate (--partition=x --gpus=1 --cpus-per-task=4): Invalid partition name specified;"
    )


NODES = """node1 idle 16 64000 gpu:4
node2 drain 16 64000 gpu:4
node2 drain 16 64000 gpu:4
node3 mix- 16 64000 gpu:8
node4 idle* 16 64000 gpu:a100:2(S:0-1),gpu:a40:4
"""


def test_while_nodes_are_down_a_job_that_none_takes_now_is_not_refused() -> None:
    no_node = (1, "", "allocation failure: Requested node configuration is not available\n")
    said: list[str] = []
    away = answering(sbatch=no_node, sinfo=(0, NODES, ""))
    slurm.require_accepted([Wanted("rule generate", 1, {"gpu": 4})], said.append, run=away)
    assert said == [
        "rule generate (--gpus=4 --cpus-per-task=1) cannot start as long as node2 is drain, node4 is idle* "
        "(`sinfo -R`); it will wait"
    ]
    for size in ({"gpu": 8}, {"gpu": 1, "mem_mb": 64_001}, {"cpus_per_task": 17}, {"gpu": 3, "gpu_model": "a100"}):
        with pytest.raises(UserError, match="Requested node configuration is not available"):
            slurm.require_accepted([Wanted("rule generate", 1, size)], print, run=away)
    with pytest.raises(UserError, match="Requested node configuration is not available"):
        slurm.require_accepted([Wanted("rule generate", 1, {"gpu": 9})], print, run=answering(sbatch=no_node))


def test_a_full_queue_is_no_refusal() -> None:
    full = answering(sbatch=(1, "", "allocation failure: Resource temporarily unavailable\n"))
    said: list[str] = []
    slurm.require_accepted([Wanted("rule generate", 1, {"gpu": 4})], said.append, run=full)
    assert said == ["SLURM's queue is full (Resource temporarily unavailable); sbatch waits and tries again"]


def test_a_controller_that_does_not_answer_is_no_refusal() -> None:
    away = answering(sbatch=(1, "", "sbatch: error: Unable to contact slurm controller (connect failure)\n"))
    with pytest.raises(UserError, match=r"^SLURM does not answer: .*scontrol ping"):
        slurm.require_accepted([Wanted("rule generate", 1, {})], print, run=away)


def test_a_time_over_the_partitions_is_refused_before_it_waits_for_ever() -> None:
    limits = answering(sinfo=(0, "4:00:00\n", ""))
    jobs = [Wanted("rule generate", 1, {"slurm_partition": "gpu", "runtime": 241})]
    with pytest.raises(UserError, match="runtime is 241 minutes, over the 240 of partition gpu"):
        slurm.require_accepted(jobs, print, run=limits)
    slurm.require_accepted([Wanted("rule generate", 1, {"slurm_partition": "gpu", "runtime": 240})], print, run=limits)


def test_a_time_that_grows_over_the_partitions_is_said() -> None:
    limits = answering(sinfo=(0, "10:00:00\n", ""))
    said: list[str] = []
    asked = {"slurm_partition": "gpu", "runtime": 240}
    slurm.require_accepted([Wanted("rule generate", 1, asked, 600)], said.append, run=limits)
    assert said == []
    slurm.require_accepted([Wanted("rule generate", 1, asked, 960)], said.append, run=limits)
    assert said == [
        "the last attempt of rule generate would wait for ever: runtime is 960 minutes, over the 600 of partition gpu; "
        "lower what its time grows to"
    ]


def test_a_time_is_not_too_long_for_one_of_several_partitions_without_a_limit() -> None:
    limits = answering(sinfo=(0, "4:00:00\ninfinite\n", ""))
    jobs = [Wanted("rule generate", 1, {"slurm_partition": "gpu,urgent", "runtime": 2000})]
    slurm.require_accepted(jobs, print, run=limits)


@pytest.mark.parametrize(
    ("listed", "account", "said"),
    [
        ((0, "ci\nroot\n", ""), "nobody", r"slurm_account is nobody, and the accounts of \S+ are ci, root"),
        ((0, "ci\nroot\n", ""), "ci", None),
        ((0, "ci\nroot\n", ""), "ci, ROOT", None),
        ((0, "", ""), "any", None),  # not all users may list them
        ((1, "", "accounting is disabled"), "any", "this cluster keeps no accounts; leave it out"),
    ],
)
def test_an_account_that_is_not_the_users_is_refused(
    listed: tuple[int, str, str], account: str, said: str | None
) -> None:
    jobs = [Wanted("rule generate", 1, {"slurm_account": account})]
    if said is None:
        slurm.require_accepted(jobs, print, run=answering(sacctmgr=listed))
        return
    with pytest.raises(UserError, match=said):
        slurm.require_accepted(jobs, print, run=answering(sacctmgr=listed))


def test_options_of_all_jobs_are_asked_about_too() -> None:
    asked: list[list[str]] = []

    def run(argv: list[str]) -> "subprocess.CompletedProcess[str]":
        asked.append(argv)
        return subprocess.CompletedProcess(argv, 0, "", "")

    slurm.require_accepted([Wanted("rule generate", 1, {})], print, ["--qos=high"], run)
    assert asked == [["sbatch", "--test-only", "--cpus-per-task=1", "--qos=high", "--wrap=true"]]


def test_an_extra_option_whose_quote_does_not_end_is_one_line() -> None:
    with pytest.raises(
        UserError, match=r"""^rule generate: slurm_extra is "--comment='it", which is no command line"""
    ):
        Wanted("rule generate", 1, {"slurm_extra": "--comment='it"}).options()


def test_a_command_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^no-such-sbatch does not answer"):
        slurm.run(["no-such-sbatch"])


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("30:00", 30),
        ("4:00:00", 240),
        ("1-00:00:00", 1440),
        ("2-12:30:00", 3630),
        ("0:30", 1),
        ("infinite", None),
        ("n/a", None),
    ],
)
def test_a_partitions_limit_is_read(text: str, minutes: int | None) -> None:
    assert slurm.limit_minutes(text) == minutes


@pytest.mark.parametrize(
    ("status_command", "config", "said"),
    [
        ("sacct", "AccountingStorageType = accounting_storage/none\nMinJobAge = 300 sec", "keeps no accounts"),
        ("squeue", "AccountingStorageType = accounting_storage/slurmdbd\nMinJobAge = 60 sec", "after 60 seconds"),
        ("squeue", "AccountingStorageType = accounting_storage/none\nMinJobAge = 300 sec", None),
        ("sacct", "AccountingStorageType = accounting_storage/slurmdbd\nMinJobAge = 2 sec", None),
    ],
)
def test_a_way_to_ask_for_states_that_would_wait_for_ever_is_refused(
    status_command: str, config: str, said: str | None
) -> None:
    run = answering(scontrol=(0, config, ""))
    if said is None:
        slurm.require_states(status_command, run)
        return
    with pytest.raises(UserError, match=said):
        slurm.require_states(status_command, run)


class Forgetful:
    """An executor that answers for the jobs it is told about and forgets the others."""

    def __init__(self, running: set[str], ended: set[str]) -> None:
        self.running, self.ended = running, ended
        self.done: list[str] = []

    def report_job_success(self, job: str) -> None:
        self.done.append(job)

    def report_job_error(self, job: str, msg: str) -> None:
        self.done.append(f"{job}: {msg}")

    async def check_active_jobs(self, active_jobs: list[str]) -> AsyncIterator[str]:
        for job in active_jobs:
            if job in self.ended:
                self.report_job_success(job)
            elif job in self.running:
                yield job


def test_a_job_that_could_not_be_asked_about_is_asked_about_again() -> None:
    class Executor(Forgetful):
        pass

    async def left(executor: Forgetful, jobs: list[str]) -> list[str]:
        return [job async for job in executor.check_active_jobs(jobs)]

    slurm.keep_unanswered(Executor)
    slurm.keep_unanswered(Executor)  # once is enough
    away = Executor(set(), set())
    assert asyncio.run(left(away, ["one", "two"])) == ["one", "two"]
    back = Executor({"one"}, {"two"})
    assert asyncio.run(left(back, ["one", "two"])) == ["one"]
    assert back.done == ["two"]
