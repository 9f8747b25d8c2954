"""Facts about what is scored and trained again: one for each line of docs/reruns.md on logits and trainings.

Edits whose lines do not touch each other are made to one finished project at once, which then runs once more. Of what
must run nothing, or only says which rules, Snakemake is asked what it would run.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Project
from test_reruns import Place, Rerun
from tiny_teacher import make_teacher
from tiny_training import GPT2, STILL, texts

pytestmark = pytest.mark.slow

ANSWERED = {"prepare_model", "split", "generate", "merge", "metrics"}
SCORED = {"logits_requests", "logits", "logits_merge"}
TRAINED = {"training_data", "train"}
SAID = re.compile(r"(\d+) windows, (\d+) with positions, (\d+) to score")
Edit = Callable[[dict[str, Any], Place], Any]


def rows(name: str, count: int = 12) -> list[dict[str, Any]]:
    return [line | {"id": f"{name}{n}", "note": ""} for n, line in enumerate(texts(count, seed=1))]


def model(**settings: Any) -> dict[str, Any]:
    return {"source": "teacher", "engine": "static", "dtype": "float32", **settings}


def recipe(**settings: Any) -> dict[str, Any]:
    """A training that takes a few seconds, over its own dataset."""
    plain = {"objective": "pretrain", "text_field": "text", "architecture": {**GPT2, **STILL}, "tokenizer": "teacher"}
    return {**plain, "sequence_tokens": 64, "batch_rows": 4, "learning_rate": 0.01, "steps": 2, **settings}


def config() -> dict[str, Any]:
    """Every line of the table has a teacher's logits, or a training, of its own."""
    logits = {name: {"dataset": "still", "text_field": "text", "top_k": 4, "model": "teacher"} for name in LOGITS}
    logits["rows"]["dataset"], logits["dtype"]["model"] = "texts", "half"
    taught = {"objective": "distill", "logits": "rows", "dataset": None, "text_field": None}
    trainings = {"recipe": recipe(dataset="still"), "lost": recipe(dataset="still", seed=1)}
    trainings["taught"] = {key: value for key, value in recipe(**taught).items() if value is not None}
    run = {"dataset": "still", "prompt": "ask", "metrics": [], "sampling": {"max_new_tokens": 4}}
    students = {f"by_{name}": {"source": f"training:{name}", "engine": "static"} for name in ("recipe", "lost")}
    return {
        "datasets": {name: {"path": f"{name}.jsonl"} for name in ("texts", "still")},
        "models": {"teacher": model(), "half": model(), **students},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "logits": logits,
        "trainings": trainings,
        "runs": {name: {**run, "model": name} for name in students},
    }


def edit_texts(_: dict[str, Any], place: Place) -> None:
    """Another text, one more, and another value in a column that nothing reads."""
    lines = rows("texts")
    lines[3]["text"] = "w1 w2 w3 w4"
    lines[7]["note"] = "seen"
    place.write_rows([lines[0] | {"id": "new", "text": "w5 w6"}, *lines], "texts.jsonl")


