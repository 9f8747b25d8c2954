"""Facts about grading answers and about the numbers that are made of the grades."""

import json
import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.clusters import slice_key
from gristmill.config.specs import MetricsSpec, encode
from gristmill.errors import UserError
from gristmill.files import write_jsonl
from gristmill.grading import contains, exact_match, grade, graders, normalize
from gristmill.intervals import RowScores
from gristmill.metrics import MAX_SLICES, RunTally

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
Line = dict[str, Any]


def answer(row_id: str, text: str | None, reference: Any, sample: int = 0, **more: Any) -> Line:
    """A line of generations.jsonl."""
    counts = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_cut_tokens": 0}
    finish = "skipped" if text is None else "stop"
    line = {"id": row_id, "sample": sample, "variant": "", "text": text, "finish_reason": finish, "row": {}}
    return {**line, **counts, "reference": reference, **more}


def tallied(lines: list[Line], **settings: Any) -> tuple[list[Line], Line]:
    """The grades and the metrics of a run."""
    spec = MetricsSpec(**{**NAMES, "metrics": ["exact_match", "contains"], "slices": [], **settings})
    tally = RunTally(spec)
    grades = list(tally.graded(lines))
    metrics = tally.metrics()
    json.dumps(metrics, allow_nan=False)
    return grades, metrics


NAMES = {"run": "direct", "dataset": "d", "model": "m", "prompt": "p"}


# Grades


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("Paris", "Paris"),
        ("  paris.\n", "Paris"),
        ("**Paris**!", "paris"),
        ('"Paris"', "Paris"),
        ("New   York", "new york"),
        ("it’s", "it's"),
        ("ＰＡＲＩＳ", "Paris"),  # noqa: RUF001
        ("Straße", "STRASSE"),
        ("A", "A"),
        ("true", True),
        ("False.", False),
        ("12", 12),
        ("12", 12.0),
        ("12.0", "12"),
        ("1,000", "1000"),
        ("1000", "1,000"),
        ("+5", 5),
        ("−5", "-5"),
        (".5", 0.5),
        ("(5)", 5),
        ("1000000000000000000000", 1e21),
        ("B", ["A", "B"]),
        ("12", ["twelve", 12]),
        ("x", [None, "x"]),
        ("?", "?"),
    ],
)
def test_an_answer_equal_to_the_reference_but_for_form_is_an_exact_match(text: str, reference: Any) -> None:
    assert exact_match(text, reference) is True
    assert contains(text, reference) is True


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("Paris, France", "Paris"),
        ("the Paris", "Paris"),
        ("A", "the A"),
        ("-5", 5),
        ("7", "007"),
        ("1", True),
        ("12,5", 125),
        ("1,00", 100),
        ("10²", 102),
        ("C", "C#"),
        ("50", "50%"),
        ("", "x"),
        ("!", "?"),
    ],
)
def test_an_answer_that_says_more_less_or_else_is_no_exact_match(text: str, reference: Any) -> None:
    assert exact_match(text, reference) is False


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("The capital is Paris.", "paris"),
        ("It is 12.", 12),
        ("It costs $1,000 today", 1000),
        ("about 12.0 m", "12"),
        ("from 5-12", 12),
        ("x = -5", -5),
        (r"\boxed{12}", 12),
        ("I use C++ daily", "C++"),
        ("say no!", "no"),
        ("New\nYork City", "new york"),
        ("首都是北京市。", "北京"),
        ("서울은 수도다", "서울"),
        ("neither, both are true", ["x", True]),
    ],
)
def test_contains_finds_the_reference_as_whole_words(text: str, reference: Any) -> None:
    assert contains(text, reference) is True


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("112", "12"),
        ("12.5", "12"),
        ("1,200", "200"),
        ("12,5", 5),
        ("v1.12.3", 12),
        ("10^12", 12),
        ("-12", 12),
        ("I know", "no"),
        ("cannot", "not"),
        ("I use C++ and C#", "C"),
        ("", "x"),
        ("...", "x"),
    ],
)
def test_contains_does_not_find_a_part_of_a_word_or_number(text: str, reference: Any) -> None:
    assert contains(text, reference) is False


