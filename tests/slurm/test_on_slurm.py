"""Facts about a run with profiles/slurm on a real SLURM."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from conftest import ANSWERS, ROOT, Project
from slurm_project import ClusterProject, Sampler, cluster_config, new_project, on_cluster

pytestmark = pytest.mark.slow
one_node = on_cluster(nodes=1)
project = pytest.fixture(new_project)


@pytest.fixture(scope="module")
def finished(one_node: Cluster, tmp_path_factory: pytest.TempPathFactory) -> ClusterProject:
    """A project after its run; what it printed is in said()."""
    made = new_project(tmp_path_factory.mktemp("finished"))
    made.finished(made.start())
    return made


def judged_config() -> dict[str, Any]:
    """The echo run, and a judge of it."""
    config = cluster_config()
    config["prompts"]["grade"] = {"file": "ask.jinja"}
    config["judges"] = {"grader": {"kind": "pointwise", "model": "echo", "prompt": "grade", "runs": ["plain"]}}
    return config


def test_six_shards_of_two_gpus_run_two_at_a_time_on_the_gpus_that_slurm_gave(
    one_node: Cluster, project: ClusterProject
) -> None:
    project.write_config(cluster_config(total=12))
    with Sampler() as seen:
        said = project.finished(project.start(ANSWERS, GRISTMILL_ECHO_SECONDS="0.5"))
    assert len(re.findall(r"^rule generate:", said, re.M)) == 6
    assert max(len(sample) for sample in seen.samples) == 2
    for sample in seen.samples:
        assert max(Counter(gpu for _, gpus in sample.values() for gpu in gpus).values(), default=0) <= 1
    named = re.findall(r"SLURM job (\d+) gave GPU (\d) \(H100\), GPU (\d) \(H100\)", project.logs())
    assert {job: frozenset(map(int, gpus)) for job, *gpus in named} == seen.gpus()
    assert len(named) == 6


def test_the_answers_are_those_of_a_local_run_byte_for_byte(finished: ClusterProject, tmp_path: Path) -> None:
    here = Project(tmp_path)
    for name in ("rows.jsonl", "ask.jinja", "config.yaml"):
        (here.folder / name).write_bytes((finished.folder / name).read_bytes())
    here.done("results/runs/plain/metrics.json", gpu=4)
    found = [line | {"seconds": 0} for line in here.lines("runs/plain/generations.jsonl")]
    assert finished.answers() == found
    assert here.value("runs/plain/metrics.json")["metrics"] == finished.value("runs/plain/metrics.json")["metrics"]


@pytest.mark.model
def test_the_demo_in_float32_gives_on_slurm_what_it_gives_here(
    one_node: Cluster, project: ClusterProject, smollm2_folder: Path
) -> None:
    demo = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    demo["datasets"]["questions"]["max_rows"] = 2
    demo["judges"]["correctness"]["runs"] = ["direct"]
    demo["models"]["smollm2"] |= {"dtype": "float32", "resources": {"mem_mb": 8000, "runtime": 10}}
    demo["gpus"] = {"devices": "none", "total": 1}
    project.write_config(demo)
    project.finished(project.start(), seconds=900)
    here = Project(project.folder.with_name("here"))
    here.folder.mkdir()
    here.write_config(demo)
    here.done()
    for unit in (
        "runs/direct",
        "runs/step_by_step",
        "judges/correctness/direct",
        "judges/preference/direct_vs_step_by_step",
    ):
        there, here_lines = (
            [line | {"seconds": 0} for line in where.lines(f"{unit}/generations.jsonl")] for where in (project, here)
        )
        assert there == here_lines, unit
    assert "gpu" not in project.logs("runs/direct").lower()
    assert (project.folder / "results/report.html").exists()


def test_a_second_run_submits_nothing(finished: ClusterProject) -> None:
    assert "Nothing to be done" in finished.done()


def test_steps_without_a_model_run_here_and_only_workers_are_submitted(finished: ClusterProject) -> None:
    logs = finished.folder / "results/logs/slurm"
    assert len(re.findall(r"has been submitted", finished.said())) == 2
    assert not list(logs.rglob("*.log"))  # a job that succeeded leaves its log to the rule's own


def test_steps_without_a_model_are_grouped_where_the_profile_says_so(
    one_node: Cluster, project: ClusterProject
) -> None:
    text = (ROOT / "profiles/slurm/config.yaml").read_text()
    start, end = text.index("# groups:"), text.index("# What follows needs no edit.")
    grouped = text[start:end].replace("# ", "", 1).replace("\n# ", "\n")
    (project.folder / "grouped").mkdir()
    (project.folder / "grouped/config.yaml").write_text(text[:start] + grouped + text[end:])
    project.write_config(judged_config())
    said = project.finished(project.start("--workflow-profile", str(project.folder / "grouped")))
    # before, 2 shards, after, asking, 2 shards, reading, end
    assert len(re.findall(r"has been submitted", said)) == 9
    assert [line["id"] for line in project.answers()] == [f"r{n}" for n in range(24)]


def test_shards_can_be_one_job_array(one_node: Cluster, project: ClusterProject) -> None:
    project.write_config(cluster_config(total=8))
    said = project.finished(project.start(ANSWERS, "--slurm-array-jobs", "generate"))
    assert "Submitted array job" in said
    assert [line["id"] for line in project.answers()] == [f"r{n}" for n in range(24)]


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"slurm_partition": "nope"}, "Invalid partition name specified"),
        ({"constraint": "moon"}, "Invalid feature specification"),
        ({"gpu_model": "a100"}, "Requested node configuration is not available"),
        ({"slurm_account": "nobody"}, "this cluster keeps no accounts; leave it out"),
        ({"mem_mb": 10_000_000}, "Requested node configuration is not available"),
        ({"runtime": 3000}, "runtime is 3000 minutes, over the 1440 of partition gpu"),
    ],
)
def test_what_slurm_would_refuse_is_one_line_before_the_first_job(
    one_node: Cluster, project: ClusterProject, resources: dict[str, str | int], said: str
) -> None:
    project.write_config(cluster_config(**resources))
    result = project.run()
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert line.startswith("error: SLURM refuses rule generate (--partition=")
    assert said in line
    assert result.returncode != 0
    assert "Traceback" not in result.stdout
    assert one_node.jobs() == {}


def test_more_gpus_than_a_node_has_are_one_line(one_node: Cluster, project: ClusterProject) -> None:
    project.write_config(cluster_config(total=8, gpus_per_model=8))
    result = project.run()
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("error:")]
    assert "--gpus=8" in line
    assert "Requested node configuration is not available" in line


def test_a_job_that_finds_other_gpus_than_it_asked_for_stops(one_node: Cluster, project: ClusterProject) -> None:
    result = project.run("--set-resources", "generate:gpu=1", "--preemptible-retries", "0")
    assert result.returncode != 0
    assert re.search(r"SLURM job \d+ has 1 GPUs \(0\), but the worker is of 2", project.logs())
    assert project.answered() == []