#: Name → its edit.
EDITS: dict[str, Edit] = {
    "rows": edit_texts,
    "k": lambda value, _: value["logits"]["k"].update(top_k=5),
    "dtype": lambda value, _: value["models"]["half"].update(dtype="bfloat16"),
    "recipe": lambda value, _: value["trainings"]["recipe"].update(weight_decay=0.1),
    "lost": lambda _, place: shutil.rmtree(place.folder / "results/trainings/lost/model"),
}
#: Logits → windows that are scored, rules that run.
LOGITS: dict[str, tuple[int, set[str]]] = {
    "rows": (2, SCORED),
    "k": (12, SCORED - {"logits_requests"}),
    "dtype": (12, SCORED),
}
#: Training → rules that run for it, rules that run for its model, whether that is asked anything.
TRAININGS: dict[str, tuple[set[str], set[str], bool]] = {
    "taught": ({"train"}, set(), False),
    "recipe": ({"train"}, ANSWERED, True),
    "lost": ({"train"}, ANSWERED, False),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The project after its first run; nothing may change it."""
    place = Place(tmp_path_factory.mktemp("finished"))
    make_teacher(place.folder / "teacher", padding=0)
    for name in config()["datasets"]:
        place.write_rows(rows(name), f"{name}.jsonl")
    place.write_prompt("ask.jinja", "{{ question }}")
    place.write_config(config())
    place.done()
    return place


@pytest.fixture(scope="module")
def edited(finished: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Rerun]:
    """The same after all edits and one more run of snakemake."""
    place = finished.copied(tmp_path_factory.mktemp("edited") / "project")
    value = place.config()
    for edit in EDITS.values():
        edit(value, place)
    place.write_config(value)
    for log in place.folder.glob("results/logits/*/logs/logits-*.log"):
        log.unlink()
    return place, place.rerun()


def scored(place: Project, name: str) -> int:
    """Windows that the teacher was given in the last run."""
    said = [SAID.search(log.read_text()) for log in (place.folder / f"results/logits/{name}/logs").glob("logits-*.log")]
    return sum(int(found[3]) for found in said if found)


@pytest.mark.parametrize("name", LOGITS)
def test_an_edit_scores_the_windows_that_it_changes_and_no_other(edited: tuple[Place, Rerun], name: str) -> None:
    place, rerun = edited
    count, rules = LOGITS[name]
    assert rerun.ran.get(f"logits {name}", set()) == rules
    assert scored(place, name) == count
    assert place.value(f"logits/{name}/metrics.json")["rows"] == (13 if name == "rows" else 12)


@pytest.mark.parametrize("name", TRAININGS)
def test_an_edit_trains_what_it_decides_and_asks_only_a_model_that_is_another(
    edited: tuple[Place, Rerun], name: str
) -> None:
    _, rerun = edited
    trains, answers, asked = TRAININGS[name]
    assert rerun.ran.get(f"training {name}", set()) == trains
    assert rerun.ran.get(f"by_{name}", set()) == answers
    assert (f"runs/by_{name}" in rerun.asked) == asked


def test_how_a_model_is_placed_and_a_training_kept_runs_nothing(finished: Place, tmp_path: Path) -> None:
    place = finished.copied(tmp_path / "project")
    value = place.config()
    value["models"]["teacher"] |= {"max_batch_rows": 3, "attention": "sdpa"}
    kept = {"micro_batch_rows": 2, "checkpoint_every_steps": 7, "keep_checkpoints": 1, "timeout_minutes": 9}
    value["trainings"]["recipe"] |= {**kept, "resources": {"runtime": 9}}
    place.write_config(value)
    assert place.would_run() == {}


def test_other_texts_train_again(finished: Place, tmp_path: Path) -> None:
    place = finished.copied(tmp_path / "project")
    changed = rows("still")
    changed[3]["text"] = "w1 w2 w3 w4"
    place.write_rows(changed, "still.jsonl")
    ran = place.would_run()
    assert {name for name in TRAININGS if ran.get(f"training {name}")} == {"recipe", "lost"}
    assert ran["training recipe"] == ran["training lost"] == TRAINED
    assert ran["by_recipe"] == ran["by_lost"] == {"render_requests", *ANSWERED}  # whose rows they are too


def test_a_column_that_nothing_reads_runs_the_steps_of_its_dataset(finished: Place, tmp_path: Path) -> None:
    place = finished.copied(tmp_path / "project")
    place.write_rows([line | {"note": "seen"} for line in rows("texts")], "texts.jsonl")
    assert place.would_run()["logits rows"] == SCORED


def test_logits_and_trainings_with_another_name_begin_anew(finished: Place, tmp_path: Path) -> None:
    place = finished.copied(tmp_path / "project")
    value = place.config()
    value["logits"]["renamed"] = value["logits"].pop("k")
    value["trainings"]["renamed"] = value["trainings"].pop("recipe")
    value["models"]["by_recipe"]["source"] = "training:renamed"
    place.write_config(value)
    ran = place.would_run()
    assert ran["logits renamed"] == SCORED
    assert ran["training renamed"] == TRAINED
    assert {unit for unit in ran if unit.startswith(("logits", "training"))} == {"logits renamed", "training renamed"}


def test_lost_data_of_logits_is_made_from_the_journal(finished: Place, tmp_path: Path) -> None:
    place = finished.copied(tmp_path / "project")
    shutil.rmtree(place.folder / "results/logits/k/data")
    place.rerun("results/logits/k/metrics.json", "results/logits/k/data")
    assert scored(place, "k") == 0
    assert (place.folder / "results/logits/k/data").is_dir()