@pytest.mark.parametrize("reference", [None, "", " \n", [], [None], ["", None]])
def test_without_a_reference_the_grade_is_null(reference: Any) -> None:
    assert grade(answer("r", "x", reference), graders(["exact_match", "contains"]))[0]["grades"] == {
        "exact_match": None,
        "contains": None,
    }


@pytest.mark.parametrize("reference", [{"a": 1}, [["nested"]]])
def test_an_object_as_reference_is_refused_with_the_row(reference: Any) -> None:
    with pytest.raises(UserError, match="row r: the reference is"):
        grade(answer("r", "x", reference), graders(["contains"]))


@pytest.mark.parametrize(("text", "reason"), [(None, "skipped"), ("", "empty"), (" \n\u3000", "empty")])
def test_a_missing_or_blank_answer_is_wrong_without_being_read(text: str | None, reason: str) -> None:
    line, _ = grade(answer("r", text, "?"), graders(["contains"]))
    graded = {"grades": {"contains": False}, "extracted": {}, "invalid": reason, "truncated": False}
    assert line == {"id": "r", "sample": 0, **graded}


@given(text=st.text(), reference=st.text(min_size=1))
def test_an_exact_match_is_always_contained(text: str, reference: str) -> None:
    if exact_match(text, reference):
        assert contains(text, reference)


@given(text=st.text())
def test_normalizing_leaves_something_of_every_text_that_is_not_blank(text: str) -> None:
    assert bool(normalize(text)) == bool(text.strip())


# Metrics


def test_a_runs_metrics_have_every_key_that_is_documented() -> None:
    lines = [
        answer("1", "Paris", "Paris", finish_reason="length"),
        answer("2", "It is Rome", "Rome", prompt_cut_tokens=3),
        answer("3", "", "Oslo"),
        answer("4", None, "Bern"),
        answer("5", "anything", None),
        answer("6", None, None),
    ]
    grades, metrics = tallied(lines)
    assert [line["grades"]["contains"] for line in grades] == [True, True, False, False, None, None]
    assert [line["truncated"] for line in grades] == [True, False, False, False, False, False]
    scores = metrics.pop("metrics")
    ci95 = metrics.pop("ci95")
    assert metrics == {
        **NAMES,
        "n": 4,
        "rows": 6,
        "samples": 1,
        "no_reference": 2,
        "metric": "exact_match",
        "accuracy": 0.25,
        "invalid": {
            "skipped": 2,
            "empty": 1,
            "unclosed_thinking": 0,
            "out_of_memory": 0,
            "non_finite_logits": 0,
            "timeout": 0,
            "server_error": 0,
            "refused_by_server": 0,
        },
        "failed_rows": [],
        "cluster": None,
        "truncated": 1,
        "prompts_cut": 1,
        "prompt_tokens": 60,
        "completion_tokens": 12,
        "slices": {},
    }
    assert ci95 == pytest.approx([0.04559, 0.69936], abs=1e-5)  # Wilson, 1 of 4
    assert (scores["contains"]["value"], scores["contains"]["correct"], scores["contains"]["interval"]) == (
        0.5,
        2,
        "wilson",
    )


def test_a_run_without_metrics_or_references_has_no_accuracy() -> None:
    _, metrics = tallied([answer("1", "x", "x")], metrics=[])
    assert (metrics["metric"], metrics["accuracy"], metrics["ci95"], metrics["metrics"]) == (None, None, None, {})
    _, metrics = tallied([answer("1", "x", None)])
    assert (metrics["n"], metrics["accuracy"], metrics["ci95"]) == (0, None, None)
    assert metrics["metrics"]["contains"] == {"value": None, "n": 0, "correct": 0, "ci95": None, "interval": None}


def test_an_empty_run_has_metrics() -> None:
    _, metrics = tallied([], slices=["topic"])
    assert (metrics["rows"], metrics["samples"], metrics["accuracy"], metrics["slices"]) == (0, 0, None, {"topic": {}})


def test_several_samples_are_clustered_by_row() -> None:
    texts = [["x", "x"], ["x", "no"], ["no", "no"]]
    lines = [answer(str(row), text, "x", sample) for row, pair in enumerate(texts) for sample, text in enumerate(pair)]
    _, metrics = tallied(lines)
    assert (metrics["n"], metrics["rows"], metrics["samples"], metrics["accuracy"]) == (6, 3, 2, 0.5)
    # Row means 1, 0.5, 0: mean 0.5, standard error 0.5 / sqrt(3), t(2) = 4.303; wider than 0…1, so clipped.
    assert metrics["ci95"] == [0.0, 1.0]
    assert metrics["metrics"]["exact_match"]["interval"] == "cluster_t"


