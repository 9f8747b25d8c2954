"""Facts about continuous batching: the same answers as one by one, row by row, whatever stands beside a row."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import countdown
import numpy as np
import pytest

from gristmill.config.schema import ModelConfig
from gristmill.engines.continuous import manager as manager_module
from gristmill.engines.continuous.engine import ContinuousEngine
from gristmill.engines.continuous.manager import DidNotStart, EngineDied, Session, make_manager
from gristmill.engines.continuous.rows import RowTable
from gristmill.engines.static.engine import StaticEngine
from gristmill.errors import UserError
from gristmill.types import Completion, Failure, Message, Outcome, Request, Sampling

pytestmark = pytest.mark.model

GREEDY = Sampling(max_new_tokens=80)
WARM = Sampling(max_new_tokens=12, temperature=4.0, top_p=0.95, top_k=50, seed=3)
ITEMS = countdown.items(countdown.Lengths(20, 20, 0.6, 60).draw(24, seed=0), countdown.SHAPES["tiny"].vocabulary, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers are known and stop at their own length."""
    return countdown.make_model(tmp_path_factory.mktemp("countdown"), countdown.SHAPES["tiny"])


@pytest.fixture(scope="module")
def loaded(folder: Path) -> ContinuousEngine:
    return ContinuousEngine(folder, config(folder), 1024, on_gpu=False, log=print)


@pytest.fixture
def engine(loaded: ContinuousEngine) -> Iterator[ContinuousEngine]:
    """The engine as new, its settings restored afterwards."""
    before, static_before = dict(loaded.__dict__), dict(loaded._static.__dict__)
    yield loaded
    loaded._end()
    loaded.__dict__.update(before)
    loaded._static.__dict__.update(static_before)


def config(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"source": str(folder), "dtype": "float32", "engine": "continuous", **settings})


def ask(sampling: Sampling, items: Sequence[countdown.Item] = ITEMS) -> list[Request]:
    return [Request(item.id, 0, "", (Message(role="user", content=item.prompt),), sampling) for item in items]


def by_id(outcomes: Iterator[Outcome]) -> dict[str, Outcome]:
    found = list(outcomes)
    assert len({outcome.id for outcome in found}) == len(found)
    return {outcome.id: outcome for outcome in found}


def texts(outcomes: Iterator[Outcome]) -> dict[str, str | None]:
    return {name: outcome.text for name, outcome in by_id(outcomes).items() if isinstance(outcome, Completion)}


def test_every_answer_is_right_and_stops_at_its_own_length(engine: ContinuousEngine) -> None:
    found = by_id(engine.generate(ask(GREEDY)))
    for item in ITEMS:
        answer = found[item.id]
        assert isinstance(answer, Completion)
        assert (answer.text, answer.completion_tokens) == (item.answer, item.answer_tokens)
        assert (answer.finish_reason, answer.prompt_tokens) == ("stop", len(item.prompt.split()))
        assert answer.seconds > 0


def test_more_rows_than_places_are_answered(engine: ContinuousEngine) -> None:
    engine._rows = 3
    assert texts(engine.generate(ask(GREEDY))) == {item.id: item.answer for item in ITEMS}


@pytest.mark.parametrize("sampling", [GREEDY, WARM, dataclasses.replace(WARM, top_p=1.0, top_k=0)], ids=repr)
def test_answers_are_those_of_the_static_engine(engine: ContinuousEngine, folder: Path, sampling: Sampling) -> None:
    found = texts(engine.generate(ask(sampling)))
    engine._end()  # the model has the manager's attention until then
    static = StaticEngine(folder, config(folder), 1024, False, print, (engine._chat, engine._model))
    assert found == texts(static.generate(ask(sampling)))


def test_a_draw_does_not_depend_on_the_rows_beside_it(engine: ContinuousEngine) -> None:
    together = texts(engine.generate(ask(WARM)))
    alone = texts(engine.generate(ask(WARM, ITEMS[5:6])))
    assert alone == {ITEMS[5].id: together[ITEMS[5].id]}
    assert len(set(together.values())) > 1


