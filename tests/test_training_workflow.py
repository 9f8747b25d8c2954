"""Facts about trainings in the whole workflow: what a model's source names, what runs again, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Project
from tiny_teacher import make_teacher
from tiny_training import GPT2, LLAMA, RECIPE, STILL, texts

pytestmark = pytest.mark.slow

RUN = {"dataset": "rows", "prompt": "ask", "metrics": ["contains"], "sampling": {"max_new_tokens": 4}}
SCRATCH = {"tokenizer": "teacher", "sequence_tokens": 64, "batch_rows": 8, "learning_rate": 0.01, "steps": 8}


def config(**trainings: Any) -> dict[str, Any]:
    return {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {
            "teacher": {"source": "teacher", "engine": "static", "dtype": "float32"},
            **{name: {"source": f"training:{name}", "engine": "static"} for name in trainings},
        },
        "prompts": {"ask": {"file": "ask.jinja"}},
        "logits": {"said": {"model": "teacher", "dataset": "rows", "text_field": "text", "top_k": 8}},
        "trainings": trainings,
        "runs": {f"by_{name}": {**RUN, "model": name} for name in ("teacher", *trainings)},
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project after its first run; nothing may change it."""
    folder = tmp_path_factory.mktemp("finished") / "my project"
    folder.mkdir()
    make_teacher(folder / "teacher")
    made = Project(folder)
    made.write_rows([line | {"question": line["question"]} for line in texts(40)])
    made.write_prompt("ask.jinja", "{{ question }}")
    plain = {"objective": "pretrain", "dataset": "rows", "text_field": "text", "architecture": {**GPT2, **STILL}}
    told = {"objective": "distill", "logits": "said", "architecture": LLAMA, "alpha": 0.2, "temperature": 2.0}
    told |= {"evaluation": {"held_out_ratio": 0.2, "every_steps": 4}, "processes": 2}
    made.write_config(config(student={**SCRATCH, **told}, plain={**SCRATCH, **plain}))
    made.done()
    return made


@pytest.fixture
def trained(finished: Project, tmp_path: Path) -> Project:
    """A copy of it, dates kept."""
    folder = tmp_path / "my project"
    shutil.copytree(finished.folder, folder, symlinks=True)
    return Project(folder)


def test_a_distilled_and_a_pretrained_model_are_evaluated_beside_their_teacher(trained: Project) -> None:
    for name in ("by_teacher", "by_student", "by_plain"):
        assert len(trained.lines(f"runs/{name}/generations.jsonl")) == 40
    metrics = trained.value("trainings/student/metrics.json")
    first, last = metrics["evaluation"]["first"], metrics["evaluation"]["last"]
    assert last["evaluation_kl"] < first["evaluation_kl"]
    assert metrics["batch"]["processes"] == 2
    said = trained.value("models/student.json")
    assert said["folder"] == "results/trainings/student/model"
    compared = trained.value("comparisons.json")["comparisons"]
    assert ["by_teacher", "by_student"] in [pair["runs"] for pair in compared], "they stand beside each other"
    assert "Nothing to be done" in trained.done()


def test_what_changes_a_model_trains_it_again_and_what_does_not_leaves_it(trained: Project) -> None:
    before = trained.value("models/student.json")["weights_hash"]
    value = yaml.safe_load((trained.folder / "config.yaml").read_text())
    value["trainings"]["student"] |= {"processes": 1, "micro_batch_rows": 4, "checkpoint_every_steps": 3}
    trained.write_config(value)
    assert "Nothing to be done" in trained.done()
    value["trainings"]["student"]["alpha"] = 0.9
    trained.write_config(value)
    said = trained.done("results/models/student.json")
    assert "rule train:" in said
    assert said.count("rule train:") == 1
    assert "rule logits:" not in said
    assert trained.value("models/student.json")["weights_hash"] != before


def test_a_lost_result_is_made_from_its_last_checkpoint_and_no_answer_is_asked_again(trained: Project) -> None:
    asked = trained.asked("runs/by_plain")
    shutil.rmtree(trained.folder / "results/trainings/plain/model")
    trained.done("results/trainings/plain/model", "results/runs/by_plain/generations.jsonl")
    assert "going on from step 8" in (trained.folder / "results/trainings/plain/logs/train.log").read_text()
    assert trained.asked("runs/by_plain") == asked


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"objective": "sft"}, "objective sft reads dataset and prompt, and dataset, text_field is given"),
        ({"steps": None}, "give either steps or epochs"),
        ({"base": "teacher"}, "give either base (a model to start from) or architecture (from scratch)"),
        ({"tokenizer": "techer"}, "trainings.t.tokenizer: 'techer' is not there; did you mean teacher?"),
        ({"text_field": "txt"}, "trainings.t.text_field: 'txt' is not a column of rows"),
        ({"batch_rows": 7}, "batch_rows=7 is no multiple of 2 = 1 processes × micro_batch_rows 2"),
        ({"tokenizer": "t"}, "trainings.t is made from itself (t); name another base, tokenizer or teacher"),
        ({"nodes": 2}, "trainings.t.nodes is 2, and this is one machine"),
        ({"mixed_precision": False, "betas": [1, 2]}, "each lies in [0, 1)"),
        ({"early_stopping": {"patience": 2}}, "early_stopping needs evaluation.every_steps"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_job(trained: Project, change: dict[str, Any], said: str) -> None:
    recipe = {**RECIPE, "tokenizer": "teacher", **change}
    trained.write_config(config(t={name: value for name, value in recipe.items() if value is not None}))
    result = trained.run("-n")
    assert result.returncode != 0
    assert said in result.stdout