def test_the_clustered_interval_is_the_t_interval_of_the_row_means() -> None:
    from scipy import stats

    scores, means = RowScores(), [1.0, 0.75, 0.5, 0.75, 0.25, 0.5, 0.75, 1.0, 0.5, 0.5]
    for row, mean in enumerate(means):
        for sample in range(4):
            scores.add(str(row), float(sample < 4 * mean))
    expected = stats.t.interval(0.95, len(means) - 1, loc=scores.value, scale=stats.sem(means))
    interval = scores.interval()
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(expected)


def test_rows_that_all_score_alike_still_have_a_wide_interval() -> None:
    scores = RowScores()
    for row in range(10):
        for _ in range(3):
            scores.add(str(row), 1.0)
    interval = scores.interval()
    assert interval is not None
    assert interval.low == pytest.approx(0.72246, abs=1e-5)  # Wilson, 10 of 10 rows
    assert (interval.high, interval.method) == (1.0, "wilson")


SCORES = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=10)


def scored(rows: Iterable[tuple[str, list[float]]]) -> RowScores:
    scores = RowScores()
    for row, values in rows:
        for value in values:
            scores.add(row, value)
    return scores


@settings(deadline=None)
@given(scores=SCORES, data=st.data())
def test_an_interval_lies_in_0_to_1_contains_the_value_and_ignores_the_order_of_rows_and_samples(
    scores: list[list[float]], data: st.DataObject
) -> None:
    rows = [(str(number), values) for number, values in enumerate(scores)]
    shuffled = [(row, data.draw(st.permutations(values))) for row, values in data.draw(st.permutations(rows))]
    tally = scored(rows)
    interval = tally.interval()
    assert interval is not None
    assert tally.value is not None
    assert all(one <= other for one, other in pairwise([0.0, interval.low, tally.value, interval.high, 1.0]))
    assert interval.low < interval.high
    assert interval == scored(shuffled).interval()


@settings(deadline=None)
@given(scores=SCORES.filter(lambda rows: len(rows) > 1 and len({sum(row) / len(row) for row in rows}) > 1))
def test_the_sums_give_the_spread_of_the_rows_around_the_mean(scores: list[list[float]]) -> None:
    from scipy import special

    n = sum(map(len, scores))
    value = sum(map(sum, scores)) / n
    spread = math.fsum((sum(row) - value * len(row)) ** 2 for row in scores)
    rows = len(scores)
    half = special.stdtrit(rows - 1, 0.975) * math.sqrt(rows / (rows - 1) * spread) / n
    interval = scored((str(number), row) for number, row in enumerate(scores)).interval()
    assert interval is not None
    if interval.method == "cluster_t":
        assert interval[:2] == pytest.approx((max(value - half, 0.0), min(value + half, 1.0)))


def test_a_tally_of_scores_holds_sums_and_no_rows() -> None:
    scores = RowScores()
    tracemalloc.start()
    for number in range(50_000):
        scores.add(f"r{number}", float(number % 2))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10_000
    assert scores.value == 0.5


def test_slices_are_scored_in_the_order_of_first_appearance() -> None:
    topics: list[Any] = ["b", "a", "b", None, "null", 3, True, '"q"', ""]
    lines = [answer(str(index), "x", "x" if index else "y", row={"t": topic}) for index, topic in enumerate(topics)]
    lines.append(answer("last", "x", "x"))
    _, metrics = tallied(lines, slices=["t"])
    slices = metrics["slices"]["t"]
    assert list(slices) == ["b", "a", "null", '"null"', "3", "true", '"\\"q\\""', ""]
    assert (slices["b"]["n"], slices["b"]["exact_match"]["value"], slices["b"]["contains"]["correct"]) == (2, 0.5, 1)
    assert slices["null"]["n"] == 2  # null, and the row without the column


def test_the_reference_can_be_a_slice() -> None:
    _, metrics = tallied([answer("1", "x", "x"), answer("2", "x", "y")], slices=["reference"])
    assert {key: value["exact_match"]["value"] for key, value in metrics["slices"]["reference"].items()} == {
        "x": 1.0,
        "y": 0.0,
    }


