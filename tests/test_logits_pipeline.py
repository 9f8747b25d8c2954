"""Facts about teacher logits in the whole workflow: the real rules on a tiny model."""

from typing import Any

import pytest
from conftest import Project
from tiny_teacher import make_teacher

from gristmill.config.load import load_config
from gristmill.config.schema import LogitsConfig
from gristmill.errors import UserError
from gristmill.logits.storage import LogitsReader, file_rows


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {"tiny": {"source": "./teacher", "engine": "static", "dtype": "float32"}},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"plain": {"dataset": "rows", "model": "tiny", "prompt": "ask", "sampling": {"max_new_tokens": 6}}},
        "logits": {
            "answers": {"model": "tiny", "run": "plain", "top_k": 8},
            "questions": {"model": "tiny", "dataset": "rows", "text_field": "question", "full": True},
            "references": {"model": "tiny", "dataset": "rows", "prompt": "ask", "top_k": 4, "max_samples": 3},
        },
    }
    return {**base, **changes}


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "question": f"w{n} w3 w{n + 1}", "reference": f"w{n} w2"} for n in range(count)]


@pytest.fixture
def teacher(project: Project) -> Project:
    make_teacher(project.folder / "teacher", padding=0)
    project.write_rows(rows(8))
    project.write_config(config())
    return project


def known(project: Project, name: str) -> list[str]:
    """Every key in the journal, once for each row that has it."""
    folder = project.folder / "results/logits" / name / "journal"
    return [line["key"] for path in folder.glob("*.parquet") for line in file_rows(path, ["key"])]


@pytest.mark.slow
def test_a_teacher_alone_is_a_whole_config(teacher: Project) -> None:
    teacher.write_config({**config(runs={}, prompts={}), "logits": {"questions": config()["logits"]["questions"]}})
    teacher.done()
    assert len(LogitsReader(teacher.folder / "results/logits/questions/data")) == 8
    assert "logits of 1 teacher" in (teacher.folder / "results/report.html").read_text()
    assert "Nothing to be done" in teacher.done()


@pytest.mark.slow
def test_texts_of_all_kinds_come_out_as_data_and_a_new_row_costs_itself_alone(teacher: Project) -> None:
    teacher.done(gpu=2)
    results = teacher.folder / "results/logits"
    readers = {name: LogitsReader(results / name / "data") for name in ("answers", "questions", "references")}
    assert {name: len(reader) for name, reader in readers.items()} == {"answers": 8, "questions": 8, "references": 3}
    assert [row.id for row in readers["answers"]] == [f"r{n}" for n in range(8)]
    assert readers["questions"].metadata["full"]
    assert [row.positions for row in readers["questions"]] == [2] * 8
    answers = {line["id"]: line for line in teacher.lines("runs/plain/generations.jsonl")}
    whole = [row for row in readers["answers"] if row.positions >= answers[row.id]["completion_tokens"] > 0]
    assert whole  # of others a special token is not in the text
    assert all(row.top_ids[0, 0] == row.token_ids[row.first] for row in whole)  # greedy: the teacher's most likely one
    for name in readers:
        there = {path.name for path in (results / name).iterdir()}
        assert there == {"data", "gpu", "journal", "live", "logs", "manifest.json", "metrics.json", "requests.jsonl",
                         "requests.jsonl.sha256"} - ({"gpu"} - there)  # fmt: skip
    assert "Nothing to be done" in teacher.done(gpu=2)

    before = {name: set(known(teacher, name)) for name in readers}
    teacher.write_rows(rows(9))
    teacher.done("results/logits/questions/manifest.json", gpu=1)
    after = known(teacher, "questions")
    assert len(after) == len(set(after)) == 9
    assert before["questions"] < set(after)
    assert len(LogitsReader(results / "questions/data")) == 9


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        ({"model": "tinny", "run": "plain"}, "logits.x.model: 'tinny' is not a model; did you mean tiny"),
        ({"model": "tiny", "run": "plan"}, "logits.x.run: 'plan' is not a run; did you mean plain"),
        ({"model": "echo", "run": "plain"}, "logits.x.model: echo has engine echo, which gives no logits"),
        ({"model": "tiny"}, "logits.x: give either run or dataset"),
        ({"model": "tiny", "dataset": "rows"}, "logits.x: dataset needs text_field"),
        ({"model": "tiny", "run": "plain", "text_field": "a"}, "logits.x: text_field and prompt belong to dataset"),
        ({"model": "tiny", "run": "plain", "on_overflow": "split"}, "logits.x: on_overflow is split"),
        ({"model": "tiny", "dataset": "rows", "prompt": "asks"}, "logits.x.prompt: 'asks' is not a prompt"),
        ({"model": "tiny", "run": "plain", "topk": 3}, "logits.x.topk is not a known key; did you mean top_k"),
    ],
)
def test_a_mistake_in_the_logits_section_is_one_line(
    teacher: Project, monkeypatch: pytest.MonkeyPatch, logits: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(teacher.folder)
    models = {**config()["models"], "echo": {"engine": "echo"}}
    with pytest.raises(UserError) as caught:
        load_config(config(logits={"x": logits}, models=models), [teacher.folder])
    assert str(caught.value).startswith(said), str(caught.value)
    assert "\n" not in str(caught.value)


def test_columns_that_are_not_there_are_named_before_any_job(teacher: Project) -> None:
    logits = {"a": {"model": "tiny", "dataset": "rows", "text_field": "txt"}}
    teacher.write_config(config(logits=logits))
    result = teacher.run("-n")
    assert result.returncode != 0
    assert "logits.a.text_field: 'txt' is not a column of rows; columns: id, question, reference" in result.stdout


def test_top_k_is_64_unless_said_otherwise() -> None:
    assert LogitsConfig(model="m", run="r").top_k == 64


def test_a_model_that_only_gives_logits_is_in_the_plan(teacher: Project) -> None:
    models = {**config()["models"], "echo": {"engine": "echo"}}
    runs = {"plain": {"dataset": "rows", "model": "echo", "prompt": "ask"}}
    teacher.write_config(config(models=models, runs=runs, logits={"a": {"model": "tiny", "run": "plain"}}))
    shown = teacher.done("plan", gpu=3)
    assert "model tiny: 1 slot each, 3 workers" in shown
