"""Facts about the decode loop: which rows run when, and that an answer depends on neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_llama import WORDS, _save_tokenizer

from gristmill.config.schema import ModelConfig
from gristmill.engines.static.engine import StaticEngine
from gristmill.engines.static.token_budget import AnswerLengths, TokenBudget
from gristmill.types import Completion, Failure, Message, Outcome, Request, Sampling

torch = pytest.importorskip("torch")

from gristmill.engines.static.decodable import obstacle  # noqa: E402

#: Large weights, so that a random model wanders through its vocabulary and comes to its end token now and then.
TINY: dict[str, Any] = {
    "vocab_size": len(WORDS) + 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=40),
    "penalty": Sampling(max_new_tokens=40, repetition_penalty=1.3),
    "drawn": Sampling(max_new_tokens=40, temperature=0.8, top_p=0.9, top_k=15, repetition_penalty=1.1, seed=3),
}


def save(folder: Path, kind: str, **changes: Any) -> Path:
    """A model of random weights, its config named by its class's first word."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    words = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    _save_tokenizer(folder, words)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "Llama")


def engine_of(folder: Path, rows: int | None = None, *, whole: bool = False, **settings: Any) -> StaticEngine:
    """The engine; `whole`: through generate()."""
    model = ModelConfig.model_validate({"source": str(folder), "dtype": "float32", "max_batch_rows": rows, **settings})
    engine = StaticEngine(folder, model, 256, on_gpu=False, log=LOGGED.append)
    if whole:
        engine._obstacle = "the test says so"
    return engine


LOGGED: list[str] = []


def ask(count: int, sampling: Sampling) -> list[Request]:
    """Prompts of 2 to 60 tokens; 24 of them have at most 56."""
    texts = [" ".join(WORDS[(7 * n + m * m) % len(WORDS)] for m in range(1 + n * 37 % 59)) for n in range(count)]
    return [Request(f"r{n}", 0, "", (Message(role="user", content=text),), sampling) for n, text in enumerate(texts)]


def told(outcomes: Sequence[Outcome]) -> dict[str, tuple[Any, ...]]:
    """Everything of the outcomes but the time they took."""
    assert len({outcome.rid for outcome in outcomes}) == len(outcomes)
    return {
        outcome.id: (outcome.text, outcome.finish_reason, outcome.prompt_tokens, outcome.completion_tokens)
        if isinstance(outcome, Completion)
        else (outcome.reason, outcome.detail)
        for outcome in outcomes
    }


@contextmanager
def watched(engine: StaticEngine, before: Callable[[Any], None] = lambda shape: None) -> Iterator[list[Any]]:
    """The shape (rows, tokens) of each call of the model."""
    shapes: list[tuple[int, int]] = []

    def note(_module: object, _arguments: object, named: dict[str, Any]) -> None:
        shapes.append(tuple(named["input_ids"].shape))
        before(shapes[-1])

    hook = engine._model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield shapes
    finally:
        hook.remove()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_answers_are_those_of_generate_one_by_one_whatever_the_batch(folder: Path, sampling: Sampling) -> None:
    requests = ask(64, sampling)
    alone = told(list(engine_of(folder, 1, whole=True).generate(requests)))
    assert len({length for _, _, _, length in alone.values()}) > 5
    for rows in (1, 2, 3, 7, 64):
        assert told(list(engine_of(folder, rows).generate(requests))) == alone


def test_a_stop_text_ends_a_row_soon_after_it_and_is_cut_off(folder: Path) -> None:
    stops = ("river stone", "bird tree", "number")
    engine = engine_of(folder, 8)
    whole = told(list(engine.generate(ask(64, SAMPLINGS["greedy"]))))
    with watched(engine) as shapes:
        found = told(list(engine.generate(ask(64, Sampling(max_new_tokens=40, stop=stops)))))
    places = {
        name: min((text.find(stop) for stop in stops if stop in text), default=None)
        for name, (text, *_) in whole.items()
    }
    assert sum(place is not None for place in places.values()) > 10
    for name, place in places.items():
        assert found[name][0] == whole[name][0][:place]
        assert found[name][1] == ("stop" if place is not None else whole[name][1])
    tokens = sum(min(whole[name][3], len(found[name][0].split()) + 2 + 3) for name in whole)
    assert sum(rows for rows, _ in shapes) < 1.15 * tokens + 64


