"""Facts about examples that are taken from a dataset's rows (prompts.*.few_shot_from)."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ANSWERS, Project, echo_config
from pydantic import ValidationError

from gristmill.config.schema import PromptConfig
from gristmill.config.specs import RequestsSpec
from gristmill.errors import UserError
from gristmill.rendering import requests

ROWS = [{"id": f"r{n}", "q": f"{n} + 1?", "reference": [n + 1, "or so"]} for n in range(4)]


def rendered(tmp_path: Path, rows: list[str], examples: list[dict[str, Any]] | None = None) -> dict[str, list[Any]]:
    """Row → (role, content) of its chat; the examples come from the run's own dataset unless others are given."""
    for name, lines in (("rows.jsonl", ROWS), ("others.jsonl", examples or [])):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "ask.jinja").write_text("{{ q }}")
    source = "rows.jsonl" if examples is None else "others.jsonl"
    spec = RequestsSpec.model_validate(
        {
            "dataset": {"path": str(tmp_path / "rows.jsonl")},
            "prompt": {
                "file": str(tmp_path / "ask.jinja"),
                "system": "Add.",
                "few_shot": [{"user": "0 + 0?", "assistant": "0"}],
                "few_shot_from": {"dataset": "examples", "rows": rows},
            },
            "sampling": {},
            "examples": {"path": str(tmp_path / source)},
        }
    )
    return {line["id"]: [(m["role"], m["content"]) for m in line["messages"]] for line in requests(spec)}


def test_examples_stand_in_the_order_of_the_config_with_their_first_reference_as_the_answer(tmp_path: Path) -> None:
    assert rendered(tmp_path, ["r2", "r1"])["r0"] == [
        ("system", "Add."),
        ("user", "0 + 0?"),
        ("assistant", "0"),
        ("user", "2 + 1?"),
        ("assistant", "3"),
        ("user", "1 + 1?"),
        ("assistant", "2"),
        ("user", "0 + 1?"),
    ]


def test_a_row_is_never_its_own_example_and_every_row_is_asked(tmp_path: Path) -> None:
    chats = rendered(tmp_path, ["r2", "r1"])
    assert list(chats) == ["r0", "r1", "r2", "r3"]
    assert chats["r1"][3:] == [("user", "2 + 1?"), ("assistant", "3"), ("user", "1 + 1?")]


def test_a_row_of_another_dataset_is_an_example_also_for_the_row_of_its_name(tmp_path: Path) -> None:
    chats = rendered(tmp_path, ["r1"], [{"id": "r1", "q": "9 + 1?", "reference": 10}])
    assert chats["r1"][3:] == [("user", "9 + 1?"), ("assistant", "10"), ("user", "1 + 1?")]


def test_an_example_that_is_not_there_or_has_no_answer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="few_shot_from names rows that examples does not have: r8, r9; correct the ids"
    ):
        rendered(tmp_path, ["r1", "r8", "r9"])
    with pytest.raises(UserError, match="row x of examples has no reference to show as its answer"):
        rendered(tmp_path, ["x"], [{"id": "x", "q": "?"}])


def test_examples_are_named_once_and_not_for_turns() -> None:
    with pytest.raises(ValidationError, match="row 7 is there twice"):
        PromptConfig.model_validate({"file": "f", "few_shot_from": {"dataset": "d", "rows": [7, "7"]}})
    with pytest.raises(ValidationError, match="few_shot_from and turns do not go together"):
        PromptConfig.model_validate({"file": "f", "turns": "t", "few_shot_from": {"dataset": "d", "rows": [7]}})


def project_with(project: Project, **few_shot: Any) -> None:
    config = echo_config()
    config["prompts"] = {
        name: {**prompt, "few_shot_from": {"dataset": "rows", "rows": ["r1"], **few_shot}}
        for name, prompt in config["prompts"].items()
    }
    project.write_config(config)


def test_an_edit_of_an_example_asks_the_rows_that_were_shown_it_again(project: Project) -> None:
    project_with(project)
    project.done(ANSWERS)
    run = next(iter(json.loads(json.dumps(echo_config()))["runs"]))
    assert len(project.asked(f"runs/{run}")) == 12
    rows = [{"id": f"r{n}", "question": f"say {n}", "reference": n if n != 1 else "one"} for n in range(12)]
    project.write_rows(rows)
    project.done(ANSWERS)
    again = project.asked(f"runs/{run}")[12:]
    assert sorted(again) == sorted(row["id"] for row in rows if row["id"] != "r1")


def test_an_unknown_dataset_of_examples_is_one_line(project: Project) -> None:
    project_with(project, dataset="row")
    result = project.run("-n")
    assert result.returncode != 0
    assert "few_shot_from.dataset: 'row' is not a dataset; did you mean rows?" in result.stdout
    assert "Traceback" not in result.stdout
