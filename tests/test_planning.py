"""Facts about the plan: how many workers each model gets, and what stops before the first job."""

from typing import Any

import pytest

from gristmill.config.schema import Config
from gristmill.errors import UserError
from gristmill.gpu.nvml import Use
from gristmill.planning.plan import CLUSTER_THREADS, GPU_WORKER_THREADS, Plan, make_plan
from gristmill.planning.text import plan_text
from gristmill.planning.workers import Worker, decode_workers, encode_workers, worker_of
from gristmill.types import Gpu


def gpus(count: int) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index:04}", "H100", 81559, 0) for index in range(count)]


def config(sizes: dict[str, int], **gpu_settings: Any) -> Config:
    """A config with a run for each model: name → gpus_per_model."""
    return Config.model_validate(
        {
            "datasets": {"d": {"path": "d.jsonl"}},
            "models": {name: {"engine": "echo", "gpus_per_model": size} for name, size in sizes.items()},
            "prompts": {"p": {"file": "p.jinja"}},
            "runs": {f"run-{name}": {"dataset": "d", "model": name, "prompt": "p"} for name in sizes},
            "gpus": gpu_settings,
        }
    )


def plan(sizes: dict[str, int], there: int, limit: int | None = None, cluster: bool = False, **settings: Any) -> Plan:
    """The plan for models on a machine with `there` GPUs and 16 cores."""
    return make_plan(config(sizes, **settings), gpus(there), limit, None if cluster else 16, cluster)


def text(sizes: dict[str, int], there: int, limit: int | None = None, cluster: bool = False, **settings: Any) -> str:
    """What plan.txt says of the same plan, without memory and commands."""
    made = plan_text(config(sizes, **settings), plan(sizes, there, limit, cluster, **settings))
    return made.partition("run: ")[0].replace("  engine echo: no weights\n", "")


def sharded(each: int) -> Config:
    """One model, with so many shards a worker."""
    models = {"m": {"engine": "echo", "shards_per_worker": each}}
    return Config.model_validate({**config({"m": 1}).model_dump(), "models": models})