@given(values=st.lists(st.none() | st.text() | st.sampled_from(["null", '"null"', '"'])))
def test_no_text_shares_a_slice_with_another_text_or_the_missing_value(values: list[str | None]) -> None:
    assert len({slice_key(value) for value in values}) == len(set(values))


def test_a_slice_column_that_no_row_has_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"runs\.direct\.slices: no row has a column 'topc'; did you mean topic\?"):
        tallied([answer("1", "x", "x", row={"topic": "a"})], slices=["topc"])


def test_a_slice_column_with_a_value_for_every_row_is_refused_at_the_limit() -> None:
    lines = [answer(str(number), "x", "x", row={"n": number}) for number in range(MAX_SLICES + 1)]
    with pytest.raises(UserError, match=r"runs\.direct\.slices: 'n' has more than 10,000 values; name a column"):
        tallied(lines, slices=["n"])


def test_metrics_take_a_run_line_by_line() -> None:
    taken: list[str] = []

    def lines() -> Iterator[Line]:
        for number in range(3):
            taken.append(f"r{number}")
            yield answer(taken[-1], "x", "x")

    tally = RunTally(MetricsSpec(**NAMES, metrics=["contains"], slices=["reference"]))
    assert next(tally.graded(lines()))["id"] == "r0"
    assert taken == ["r0"]


ANSWERS = st.lists(
    st.tuples(st.sampled_from(["x", "no", "", None]), st.sampled_from(["x", None]), st.sampled_from(["s", "t"])),
    max_size=12,
)


@settings(deadline=None)
@given(rows=ANSWERS, data=st.data())
def test_the_order_of_the_rows_changes_no_number(rows: list[Any], data: st.DataObject) -> None:
    lines = [answer(str(index), text, ref, row={"t": topic}) for index, (text, ref, topic) in enumerate(rows)]
    _, one = tallied(lines, slices=["t"] if rows else [])
    _, other = tallied(data.draw(st.permutations(lines)), slices=["t"] if rows else [])
    assert one == other


def test_the_script_writes_grades_and_metrics(tmp_path: Path) -> None:
    generations, grades, metrics = tmp_path / "generations.jsonl", tmp_path / "grades.jsonl", tmp_path / "metrics.json"
    write_jsonl(generations, [answer("1", "Paris.\u2028", "Paris"), answer("2", "?", "Rome")])
    spec = encode(MetricsSpec(**NAMES, metrics=["exact_match"], slices=[]))
    command = [sys.executable, str(SCRIPTS / "metrics.py"), "--spec", spec, "--generations", str(generations)]
    command += ["--grades", str(grades), "--metrics", str(metrics)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    made = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (made.returncode, made.stdout, made.stderr) == (0, "direct: exact_match 0.5 over 2 answers\n", "")
    assert [json.loads(line)["grades"] for line in grades.read_bytes().split(b"\n") if line] == [
        {"exact_match": True},
        {"exact_match": False},
    ]
    assert json.loads(metrics.read_text())["accuracy"] == 0.5


def test_failed_rows_count_as_wrong_and_are_named_with_their_reasons() -> None:
    lines = [answer("r0", "yes", "yes"), answer("r1", None, "yes", finish_reason="timeout")]
    grades, found = tallied(lines)
    assert [line["invalid"] for line in grades] == [None, "timeout"]
    assert (found["accuracy"], found["invalid"]["timeout"]) == (0.5, 1)
    assert found["failed_rows"] == [{"id": "r1", "sample": 0, "reason": "timeout"}]


def test_n_is_of_the_headline_also_beside_a_function_that_needs_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_metric_n.py").write_text("def long(text, row):\n    return len(text) > 3\n")
    monkeypatch.chdir(tmp_path)
    lines = [answer("a", "yes", "yes"), answer("b", "nope", None), answer("c", "no", "yes")]
    metrics = tallied(lines, metrics=["exact_match", {"python": "own_metric_n:long"}])[1]
    assert (metrics["n"], metrics["no_reference"], metrics["accuracy"]) == (2, 1, 0.5)
    assert metrics["metrics"]["python: own_metric_n:long"]["n"] == 3
