"""Grades and numbers of public data, computed elsewhere: ../shared/data beside the checkout, skipped where absent.

Some rows are offensive: a failure names ids and labels, never texts.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.config.specs import MetricsSpec
from gristmill.files import read_jsonl
from gristmill.grading.number import DECLARED, read_number
from gristmill.metrics import RunTally
from gristmill.rows import read_rows
from gristmill.samples import pass_at_k

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text("utf-8")) if DATA.is_dir() else {}
MODELS = [name for name in EXPECTED.get("gsm8k", {}) if name.endswith(("finetuning", "verification"))]

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")


def answer(row_id: str, text: str, reference: Any, **row: Any) -> dict[str, Any]:
    """A line of generations.jsonl."""
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_cut_tokens": 0, "finish_reason": "stop"}
    return {"id": row_id, "sample": 0, "variant": "", "text": text, "reference": reference, "row": row, **counts}


def tallied(lines: Iterator[dict[str, Any]], **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    names = {"run": "r", "dataset": "d", "model": "m", "prompt": "p", "slices": []}
    tally = RunTally(MetricsSpec(**{**names, **settings}))
    return list(tally.graded(lines)), tally.metrics()


def constant(lines: Iterator[tuple[str, str]], label: str, labels: Any) -> dict[str, Any]:
    """The metrics of a model that gives every row one label; `lines` has (id, reference)."""
    answers = (answer(row_id, label, reference) for row_id, reference in lines)
    return tallied(answers, metrics=["label"], labels=labels)[1]


# GSM8K


def solutions() -> list[dict[str, Any]]:
    return list(read_jsonl(DATA / "gsm8k" / "example_model_solutions.jsonl"))


@pytest.mark.parametrize("model", MODELS)
def test_the_number_metric_grades_every_stored_solution_as_its_authors_did(model: str) -> None:
    rows = solutions()
    lines = (answer(str(n), row[model]["solution"], row["ground_truth"]) for n, row in enumerate(rows))
    grades, metrics = tallied(lines, metrics=["number"])
    stored = {str(number): row[model]["is_correct"] for number, row in enumerate(rows)}
    assert [line["id"] for line in grades if line["grades"]["number"] is not stored[line["id"]]] == []
    assert metrics["metrics"]["number"]["correct"] == EXPECTED["gsm8k"][model]["correct"]
    assert metrics["n"] == 1319


@pytest.mark.parametrize("model", MODELS)
def test_the_solutions_that_declare_no_answer_are_as_many_as_were_counted(model: str) -> None:
    undeclared = [n for n, row in enumerate(solutions()) if not DECLARED.search(row[model]["solution"])]
    assert len(undeclared) == EXPECTED["gsm8k"][model]["no_answer"]


def test_every_gold_solution_has_its_number() -> None:
    expected = EXPECTED["gsm8k"]
    gold = [str(row["answer"]) for row in read_jsonl(DATA / "gsm8k" / "test.jsonl")]
    numbers = [read_number(text) or "nan" for text in gold]
    assert sum(map(float, numbers)) == expected["gold_sum"]
    assert sum(number.startswith("-") for number in numbers) == expected["gold_negative"]
    written = [text.rpartition("#### ")[2].strip() for text in gold]
    differ = [text for text, number in zip(written, numbers, strict=True) if text != number]
    assert all("," in text for text in differ)
    assert len(differ) == expected["gold_with_comma"]


# pass@k


@pytest.mark.parametrize(("case", "value"), EXPECTED.get("pass_at_k", {}).items())
def test_pass_at_k_is_the_published_estimator(case: str, value: float) -> None:
    n, c, k = map(int, case.split(","))
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


# Classification


def test_davidsons_majority_class_has_the_known_accuracy_and_macro_f1() -> None:
    expected = EXPECTED["davidson"]
    path = DATA / "hate_davidson" / "labeled_data.csv"
    rows = [(row.id, str(row.fields["class"])) for row in read_rows(path, id_field=None)]
    assert path.read_bytes().count(b"\n") >= expected["physical_lines"] - 1 > len(rows) == expected["n"]
    found = constant(iter(rows), "1", {"0": [], "1": [], "2": []})["classification"]
    assert {label: scores["support"] for label, scores in found["per_class"].items()} == expected["classes"]
    assert found["accuracy"] == pytest.approx(expected["majority_acc"], abs=1e-12)
    assert found["majority"]["accuracy"] == found["accuracy"]
    assert found["macro"]["f1"] == pytest.approx(expected["majority_macro_f1"], abs=1e-12)
    assert found["undefined"] == {"precision": ["0", "2"]}


def test_hatecheck_called_hateful_throughout_has_the_known_numbers_in_29_functionalities() -> None:
    expected = EXPECTED["hatecheck"]
    rows = list(read_rows(DATA / "hatecheck" / "test_suite_cases.csv", id_field="case_id"))
    labels = {"hateful": [], "non-hateful": ["not hateful"]}
    lines = (
        answer(row.id, "hateful", row.fields["label_gold"], functionality=row.fields["functionality"]) for row in rows
    )
    _, metrics = tallied(lines, metrics=["label"], labels=labels, slices=["functionality"], cluster="functionality")
    found = metrics["classification"]
    assert {label: scores["support"] for label, scores in found["per_class"].items()} == expected["labels"]
    assert round(found["accuracy"], 4) == round(expected["all_hateful_acc"], 4)
    assert found["macro"]["f1"] == pytest.approx(expected["all_hateful_macro_f1"], abs=1e-12)
    slices = metrics["slices"]["functionality"]
    assert len(slices) == expected["functionalities"]
    assert {entry["label"]["value"] for entry in slices.values()} == {0.0, 1.0}
    assert sum(entry["n"] for entry in slices.values()) == expected["n"]