def refusal(*args: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        plan(*args, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("size", "workers"), [(1, 4), (2, 2), (4, 1)])
def test_four_gpus_make_four_two_or_one_workers(size: int, workers: int) -> None:
    made = plan({"m": size}, there=4)
    assert (made.tokens, made.workers("m")) == (4, workers)


def test_what_is_left_over_is_said() -> None:
    said = text({"m": 3}, there=8)
    assert "model m: 3 GPUs each, 2 workers" in said
    assert ": 0+1+2, 3+4+5 (as long as no other job holds them); 2 left over" in said
    assert "(gpus_per_model 1, 2, 4, 8 would use all)" in said
    assert "left over" not in text({"m": 4}, there=8)


def test_the_plan_names_every_gpu_and_every_models_groups() -> None:
    lines = text({"big": 2, "small": 1}, there=4).splitlines()
    assert lines[0] == "4 GPU tokens for 4 GPUs:"
    assert lines[2] == "  GPU 1  H100  81559 MiB  GPU-0001"
    assert "model big: 2 GPUs each, 2 workers with 8 threads each: 0+1, 2+3 (" in lines[5]
    assert "model small: 1 GPU each, 4 workers with 4 threads each: 0, 1, 2, 3 (" in lines[6]


def test_the_plan_names_physical_indices() -> None:
    made = make_plan(config({"m": 1}), gpus(8)[5:7], None, 16, False)
    assert ": 5, 6 (" in plan_text(config({"m": 1}), made)


def test_a_limit_below_the_gpus_is_kept() -> None:
    made = plan({"m": 1}, there=4, limit=2)
    assert (made.tokens, made.workers("m")) == (2, 2)
    assert text({"m": 1}, there=4, limit=2).startswith("2 GPU tokens for 4 GPUs:\n")


def test_a_limit_above_the_gpus_is_lowered_and_said() -> None:
    made = plan({"m": 2}, there=4, limit=8)
    assert (made.tokens, made.workers("m")) == (4, 2)
    said = text({"m": 2}, there=4, limit=8)
    assert said.startswith("4 GPU tokens for 4 GPUs (--resources gpu=8 asks for more than may be used here):\n")


def test_the_plan_says_how_often_a_model_loads_where_that_is_not_once_a_worker() -> None:
    said = plan_text(sharded(3), make_plan(sharded(3), gpus(2), None, 16, False))
    assert "\n  3 shards a worker: up to 6 jobs for a run or judge target, a load each\n" in said
    assert "shards a worker" not in plan_text(sharded(1), make_plan(sharded(1), gpus(2), None, 16, False))


def test_shards_do_not_change_how_many_workers_there_are_or_what_they_get() -> None:
    one, many = (make_plan(sharded(each), gpus(4), None, 16, False) for each in (1, 8))
    assert (one.all_workers(), one.threads("m")) == (many.all_workers(), many.threads("m"))


# ---- refusals


def test_more_shards_than_can_be_merged_at_once_are_refused_with_the_most() -> None:
    make_plan(sharded(500), gpus(2), None, 16, False)
    with pytest.raises(UserError) as caught:
        make_plan(sharded(501), gpus(2), None, 16, False)
    assert str(caught.value) == (
        "models.m.shards_per_worker is 501: 2 workers would make 1002 shards, over the 1000 that are merged at once; "
        "use 500 or less"
    )


def test_a_model_larger_than_the_tokens_is_refused_with_the_numbers_that_work() -> None:
    message = refusal({"m": 3}, there=4, limit=2)
    assert message.startswith("models.m.gpus_per_model is 3, but there are 2 GPU tokens (--resources gpu=2)")
    assert "use gpus_per_model 1, 2, or --resources gpu=3" in message
    assert "use gpus_per_model 1, 2, 4, or" in refusal({"m": 8}, there=4)


def test_a_refusal_says_where_the_tokens_come_from() -> None:
    assert "1 GPU token (no --resources gpu was given)" in refusal({"m": 2}, there=0)
    assert "2 GPU tokens (gpus.total is 2)" in refusal({"m": 4}, there=0, total=2)
    assert "4 GPU tokens (the GPUs that may be used here)" in refusal({"m": 8}, there=4)
    assert "4 GPU tokens (the GPUs that may be used here)" in refusal({"m": 8}, there=4, limit=8)
    assert "2 GPU tokens (--resources gpu=2)" in refusal({"m": 4}, there=0, limit=2)
    assert "2 GPU tokens (--resources gpu=2)" in refusal({"m": 4}, there=4, limit=2, cluster=True)


@pytest.mark.parametrize("there", [0, 4])
def test_no_token_at_all_is_refused(there: int) -> None:
    assert "--resources gpu=0 leaves no token" in refusal({"m": 1}, there=there, limit=0)


def test_a_model_that_nothing_uses_may_be_too_large() -> None:
    full = config({"small": 1, "huge": 64})
    small = full.model_copy(update={"runs": {"run-small": full.runs["run-small"]}})
    made = make_plan(small, gpus(1), None, 4, False)
    assert made.gpus_per_model == {"small": 1}


def test_a_model_that_only_a_judge_uses_is_planned() -> None:
    full = config({"small": 1, "huge": 64}).model_dump()
    full["judges"] = {"j": {"kind": "pointwise", "model": "huge", "prompt": "p", "runs": ["run-small"]}}
    del full["runs"]["run-huge"]
    with pytest.raises(UserError, match=r"models\.huge.gpus_per_model is 64"):
        make_plan(Config.model_validate(full), gpus(1), None, 4, False)


def test_devices_of_which_none_may_be_used_are_refused() -> None:
    assert "gpus.devices is [3], but no GPU may be used here" in refusal({"m": 1}, there=0, devices=[3])


# ---- without GPUs, and on a cluster


def test_without_a_gpu_a_token_is_a_cpu_slot() -> None:
    made = plan({"m": 1}, there=0)
    assert (made.tokens, made.workers("m"), made.threads("m")) == (1, 1, 16)
    assert text({"m": 1}, there=0) == (
        "1 GPU token, no GPU on this machine: a token is a CPU slot\n"
        "model m: 1 slot each, 1 worker with 16 threads each\n"
    )


def test_without_a_gpu_the_limit_or_the_config_says_how_many_slots() -> None:
    assert plan({"m": 2}, there=0, total=4).workers("m") == 2
    assert plan({"m": 2}, there=0, total=4, limit=6).workers("m") == 3


def test_on_a_cluster_this_machines_gpus_say_nothing() -> None:
    assert plan({"m": 2}, there=3, cluster=True, total=8).workers("m") == 4
    assert plan({"m": 2}, there=3, cluster=True, total=8, limit=2).workers("m") == 1
    assert plan({"m": 1}, there=3, cluster=True).workers("m") == 1


def test_on_a_cluster_the_plan_speaks_of_gpus_elsewhere() -> None:
    assert text({"m": 2}, there=3, cluster=True, total=8) == (
        "8 GPU tokens for jobs on a cluster, each a GPU\n"
        f"model m: 2 GPUs each, 4 workers with {2 * CLUSTER_THREADS} threads each\n"
    )


def test_devices_of_this_machine_are_refused_for_jobs_of_a_cluster() -> None:
    with pytest.raises(UserError, match=r"^gpus.devices names GPUs of this machine, but the jobs run on a cluster"):
        plan({"m": 1}, there=0, cluster=True, total=2, devices=[3])


# ---- threads


@pytest.mark.parametrize(("there", "size", "threads"), [(4, 1, 4), (4, 2, 8), (4, 4, GPU_WORKER_THREADS), (8, 1, 2)])
def test_all_workers_of_a_model_together_fit_the_cores(there: int, size: int, threads: int) -> None:
    made = plan({"m": size}, there=there)
    assert made.threads("m") == threads
    assert made.threads("m") * made.workers("m") <= 16


def test_a_worker_has_a_thread_even_where_cores_are_few() -> None:
    assert make_plan(config({"m": 1}), gpus(8), None, 2, False).threads("m") == 1


def test_cpu_slots_share_all_cores() -> None:
    assert plan({"m": 1}, there=0, limit=2).threads("m") == 8
    assert plan({"m": 1}, there=0).threads("m") == 16


# ---- unlike GPUs

UNLIKE = [
    {"devices": [0, 1, 2, 3], "gpus_per_model": 1},
    {"devices": [4, 5, 6, 7], "gpus_per_model": 2, "speed": 0.4},
]


def test_each_group_has_workers_of_its_own_size_and_speed_the_fastest_first() -> None:
    made = plan({"m": 1}, there=8, groups=UNLIKE)
    assert [(worker.gpus, worker.speed, worker.group) for worker in made.workers_of("m")] == [
        *[(1, 1.0, 0)] * 4,
        *[(2, 0.4, 1)] * 2,
    ]
    assert made.tokens == 8


def test_a_model_that_asks_for_more_than_its_group_gets_it() -> None:
    made = plan({"m": 4}, there=8, groups=UNLIKE)
    assert [(worker.gpus, worker.group) for worker in made.workers_of("m")] == [(4, 0), (4, 1)]


def test_workers_stay_within_a_limit_below_the_groups() -> None:
    made = plan({"m": 1}, there=8, limit=6, groups=UNLIKE)
    assert [worker.group for worker in made.workers_of("m")] == [0, 0, 0, 0, 1]


def test_groups_are_said_with_their_gpus_and_what_is_left_over() -> None:
    lines = text({"m": 3}, there=8, groups=UNLIKE).splitlines()
    assert lines[9:] == [
        "model m: 2 workers with 8 threads each",
        "  group 0, speed 1: 3 GPUs each, 1 worker: 0+1+2 (as long as no other job holds them); "
        "1 left over (gpus_per_model 1, 2, 4 would use all)",
        "  group 1, speed 0.4: 3 GPUs each, 1 worker: 4+5+6 (as long as no other job holds them); "
        "1 left over (gpus_per_model 1, 2, 4 would use all)",
    ]


def test_gpus_that_are_left_over_for_want_of_tokens_are_said_so() -> None:
    lines = text({"m": 1}, there=8, limit=1, groups=UNLIKE).splitlines()
    assert lines[-2].endswith("; 3 left over (1 GPU token for all groups)")
    assert lines[-1].endswith("2 GPUs each, 0 workers; 4 left over (1 GPU token for all groups)")


def test_the_commands_of_a_plan_name_the_config_they_are_for() -> None:
    said = plan_text(config({"m": 1}), plan({"m": 1}, there=4), configfiles=["my config.yaml"])
    assert "run:   snakemake --cores all --resources gpu=4 --configfile 'my config.yaml'\n" in said
    assert said.endswith("look:  snakemake --cores all --configfile 'my config.yaml' -n\n")


def test_groups_where_no_gpu_may_be_used_are_refused_by_their_own_name() -> None:
    said = refusal({"m": 1}, there=0, groups=[{"devices": [0]}])
    assert said == "gpus.groups names [0], but no GPU may be used here; remove gpus.groups"


def test_a_group_knows_its_smallest_memory() -> None:
    cards = [Gpu(0, "GPU-0", "H100", 81559, 0), Gpu(1, "GPU-1", "L4", 23034, 0)]
    made = make_plan(config({"m": 1}, groups=[{"devices": [0]}, {"devices": [1]}]), cards, None, 4, False)
    assert [worker.memory_mib for worker in made.workers_of("m")] == [81559, 23034]


def test_a_model_that_no_group_has_room_for_is_refused() -> None:
    message = refusal({"m": 8}, there=8, groups=UNLIKE)
    assert "no group of gpus.groups has room for a worker (4 with 1 a worker, 4 with 2 a worker GPUs" in message


def test_a_gpu_belongs_to_one_group() -> None:
    twice = [{"devices": [0, 1]}, {"devices": ["GPU-0001"]}]
    assert "gpus.groups name GPU 1 twice" in refusal({"m": 1}, there=4, groups=twice)
    with pytest.raises(ValueError, match="groups name device 1 twice"):
        config({"m": 1}, groups=[{"devices": [0, 1]}, {"devices": [1]}])
    with pytest.raises(ValueError, match="both devices and groups are given"):
        config({"m": 1}, devices=[0], groups=[{"devices": [1]}])


def test_groups_of_this_machine_are_refused_on_a_cluster() -> None:
    assert "remove gpus.groups" in refusal({"m": 1}, there=8, cluster=True, groups=UNLIKE)


def test_shards_go_round_the_workers_so_that_each_has_as_many() -> None:
    workers = plan({"m": 1}, there=8, groups=UNLIKE).workers_of("m")
    owners = [worker_of(workers, shard) for shard in range(1, 3 * len(workers) + 1)]
    assert owners == workers * 3


def test_a_shard_belongs_to_its_worker_and_travels_as_text() -> None:
    workers = plan({"m": 1}, there=8, groups=UNLIKE).all_workers()
    assert decode_workers(encode_workers(workers)) == workers
    assert worker_of(workers["m"], 5) == Worker(2, 0.4, 1, 81559)
    assert worker_of(workers["m"], 7) == worker_of(workers["m"], 1)


@pytest.mark.parametrize("broken", ["{", "[]", '{"m": [{"cards": 1}]}'])
def test_broken_workers_are_refused_in_one_line(broken: str) -> None:
    with pytest.raises(UserError, match="--workers is not what the plan writes"):
        decode_workers(broken)


# ---- GPUs in use


def test_gpus_that_others_fill_are_left_out_and_named() -> None:
    busy = {"GPU-0001": "filled by pid 99 (python, 70000 MiB)"}
    made = make_plan(config({"m": 1}), gpus(3), None, 16, False, busy)
    assert (made.tokens, [gpu.index for gpu in made.gpus]) == (2, [0, 2])
    assert "left out: GPU-0001, filled by pid 99 (python, 70000 MiB)" in plan_text(config({"m": 1}), made)


def test_a_model_that_is_too_large_for_what_others_leave_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"GPU-0000 left out, filled by pid 9; GPU-0001 left out, filled by pid 9"):
        make_plan(
            config({"m": 4}), gpus(4), None, 16, False, dict.fromkeys(("GPU-0000", "GPU-0001"), "filled by pid 9")
        )


