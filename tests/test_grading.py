"""Facts about how each metric reads an answer, and about the runs' own metrics."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_metrics import answer, tallied

from gristmill.config.schema import DatasetConfig, PromptConfig, RunConfig, SamplingConfig, metric_name
from gristmill.config.specs import MetricsSpec, RequestsSpec, encode
from gristmill.errors import UserError
from gristmill.files import read_jsonl, write_jsonl
from gristmill.grading import Grader, exact, grade, graders
from gristmill.grading.choice import LETTERS, read_choice
from gristmill.grading.custom import compiled, last_match
from gristmill.grading.labels import LabelReader
from gristmill.grading.number import read_number
from gristmill.rendering import requests

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
HATE = {"hateful": [], "non-hateful": ["not hateful"]}


def graded(text: str, reference: Any, metric: Any, **labels: Sequence[str]) -> tuple[Any, Any]:
    """The grade and what was read."""
    metrics = graders([metric], labels)
    line, _ = grade(answer("r", text, reference), metrics)
    name = metric_name(metric)
    return line["grades"][name], line["extracted"].get(name)


def run(**settings: Any) -> RunConfig:
    return RunConfig.model_validate({"dataset": "d", "model": "m", "prompt": "p", **settings})


# Exact


@pytest.mark.parametrize(("text", "same"), [("Paris", True), (" Paris\n", True), ("paris", False), ("Paris.", False)])
def test_exact_takes_the_text_as_it_stands(text: str, same: bool) -> None:
    assert exact(text, ["Rome", "Paris"]) is same


# Numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 3 = 18\n#### 18", "18"),
        ("#### 5\nor rather\n#### -1,234.50", "-1234.5"),
        ("#### 1. Add\nThe answer is 5", "5"),
        ("16 - 3 = 13\nA: 13", "13"),
        ("**Answer:** $1,000", "1000"),
        ("The answer is **42**. I counted 3 times.", "42"),
        ("The answer is 4. No, the answer is: 5", "5"),
        (r"so \boxed{7}, which took 2 steps", "7"),
        (r"The answer is $\boxed{-7}$", "-7"),
        ("It costs -$5.00", "-5"),
        ("about 50%", "50"),
        ("3 apples and 7 pears", "7"),
        ("from 5-12", "12"),
        ("−0.0", "0"),
        (".5", "0.5"),
        ("007", "7"),
        ("1" * 40, "1" * 40),
    ],
)
def test_the_number_is_the_last_of_the_most_explicit_kind(text: str, number: str) -> None:
    assert read_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "none", "A: x", "v1.2.3", "3/4", "2 of 7\nA: 1/2", "A: 1,23", "10²", "1,23", "abc4", "the 5th", "####"]
)
def test_no_number_is_read_from_a_word_a_fraction_or_a_version(text: str) -> None:
    assert read_number(text) is None


def test_the_reference_of_a_number_may_be_a_whole_solution() -> None:
    assert graded("It is 1000.", "500 * 2 = <<500*2=1000>>1000\n#### 1,000", "number") == (True, "1000")
    assert graded("It is many.", "#### 5", "number") == (False, None)
    with pytest.raises(UserError, match="row r: the reference 'many' holds no number; correct it"):
        graded("5", "many", "number")


# Choices


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("[[A]] … no, [[B]]", "B"),
        (r"\boxed{\text{C}}", "C"),
        (r"Answer: $\boxed{D}$", "D"),
        ("Answer: A\n…\nAnswer: **B**", "B"),
        ("The correct answer is (C).", "C"),
        ("the answer is D because", "D"),
        ("Answer: A\nB) is wrong", "A"),
        ("It must be (J), since …", "J"),
        ("I think.\nB", "B"),
        ("**B.**", "B"),
        ("B) Paris", "B"),
    ],
)
def test_the_choice_is_the_letter_that_the_answer_settles_on(text: str, letter: str) -> None:
    assert read_choice(text) == letter


@pytest.mark.parametrize(
    "text",
    [
        *("", "K", "b", "A good guess", "I think so", "The answer is A good guess", "A+", "B's"),
        *("The answer is A or B", "Answer: A, B", "Answer: (B) or (C)", "The answer is not B", "not (B)"),
        *("(A) is wrong. (B) is right", "A) Rome\nB) Paris", "A. x B. y"),
    ],
)
def test_doubt_about_a_choice_reads_as_none(text: str) -> None:
    assert read_choice(text) is None


@pytest.mark.parametrize("reference", ["B", "b", "(B)", 1, "1", ["A", "B"]])
def test_the_reference_of_a_choice_is_a_letter_or_an_index(reference: Any) -> None:
    assert graded("Answer: B", reference, "choice") == (True, "B")


@pytest.mark.parametrize("reference", ["K", 10, "Paris", True, -1])
def test_any_other_reference_of_a_choice_is_refused(reference: Any) -> None:
    with pytest.raises(UserError, match=r"row r: the reference .* is no choice; use a letter"):
        graded("B", reference, "choice")


@given(text=st.text(alphabet="ABKabk()[]{}.:,* \nanswerisort\\boxed", max_size=40))
def test_a_choice_is_one_of_the_letters_or_none(text: str) -> None:
    assert read_choice(text) in {None, *LETTERS}


# Labels


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Hateful.", "hateful"),
        ("At first hateful, in the end non-hateful", "non-hateful"),
        ("non hateful", "non-hateful"),
        ("NON\u2011HATEFUL", "non-hateful"),
        ("It is not hateful", "non-hateful"),
        ("No, **hateful**", "hateful"),
        ("_hateful_", "hateful"),
        ('{"label":"hateful"}', "hateful"),
    ],
)
def test_a_label_is_the_last_that_stands_as_a_word(text: str, label: str) -> None:
    assert LabelReader(HATE).read(text) == label


@pytest.mark.parametrize(
    "text", ["", "hatefully", "un-hateful", "hateful_1", "hateful/non-hateful", "It isn't hateful", "not non-hateful"]
)
def test_a_part_of_a_word_or_a_denied_label_is_no_label(text: str) -> None:
    assert LabelReader(HATE).read(text) is None


def test_labels_may_be_numbers() -> None:
    reader = LabelReader({"0": [], "1": [], "-1": []})
    texts = ["0", "Label: 1.", "-1", "1.5", "10", "2"]
    assert [reader.read(text) for text in texts] == ["0", "1", "-1", None, None, None]


def test_a_reference_is_mapped_through_the_aliases_and_one_that_is_no_label_is_refused() -> None:
    assert graded("non-hateful", "Not hateful", "label", **HATE) == (True, "non-hateful")
    assert graded("neutral", "hateful", "label", **HATE) == (False, None)
    with pytest.raises(UserError, match="row r: the reference 'spam' is none of the labels hateful, non-hateful; add"):
        graded("hateful", "spam", "label", **HATE)
    with pytest.raises(UserError, match="row r: the reference is hateful, non-hateful, and a row has one label"):
        graded("hateful", ["hateful", "non-hateful"], "label", **HATE)


@given(
    labels=st.lists(st.text(alphabet="ab-_ 1.'", min_size=1).filter(str.strip), min_size=2, max_size=4, unique=True),
    text=st.text(alphabet="ab-_ 1.'not\n", max_size=30),
)
def test_no_label_is_read_that_was_not_offered(labels: list[str], text: str) -> None:
    reader = LabelReader({label: [] for label in labels})
    assert reader.read(text) in {None, *labels}


def test_the_most_likely_label_is_read_from_its_likelihood() -> None:
    lines = [
        answer("a", "hateful", "hateful", label_logprobs=[-0.1, -3.0]),
        answer("b", "non-hateful", "hateful", label_logprobs=[-2.0, -0.5]),
        answer("c", None, "hateful", label_logprobs=None),
    ]
    grades, metrics = tallied(lines, metrics=["label"], labels=HATE, readout="likelihood")
    assert [line["extracted"]["label"] for line in grades] == ["hateful", "non-hateful", None]
    assert metrics["classification"]["confusion"] == [[1, 1, 1], [0, 0, 0]]
    assert metrics["label_mass"] == pytest.approx((0.904837 + 0.049787 + 0.135335 + 0.606531) / 2, abs=1e-6)


@pytest.mark.parametrize("scores", [None, [-1.0]])
def test_an_answer_without_the_labels_likelihoods_is_refused(scores: list[float] | None) -> None:
    line = answer("a", "hateful", "hateful", label_logprobs=scores)
    with pytest.raises(UserError, match=r"row a: the answer has .*label_logprobs"):
        tallied([line], metrics=["label"], labels=HATE, readout="likelihood")


# Patterns


def test_a_pattern_gives_its_last_match_and_its_first_group() -> None:
    assert graded("v=1 v=2", "2", {"regex": r"v=(\d)"}) == (True, "2")
    assert graded("Color: RED!", "red", {"regex": r"(?<=: )\S+"}) == (True, "RED!")
    assert graded("nothing", "red", {"regex": r"v=(\d)"}) == (False, None)


def test_a_pattern_that_backtracks_without_end_ends_the_job_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.grading.custom.MAX_SEARCH_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"the pattern '\(a\|aa\)\+\$' searched for over 0.05 s"):
        last_match(compiled("(a|aa)+$"), "a" * 200 + "b")


# Functions


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(
        "def long(text, row):\n    return len(text) / row['reference'] if 'x' not in text else None\n"
        "def any_text(text, row):\n    return 'yes'\n"
        "def fails(text, row):\n    return row['nowhere']\n"
    )
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


def test_a_users_function_grades_with_parts_of_one(functions: Path) -> None:
    lines = [answer(str(n), text, 4) for n, text in enumerate(["abcd", "ab", "x", ""])]
    grades, metrics = tallied(lines, metrics=[{"python": "mine:long"}])
    assert [line["grades"]["python: mine:long"] for line in grades] == [True, 0.5, False, False]
    scores = metrics["metrics"]["python: mine:long"]
    assert (scores["value"], scores["n"], scores["correct"], scores["unread"]) == (0.375, 4, None, 1)
    assert str(functions) not in sys.path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("mine:nothing", "cannot be imported .AttributeError: "),
        ("broken:f", "cannot be imported .ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("mine:any_text", "row r: mine:any_text gave 'yes'; return true, false"),
        ("mine:fails", "row r: mine:fails raised KeyError: 'nowhere'; correct the function"),
    ],
)
@pytest.mark.usefixtures("functions")
def test_a_function_that_fails_is_one_line(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tallied([answer("r", "abc", 4)], metrics=[{"python": path}])
    assert "\n" not in str(caught.value)


def test_the_program_imports_a_function_from_the_working_directory(functions: Path) -> None:
    write_jsonl(functions / "generations.jsonl", [answer("r", "abcd", 4)])
    names = {"run": "r", "dataset": "d", "model": "m", "prompt": "p", "slices": []}
    spec = encode(MetricsSpec.model_validate({**names, "metrics": [{"python": "mine:long"}]}))
    program = [sys.executable, str(SCRIPTS / "metrics.py"), "--spec", spec, "--generations", "generations.jsonl"]
    outputs = ["--grades", "grades.jsonl", "--metrics", "metrics.json"]
    subprocess.run([*program, *outputs], cwd=functions, check=True)
    assert [line["grades"] for line in read_jsonl(functions / "grades.jsonl")] == [{"python: mine:long": True}]


# What may stand in a config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": [{"regex": "("}]}, "is no regular expression"),
        ({"metrics": [{"regex": "a", "python": "b:c"}]}, "has one key, and this has 2"),
        ({"metrics": [{"python": "mine.long"}]}, "'mine.long' names no function; write package.module:function"),
        ({"metrics": ["label"]}, "there are no labels; list them"),
        ({"metrics": ["exact"], "labels": HATE}, "labels are read by the metric label; add it"),
        ({"readout": "likelihood"}, "readout is likelihood, but there are no labels"),
        ({"metrics": ["label"], "labels": ["a"]}, "labels has only 'a'; name two or more"),
        ({"metrics": ["label"], "labels": {"a": ["x y"], "b": ["X-Y"]}}, "'X-Y' stands for 'a' and for 'b'"),
        ({"metrics": ["label"], "labels": ["a", " "]}, "' ' of ' ' is blank; write a word"),
        (
            {"labels": HATE, "readout": "likelihood", "sampling": {"samples": 2, "temperature": 1}},
            "samples is 2, but a likelihood is the same each time",
        ),
    ],
)
def test_a_run_that_cannot_be_read_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run(**settings)


def test_labels_may_be_a_list_or_have_aliases() -> None:
    assert run(metrics=["label"], labels=["a", "b"]).label_names() == {"a": [], "b": []}
    assert run(metrics=["label"], labels=HATE).label_names() == HATE


def test_every_metric_has_a_name_of_its_own() -> None:
    own: list[Any] = [{"regex": "a"}, {"regex": "b"}]
    metrics: dict[str, Grader] = graders(["exact", *own])
    assert list(metrics) == ["exact", "regex: a", "regex: b"]


@pytest.mark.parametrize("labels", [[], ["b", "a"]])
def test_a_request_names_the_labels_whose_likelihoods_are_asked_for_and_is_as_before_without(
    tmp_path: Path, labels: list[str]
) -> None:
    (tmp_path / "p.jinja").write_text("{{ q }}")
    write_jsonl(tmp_path / "d.jsonl", [{"id": "1", "q": "x", "reference": "a"}])
    prompt = PromptConfig(file=str(tmp_path / "p.jinja"))
    dataset = DatasetConfig.model_validate({"path": str(tmp_path / "d.jsonl")})
    spec = RequestsSpec(dataset=dataset, prompt=prompt, sampling=SamplingConfig.model_validate({}), labels=labels)
    (line,) = requests(spec)
    assert list(line) == [
        *("id", "sample", "variant", "messages", "sampling", *(["labels"] if labels else []), "reference", "row")
    ]
    assert line.get("labels", []) == labels
