"""Facts about config/data/questions.jsonl, the labelled demo dataset."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

QUESTIONS = Path(__file__).resolve().parents[1] / "config" / "data" / "questions.jsonl"
CATEGORIES = ["arithmetic", "geography", "science", "language", "common_sense"]


def read_rows() -> list[dict[str, Any]]:
    # Not str.splitlines(): it would also split at characters that JSON allows inside a string.
    lines = QUESTIONS.read_bytes().decode("utf-8").rstrip("\n").split("\n")
    return [json.loads(line) for line in lines]


def accepted_answers(row: dict[str, Any]) -> list[str]:
    reference = row["reference"]
    alternatives = reference if isinstance(reference, list) else [reference]
    return [str(alternative) for alternative in alternatives]


def contains_whole(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return read_rows()


def test_there_are_75_rows_with_the_same_keys(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 75
    assert [row["id"] for row in rows if set(row) != {"id", "category", "question", "reference"}] == []


def test_ids_and_questions_are_unique(rows: list[dict[str, Any]]) -> None:
    assert [value for value, count in Counter(row["id"] for row in rows).items() if count > 1] == []
    assert [value for value, count in Counter(row["question"] for row in rows).items() if count > 1] == []


def test_each_category_has_15_rows(rows: list[dict[str, Any]]) -> None:
    assert Counter(row["category"] for row in rows) == dict.fromkeys(CATEGORIES, 15)


def test_categories_are_interleaved_round_robin(rows: list[dict[str, Any]]) -> None:
    assert [row["category"] for row in rows] == CATEGORIES * 15


def test_questions_have_5_to_30_words(rows: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in rows if not 5 <= len(row["question"].split()) <= 30] == []


def test_every_reference_is_nonempty_and_at_most_4_words(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        answers = accepted_answers(row)
        assert answers, row["id"]
        for answer in answers:
            assert 1 <= len(answer.split()) <= 4, (row["id"], answer)
            assert answer == answer.strip(), (row["id"], answer)


def test_references_are_numbers_in_arithmetic_and_text_elsewhere(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        reference = row["reference"]
        if row["category"] == "arithmetic":
            assert type(reference) in (int, float), row["id"]
        elif isinstance(reference, list):
            assert len(reference) >= 2, row["id"]
            assert len(set(reference)) == len(reference), row["id"]
            assert all(isinstance(alternative, str) for alternative in reference), row["id"]
        else:
            assert isinstance(reference, str), row["id"]


def test_no_question_contains_its_own_answer(rows: list[dict[str, Any]]) -> None:
    given_away = [
        (row["id"], answer)
        for row in rows
        for answer in accepted_answers(row)
        if contains_whole(row["question"], answer)
    ]
    assert given_away == []


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("Is it hot or cold?", "Cold", True),
        ('Is it "cold"?', "cold", True),
        ("What is the plural of child?", "children", False),
        ("Which children came?", "child", False),
        ("What is 15 minus 8?", "5", False),
        ("What is 5 minus 0?", "5", True),
        ("What is 7 minus 10?", "-3", False),
    ],
)
def test_the_check_for_given_away_answers_sees_whole_words(text: str, answer: str, found: bool) -> None:
    assert contains_whole(text, answer) is found


def test_the_oddities_of_real_data_are_there(rows: list[dict[str, Any]]) -> None:
    questions = [row["question"] for row in rows]
    assert any(not question.isascii() for question in questions)
    assert any('"' in question for question in questions)
    assert any("\n" in question for question in questions)
    assert any(row["reference"] == 0 for row in rows), "a reference that is falsy but is not missing"
    assert any(isinstance(row["reference"], float) for row in rows)
    assert any(isinstance(row["reference"], int) and row["reference"] < 0 for row in rows)