def test_a_second_call_for_the_same_goes_to_the_manager_that_runs(engine: ContinuousEngine) -> None:
    said: list[str] = []
    engine._log = said.append
    for _ in range(2):
        assert texts(engine.generate(ask(GREEDY))) == {item.id: item.answer for item in ITEMS}
    assert sum("continuous batching ready" in line for line in said) == 1
    assert texts(engine.generate(ask(WARM))) != {}
    assert sum("continuous batching ready" in line for line in said) == 2


def test_prompts_that_begin_alike_share_their_pages(engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    found: list[int] = []
    search = PagedAttentionCache.search_prefix_match

    def noting(self: Any, request_id: str, prompt_ids: list[int]) -> int:
        found.append(search(self, request_id, prompt_ids))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", noting)
    shared = " ".join(f"w{countdown.CHAIN_END + word}" for word in range(600))
    items = [dataclasses.replace(item, prompt=f"{shared} {item.prompt}") for item in ITEMS[:6]]
    assert texts(engine.generate(ask(GREEDY, items))) == {item.id: item.answer for item in items}
    assert 512 in found  # two pages of 256 tokens


@pytest.fixture
def few_pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many pages a manager has."""
    plain = manager_module._plain_manager

    def only(pages: int) -> None:
        def made(*args: Any, **settings: Any) -> Any:
            manager = plain(*args, **settings)
            manager.continuous_batching_config.num_blocks = pages
            return manager

        monkeypatch.setattr(manager_module, "_plain_manager", made)

    return only


def uneven(seed: int) -> list[countdown.Item]:
    """Rows of one to three pages each."""
    stream = np.random.default_rng(seed)
    lengths = zip(stream.choice([20, 200, 400], 24), stream.choice([5, 200, 400], 24), strict=True)
    return countdown.items([(int(p), int(a)) for p, a in lengths], countdown.SHAPES["tiny"].vocabulary, 1)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [(), ("c50 c49",)])
def test_rows_go_on_when_the_pages_are_full_also_when_all_that_run_are_taken_out(
    engine: ContinuousEngine, few_pages: Callable[[int], None], stop: tuple[str, ...]
) -> None:
    few_pages(8)
    items = uneven(1)
    found = texts(engine.generate(ask(Sampling(max_new_tokens=420, stop=stop), items)))
    assert found == {item.id: item.answer.partition(stop[0])[0] if stop else item.answer for item in items}


def test_a_row_that_is_larger_than_all_pages_fails_alone(
    engine: ContinuousEngine, few_pages: Callable[[int], None]
) -> None:
    few_pages(3)
    big = countdown.items([(600, 3)], countdown.SHAPES["tiny"].vocabulary, 7)[0]
    big = dataclasses.replace(big, id="big")
    found = by_id(engine.generate(ask(GREEDY, [ITEMS[0], big, ITEMS[1]])))
    assert isinstance(found["big"], Failure)
    assert found["big"].reason == "out_of_memory"
    assert {item.id: found[item.id].text for item in ITEMS[:2]} == {item.id: item.answer for item in ITEMS[:2]}


def test_a_prompt_without_a_token_is_refused_by_every_engine(engine: ContinuousEngine) -> None:
    empty = dataclasses.replace(ITEMS[0], id="empty", prompt="")
    for each in (engine, engine._static):
        with pytest.raises(UserError, match=r"1 prompt has no tokens: empty#0; drop the rows, or give the prompt"):
            list(each.generate(ask(GREEDY, [ITEMS[1], empty])))
        engine._end()


def test_a_model_has_its_own_attention_again_after_a_manager_that_did_not_start(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine._model.config._attn_implementation
    engine._model.set_attn_implementation("eager")
    engine._own_attention = "eager"
    try:
        with pytest.raises(DidNotStart, match="slower than static"):
            make_manager(engine._model, Session(GREEDY, (2,), 1, 1, 8, 0.1), RowTable(1, engine._model.device), True)
        assert engine._model.config._attn_implementation == "eager"
        list(engine.generate(ask(GREEDY, ITEMS[:1])))
        engine._end()
        assert engine._model.config._attn_implementation == "eager"
    finally:
        engine._model.set_attn_implementation(own)


def test_a_thread_that_hangs_does_not_hold_the_job(folder: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from gristmill.config.schema import ModelConfig
from gristmill.engines.continuous import engine as module
from gristmill.types import Message, Request, Sampling

module.END_S = 0.5
folder = Path({str(folder)!r})
model = ModelConfig.model_validate({{"source": str(folder), "dtype": "float32", "engine": "continuous"}})
engine = module.ContinuousEngine(folder, model, 1024, False, lambda text: print(text, file=sys.stderr, flush=True))
rows = [Request(str(n), 0, "", (Message(role="user", content=f"w1200 c{{n}}"),), Sampling(40)) for n in (3, 30)]
outcomes = engine.generate(rows)
print(next(outcomes).text, flush=True)
engine._model.forward = lambda *_args, **_settings: time.sleep(1000)
time.sleep(0.5)
outcomes.close()
engine.close()
"""
    library = str(Path(manager_module.__file__).parents[3])
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.stdout, done.returncode) == ("c2 c1\n", 1), done.stderr
    assert "the thread of continuous batching hangs" in done.stderr


