"""Whole evaluations of a real model on public data: HateCheck by three strategies, and LLMBar as a test of a judge.

The data lies in ../shared/data beside the checkout. Some of its texts are offensive: a failure shows ids and numbers.
What SmolLM2 answers is no fact; that every answer is counted once, and that a poor judge is called one, is.

A prompt of some hundred tokens takes a second on a CPU, so these ask a few rows. GRISTMILL_EVALUATION_ROWS=200 asks 200
rows of HateCheck and all 100 of LLMBar; what that gave stands in benchmarks/README.md.
"""

import csv
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Project

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
ROWS = int(os.environ.get("GRISTMILL_EVALUATION_ROWS", "8"))
LABELS = ("hateful", "non-hateful")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout"),
]


def hatecheck() -> list[dict[str, str]]:
    """Rows from all over the file, so that many functionalities and both classes are among them."""
    with (DATA / "hatecheck/test_suite_cases.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    step = len(rows) / ROWS
    return [rows[int(place * step)] for place in range(ROWS)]


def classification(model: Path, examples: list[str]) -> dict[str, Any]:
    run = {
        "dataset": "hatecheck",
        "model": "smollm2",
        "sampling": {"max_new_tokens": 8},
        "metrics": ["label"],
        "labels": {"hateful": ["hate speech"], "non-hateful": ["not hateful", "nonhateful"]},
        "slices": ["functionality"],
    }
    file = "classify.jinja"
    return {
        "datasets": {
            "hatecheck": {"path": "cases.jsonl", "id_field": "case_id", "fields": {"reference": "label_gold"}}
        },
        "models": {"smollm2": {"source": str(model), "dtype": "float32"}},
        "prompts": {
            "zero_shot": {"file": file},
            "few_shot": {
                "file": file,
                "few_shot_from": {"dataset": "hatecheck", "rows": examples},
            },
            "policy": {
                "file": file,
                "system": "A text is hateful if it attacks people for what they are. Anything else is non-hateful.",
            },
        },
        "runs": {
            "zero_shot": {**run, "prompt": "zero_shot"},
            "few_shot": {**run, "prompt": "few_shot"},
            "policy": {**run, "prompt": "policy", "readout": "likelihood"},
        },
    }


def test_hatecheck_by_three_strategies_counts_every_row_once_and_compares_them(
    project: Project, smollm2_folder: Path
) -> None:
    rows = hatecheck()
    project.write_rows([{k: row[k] for k in ("case_id", "test_case", "label_gold", "functionality")} for row in rows],
                       "cases.jsonl")  # fmt: skip
    project.write_prompt("classify.jinja", "Text: {{ test_case }}\nIs this hateful or non-hateful? One word:")
    examples = [next(row["case_id"] for row in rows if row["label_gold"] == label) for label in LABELS]
    project.write_config(classification(smollm2_folder, examples))
    project.done()
    gold = {row["case_id"]: row["label_gold"] for row in rows}
    for run in ("zero_shot", "few_shot", "policy"):
        metrics, grades = project.value(f"runs/{run}/metrics.json"), project.lines(f"runs/{run}/grades.jsonl")
        found = metrics["classification"]
        read = Counter((gold[line["id"]], line["extracted"]["label"]) for line in grades)
        table = {
            (true, column): count
            for true, counts in zip(found["labels"], found["confusion"], strict=True)
            for column, count in zip(found["confusion_columns"], counts, strict=True)
        }
        assert (metrics["n"], sum(table.values())) == (ROWS, ROWS)
        assert table == {(true, said): read[true, said if said != "invalid" else None] for true, said in table}
        right = sum(read[label, label] for label in LABELS)
        assert found["accuracy"] == metrics["accuracy"] == right / ROWS
        assert found["invalid"] == sum(read[label, None] for label in LABELS)
        slices = metrics["slices"]["functionality"]
        assert {name: part["n"] for name, part in slices.items()} == Counter(row["functionality"] for row in rows)
        assert sum(part["label"]["correct"] for part in slices.values()) == right
    policy = project.value("runs/policy/metrics.json")
    assert policy["classification"]["invalid"] == 0
    assert 0 < policy["label_mass"] <= 1
    compared = project.value("comparisons.json")["comparisons"]
    assert {tuple(each["runs"]) for each in compared} == {
        ("zero_shot", "few_shot"), ("zero_shot", "policy"), ("few_shot", "policy")
    }  # fmt: skip
    for each in compared:
        one, other = (project.value(f"runs/{run}/metrics.json")["accuracy"] for run in each["runs"])
        assert (each["n_common"], each["family_size"]) == (ROWS, 3)
        assert each["difference"] == pytest.approx(one - other)
        assert each["p_holm"] is None or each["p_holm"] >= each["p"]
    report = (project.folder / "results/report.html").read_text()
    assert "non-hateful" in report
    assert "policy" in report
    assert project.asked("runs/policy") == [row["case_id"] for row in rows] or len(project.asked("runs/policy")) == ROWS
    assert "Nothing to be done" in project.done()


def judge_config(model: Path) -> dict[str, Any]:
    judge = {
        "kind": "pairwise",
        "model": "smollm2",
        "prompt": "which",
        "pairs": [["output_1", "output_2"]],
        "labels": {"A": "first", "B": "second"},
        "human": "label",
        "human_labels": {1: "first", 2: "second"},
        "stop_after_unreadable": None,
    }
    answer = {"dataset": "llmbar", "model": "stored", "sampling": {"max_new_tokens": 100_000}}
    return {
        "datasets": {"llmbar": {"path": "rows.jsonl"}},
        "models": {"stored": {"engine": "echo"}, "smollm2": {"source": str(model), "dtype": "float32"}},
        "prompts": {
            "output_1": {"file": "output_1.jinja"},
            "output_2": {"file": "output_2.jinja"},
            "which": {"file": "which.jinja"},
        },
        "runs": {name: {**answer, "prompt": name} for name in ("output_1", "output_2")},
        "judges": {
            "by_words": {**judge, "sampling": {"max_new_tokens": 8}},
            "by_likelihood": {**judge, "readout": "likelihood"},
        },
    }


def test_llmbar_shows_how_far_a_small_model_is_from_a_judge(project: Project, smollm2_folder: Path) -> None:
    rows = json.loads((DATA / "llmbar/Natural/dataset.json").read_text())[: ROWS // 2]
    project.write_rows({"id": f"n{number}", **row} for number, row in enumerate(rows))
    project.write_prompt("output_1.jinja", "{{ output_1 }}")
    project.write_prompt("output_2.jinja", "{{ output_2 }}")
    project.write_prompt(
        "which.jinja",
        "Instruction: {{ input }}\n\nAnswer A: {{ answer_a }}\n\nAnswer B: {{ answer_b }}\n\n"
        "Which answer follows the instruction better? Write A or B.",
    )
    project.write_config(judge_config(smollm2_folder))
    project.done()
    generations = project.lines("runs/output_1/generations.jsonl")
    assert [line["text"] for line in generations] == [row["output_1"] for row in rows]
    people = ["output_1" if row["label"] == 1 else "output_2" for row in rows]
    for judge in ("by_words", "by_likelihood"):
        folder = f"judges/{judge}/output_1_vs_output_2"
        metrics, verdicts = project.value(f"{folder}/metrics.json"), project.lines(f"{folder}/verdicts.jsonl")
        agreed = sum(line["winner"] == person for line, person in zip(verdicts, people, strict=True))
        human = metrics["human"]
        assert (metrics["n"], human["n"], human["missing"], human["policy"]) == (len(rows), len(rows), 0, "wrong")
        assert human["percent"] == agreed / len(rows)
        both = [[order["choice"] for order in line["orders"]] for line in verdicts]
        read_twice = [choices for choices in both if len(choices) == 2 and None not in choices]
        same = sum(one == other for one, other in read_twice)
        assert metrics["consistency"] == (same / len(read_twice) if read_twice else None)
        assert metrics["reliable"] == (not metrics["unreliable_because"])
        if human["kappa"] is not None and human["kappa"] < 0.2:
            assert any("people" in reason for reason in metrics["unreliable_because"])
        (ranking,) = (each for each in project.value("rankings.json")["rankings"] if each["judge"] == judge)
        assert ranking["reliable"] == metrics["reliable"]
    by_words = project.value("judges/by_words/output_1_vs_output_2/metrics.json")
    assert not by_words["reliable"]  # it nearly always says the same letter
    likelihood = project.lines("judges/by_likelihood/output_1_vs_output_2/verdicts.jsonl")
    for line in likelihood:
        asked = [order for order in line["orders"] if order["probabilities"] is not None]
        assert all(sum(order["probabilities"].values()) == pytest.approx(1) for order in asked)
        assert all(0 < order["label_mass"] <= 1 + 1e-6 for order in asked)
    report = (project.folder / "results/report.html").read_text()
    assert "unreliable" in report
