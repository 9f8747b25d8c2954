"""Facts about rows of several turns: each turn sees the answers before it, none is asked twice or left out."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from conftest import ROOT, Project, echo_config, wait_until
from conversations import Way, spoken, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import payload

from gristmill.config.schema import ModelConfig
from gristmill.config.specs import JudgeSpec, VerdictSpec
from gristmill.errors import UserError
from gristmill.files import checked, read_jsonl, with_checksum, write_jsonl
from gristmill.followups import Earlier, Followups, filled, gaps, unfilled
from gristmill.judging.requests import judge_requests
from gristmill.judging.verdicts import judged
from gristmill.merging import UnusableParts
from gristmill.types import Completion, Failure, JsonDict, Outcome, Request

A = {"id": "a", "turns": ["one", "two", "three"]}
B = {"id": "b", "turns": ["uno", "due"]}


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    return Way(tmp_path, monkeypatch)


# ---- asking


def test_each_turn_is_asked_after_the_answers_before_it(way: Way) -> None:
    way.rows(A, B)
    engine = way.work(*way.shards(1))
    assert [[str(request.rid) for request in wave] for wave in engine.waves] == [
        ["a#0/turn_1", "b#0/turn_1"],
        ["a#0/turn_2", "b#0/turn_2"],
        ["a#0/turn_3"],
    ]
    assert texts(way.merge()) == {
        "a#0/turn_1": "<one>",
        "a#0/turn_2": "<one|<one>|two>",
        "a#0/turn_3": "<one|<one>|two|<one|<one>|two>|three>",
        "b#0/turn_1": "<uno>",
        "b#0/turn_2": "<uno|<uno>|due>",
    }


def test_the_generations_show_the_prompt_that_was_answered(way: Way) -> None:
    way.system, way.template = "You are at turn {{ turn_number }}.", "{{ turn_number }}: {{ turn }}"
    way.rows(B)
    way.run()
    assert [line["messages"] for line in way.merge()][1] == [
        {"role": "system", "content": "You are at turn 1."},
        {"role": "user", "content": "1: uno"},
        {"role": "assistant", "content": "<You are at turn 1.|1: uno>"},
        {"role": "user", "content": "2: due"},
    ]


def test_each_sample_is_a_conversation_of_its_own(way: Way) -> None:
    way.sampling = {"max_new_tokens": 8, "temperature": 1.0, "samples": 2}
    way.rows(B)
    way.run(says=lambda request: f"{request.sample}{spoken(request)}")
    assert texts(way.merge()) == {
        "b#0/turn_1": "0<uno>",
        "b#0/turn_2": "0<uno|0<uno>|due>",
        "b#1/turn_1": "1<uno>",
        "b#1/turn_2": "1<uno|1<uno>|due>",
    }


@pytest.mark.parametrize(
    ("reference", "each"),
    [(["x", "y"], ["x", "y"]), (["x", "y", "z"], [["x", "y", "z"]] * 2), ("x", ["x", "x"]), (None, [None, None])],
)
def test_a_reference_for_each_turn_goes_to_its_turn_and_any_other_to_all(way: Way, reference: Any, each: Any) -> None:
    way.rows(B | {"reference": reference})
    assert [line["reference"] for line in way.requests()] == each


@pytest.mark.parametrize("turns", [[], "one", None, ["one", 2], ["one", " "], {"1": "one"}])
def test_turns_that_are_no_list_of_texts_are_one_line_with_the_rows_id(way: Way, turns: Any) -> None:
    with pytest.raises(UserError, match=r"row a: the turns in column 'turns' are .*; give a list of texts") as caught:
        way.rows(B, A | {"turns": turns})
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 3))
def test_any_number_of_shards_gives_the_same_conversations(turns: list[int], shards: int, samples: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        way = Way(Path(folder), patch, sampling={"max_new_tokens": 8, "temperature": 1.0, "samples": samples})
        way.rows(*({"id": f"r{row}", "turns": [f"{row}.{n}" for n in range(count)]} for row, count in enumerate(turns)))
        shards = min(shards, len(turns) * samples)
        asked = way.run(shards)
        found = way.merge(shards)
        assert sorted(asked) == sorted(texts(found))
        assert [(line["id"], line["sample"], line["variant"]) for line in found] == [
            (line["id"], line["sample"], line["variant"]) for line in way.requests()
        ]
        for before, line in pairwise(found):
            assert line["variant"] == "turn_1" or before["text"] in [m["content"] for m in line["messages"]]


# ---- nothing twice


def test_a_second_run_asks_nothing_and_loads_no_model(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    way.rows(A, B)
    way.run()
    before = way.merge()
    assert way.run() == []
    assert way.merge() == before


def test_another_number_of_shards_asks_nothing_again(way: Way) -> None:
    way.rows(A, B, {"id": "c", "turns": ["solo"]})
    way.run(1)
    before = way.merge(1)
    assert way.run(3) == []
    assert way.merge(3) == before


def test_a_job_that_dies_in_a_conversation_goes_on_where_it_was(way: Way) -> None:
    def dying(request: Request) -> str:
        if request.rid.variant == "turn_2" and request.id == "b":
            raise RuntimeError("CUDA error")
        return spoken(request)

    way.rows(A, B)
    with pytest.raises(RuntimeError, match="CUDA error"):
        way.run(says=dying)
    assert way.run() == ["a#0/turn_3", "b#0/turn_2"]
    assert texts(way.merge())["b#0/turn_2"] == "<uno|<uno>|due>"


def test_an_edited_first_turn_asks_the_whole_conversation_again_and_no_other(way: Way) -> None:
    way.rows(A, B)
    way.run()
    way.rows(A, B | {"turns": ["UNO", "due"]})
    assert way.run() == ["b#0/turn_1", "b#0/turn_2"]
    assert texts(way.merge())["b#0/turn_2"] == "<UNO|<UNO>|due>"


def test_an_edited_last_turn_and_a_new_turn_ask_only_themselves(way: Way) -> None:
    way.rows(A, B)
    way.run()
    way.rows(A | {"turns": ["one", "two", "3"]}, B | {"turns": ["uno", "due", "tre"]})
    assert way.run() == ["a#0/turn_3", "b#0/turn_3"]


def test_a_first_answer_that_is_another_now_asks_the_later_turns_again(way: Way) -> None:
    way.rows(B)
    way.run(says=lambda request: "old")
    for path in (way.folder / "journal").glob("*.jsonl"):  # the first answer's record is damaged
        path.write_bytes(
            path.read_bytes().replace(b'"variant":"turn_1","text":"old"', b'"variant":"turn_1","text":"odd"')
        )
    assert way.run(says=lambda request: "new") == ["b#0/turn_1", "b#0/turn_2"]
    assert [m["content"] for m in way.merge()[1]["messages"]] == ["uno", "new", "due"]


def test_a_killed_worker_keeps_the_turns_that_are_done(project: Project) -> None:
    """By the real program and a real SIGKILL, through the workflow."""
    project.write_rows({"id": f"r{n}", "turns": [f"say {n}", f"and {n}"]} for n in range(12))
    project.write_prompt("turn.jinja", "{{ turn }}")
    project.write_config(
        echo_config(
            prompts={"ask": {"file": "turn.jinja", "turns": "turns"}},
            runs={"plain": {"dataset": "rows", "model": "echo", "prompt": "ask"}},
        )
    )
    slow = project.environment(GRISTMILL_ECHO_SECONDS="0.15")
    words = project.command("results/runs/plain/generations.jsonl", gpu=2)
    with subprocess.Popen(words, cwd="/", env=slow, start_new_session=True, stderr=subprocess.DEVNULL) as running:
        wait_until(lambda: len(project.asked("runs/plain")) >= 15)  # in the second turns
        os.killpg(running.pid, signal.SIGKILL)
    done = len(project.asked("runs/plain"))
    assert done < 24
    project.done("results/runs/plain/generations.jsonl", gpu=3)
    asked = project.asked("runs/plain")
    assert sorted(asked) == sorted([f"r{n}" for n in range(12)] * 2)  # each turn once
    lines = project.lines("runs/plain/generations.jsonl")
    assert [m["content"] for m in lines[7]["messages"]] == ["say 3", "say 3", "and 3"]


# ---- turns that cannot be asked


def skipping(request: Request) -> Outcome | str:
    if request.rid == ("a", 0, "turn_1"):
        return Completion(*request.rid, None, "skipped", 9, 0, 0.0)
    return spoken(request)


def failing(request: Request) -> Outcome | str:
    return Failure(*request.rid, "timeout", "too slow") if request.rid == ("a", 0, "turn_2") else spoken(request)


def test_a_turn_after_a_skipped_one_is_not_asked_and_says_why(way: Way) -> None:
    way.rows(A, B)
    assert way.run(says=skipping) == ["a#0/turn_1", "b#0/turn_1", "b#0/turn_2"]
    found = way.merge()
    assert [(line["text"], line["finish_reason"]) for line in found[:3]] == [
        (None, "skipped"),
        (None, "no_earlier_answer"),
        (None, "no_earlier_answer"),
    ]
    assert [m["content"] for m in found[2]["messages"]] == ["one", None, "two", None, "three"]
    assert way.run() == []  # a skipped prompt is an answer, and stays one


def test_a_turn_after_a_failed_one_is_asked_when_that_one_is(way: Way) -> None:
    way.rows(A, B)
    assert "a#0/turn_3" not in way.run(says=failing, max_failed_ratio=0.2)
    assert [line["finish_reason"] for line in way.merge()] == ["stop", "timeout", "no_earlier_answer", "stop", "stop"]
    assert way.run() == ["a#0/turn_2", "a#0/turn_3"]
    assert [line["finish_reason"] for line in way.merge()] == ["stop"] * 5


def test_a_failed_turn_stops_the_job_when_none_may_fail(way: Way) -> None:
    way.rows(A, B)
    with pytest.raises(UserError, match=r"1 rows failed: a#0/turn_2 \(timeout\)"):
        way.run(says=failing)


def test_a_job_in_which_every_first_turn_fails_is_no_result(way: Way) -> None:
    way.rows(A, B)
    with pytest.raises(UserError, match="2 rows failed"):
        way.run(says=lambda request: Failure(*request.rid, "timeout", ""), max_failed_ratio=1.0)


def limited(policy: str) -> ModelConfig:
    """The echo engine counts words: a first turn of 3 and its answer of 3 leave no room for a second of 3."""
    return ModelConfig(engine="echo", context_tokens=12, on_overflow=policy)


LONG = {"id": "long", "turns": ["w w w", "v v v"]}
SHORT = {"id": "short", "turns": ["w", "v"]}


def test_a_later_turn_that_does_not_fit_is_said_when_the_answers_before_it_are_there(way: Way) -> None:
    way.model, way.weights = limited("error"), way.weights | {"context_tokens": 99}
    way.sampling = {"max_new_tokens": 4}
    way.rows(LONG, SHORT)
    with pytest.raises(UserError, match=r"1 prompt does not fit: the longest has 9 tokens.*long#0/turn_2.*on_overflow"):
        way.run(says=lambda request: request.messages[-1]["content"])


def test_only_later_turns_that_do_not_fit_are_asked_again_when_the_policy_changes(way: Way) -> None:
    way.sampling = {"max_new_tokens": 4}
    way.model = limited("skip")
    way.rows(LONG, SHORT)
    way.run(says=lambda request: request.messages[-1]["content"])
    way.merge()
    way.model = limited("truncate_left")
    assert way.run(says=lambda request: "cut") == ["long#0/turn_2"]
    assert texts(way.merge())["long#0/turn_2"] == "cut"


def test_a_later_turn_too_long_by_itself_is_refused_before_anything_is_asked(way: Way) -> None:
    way.model, way.sampling = limited("error"), {"max_new_tokens": 4}
    way.rows(SHORT, {"id": "huge", "turns": ["w", "v " * 12]})
    with pytest.raises(UserError, match=r"1 prompt does not fit.*huge#0/turn_2"):
        way.shards(1)


# ---- splitting and merging


def test_lengths_are_balanced_by_all_turns_and_the_answers_before_them(way: Way) -> None:
    talks = [{"id": f"talk{n}", "turns": ["w"] * 4} for n in range(2)]
    singles = [{"id": f"single{n}", "turns": ["w " * 9]} for n in range(4)]
    way.rows(talks[0], talks[1], *singles)
    ids = [[line["id"] for line in read_jsonl(shard.requests)] for shard in way.shards(2)]
    assert [sum(name.startswith("talk") for name in names) for names in ids] == [4, 4]
    assert [len(set(names)) for names in ids] == [3, 3]


def test_merge_refuses_a_second_turn_that_belongs_to_another_first_turn(way: Way) -> None:
    way.rows(A, B)
    way.run()
    edit_part(way, 3, {"text": "another answer"})
    with pytest.raises(UnusableParts, match=r"b#0/turn_2 in .* answers a turn after other answers than are there"):
        way.merge()


def test_merge_refuses_an_answer_where_the_turn_before_has_none_and_none_where_it_has_one(way: Way) -> None:
    way.rows(B)
    way.run()
    edit_part(way, 1, {"text": None, "finish_reason": "no_earlier_answer"})
    with pytest.raises(UnusableParts, match=r"b#0/turn_2 in .* answers a turn after other answers"):
        way.merge()


def edit_part(way: Way, number: int, columns: JsonDict) -> None:
    """Change a line of the only part, checksum and all."""
    path = way.folder / "parts/1-of-1.jsonl"
    lines = [checked(line) for line in read_jsonl(path)]
    lines[number] |= columns
    write_jsonl(path, map(with_checksum, lines))


def test_a_turn_without_the_turns_before_it_is_no_shard() -> None:
    line = {"id": "a", "sample": 0, "variant": "turn_2", "sampling": {"max_new_tokens": 1, "stop": []}}
    line |= {"messages": [{"role": "assistant", "content": None}], "prompt_tokens": 1}
    with pytest.raises(UserError, match="a#0: a turn does not stand right after the turns before it"):
        Followups([line], lambda request, tokens: "", lambda request: 1)


@given(st.lists(st.one_of(st.none(), st.text()), max_size=8))
def test_filling_and_emptying_gaps_are_inverse(contents: list[str | None]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    places = gaps(messages)
    whole = filled(messages, ["x"] * len(places))
    assert gaps(whole) == ()
    assert unfilled(whole, places) == messages


def test_earlier_answers_of_another_sample_are_not_given() -> None:
    earlier: Earlier[str] = Earlier()
    earlier.add(("a", 0), "x")
    assert earlier.before(("a", 0), 1) == ["x"]
    with pytest.raises(UserError):
        earlier.before(("a", 1), 1)


# ---- judging


def judge_spec(kind: str, text: str, folder: Path) -> JudgeSpec:
    (folder / "judge.jinja").write_text(text)
    labels = {"A": "correct", "B": "incorrect"} if kind == "pointwise" else {"A": "first", "B": "second"}
    target = ["x"] if kind == "pointwise" else ["x", "y"]
    named = {"kind": kind, "target": target, "labels": labels, "both_orders": True, "sampling": {}}
    return JudgeSpec.model_validate(named | {"prompt": {"file": str(folder / "judge.jinja")}})


def test_a_judge_is_shown_each_turn_with_the_conversation_before_it(way: Way) -> None:
    way.system = "Be kind."
    way.rows(B)
    way.run(says=lambda request: f"re {request.messages[-1]['content']}")
    text = "{{ question }} -> {{ answer }}{% for m in conversation %} [{{ m.role }} {{ m.content }}]{% endfor %}"
    lines = list(judge_requests(judge_spec("pointwise", text, way.folder), [way.merge()]))
    assert [(line["variant"], line["messages"][-1]["content"]) for line in lines] == [
        ("turn_1", "uno -> re uno [user uno]"),
        ("turn_2", "due -> re due [user uno] [assistant re uno] [user due]"),
    ]


def test_a_pair_is_compared_turn_by_turn_in_both_orders(way: Way) -> None:
    way.rows(B)
    way.run(says=lambda request: f"re {request.messages[-1]['content']}")
    first = way.merge()
    second = [line | {"text": line["text"].upper()} for line in first]
    second[1]["messages"] = list(filled(unfilled(second[1]["messages"], [1]), ["RE UNO"]))
    text = "{{ question }}: {{ conversation_a[1].content }} {{ answer_a }}"
    text += " / {{ conversation_b[1].content }} {{ answer_b }}"
    lines = list(judge_requests(judge_spec("pairwise", text, way.folder), [first[1:], second[1:]]))
    assert [(line["variant"], line["messages"][-1]["content"]) for line in lines] == [
        ("turn_2/first_second", "due: re uno re due / RE UNO RE DUE"),
        ("turn_2/second_first", "due: RE UNO RE DUE / re uno re due"),
    ]


def test_verdicts_of_two_turns_have_names_of_their_own(way: Way) -> None:
    way.rows(B)
    way.run()
    generations = way.merge()
    replies = [line | {"text": text} for line, text in zip(generations, "AB", strict=True)]
    judge = {"kind": "pointwise", "model": "m", "prompt": "p", "runs": ["x"]}
    spec = VerdictSpec.model_validate({"name": "j", "judge": judge, "target": ["x"]})
    lines = [each.line for each in judged(spec, [generations], replies)]
    assert [(line["variant"], line["verdict"]) for line in lines] == [("turn_1", "correct"), ("turn_2", "incorrect")]


# ---- the whole workflow


def test_the_workflow_takes_rows_of_several_turns_from_file_to_report(project: Project) -> None:
    project.write_rows(
        {"id": f"r{n}", "turns": [f"say {n}", f"and {n}"], "reference": [f"say {n}", "no"]} for n in range(6)
    )
    project.write_prompt("turn.jinja", "{{ turn }}")
    project.write_prompt("grade.jinja", "{% if question %}Verdict: A{% endif %}")
    judge = {"kind": "pointwise", "model": "echo", "prompt": "grade", "runs": ["plain"]}
    project.write_config(
        echo_config(
            prompts={"ask": {"file": "turn.jinja", "turns": "turns"}, "grade": {"file": "grade.jinja"}},
            runs={"plain": {"dataset": "rows", "model": "echo", "prompt": "ask", "metrics": ["contains"]}},
            judges={"grader": judge},
        )
    )
    project.done(gpu=3)
    lines = project.lines("runs/plain/generations.jsonl")
    assert [(line["id"], line["variant"]) for line in lines[:3]] == [
        ("r0", "turn_1"),
        ("r0", "turn_2"),
        ("r1", "turn_1"),
    ]
    assert [m["content"] for m in lines[3]["messages"]] == ["say 1", "say 1", "and 1"]
    metrics = project.value("runs/plain/metrics.json")
    assert (metrics["n"], metrics["rows"], metrics["metrics"]["contains"]["correct"]) == (12, 6, 6)
    grades = [(line["id"], line["variant"]) for line in project.lines("runs/plain/grades.jsonl")]
    verdicts = [(line["id"], line["variant"]) for line in project.lines("judges/grader/plain/verdicts.jsonl")]
    assert len(set(grades)) == 12
    assert grades == verdicts
    assert project.value("judges/grader/plain/metrics.json")["n"] == 12
    page = (project.folder / "results/report.html").read_text()
    rows = [row for row in payload(page)["rows"] if row["id"] == "r5"]
    assert [[answer["turn"] for answer in row["answers"]] for row in rows] == [[1, 2]]
    assert "Nothing to be done" in project.done(gpu=3)
    words = [sys.executable, str(ROOT / "scripts/journal.py"), "prune", "--apply"]
    said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, cwd=project.folder).stdout
    assert "0 answers that generations.jsonl does not use" in said


def test_turns_that_are_no_column_and_a_judges_turns_stop_before_any_job(project: Project) -> None:
    project.write_prompt("turn.jinja", "{{ turn }}")
    judge = {"kind": "pointwise", "model": "echo", "prompt": "ask", "runs": ["plain"]}
    config = echo_config(prompts={"ask": {"file": "turn.jinja", "turns": "rounds"}}, judges={"grader": judge})
    project.write_config(config)
    result = project.run("-n")
    assert result.returncode != 0
    assert "prompts.ask.turns: 'rounds' is not a column of rows" in result.stdout
    assert "prompts.ask.turns: a judge's prompt has no turns" in result.stdout


def test_the_example_of_two_turns_runs_to_its_report_without_a_model(project: Project) -> None:
    config = yaml.safe_load((ROOT / "config/examples/mt_bench.yaml").read_text())
    project.write_config(config | {"models": {name: {"engine": "echo"} for name in config["models"]}})
    project.done(gpu=2)
    lines = project.lines("runs/answers/generations.jsonl")
    assert [(line["id"], line["variant"]) for line in lines[2:4]] == [("2", "turn_1"), ("2", "turn_2")]
    assert [line["reference"] for line in lines[:4]] == [None, None, "144", "100"]
    (asked,) = [line for line in project.lines("judges/referee/answers/requests.jsonl") if line["id"] == "2"][1:]
    assert lines[3]["messages"][2]["content"] in asked["messages"][0]["content"]
    assert (project.folder / "results/report.html").is_file()


def test_every_kind_of_judge_has_the_question_and_the_conversation_of_a_turn() -> None:
    from gristmill.prompts import JUDGE_NAMES, JUDGED_TURN_NAMES

    assert JUDGED_TURN_NAMES.keys() == JUDGE_NAMES.keys()
    assert all("question" in names for names in JUDGED_TURN_NAMES.values())
