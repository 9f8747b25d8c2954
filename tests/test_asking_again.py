"""Facts about asking a judge again: what cannot be read is asked anew, nothing else is, a hopeless judge is stopped."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, echo_config
from conversations import ECHO, WEIGHTS, Speaker, Way

from gristmill import journal, worker
from gristmill.codec import request_from_json, request_to_json
from gristmill.config.schema import GpusConfig, JudgeConfig
from gristmill.config.specs import asked_again
from gristmill.errors import UserError
from gristmill.files import read_jsonl
from gristmill.judging.asking import Asking
from gristmill.keys import RequestKeys, model_identity, row_seed
from gristmill.types import Completion, JsonDict, Outcome, Request, Sampling
from gristmill.worker import run_shard


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    return Way(tmp_path, monkeypatch)


def questions(way: Way, count: int, temperature: float = 0.0) -> None:
    """So many requests to a judge, r0, r1, …"""
    sampling = {"max_new_tokens": 8, "temperature": temperature, "stop": [], "seed": 0}
    messages = [{"role": "user", "content": "A or B?"}]
    shared = {"sample": 0, "variant": "", "messages": messages, "sampling": sampling, "reference": None, "row": {}}
    way.ask({"id": f"r{row}"} | shared for row in range(count))


def readable_at(attempts: dict[str, int]) -> Callable[[Request], str]:
    """A judge whose words can be read from a row's attempt on; from the first, for rows that are not named."""
    return lambda r: "Verdict: A" if r.attempt >= attempts.get(r.id, 1) else f"hm {r.id} {r.attempt}"


def asked(engine: Speaker) -> list[list[tuple[str, int]]]:
    return [[(request.id, request.attempt) for request in wave] for wave in engine.waves]


def work(way: Way, asking: Asking, says: Callable[[Request], Any]) -> Speaker:
    (shard,) = way.shards(1, asking=asking)
    return way.work(shard, says)


# ---- keys and seeds


REQUEST = Request("row-1", 0, "", ({"role": "user", "content": "Why?"},), Sampling(max_new_tokens=8, seed=1))


def test_a_first_attempt_is_the_request_that_it_always_was() -> None:
    keys = RequestKeys(model_identity(ECHO, WEIGHTS, on_gpu=False), ECHO)
    assert "attempt" not in request_to_json(REQUEST)
    assert keys.key(REQUEST, None) == "5a9694a931b9ab0e9bbd0e543aaa6fe1"
    assert row_seed(REQUEST) == 8919724151934432958
    assert request_from_json(request_to_json(REQUEST)) == REQUEST


def test_each_attempt_has_a_key_and_a_seed_of_its_own() -> None:
    keys = RequestKeys(model_identity(ECHO, WEIGHTS, on_gpu=False), ECHO)
    attempts = [replace(REQUEST, attempt=attempt) for attempt in range(1, 6)]
    assert len({keys.key(request, None) for request in attempts}) == 5
    assert len({row_seed(request) for request in attempts}) == 5
    assert [request_from_json(request_to_json(request)) for request in attempts] == attempts


def test_a_greedy_judge_is_drawn_when_it_is_asked_again_and_another_as_before(way: Way) -> None:
    for temperature, drawn in ((0.0, 0.9), (0.3, 0.3)):
        questions(way, 1, temperature)
        engine = work(way, way.judge(retries=1, retry_temperature=0.9), readable_at({"r0": 2}))
        assert [request.sampling.temperature for wave in engine.waves for request in wave] == [temperature, drawn]


# ---- what is asked


def test_only_what_cannot_be_read_is_asked_again_and_counted(way: Way) -> None:
    questions(way, 4)
    engine = work(way, way.judge(retries=2), readable_at({"r1": 2, "r2": 3, "r3": 9}))
    assert asked(engine) == [
        [("r0", 1), ("r1", 1), ("r2", 1), ("r3", 1)],
        [("r1", 2), ("r2", 2), ("r3", 2)],
        [("r2", 3), ("r3", 3)],
    ]
    lines = way.merge()
    assert [(line["text"], line.get("attempt"), line.get("unreadable_attempts")) for line in lines] == [
        ("Verdict: A", None, None),
        ("Verdict: A", 2, 1),
        ("Verdict: A", 3, 2),
        ("hm r3 3", 3, 3),
    ]


def test_the_words_of_earlier_attempts_stay_in_the_journal_under_the_keys_that_the_answer_names(way: Way) -> None:
    questions(way, 1)
    work(way, way.judge(retries=2), readable_at({"r0": 3}))
    (line,) = way.merge()
    known = journal.read_known(way.folder / "journal", set(line["earlier_keys"]), print)
    assert [known[key].text for key in line["earlier_keys"]] == ["hm r0 1", "hm r0 2"]