def test_a_tokens_likelihood_is_lowered_for_what_is_in_the_prompt_and_not_for_padding(folder: Path) -> None:
    """The end token pads here: rows beside a longer one would not end, if padding counted."""
    engine = engine_of(folder, 8)
    engine._chat.tokenizer.pad_token = "<eos>"
    requests = ask(16, SAMPLINGS["penalty"])
    alone = [outcome for request in requests for outcome in engine.generate([request])]
    assert told(list(engine.generate(requests))) == told(alone)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Olmo2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("GPT2", {"n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("OPT", {"max_position_embeddings": 96, "word_embed_proj_dim": 32, "ffn_dim": 64, "init_std": 0.6}),
        ("Phi3", {}),
        ("Mixtral", {"num_local_experts": 4}),
        ("DeepseekV3", {"first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
                        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}),
    ],
)  # fmt: skip
def test_models_of_full_attention_run_in_the_loop(
    tmp_path: Path, kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positions of GPT-2 and OPT end at 96: the longest row reaches the last one and waits there for others."""
    monkeypatch.setattr("gristmill.engines.static.decoding.JOIN_SHARE", 0.5)
    monkeypatch.setattr("gristmill.engines.static.decoding.LEAVE_SHARE", 1.0)
    folder = save(tmp_path, kind, **changes)
    requests = ask(24, SAMPLINGS["greedy"])
    loop = engine_of(folder, 5)
    assert loop._obstacle is None
    assert (min(loop.prompt_tokens(requests)), max(loop.prompt_tokens(requests))) == (2, 56)
    assert told(list(loop.generate(requests))) == told(list(engine_of(folder, 1, whole=True).generate(requests)))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Mistral", {"sliding_window": 8}, "DynamicSlidingWindowLayer"),
        ("Gemma2", {"sliding_window": 8, "head_dim": 8}, "DynamicSlidingWindowLayer"),
        ("Mamba", {"state_size": 4}, "keeps a state"),
        ("Bloom", {}, "takes no position_ids"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rope"),
    ],
)
def test_other_models_answer_in_whole_batches_and_the_log_says_why(
    tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    folder = save(tmp_path, kind, **changes)
    LOGGED.clear()
    engine = engine_of(folder, 5)
    requests = ask(12, SAMPLINGS["greedy"])
    found = told(list(engine.generate(requests)))
    assert len(found) == 12
    (line,) = LOGGED
    assert "whole batches" in line
    assert said in line
    if kind != "Mamba":  # its state takes in the padding
        assert found == told(list(engine_of(folder, 1).generate(requests)))


def test_a_model_with_code_of_its_own_and_one_with_an_encoder_are_left_to_generate() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    class Own(LlamaForCausalLM):
        pass

    assert "not of transformers" in (obstacle(Own(LlamaConfig(**TINY))) or "")
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=22))
    assert "T5" in (obstacle(t5) or "")


def test_rows_leave_and_others_take_their_place(folder: Path) -> None:
    requests = ask(64, SAMPLINGS["greedy"])
    shares = {}
    for whole in (False, True):
        engine = engine_of(folder, 8, whole=whole)
        with watched(engine) as shapes:
            found = told(list(engine.generate(requests)))
        assert max(rows for rows, _ in shapes) == 8
        useful = sum(length + (finish == "stop") for _, finish, _, length in found.values())
        shares[whole] = useful / sum(rows for rows, _ in shapes)  # each call gives each of its rows a token
    assert shares[True] < 0.6
    assert shares[False] > 0.85


def test_the_first_to_end_comes_first_and_while_others_run(folder: Path) -> None:
    requests = ask(8, SAMPLINGS["greedy"])
    engine = engine_of(folder, 8)
    lengths = {name: length for name, (_, _, _, length) in told(list(engine.generate(requests))).items()}
    with watched(engine) as shapes:
        first = next(iter(engine.generate(requests)))
    assert lengths[first.id] == min(lengths.values())
    assert len(shapes) <= lengths[first.id] + 3


def test_after_a_stop_no_row_joins_and_those_in_flight_end(folder: Path) -> None:
    engine = engine_of(folder, 8)
    with watched(engine) as shapes:
        running = engine.generate(ask(64, SAMPLINGS["greedy"]))
        found = [next(running)]
        begun = sum(rows for rows, tokens in shapes if tokens > 1)
        engine.stop()
        found += list(running)
    assert 8 <= begun < 64
    assert len(found) == begun == sum(rows for rows, tokens in shapes if tokens > 1)


@pytest.mark.parametrize("most", [1, 3, 6])
@pytest.mark.parametrize("where", ["prefill", "step"])
def test_out_of_memory_anywhere_loses_no_row_and_changes_no_answer(folder: Path, where: str, most: int) -> None:
    requests = ask(40, SAMPLINGS["drawn"])
    expected = told(list(engine_of(folder).generate(requests)))
    engine = engine_of(folder, 16)
    failures = 0

    def run_out(shape: tuple[int, int]) -> None:
        nonlocal failures
        if shape[0] > most and (shape[1] > 1) == (where == "prefill"):
            failures += 1
            raise torch.OutOfMemoryError("too many rows")

    LOGGED.clear()
    with watched(engine, run_out):
        assert told(list(engine.generate(requests))) == expected
    assert 1 <= failures == len([line for line in LOGGED if "out of memory" in line]) <= 8


def test_out_of_memory_in_a_prefill_leaves_the_running_rows_alone(folder: Path) -> None:
    requests = ask(40, SAMPLINGS["greedy"])
    engine = engine_of(folder, 16)
    expected = told(list(engine.generate(requests)))
    prefills = 0

    def run_out(shape: tuple[int, int]) -> None:
        nonlocal prefills
        prefills += shape[1] > 1
        if prefills == 2 and shape[1] > 1:
            raise torch.OutOfMemoryError("once")

    with watched(engine, run_out) as shapes:
        assert told(list(engine.generate(requests))) == expected
    begun = [rows for rows, tokens in shapes if tokens > 1]
    assert sum(begun) == 40 + begun[1]


def test_out_of_memory_while_rows_move_starts_all_of_them_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.engines.static import kv_cache

    requests = ask(40, SAMPLINGS["drawn"])
    engine = engine_of(folder, 16)
    expected = told(list(engine.generate(requests)))
    move, calls = kv_cache.rearrange, 0

    def once(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        move(*arguments)
        if calls == 3:
            raise torch.OutOfMemoryError("once")

    monkeypatch.setattr(kv_cache, "rearrange", once)
    assert told(list(engine.generate(requests))) == expected
    assert calls > 3


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_row_that_does_not_fit_alone_fails_and_the_others_are_answered(folder: Path, tokens: int) -> None:
    """In its prefill, or later: the model has no room for a row of 60 tokens."""
    requests = ask(20, Sampling(max_new_tokens=20))
    engine = engine_of(folder, 4)
    longest = max(engine.prompt_tokens(requests))
    expected = told(list(engine.generate(requests)))

    def run_out(_module: object, _arguments: object, named: dict[str, Any]) -> None:
        if named["position_ids"].max() >= longest - 1 + tokens:
            raise torch.OutOfMemoryError("too long")

    hook = engine._model.register_forward_pre_hook(run_out, with_kwargs=True)
    try:
        outcomes = list(engine.generate(requests))
    finally:
        hook.remove()
    failed = {outcome.id for outcome in outcomes if isinstance(outcome, Failure)}
    assert 1 <= len(failed) < 10
    assert {name: found for name, found in told(outcomes).items() if name not in failed} == {
        name: found for name, found in expected.items() if name not in failed
    }


def test_a_row_whose_logits_are_not_finite_fails_alone_and_at_its_step(folder: Path) -> None:
    requests = ask(12, SAMPLINGS["greedy"])
    engine = engine_of(folder, 4)
    expected = told(list(engine.generate(requests)))
    spoilt = max(expected, key=lambda name: expected[name][3])
    prompt = engine._chat.encode([request.messages for request in requests if request.id == spoilt])[0]
    position = len(prompt) + 3  # of the fourth new token, which gives the fifth
    named_then: dict[str, Any] = {}

    def note(_module: object, _arguments: object, named: dict[str, Any]) -> None:
        named_then.update(named)

    def spoil(_module: object, _arguments: object, output: Any) -> Any:
        """Also others that come by this position, so that more than one row fails."""
        if named_then["input_ids"].shape[1] == 1:
            output.logits[named_then["position_ids"][:, 0] == position] = torch.nan
        return output

    hooks = [
        engine._model.register_forward_pre_hook(note, with_kwargs=True),
        engine._model.register_forward_hook(spoil),
    ]
    try:
        found = told(list(engine.generate(requests)))
    finally:
        for hook in hooks:
            hook.remove()
    failed = {name for name, outcome in found.items() if outcome[0] == "non_finite_logits"}
    assert len(failed) < 12
    assert "new token 5" in found[spoilt][1]
    assert {name: outcome for name, outcome in found.items() if name not in failed} == {
        name: outcome for name, outcome in expected.items() if name not in failed
    }


def test_a_rows_time_counts_from_when_it_joins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks at every look at it: 25 ticks are enough for most rows, and not for all of them together."""
    requests = ask(40, SAMPLINGS["greedy"])
    whole = told(list(engine_of(folder, 4).generate(requests)))
    engine = engine_of(folder, 4, timeout_seconds=25)
    ticks = 0

    def clock() -> float:
        nonlocal ticks
        ticks += 1
        return float(ticks)

    monkeypatch.setattr("gristmill.engines.static.decoding.time.monotonic", clock)
    found = told(list(engine.generate(requests)))
    monkeypatch.undo()
    late = {name for name, outcome in found.items() if outcome[0] == "timeout"}
    assert ticks > 100
    assert late == {name for name in late if whole[name][3] > 15}
    assert late >= {name for name in whole if whole[name][3] > 26}
    assert {name: outcome for name, outcome in found.items() if name not in late} == {
        name: outcome for name, outcome in whole.items() if name not in late
    }


def test_a_growing_layer_holds_what_a_dynamic_one_holds() -> None:
    from transformers.cache_utils import DynamicLayer

    from gristmill.engines.static.kv_cache import GrowingLayer

    torch.manual_seed(0)
    mine, theirs = GrowingLayer(5), DynamicLayer()
    for tokens in (3, 1, 1, 1, 70, 1, 1):
        keys, values = torch.randn(2, 2, tokens, 4), torch.randn(2, 2, tokens, 6)
        for own, other in zip(mine.update(keys, values), theirs.update(keys, values), strict=True):
            assert torch.equal(own, other)
        assert mine.get_seq_length() == theirs.get_seq_length()


def test_rows_that_join_are_aligned_at_the_right_over_zeros() -> None:
    from gristmill.engines.static.kv_cache import GrowingLayer

    torch.manual_seed(0)
    layer, other = GrowingLayer(8), GrowingLayer(0)
    old, new = torch.randn(3, 1, 4, 2), torch.randn(2, 1, 5, 2)
    layer.update(old, old)
    other.update(new, new + 1)
    layer.rearrange(torch.tensor([2, 0]), 1, other, 9)
    assert layer.keys.shape == (4, 1, 5, 2)
    assert torch.equal(layer.keys[:2, :, 2:], old[[2, 0], :, 1:])
    assert not layer.keys[:2, :, :2].any()
    assert torch.equal(layer.values[2:], new + 1)
    assert not other.is_initialized


def test_an_answer_is_expected_as_long_as_most_that_were_seen() -> None:
    lengths = AnswerLengths(1000)
    for length in range(390, 0, -10):
        lengths.add(length)
    assert lengths.expected(0, running=40) == 1000  # those that ended so far are the short ones
    lengths.add(400)
    assert lengths.expected(0, running=40) == 380
    assert lengths.expected(400, running=40) == 464
    assert lengths.expected(990, running=40) == 1000


def test_a_budget_is_halved_and_stays_so_and_one_row_may_always_try() -> None:
    said: list[str] = []
    budget = TokenBudget(None, on_gpu=False, log=said.append)
    assert budget.rows(10**6) == 32
    budget.halve(32, 100)
    assert (budget.rows(100), budget.rows(400), budget.rows(10**6)) == (16, 4, 1)
    budget.halve(3, 100, running=4)
    assert budget.rows(100) == 5
    assert budget.halved == 2
    assert said == [
        "out of memory with 32 rows of 100 tokens; going on with at most 1600 tokens in a batch",
        "out of memory with 3 rows of 100 tokens beside 4 others; going on with at most 500 tokens in a batch",
    ]