def test_two_samplings_in_one_shard_are_each_answered_by_their_own(engine: ContinuousEngine) -> None:
    mixed = ask(GREEDY, ITEMS[:4]) + ask(dataclasses.replace(GREEDY, max_new_tokens=5), ITEMS[4:8])
    found = by_id(engine.generate(mixed))
    assert [found[item.id].completion_tokens for item in ITEMS[:4]] == [item.answer_tokens for item in ITEMS[:4]]
    assert [found[item.id].completion_tokens for item in ITEMS[4:8]] == [min(5, i.answer_tokens) for i in ITEMS[4:8]]


def test_a_row_is_given_out_while_a_longer_one_goes_on(engine: ContinuousEngine) -> None:
    items = sorted(ITEMS, key=lambda item: -item.answer_tokens)
    first = next(iter(engine.generate(ask(GREEDY, items))))
    assert first.id != items[0].id


def test_a_stop_text_ends_a_row_and_is_cut_off(engine: ContinuousEngine) -> None:
    long = [item for item in ITEMS if item.answer_tokens > 20]
    found = by_id(engine.generate(ask(dataclasses.replace(GREEDY, stop=(" c15 ",)), long)))
    for item in long:
        assert found[item.id].text == item.answer.partition(" c15 ")[0]
        assert found[item.id].finish_reason == "stop"