def test_without_retries_nothing_is_asked_again_and_no_column_is_added(way: Way) -> None:
    questions(way, 2)
    assert asked(work(way, way.judge(), readable_at({"r1": 2}))) == [[("r0", 1), ("r1", 1)]]
    assert not {"attempt", "earlier_keys", "unreadable_attempts"} & {name for line in way.merge() for name in line}


def test_a_skipped_prompt_is_not_asked_again(way: Way) -> None:
    def skipped(request: Request) -> Outcome | str:
        return Completion(*request.rid, None, "skipped", 9, 0, 0.0) if request.id == "r0" else "A"

    questions(way, 2)
    assert asked(work(way, way.judge(retries=3, stop_after_unreadable=1), skipped)) == [[("r0", 1)], [("r1", 1)]]


# ---- nothing twice


def test_a_second_run_asks_nothing_and_gives_the_same(way: Way) -> None:
    questions(way, 3)
    says = readable_at({"r1": 2, "r2": 9})
    work(way, way.judge(retries=2), says)
    before = way.merge()
    (shard,) = way.shards(1, asking=way.judge(retries=2))
    assert way.work(shard, says).waves == []
    assert way.merge() == before


def test_a_job_that_dies_among_attempts_asks_only_the_rest(way: Way) -> None:
    def dying(request: Request) -> str:
        if (request.id, request.attempt) == ("r2", 2):
            raise RuntimeError("CUDA error")
        return readable_at({"r1": 2, "r2": 3})(request)

    questions(way, 3)
    with pytest.raises(RuntimeError, match="CUDA error"):
        work(way, way.judge(retries=2), dying)
    assert asked(work(way, way.judge(retries=2), readable_at({"r1": 2, "r2": 3}))) == [[("r2", 2)], [("r2", 3)]]


def test_more_retries_go_on_from_the_attempts_that_there_are(way: Way) -> None:
    questions(way, 2)
    says = readable_at({"r1": 4})
    work(way, way.judge(retries=1), says)
    assert asked(work(way, way.judge(retries=3), says)) == [[("r1", 3)], [("r1", 4)]]


def test_another_reader_asks_again_only_what_it_cannot_read(way: Way) -> None:
    questions(way, 2)
    words = {"r0": "Verdict: A", "r1": "Verdict: B"}
    work(way, way.judge(retries=1), lambda request: words[request.id])
    stricter = way.judge(retries=1, labels={"A": "correct", "C": "incorrect"})
    assert asked(work(way, stricter, lambda request: "Verdict: C")) == [[("r1", 2)]]
    looser = way.judge(retries=1, labels={"A": "correct", "B": "incorrect"})
    assert asked(work(way, looser, lambda request: "not asked")) == []
    assert [line["text"] for line in way.merge()] == ["Verdict: A", "Verdict: B"]


# ---- a judge that writes no verdicts


def test_so_many_unreadable_verdicts_in_a_row_end_the_job_with_one_line(way: Way) -> None:
    questions(way, 9)
    with pytest.raises(UserError) as caught:
        work(way, way.judge(stop_after_unreadable=3), lambda r: "A" if r.id in ("r0", "r3") else "word " * 200)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("judges.grader: 3 verdicts in a row cannot be read, the last is 'word word")
    assert "stop_after_unreadable (now 3; null: never)" in message
    assert "run again" in message
    assert len(message.partition("the last is ")[2].partition("; have")[0]) == 200
    assert len(journaled(way)) == 7  # r0 to r6: what was answered stays


def journaled(way: Way) -> list[str]:
    lines = [line for path in (way.folder / "journal").glob("*.jsonl") for line in read_jsonl(path)]
    return [line["completion"]["id"] for line in lines if "completion" in line]


def test_a_rerun_after_a_stop_reads_what_is_known_and_counts_only_what_is_new(way: Way) -> None:
    questions(way, 5)
    asking = way.judge(stop_after_unreadable=3)
    with pytest.raises(UserError, match="3 verdicts in a row"):
        work(way, asking, lambda request: "hm")
    assert asked(work(way, asking, lambda request: "hm")) == [[("r3", 1), ("r4", 1)]]  # 2 new ones are no streak
    assert work(way, asking, lambda request: "hm").waves == []
    assert [line["text"] for line in way.merge()] == ["hm"] * 5


