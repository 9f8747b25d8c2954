"""Facts about a training over several nodes of a real SLURM."""

import re
from typing import Any

import pytest
from cluster import Cluster
from conftest import Project
from slurm_project import ClusterProject, new_project, on_cluster
from tiny_teacher import make_teacher
from tiny_training import LLAMA, texts

pytestmark = pytest.mark.slow
two_nodes = on_cluster(nodes=2)
project = pytest.fixture(new_project)
RECIPE = {"objective": "pretrain", "dataset": "rows", "text_field": "text", "architecture": LLAMA, "steps": 6}
RECIPE |= {"tokenizer": "teacher", "sequence_tokens": 64, "batch_rows": 8, "learning_rate": 0.01}


def config(**placement: Any) -> dict[str, Any]:
    small = {"resources": {"mem_mb": 4000, "runtime": 10}}
    return {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {
            "teacher": {"source": "teacher", "engine": "static", "dtype": "float32", **small},
            "student": {"source": "training:student", "engine": "static", **small},
        },
        "prompts": {"ask": {"file": "ask.jinja"}},
        "trainings": {"student": {**RECIPE, **placement}},
        "runs": {
            "by_student": {"dataset": "rows", "prompt": "ask", "model": "student", "sampling": {"max_new_tokens": 4}}
        },
        "gpus": {"devices": "none"},
    }


def test_two_nodes_train_the_model_that_two_processes_of_one_machine_train(
    two_nodes: Cluster, project: ClusterProject
) -> None:
    make_teacher(project.folder / "teacher")
    project.write_rows(texts(40))
    placement = {"nodes": 2, "processes": 1, "resources": {"mem_mb": 4000, "runtime": 10, "cpus_per_task": 1}}
    project.write_config(config(**placement))
    project.finished(project.start(), seconds=400)
    said = (project.folder / "results/trainings/student/logs/train.log").read_text()
    assert re.search(r"8 rows a step = 2 processes", said)
    here = Project(project.folder.with_name("here"))
    here.folder.mkdir()
    for name in ("rows.jsonl", "ask.jinja"):
        (here.folder / name).write_bytes((project.folder / name).read_bytes())
    make_teacher(here.folder / "teacher")
    here.write_config(config(processes=2))
    here.done()
    there = project.value("models/student.json")["weights_hash"]
    assert there == here.value("models/student.json")["weights_hash"]
