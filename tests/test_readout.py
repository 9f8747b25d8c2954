"""Facts about reading a judge's label: what is read, and above all what is not."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.judging.readout import read_label
from gristmill.types import Reading

LETTERS = ("A", "B", "C")
WORDS = ("correct", "incorrect")


def label(text: str, labels: tuple[str, ...] = LETTERS) -> str | None:
    return read_label(text, labels).label


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[A]]", "A"),
        ("The first is vague. My verdict is: [[B]]", "B"),
        (r"so \boxed{C}", "C"),
        ("Verdict: A", "A"),
        ("**Verdict:** **B**", "B"),
        ("**Winner**: Assistant B.", "B"),
        ("Judgement: [A]", "A"),
        ('{"choice": "A", "why": "shorter"}', "A"),
        ("<verdict>B</verdict>", "B"),
        ("## Verdict\nA\n\nIt is complete.", "A"),
        ("The final verdict is **B**.", "B"),
        ("Final answer: B", "B"),
        ("I weighed both. So, my answer is: C", "C"),
        ("Verdict: A (the first one)", "A"),
        ("Verdict: A because it is shorter", "A"),
        ("A", "A"),
        (" A.\n", "A"),
        ("(B)", "B"),
        ("**C**", "C"),
        ("A)", "A"),
        ("- B", "B"),
        ("Answer B.", "B"),
        ("A\nIt names the right year.", "A"),
        ("It names the right year.\n\nB", "B"),
        ("A: correct", "A"),
        ("B) the year is wrong", "B"),
        ("**A**: it fits", "A"),
        ("B. The year is wrong.", "B"),
        ("B because the year is wrong", "B"),
    ],
)
def test_a_label_is_read_from_the_forms_that_judges_use(text: str, expected: str) -> None:
    assert read_label(text, LETTERS) == Reading(expected, None, text)


@pytest.mark.parametrize(
    "text",
    [
        "A good answer names the year.",
        "A better one would be B",
        "Verdict: A good answer overall",
        "neither A nor B",
        "Verdict: neither A nor B",
        "A or B",
        "Verdict: A or B",
        "Verdict: A/B",
        "Verdict: A, B",
        "Verdict: A (or B)",
        "A, B and C are all fine",
        "Verdict: A's year is wrong",
        "Verdict: A-level",
        "Verdict: A+",
        "Verdict: not A",
        "Verdict: a",
        "a",
        "AB",
        "B1",
        "The student's answer: B",
        "Reference answer: B\nIt differs.",
        "I think A is better than B.",
        "A: clear and short.\nB: long.",
        "Answer A:\nclear\nAnswer B:\nlong",
        "<think>[[A]] or not",
    ],
)
def test_doubtful_words_are_not_read(text: str) -> None:
    assert read_label(text, LETTERS) == Reading(None, "no_label", text)


@pytest.mark.parametrize("text", ["", " ", "\n\t\n"])
def test_a_blank_completion_is_empty(text: str) -> None:
    assert read_label(text, LETTERS) == Reading(None, "empty", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("incorrect", "incorrect"),
        ("Incorrect.", "incorrect"),
        ("**CORRECT**", "correct"),
        ("Verdict: Incorrect", "incorrect"),
        ("Correct, the year fits.", "correct"),
        ("[[Incorrect]]", "incorrect"),
        ("not correct", None),
        ("Verdict: not correct", None),
        ("Partially correct", None),
        ("Verdict: partially correct", None),
        ("correct/incorrect", None),
        ("Verdict: correct or incorrect", None),
        ("correctly done", None),
        ("Correct but incomplete", None),
    ],
)
def test_incorrect_and_not_correct_never_read_as_correct(text: str, expected: str | None) -> None:
    assert label(text, WORDS) == expected


@pytest.mark.parametrize(
    ("text", "labels", "expected"),
    [
        ("AB", ("A", "AB"), "AB"),
        ("Verdict: AB", ("A", "AB"), "AB"),
        ("Verdict: A", ("A", "AB"), "A"),
        ("10", ("1", "10"), "10"),
        ("Rating: [[8]]", ("8", "10"), "8"),
        ("Verdict: 8/10", ("8", "10"), None),
        ("Verdict: 1.5", ("1", "5"), None),
        ("My final verdict is: [[A>>B]]", ("A>B", "A>>B", "A=B"), "A>>B"),
        ("A>B", ("A", "B"), None),
        ("Verdict: A+", ("A", "A+"), "A+"),
        ("Verdict: Not  Relevant", ("relevant", "not relevant"), "not relevant"),
        ("Verdict: yes", ("Yes", "no"), "Yes"),
        ("Verdict: tie", ("A", "B", "Tie"), "Tie"),
        ("anything", (), None),
        ("x", ("", " "), None),
    ],
)
def test_labels_that_look_alike_are_kept_apart(text: str, labels: tuple[str, ...], expected: str | None) -> None:
    assert label(text, labels) == expected


def test_of_two_matches_of_one_strength_the_last_wins() -> None:
    assert label("First I thought [[A]], but [[B]]") == "B"
    assert label("Verdict: B\nOn reflection\nVerdict: A") == "A"


def test_a_stronger_form_wins_over_a_later_weaker_one() -> None:
    assert label("[[A]]\nB") == "A"
    assert label("Verdict: A\nB") == "A"


def test_only_the_words_after_the_reasoning_are_read() -> None:
    assert label("<think>surely [[A]]</think>\nB") == "B"
    assert label("surely [[A]]</think>\nB") == "B"


def test_a_letter_that_matches_only_by_unicode_case_folding_is_read_without_an_error() -> None:
    assert label("İncorrect", WORDS) in {None, "incorrect"}


PIECES = st.sampled_from(
    [
        "A",
        "B",
        "correct",
        "incorrect",
        "Verdict",
        "Answer",
        ":",
        " is ",
        "[[",
        "]]",
        "**",
        "\n",
        " ",
        "(",
        ")",
        ".",
        ",",
        "or",
    ]
)
TEXTS = st.text() | st.lists(PIECES, max_size=12).map("".join)
LABELS = st.lists(st.sampled_from([*LETTERS, *WORDS]) | st.text(max_size=4), max_size=4)


@settings(deadline=None)
@given(text=TEXTS, labels=LABELS)
def test_reading_never_raises_and_gives_one_of_the_labels_or_a_reason(text: str, labels: list[str]) -> None:
    reading = read_label(text, labels)
    assert reading.raw == text
    assert (reading.label in labels) == (reading.reason is None)
    assert reading.label is None or reading.label.casefold().strip() != ""


@settings(deadline=None)
@given(other=st.sampled_from(LETTERS), text=st.sampled_from(LETTERS))
def test_the_bare_label_is_read_as_itself_whatever_the_others_are(other: str, text: str) -> None:
    assert label(text, (other, *LETTERS)) == text


@pytest.mark.parametrize(
    "unit", ["\n", " ", "*", "[", "(", "A", "A\n", "A or ", "Verdict: ", "Verdict\n", "answer", '"']
)
@pytest.mark.parametrize("start", ["", "Verdict:", "A"])
def test_a_model_stuck_on_one_word_is_read_in_no_time(start: str, unit: str) -> None:
    began = time.perf_counter()
    read_label(start + unit * 10_000 + "x", LETTERS)
    assert time.perf_counter() - began < 2
