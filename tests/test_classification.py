"""Facts about the numbers of a labelled run."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import answer, tallied

LABELS = {"a": [], "b": ["bee"], "c": []}


def classified(pairs: list[tuple[str, str | None]], **settings: Any) -> dict[str, Any]:
    """The metrics of (reference, answer) pairs."""
    lines = [answer(str(n), said, true, row={"true": true}) for n, (true, said) in enumerate(pairs)]
    found: dict[str, Any] = tallied(lines, metrics=["label"], labels=LABELS, **settings)[1]
    return found


PAIRS: list[tuple[str, str | None]] = [
    *(("a", "a"), ("a", "a"), ("a", "b"), ("a", "who knows")),
    *(("bee", "B."), ("b", "a"), ("b", None), ("b", "")),
]


def test_a_class_has_precision_recall_f1_and_support() -> None:
    found = classified(PAIRS)["classification"]
    assert found["per_class"]["a"] == pytest.approx({"precision": 2 / 3, "recall": 1 / 2, "f1": 4 / 7, "support": 4})
    assert found["per_class"]["b"] == pytest.approx({"precision": 1 / 2, "recall": 1 / 4, "f1": 1 / 3, "support": 4})
    assert found["per_class"]["c"] == {"precision": 0, "recall": 0, "f1": 0, "support": 0}
    assert found["macro"]["f1"] == pytest.approx((4 / 7 + 1 / 3) / 3)
    assert found["undefined"] == {"precision": ["c"], "recall": ["c"], "f1": ["c"]}


def test_the_confusion_matrix_has_a_column_for_what_is_no_label() -> None:
    found = classified(PAIRS)
    assert found["classification"]["confusion"] == [[2, 1, 0, 1], [1, 1, 0, 2], [0, 0, 0, 0]]
    assert found["classification"]["confusion_columns"] == ["a", "b", "c", "invalid"]
    assert found["classification"]["majority"] == {"label": "a", "accuracy": 0.5}
    assert (found["classification"]["invalid"], found["classification"]["invalid_ratio"]) == (3, 3 / 8)
    assert found["classification"]["accuracy"] == found["accuracy"] == 3 / 8
    assert found["metrics"]["label"]["unread"] == 1
    assert (found["invalid"]["skipped"], found["invalid"]["empty"]) == (1, 1)


def test_a_slice_counts_its_own_invalid_answers() -> None:
    slices = classified(PAIRS, slices=["true"])["slices"]["true"]
    assert [(key, entry["n"], entry["invalid"], entry["label"]["unread"]) for key, entry in slices.items()] == [
        ("a", 4, 0, 1),
        ("bee", 1, 0, 0),
        ("b", 3, 2, 0),
    ]


def test_without_answers_every_score_is_null() -> None:
    found = classified([])["classification"]
    assert (found["accuracy"], found["macro"]["f1"], found["per_class"]) == (None, None, {})


@given(
    pairs=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["a", "b", "c", "d", None])), min_size=1),
    seed=st.integers(0, 9),
)
def test_the_order_of_the_rows_changes_nothing(pairs: list[tuple[str, str | None]], seed: int) -> None:
    shuffled = random.Random(seed).sample(pairs, len(pairs))
    assert classified(shuffled) == classified(pairs)