def test_a_row_whose_time_is_over_fails_and_the_others_do_not(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._config = engine._config.model_copy(update={"timeout_seconds": 1e-6})
    found = by_id(engine.generate(ask(GREEDY, ITEMS[:6])))
    reasons = [outcome.reason for outcome in found.values() if isinstance(outcome, Failure)]
    assert reasons
    assert set(reasons) == {"timeout"}
    engine._config = engine._config.model_copy(update={"timeout_seconds": 600})
    assert texts(engine.generate(ask(GREEDY, ITEMS[:6]))) == {item.id: item.answer for item in ITEMS[:6]}


def test_a_repetition_penalty_goes_to_the_static_engine_and_is_told(engine: ContinuousEngine) -> None:
    said: list[str] = []
    engine._log = said.append
    found = by_id(
        engine.generate(ask(dataclasses.replace(GREEDY, repetition_penalty=1.3, max_new_tokens=4), ITEMS[:2]))
    )
    assert len(found) == 2
    assert said[0].startswith("2 rows go to the static engine: continuous batching has no repetition_penalty")


def labelled(items: Sequence[countdown.Item]) -> list[Request]:
    return [dataclasses.replace(request, sample=1, labels=(" c3", " c5")) for request in ask(GREEDY, items)]


def test_likelihoods_and_schemas_are_asked_of_the_static_engine_and_that_is_told(engine: ContinuousEngine) -> None:
    said: list[str] = []
    engine._log = said.append
    found = {outcome.rid: outcome for outcome in engine.generate([*ask(GREEDY, ITEMS[:3]), *labelled(ITEMS[:3])])}
    assert [line for line in said if "go to" in line] == [
        "3 rows go to the static engine: continuous batching has no likelihood of labels"
    ]
    for request, expected in zip(labelled(ITEMS[:3]), engine._static.generate(labelled(ITEMS[:3])), strict=True):
        assert isinstance(expected, Completion)
        answer, plain = found[expected.rid], found[request.rid._replace(sample=0)]
        assert isinstance(answer, Completion)
        assert answer.label_logprobs == pytest.approx(expected.label_logprobs, abs=1e-4)
        assert isinstance(plain, Completion)
        assert plain.label_logprobs is None
    with pytest.raises(UserError, match="json_schema"):  # of countdowns there are none; the static engine says so
        list(engine.generate(ask(dataclasses.replace(GREEDY, json_schema='{"type":"nonsense"}'), ITEMS[:1])))
    assert said[-1] == "1 rows go to the static engine: continuous batching has no json_schema"


def test_a_model_that_is_cut_has_no_likelihood_and_the_next_step_is_named(engine: ContinuousEngine) -> None:
    engine._ranks = object()  # type: ignore[assignment]
    try:
        with pytest.raises(UserError, match="likelihood of labels needs the static engine; set parallel: layers"):
            list(engine.generate(labelled(ITEMS[:1])))
    finally:
        engine._ranks = None


def test_a_prompt_that_is_too_long_is_skipped_or_shortened_as_the_policy_says(engine: ContinuousEngine) -> None:
    long = max(ITEMS, key=lambda item: len(item.prompt.split()))
    engine._context_tokens = GREEDY.max_new_tokens + len(long.prompt.split()) - 1
    engine._config = engine._config.model_copy(update={"on_overflow": "skip"})
    found = by_id(engine.generate(ask(GREEDY, [long, ITEMS[0]])))
    assert (found[long.id].text, found[long.id].finish_reason) == (None, "skipped")
    engine._config = engine._config.model_copy(update={"on_overflow": "truncate_left"})
    found = by_id(engine.generate(ask(GREEDY, [long])))
    assert (found[long.id].text, found[long.id].prompt_cut_tokens) == (long.answer, 1)


def test_a_row_whose_logits_are_not_finite_fails_alone(engine: ContinuousEngine) -> None:
    bad = next(item for item in ITEMS if item.answer_tokens > 30)
    others = [item for item in ITEMS if item.answer_tokens < 30]
    embedding = engine._model.get_input_embeddings().weight.data
    spoilt = countdown.END + 30  # c30, which only the long countdown meets
    kept = embedding[spoilt].clone()
    embedding[spoilt] = float("nan")
    try:
        found = by_id(engine.generate(ask(GREEDY, [bad, *others])))
    finally:
        embedding[spoilt] = kept
    assert isinstance(found[bad.id], Failure)
    assert found[bad.id].reason == "non_finite_logits"
    assert {item.id: found[item.id].text for item in others} == {item.id: item.answer for item in others}


def test_after_stop_nothing_new_begins_and_what_runs_is_finished(engine: ContinuousEngine) -> None:
    engine._rows = 2
    outcomes = engine.generate(ask(GREEDY))
    first = next(outcomes)
    engine.stop()
    rest = list(outcomes)
    assert 1 + len(rest) <= 2 + 2
    answers = {item.id: item.answer for item in ITEMS}
    assert all(outcome.text == answers[outcome.id] for outcome in [first, *rest])


def test_a_manager_that_dies_is_an_error_that_says_how_to_go_on(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = engine.generate(ask(GREEDY))
    next(outcomes)
    monkeypatch.setattr(type(engine._model), "forward", broken)
    with pytest.raises(EngineDied, match=r"a GPU fell off the bus.*; run again to go on"):
        list(outcomes)


def broken(*_args: Any, **_settings: Any) -> None:
    raise RuntimeError("a GPU fell off the bus")


def test_no_thread_is_left_when_the_caller_goes_away(engine: ContinuousEngine) -> None:
    import threading

    outcomes = engine.generate(ask(GREEDY))
    next(outcomes)
    outcomes.close()
    deadline = time.monotonic() + 10
    while any("_run_generation_loop" in repr(thread) for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_when_auto_took_it_and_it_does_not_start_the_rows_go_to_static(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_start(*_args: Any) -> Any:
        raise DidNotStart("continuous batching does not start: no pages")

    said: list[str] = []
    engine._log, engine._on_gpu = said.append, True
    monkeypatch.setattr("gristmill.engines.continuous.engine.make_manager", no_start)
    monkeypatch.setattr("gristmill.engines.continuous.engine.release_memory", lambda _on_gpu: None)
    with pytest.raises(DidNotStart, match="no pages"):
        list(engine.generate(ask(GREEDY, ITEMS[:2])))
    engine._config = engine._config.model_copy(update={"engine": "auto"})
    assert texts(engine.generate(ask(GREEDY, ITEMS[:2]))) == {item.id: item.answer for item in ITEMS[:2]}
    assert said == ["continuous batching does not start: no pages; the rows go to the static engine"]


def test_a_manager_whose_pages_cannot_be_made_did_not_start(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching import continuous_api

    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, "_create_batch_processor", broken)
    with pytest.raises(DidNotStart, match="does not start: a GPU fell off the bus"):
        list(engine.generate(ask(GREEDY, ITEMS[:2])))


def test_when_auto_took_it_and_its_first_pass_fails_the_rows_go_to_static(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = type(engine._model).forward

    @functools.wraps(forward)
    def no_pages(self: Any, *args: Any, **settings: Any) -> Any:
        return broken() if "cu_seq_lens_q" in settings else forward(self, *args, **settings)

    said: list[str] = []
    engine._log, engine._on_gpu = said.append, True
    engine._config = engine._config.model_copy(update={"engine": "auto"})
    monkeypatch.setattr(type(engine._model), "forward", no_pages)
    monkeypatch.setattr("gristmill.engines.continuous.engine.make_manager", on_a_cpu)
    monkeypatch.setattr("gristmill.engines.continuous.engine.release_memory", lambda _on_gpu: None)
    assert texts(engine.generate(ask(GREEDY, ITEMS[:2]))) == {item.id: item.answer for item in ITEMS[:2]}
    assert "a GPU fell off the bus" in said[-1]
    assert said[-1].endswith("the rows go to the static engine")


def test_out_of_memory_begins_again_with_fewer_pages_and_asks_only_what_is_left(
    engine: ContinuousEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    asked: list[int] = []
    session = type(engine)._session

    def one_short_session(self: ContinuousEngine, requests: Any, sampling: Sampling, share: float) -> Iterator[Outcome]:
        shares.append(share)
        asked.append(len(requests))
        outcomes = session(self, requests, sampling, share)
        if len(shares) == 1:
            yield next(outcomes)
            outcomes.close()
            raise EngineDied("continuous batching ended: CUDA out of memory. Tried to allocate 2 GiB")
        yield from outcomes

    said: list[str] = []
    engine._log, engine._on_gpu = said.append, True
    monkeypatch.setattr(type(engine), "_session", one_short_session)
    monkeypatch.setattr("gristmill.engines.continuous.engine.release_memory", lambda _on_gpu: None)
    monkeypatch.setattr("gristmill.engines.continuous.engine.make_manager", on_a_cpu)
    assert texts(engine.generate(ask(GREEDY))) == {item.id: item.answer for item in ITEMS}
    assert (shares, asked) == ([0.88, 0.7], [len(ITEMS), len(ITEMS) - 1])
    assert "out of memory with 88% of the free memory for pages; 23 rows begin again" in said


def on_a_cpu(model: Any, session: Session, table: Any, _on_gpu: bool) -> Any:
    return make_manager(model, session, table, on_gpu=False)


def test_a_session_comes_back_from_another_process_as_it_was() -> None:
    import json

    session = Session(dataclasses.replace(WARM, stop=("a", "b")), (1, 2), 3, 4, 5, 0.5)
    assert Session.from_json(json.loads(json.dumps(session.to_json()))) == session