def test_only_verdicts_whose_attempts_are_used_up_are_counted(way: Way) -> None:
    questions(way, 6)
    engine = work(way, way.judge(retries=1, stop_after_unreadable=2), readable_at({f"r{n}": 2 for n in range(6)}))
    assert Counter(attempt for wave in asked(engine) for _, attempt in wave) == {1: 6, 2: 6}


def test_a_judge_that_writes_no_verdict_is_stopped_before_every_row_is_asked(way: Way) -> None:
    questions(way, 50)
    engines: list[Request] = []

    def mumbling(request: Request) -> str:
        engines.append(request)
        return "hm"

    with pytest.raises(UserError, match="4 verdicts in a row"):
        work(way, way.judge(retries=2, stop_after_unreadable=4), mumbling)
    assert len(engines) == 12  # 4 rows, 3 attempts each


def test_null_never_stops(way: Way) -> None:
    questions(way, 30)
    work(way, way.judge(stop_after_unreadable=None), lambda request: "hm")
    assert len(way.merge()) == 30


# ---- the workflow

VERDICTS = "results/judges/grader/plain/verdicts.jsonl"


def judged(project: Project, **judge: Any) -> Project:
    project.write_prompt("grade.jinja", "{{ 'Verdict: A' if reference != 3 else 'no idea' }}")
    named = {"kind": "pointwise", "model": "echo", "prompt": "grade", "runs": ["plain"]}
    prompts = {"ask": {"file": "ask.jinja"}, "grade": {"file": "grade.jinja"}}
    project.write_config(echo_config(prompts=prompts, judges={"grader": named | judge}))
    return project


def test_the_workflow_asks_again_when_retries_are_raised_and_only_what_cannot_be_read(project: Project) -> None:
    judged(project).done(VERDICTS, gpu=2)
    assert len(project.asked("judges/grader/plain")) == 12
    judged(project, retries=2).done(VERDICTS, gpu=2)
    assert Counter(project.asked("judges/grader/plain")) == {f"r{n}": 3 if n == 3 else 1 for n in range(12)}
    line = project.lines("judges/grader/plain/generations.jsonl")[3]
    assert (line["attempt"], line["unreadable_attempts"], len(line["earlier_keys"])) == (3, 3, 2)
    assert project.value("judges/grader/plain/metrics.json")["unreadable"] == 1
    assert "Nothing to be done" in project.done(VERDICTS, gpu=2)


def test_the_workflow_stops_a_judge_that_cannot_be_read_and_goes_on_when_it_may(project: Project) -> None:
    judged(project, stop_after_unreadable=5)
    project.write_prompt("grade.jinja", "no idea")
    result = project.run(VERDICTS, gpu=1)
    assert result.returncode == 1
    assert "judges.grader: 5 verdicts in a row cannot be read, the last is 'no idea'" in result.stdout
    judged(project, stop_after_unreadable=None)
    project.write_prompt("grade.jinja", "no idea")
    project.done(VERDICTS, gpu=1)
    assert Counter(project.asked("judges/grader/plain")) == {f"r{n}": 1 for n in range(12)}  # none twice
    assert project.value("judges/grader/plain/metrics.json")["unreadable"] == 12


def test_what_decides_about_asking_again_is_all_that_reruns_a_judge_with_retries() -> None:
    base: JsonDict = {"kind": "pointwise", "model": "m", "prompt": "p", "runs": ["a"], "retries": 1}

    def what(**changes: Any) -> str:
        return asked_again(JudgeConfig.model_validate(base | changes))

    assert what(retries=2) != what()
    assert what(retry_temperature=0.5) != what()
    assert what(labels={"yes": "correct", "no": "incorrect"}) != what()
    assert what(runs=["a", "b"], stop_after_unreadable=7, reliability={"min_kappa": 0.5}, model="n") == what()


def test_fewer_retries_ask_nothing_and_take_an_earlier_answer(way: Way) -> None:
    questions(way, 2)
    says = readable_at({"r1": 3})
    work(way, way.judge(retries=2), says)
    assert work(way, way.judge(retries=1), says).waves == []
    assert [line["text"] for line in way.merge()] == ["Verdict: A", "hm r1 2"]


def test_the_engine_is_picked_for_the_temperature_of_later_attempts_too(way: Way) -> None:
    questions(way, 3)
    seen: list[set[Sampling]] = []
    (shard,) = way.shards(1, asking=way.judge(retries=1))
    way.patch.setattr(worker, "open_engine", lambda *words: (seen.append(words[4]), (Speaker(lambda r: "A"), "so"))[1])
    run_shard(shard, ECHO, WEIGHTS, GpusConfig(wait_minutes=0), 1)
    assert [{sampling.temperature for sampling in each} for each in seen] == [{0.0, 0.7}]
