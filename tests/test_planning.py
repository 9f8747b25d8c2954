"""Facts about the plan: how many workers each model gets, and what stops before the first job."""

from typing import Any

import pytest

from gristmill.config.schema import Config
from gristmill.errors import UserError
from gristmill.planning import CLUSTER_THREADS, GPU_WORKER_THREADS, Plan, make_plan
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
    made = plan({"m": 3}, there=8)
    assert made.workers("m") == 2
    assert "model m: 3 GPUs each, 2 workers" in made.text()
    assert ": 0+1+2, 3+4+5 (as long as no other job holds them); 2 left over" in made.text()
    assert "left over" not in plan({"m": 4}, there=8).text()


def test_the_plan_names_every_gpu_and_every_models_groups() -> None:
    lines = plan({"big": 2, "small": 1}, there=4).text().splitlines()
    assert lines[0] == "4 GPU tokens for 4 GPUs:"
    assert lines[2] == "  GPU 1  H100  81559 MiB  GPU-0001"
    assert "model big: 2 GPUs each, 2 workers with 8 threads each: 0+1, 2+3 (" in lines[5]
    assert "model small: 1 GPU each, 4 workers with 4 threads each: 0, 1, 2, 3 (" in lines[6]


def test_the_plan_names_physical_indices() -> None:
    made = make_plan(config({"m": 1}), gpus(8)[5:7], None, 16, False)
    assert ": 5, 6 (" in made.text()


def test_a_limit_below_the_gpus_is_kept() -> None:
    made = plan({"m": 1}, there=4, limit=2)
    assert (made.tokens, made.workers("m")) == (2, 2)
    assert made.text().startswith("2 GPU tokens for 4 GPUs:\n")


def test_a_limit_above_the_gpus_is_lowered_and_said() -> None:
    made = plan({"m": 2}, there=4, limit=8)
    assert (made.tokens, made.workers("m")) == (4, 2)
    assert made.text().startswith("4 GPU tokens for 4 GPUs (--resources gpu=8 asks for more than may be used here):\n")


# ---- refusals


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
    with pytest.raises(UserError, match=r"models.huge.gpus_per_model is 64"):
        make_plan(Config.model_validate(full), gpus(1), None, 4, False)


def test_devices_of_which_none_may_be_used_are_refused() -> None:
    assert "gpus.devices is [3], but no GPU may be used here" in refusal({"m": 1}, there=0, devices=[3])


# ---- without GPUs, and on a cluster


def test_without_a_gpu_a_token_is_a_cpu_slot() -> None:
    made = plan({"m": 1}, there=0)
    assert (made.tokens, made.workers("m"), made.threads("m")) == (1, 1, 16)
    assert made.text() == (
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
    text = plan({"m": 2}, there=3, cluster=True, total=8).text()
    assert text == (
        "8 GPU tokens for jobs on a cluster, each a GPU\n"
        f"model m: 2 GPUs each, 4 workers with {CLUSTER_THREADS} threads each\n"
    )


def test_devices_are_not_checked_on_the_machine_that_submits() -> None:
    assert plan({"m": 1}, there=0, cluster=True, total=2, devices=[3]).tokens == 2


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
