"""Facts about the whole workflow on made-up GPUs, with the echo engine: groups, shared boxes, masks, and the plan."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ANSWERS, ROOT, SNAKEMAKE, Project, echo_config
from test_pipeline import wait_until

from gristmill import locks

UNLIKE = [
    {"devices": [0, 1], "gpus_per_model": 1},
    {"devices": [2, 3], "gpus_per_model": 2, "speed": 0.5},
]


def inventory(project: Project, count: int, used_mib: dict[int, int] | None = None) -> str:
    """A file of `count` GPUs, some of them in use by others."""
    gpus = [
        {"index": n, "uuid": f"GPU-{n}", "name": "fake", "memory_total_mib": 80_000}
        | {"memory_used_mib": (used_mib or {}).get(n, 0)}
        for n in range(count)
    ]
    path = project.folder / "gpus.json"
    path.write_text(json.dumps(gpus))
    return str(path)


def log_of(project: Project) -> str:
    """What the job of the only shard has said so far."""
    return "".join(path.read_text() for path in project.folder.glob("results/runs/plain/logs/generate-*.log"))


def devices(project: Project, run: str = "plain") -> dict[str, list[int]]:
    """Shard → indices of the GPUs that its job held, from the manifest."""
    workers = project.value(f"runs/{run}/manifest.json")["workers"]
    return {worker["shard"]: [gpu["index"] for gpu in worker["devices"]] for worker in workers}


def test_unlike_groups_get_shards_by_their_speed_and_their_own_gpus(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(50))
    project.write_config(echo_config(gpus={"groups": UNLIKE}))
    project.done(ANSWERS, "--notemp", GRISTMILL_INVENTORY=inventory(project, 4))
    parts = sorted((project.folder / "results/runs/plain/parts/3").glob("*.jsonl"))
    assert [len(path.read_text().splitlines()) for path in parts] == [20, 20, 10]
    held = devices(project)
    assert held["3-of-3"] == [2, 3]
    assert {*held["1-of-3"], *held["2-of-3"]} <= {0, 1}
    assert [len(held[name]) for name in ("1-of-3", "2-of-3")] == [1, 1]


def test_other_groups_and_devices_ask_nothing_again(project: Project) -> None:
    project.done(ANSWERS, GRISTMILL_INVENTORY=inventory(project, 4))
    project.write_config(echo_config(gpus={"groups": UNLIKE}))
    project.done(ANSWERS, "--forcerun", "merge", GRISTMILL_INVENTORY=inventory(project, 4))
    assert len(project.asked("runs/plain")) == 12


def test_a_mask_and_the_configs_devices_decide_which_gpus_a_job_may_hold(project: Project) -> None:
    project.write_config(echo_config(gpus={"devices": [1, 3, 5, 7]}))
    project.done(ANSWERS, GRISTMILL_INVENTORY=inventory(project, 8), CUDA_VISIBLE_DEVICES="GPU-3,5,0")
    assert {index for held in devices(project).values() for index in held} <= {3, 5}
    plan = (project.folder / "results/plan.txt").read_text()
    assert plan.startswith("2 GPU tokens for 2 GPUs:\n")


def test_a_gpu_that_others_fill_gets_no_job_and_the_plan_names_it(project: Project) -> None:
    project.done(ANSWERS, GRISTMILL_INVENTORY=inventory(project, 3, {0: 70_000}))
    assert sorted(devices(project)) == ["1-of-2", "2-of-2"]
    assert {index for held in devices(project).values() for index in held} <= {1, 2}
    plan = (project.folder / "results/plan.txt").read_text()
    assert "left out: GPU-0, filled by 70000 MiB of another process" in plan


def test_two_snakemakes_on_one_box_share_its_gpus_without_an_overlap(project: Project, tmp_path: Path) -> None:
    other = Project(tmp_path / "other")
    other.folder.mkdir()
    both = [project, other]
    for one in both:
        one.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(12))
        one.write_prompt("ask.jinja", "{{ question }}")
        one.write_config(echo_config(models={"echo": {"engine": "echo", "gpus_per_model": 2}}))
    shared = {
        "GRISTMILL_LEASES": str(tmp_path / "leases"),
        "GRISTMILL_INVENTORY": inventory(project, 3),
        "GRISTMILL_ECHO_SECONDS": "0.4",
    }
    (tmp_path / "leases").mkdir()
    mine = [locks.try_lock(tmp_path / "leases" / f"GPU-{n}.lock", "the test") for n in range(3)]
    command = [one.command("results/runs/plain/manifest.json") for one in both]
    started = [
        subprocess.Popen(words, cwd="/", env=one.environment(**shared), stderr=subprocess.DEVNULL)
        for words, one in zip(command, both, strict=True)
    ]
    wait_until(lambda: all("(the test)" in log_of(one) for one in both))  # both jobs wait for a group
    for fd in mine:
        assert fd is not None
        locks.release(fd)
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    logs = [log_of(one) for one in both]
    assert all("lease on GPU" in log for log in logs)  # three GPUs hold one group of two at a time:
    (waited,) = [log for log in logs if "(generate runs/plain 1-of-1)" in log]
    assert "waiting for 2 of 3 GPUs; held: GPU 0 by pid" in waited


def test_snakemake_plan_prints_the_plan_and_starts_nothing(project: Project) -> None:
    output = project.done("plan", GRISTMILL_INVENTORY=inventory(project, 4))
    assert "4 GPU tokens for 4 GPUs:" in output
    assert "model echo: 1 GPU each, 4 workers with 1 thread each: 0, 1, 2, 3" in output
    assert "run:   snakemake --cores all --resources gpu=4" in output
    assert [path.name for path in (project.folder / "results").iterdir()] == ["plan.txt"]


def test_the_plan_program_says_the_same_for_a_machine_one_does_not_have(project: Project) -> None:
    project.done("plan", GRISTMILL_INVENTORY=inventory(project, 4))
    command = [sys.executable, str(ROOT / "scripts/plan.py"), "--config", "config.yaml", "--inventory", "gpus.json"]
    result = subprocess.run(
        [*command, "--cores", "2"], cwd=project.folder, env=project.environment(), capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    said = (project.folder / "results/plan.txt").read_text()
    assert result.stdout == said.replace(f"'{project.folder}/config.yaml'", "config.yaml")  # each as it was typed


def test_a_model_that_cannot_fit_stops_before_any_job(project: Project) -> None:
    weights = project.folder / "big"
    weights.mkdir()
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 1, "num_attention_heads": 64}
    (weights / "config.json").write_text(json.dumps({**sizes, "vocab_size": 1000, "dtype": "bfloat16"}))
    tensor = {"dtype": "BF16", "shape": [8192, 10_000_000], "data_offsets": [0, 0]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": tensor}).encode()
    (weights / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    project.write_config(echo_config(models={"echo": {"source": "big"}}))
    result = project.run("-n", GRISTMILL_INVENTORY=inventory(project, 2))
    assert result.returncode == 2
    assert "config error: models.echo has 152.6 GiB of weights" in result.stdout
    assert "Traceback" not in result.stdout


@pytest.mark.parametrize("rule", ["merge", "generate"])
def test_a_job_on_a_cluster_node_keeps_the_submitters_plan(project: Project, rule: str) -> None:
    """A cluster's job runs Snakemake again, on a node with other GPUs (here 1) and without --resources gpu."""
    changes: dict[str, Any] = {"models": {"echo": {"engine": "echo", "gpus_per_model": 2}}}
    project.write_config(echo_config(**changes))
    project.done(ANSWERS, "--notemp", gpu=6)
    targets = {
        "merge": ("merge:run=plain", "manifest.json"),
        "generate": ("generate:run=plain,shard=2,shards=3", "parts/3/2-of-3.jsonl"),
    }
    target, made = targets[rule]
    (project.folder / "results/runs/plain" / made).unlink()
    command = [str(SNAKEMAKE), "--snakefile", str(ROOT / "Snakefile"), "--directory", str(project.folder)]
    command += ["--configfile", str(project.folder / "config.yaml"), "--mode", "remote", "--cores", "1", "--nolock"]
    command += ["--target-jobs", target, "--allowed-rules", rule, "--force", "--notemp"]
    environment = project.environment(GRISTMILL_INVENTORY=inventory(project, 2), GRISTMILL_CLUSTER_TOKENS="6")
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (project.folder / "results/runs/plain" / made).exists()