def test_when_others_fill_all_gpus_the_jobs_are_planned_and_wait() -> None:
    made = make_plan(config({"m": 1}), gpus(2), None, 16, False, {gpu.uuid: "pid 9" for gpu in gpus(2)})
    assert made.tokens == 2


def test_what_runs_on_a_gpu_stands_beside_it() -> None:
    uses = {"GPU-0000": Use(900, ("pid 7 (Xorg, 900 MiB)",)), "GPU-0001": Use(0)}
    lines = plan_text(config({"m": 1}), plan({"m": 1}, there=2), uses).splitlines()
    assert lines[1].endswith("GPU-0000  900 MiB in use, pid 7 (Xorg, 900 MiB)")
    assert lines[2].endswith("GPU-0001")


def test_workers_are_shown_on_the_groups_that_nvlink_joins() -> None:
    links = {frozenset({"GPU-0000", "GPU-0002"}): 100, frozenset({"GPU-0001", "GPU-0003"}): 100}
    assert ": 0+2, 1+3 (" in plan_text(config({"m": 2}), plan({"m": 2}, there=4), {}, links)


def test_the_plan_ends_with_the_commands_to_run() -> None:
    assert plan_text(config({"m": 1}), plan({"m": 1}, there=4)).endswith(
        "run:   snakemake --cores all --resources gpu=4\nlook:  snakemake --cores all -n\n"
    )
    assert "--workflow-profile profiles/slurm" in plan_text(config({"m": 1}), plan({"m": 1}, there=0, cluster=True))
