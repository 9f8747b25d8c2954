"""Facts about the likelihood of labels: it is what the model says, whatever the batch, or a failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_llama import WORDS
from test_decoding import LOGGED, engine_of, save, watched

from gristmill import worker
from gristmill.codec import request_from_json, request_to_json
from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.config.specs import ModelSpec
from gristmill.engines.echo import EchoEngine
from gristmill.engines.static.engine import StaticEngine
from gristmill.engines.tokens import Tokens, tokenize
from gristmill.errors import UserError
from gristmill.files import read_jsonl, with_checksum, write_jsonl, write_sealed
from gristmill.merging import merged
from gristmill.planning.workers import Worker
from gristmill.splitting import split
from gristmill.types import Completion, Failure, JsonDict, Message, Request, Sampling
from gristmill.weights import prepare
from gristmill.worker import Shard, run_shard

torch = pytest.importorskip("torch")

SAMPLING = Sampling(max_new_tokens=40)
#: One token, several, and labels that begin alike.
LABELS = {
    "single": (" red", " blue", " green"),
    "multi": (" red river", " old stone house", " new"),
    "shared": (" red", " red river", " red river bird", " red stone"),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen": ("Qwen3", {"head_dim": 8}),
    "gpt2": ("GPT2", {"n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "sliding": ("Mistral", {"sliding_window": 8}),
    "state": ("Mamba", {"state_size": 4}),
    "dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "Llama")


def ask(count: int, *labels: tuple[str, ...], longest: int = 59) -> list[Request]:
    """Prompts of many lengths, asked about the sets of labels in turn."""
    texts = [" ".join(WORDS[(7 * n + m * m) % len(WORDS)] for m in range(1 + n * 37 % longest)) for n in range(count)]
    return [
        Request(f"r{n}", 0, "", (Message(role="user", content=text),), SAMPLING, labels[n % len(labels)])
        for n, text in enumerate(texts)
    ]


def naive(engine: StaticEngine, request: Request) -> list[float]:
    """One forward pass of prompt and label for each label, and a sum over its tokens."""
    prompt = engine._chat.render(request.messages)
    start = len(engine._chat.encode_prompts([prompt])[0])
    found = []
    for label in request.labels:
        (ids,) = engine._chat.encode_prompts([prompt + label])
        with torch.inference_mode():
            logits = engine._model(input_ids=torch.tensor([ids])).logits[0].float()
        scores = torch.log_softmax(logits, dim=-1)
        found.append(sum(scores[place - 1, ids[place]].item() for place in range(start, len(ids))))
    return found


def scores(engine: StaticEngine, requests: Sequence[Request]) -> dict[str, tuple[float, ...]]:
    found = [outcome for outcome in engine.generate(requests) if isinstance(outcome, Completion)]
    assert len(found) == len(requests)
    return {outcome.id: outcome.label_logprobs or () for outcome in found}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_a_labels_likelihood_is_that_of_a_pass_of_its_own(tmp_path: Path, kind: str, labels: tuple[str, ...]) -> None:
    engine = engine_of(save(tmp_path, MODELS[kind][0], **MODELS[kind][1]), 5)
    requests = ask(12, labels, longest=57)
    found = scores(engine, requests)
    for request in requests:
        assert found[request.id] == pytest.approx(naive(engine, request), abs=1e-4)


def test_a_likelihood_does_not_depend_on_the_batch(folder: Path) -> None:
    requests = ask(40, *LABELS.values())
    alone = {name: found for one in requests for name, found in scores(engine_of(folder, 1), [one]).items()}
    for rows in (2, 7, 64):
        found = scores(engine_of(folder, rows), requests)
        assert {name: pytest.approx(values, abs=1e-4) for name, values in alone.items()} == found


def test_labels_of_one_token_need_one_pass_and_others_do_not_read_the_prompt_again(folder: Path) -> None:
    engine = engine_of(folder, 64)
    with watched(engine) as shapes:
        scores(engine, ask(8, LABELS["single"]))
    assert [rows for rows, _ in shapes] == [8]
    with watched(engine) as shapes:
        scores(engine, ask(8, LABELS["shared"]))
    assert [tokens for _, tokens in shapes[1:]] == [1, 2, 1]


def test_all_single_tokens_together_have_the_mass_1(folder: Path) -> None:
    """The vocabulary of the small model, but for its three special tokens, whose mass is what is missing."""
    engine = engine_of(folder)
    (request,) = ask(1, tuple(f" {word}" for word in WORDS))
    (ids,) = engine._chat.encode([request.messages])
    with torch.inference_mode():
        special = engine._model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)[:3].sum().item()
    assert sum(map(math.exp, scores(engine, [request])["r0"])) == pytest.approx(1 - special, abs=1e-4)


def test_the_text_is_the_most_likely_label_and_nothing_is_generated(folder: Path) -> None:
    engine = engine_of(folder)
    for outcome, request in zip(engine.generate(ask(5, LABELS["multi"])), ask(5, LABELS["multi"]), strict=True):
        assert isinstance(outcome, Completion)
        assert outcome.label_logprobs is not None
        best = max(range(3), key=outcome.label_logprobs.__getitem__)
        assert (outcome.text, outcome.finish_reason, outcome.completion_tokens) == (request.labels[best], "stop", 0)
        break
    lengths = {outcome.id: outcome.prompt_tokens for outcome in engine.generate(ask(5, LABELS["multi"]))}  # type: ignore[union-attr]
    plain = [replace(request, labels=()) for request in ask(5, LABELS["multi"])]
    assert [lengths[request.id] for request in plain] == engine.prompt_tokens(plain)


def test_answers_and_likelihoods_may_be_asked_for_together(folder: Path) -> None:
    engine = engine_of(folder, 4)
    labelled, plain = ask(6, LABELS["multi"]), [replace(one, sample=1, labels=()) for one in ask(6, ())]
    found = {outcome.rid: outcome for outcome in engine.generate([*labelled, *plain])}
    alone = {outcome.rid: outcome for outcome in engine.generate(plain)}
    assert len(found) == 12
    for request in plain:
        answer = found[request.rid]
        assert isinstance(answer, Completion)
        assert answer.label_logprobs is None
        assert answer.text == alone[request.rid].text  # type: ignore[union-attr]


# ---- memory, signals, broken models


def test_out_of_memory_halves_the_batch_and_changes_no_likelihood(folder: Path) -> None:
    requests = ask(24, *LABELS.values())
    expected = scores(engine_of(folder), requests)
    engine = engine_of(folder, 16)

    def run_out(shape: tuple[int, int]) -> None:
        if shape[0] > 3:
            raise torch.OutOfMemoryError("too many rows")

    LOGGED.clear()
    with watched(engine, run_out):
        found = scores(engine, requests)
    assert {name: pytest.approx(values, abs=1e-4) for name, values in expected.items()} == found
    assert any("out of memory" in line for line in LOGGED)


def test_a_row_that_does_not_fit_alone_fails_and_the_others_are_scored(folder: Path) -> None:
    requests = ask(12, LABELS["multi"])
    engine = engine_of(folder, 4)
    longest = max(engine.prompt_tokens(requests)) - 3

    def run_out(shape: tuple[int, int]) -> None:
        if shape[1] >= longest:
            raise torch.OutOfMemoryError("too long")

    with watched(engine, run_out):
        outcomes = list(engine.generate(requests))
    assert len(outcomes) == 12
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert 1 <= len(failed) < 6
    assert {(one.reason, "prompt tokens and 3 new ones" in one.detail) for one in failed} == {("out_of_memory", True)}


@pytest.mark.parametrize("whole", [False, True])
def test_logits_that_are_not_finite_are_a_failure_and_no_likelihood(folder: Path, whole: bool) -> None:
    engine = engine_of(folder, 1, whole=whole)
    requests = ask(4, LABELS["multi"])
    spoilt = engine._chat.encode([requests[2].messages])[0]

    def spoil(_module: object, _arguments: object, named: dict[str, Any], output: Any) -> Any:
        if named["input_ids"][0, : len(spoilt)].tolist() == spoilt:
            output.logits[0, -1, 5] = torch.nan
        return output

    hook = engine._model.register_forward_hook(spoil, with_kwargs=True)
    try:
        outcomes = {outcome.id: outcome for outcome in engine.generate(requests)}
    finally:
        hook.remove()
    failed = outcomes.pop("r2")
    assert isinstance(failed, Failure)
    assert failed.reason == "non_finite_logits"
    assert all(isinstance(outcome, Completion) for outcome in outcomes.values())


def test_weights_that_are_nan_make_no_likelihood_at_all(tmp_path: Path) -> None:
    engine = engine_of(save(tmp_path, "Llama"), 4)
    with torch.no_grad():
        engine._model.lm_head.weight[3] = torch.nan
    outcomes = list(engine.generate(ask(6, LABELS["single"])))
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Failure)] == ["non_finite_logits"] * 6


def test_after_a_stop_no_batch_begins(folder: Path) -> None:
    engine = engine_of(folder, 4)
    running = engine.generate(ask(12, LABELS["single"]))
    first = next(running)
    engine.stop()
    assert len([first, *running]) == 4


# ---- prompts that are too long


def short(engine: StaticEngine, context: int, policy: str) -> StaticEngine:
    engine._context_tokens = context
    engine._config = engine._config.model_copy(update={"on_overflow": policy})
    return engine


def test_the_longest_label_counts_as_a_part_of_the_prompt(folder: Path) -> None:
    engine = engine_of(folder)
    requests = ask(5, LABELS["shared"])
    plain = engine.prompt_tokens([replace(request, labels=()) for request in requests])
    assert engine.prompt_tokens(requests) == [tokens + 3 for tokens in plain]
    context = max(plain) + 3
    assert len(scores(short(engine, context, "error"), requests)) == 5
    with pytest.raises(UserError, match=rf"{max(plain)} prompt tokens, but {max(plain) - 1} fit; .*on_overflow"):
        list(short(engine, context - 1, "error").generate(requests))


@pytest.mark.parametrize("policy", ["truncate_left", "truncate_middle"])
def test_a_long_prompt_is_shortened_and_its_labels_are_not(folder: Path, policy: str) -> None:
    engine = engine_of(folder)
    requests = ask(5, LABELS["shared"])
    tokens = [asked.prompt for asked in tokenize(requests, engine._chat)]
    found = {outcome.id: outcome for outcome in short(engine, 13, policy).generate(requests)}
    for request, ids in zip(requests, tokens, strict=True):
        outcome = found[request.id]
        assert isinstance(outcome, Completion)
        assert (outcome.prompt_tokens, outcome.prompt_cut_tokens) == (min(10, len(ids)), max(0, len(ids) - 10))
        kept = ids if len(ids) <= 10 else ids[-10:] if policy == "truncate_left" else ids[:5] + ids[-5:]
        with torch.inference_mode():
            logits = engine._model(input_ids=torch.tensor([kept])).logits[0, -1]
        red = engine._chat.tokenizer.convert_tokens_to_ids("red")
        assert outcome.label_logprobs is not None
        assert outcome.label_logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[red].item(), abs=1e-4)


def test_a_long_prompt_that_is_skipped_has_no_likelihood(folder: Path) -> None:
    engine = engine_of(folder)
    requests = ask(5, LABELS["shared"])
    found = {outcome.id: outcome for outcome in short(engine, 13, "skip").generate(requests)}
    lengths = engine.prompt_tokens(requests)
    for request, tokens in zip(requests, lengths, strict=True):
        outcome = found[request.id]
        assert isinstance(outcome, Completion)
        assert (outcome.finish_reason == "skipped") == (tokens > 13) == (outcome.label_logprobs is None)
    assert max(lengths) > 13


# ---- where a label begins


class Chat:
    """A tokenizer whose tokens are the pairs of a list, greedily, and else the single letters."""

    def __init__(self, *pairs: str) -> None:
        self.pairs = pairs

    def render(self, messages: Sequence[Message]) -> str:
        return messages[-1]["content"]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            token = text[:2] if text[:2] in self.pairs else text[:1]
            ids.append(sum(ord(letter) << 8 * place for place, letter in enumerate(token)))
            text = text[len(token) :]
        return ids


def cut(chat: Chat, prompt: str, *labels: str) -> Tokens:
    request = Request("r", 0, "", (Message(role="user", content=prompt),), SAMPLING, labels)
    (found,) = tokenize([request], chat)  # type: ignore[arg-type]
    return found


def test_a_label_that_merges_with_the_prompts_end_counts_from_there_and_so_do_the_others() -> None:
    chat = Chat(" A", " B")
    assert cut(Chat(), "is: ", "A") == Tokens([*map(ord, "is: ")], ((ord("A"),),))
    ids = {text: chat._encode(text) for text in (" A", " B", " C")}
    assert cut(chat, "is: ", "A", "B") == Tokens([*map(ord, "is:")], (tuple(ids[" A"]), tuple(ids[" B"])))
    mixed = cut(chat, "is: ", "A", "C")
    assert mixed == Tokens([*map(ord, "is:")], (tuple(ids[" A"]), tuple(map(ord, " C"))))
    assert mixed.tokens == 5


@given(
    st.text("ab ", min_size=1, max_size=8),
    st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["aa", "ab", " a", " b", "b ", "  "]), unique=True),
)
@settings(deadline=None)
def test_prompt_and_label_together_are_the_tokens_of_the_whole_text(
    prompt: str, labels: list[str], pairs: list[str]
) -> None:
    chat = Chat(*pairs)
    found = cut(chat, prompt, *labels)
    assert [found.prompt + list(ids) for ids in found.labels] == [chat._encode(prompt + label) for label in labels]
    assert found.prompt == chat._encode(prompt)[: len(found.prompt)]
    assert found.tokens == max(len(chat._encode(prompt + label)) for label in labels)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ((" red", " "), r"r0#0: label ' ' has no tokens .*; change it"),
        ((" red", ""), "label '' has no tokens"),
        ((" red", "  red"), r"labels ' red' and '  red' are the same tokens .*; change one"),
        ((" unheard", " unseen"), "labels ' unheard' and ' unseen' are the same tokens"),
    ],
)
def test_labels_that_the_model_cannot_tell_apart_are_refused(folder: Path, labels: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(engine_of(folder).generate(ask(1, labels)))


# ---- the engine without a model


def test_echo_gives_each_question_numbers_of_its_own_with_a_mass_below_1() -> None:
    requests = ask(50, LABELS["multi"], LABELS["shared"])
    found = {outcome.id: outcome for outcome in EchoEngine().generate(requests)}
    again = {outcome.id: outcome for outcome in EchoEngine().generate(requests[::-1])}
    assert len({outcome.label_logprobs for outcome in found.values() if isinstance(outcome, Completion)}) == 50
    for request in requests:
        outcome, other = found[request.id], again[request.id]
        assert isinstance(outcome, Completion)
        assert isinstance(other, Completion)
        assert outcome.label_logprobs is not None
        assert outcome.label_logprobs == other.label_logprobs
        assert 0.4 < sum(map(math.exp, outcome.label_logprobs)) < 1
        best = max(range(len(request.labels)), key=outcome.label_logprobs.__getitem__)
        assert (outcome.text, outcome.completion_tokens) == (request.labels[best], 0)


def test_echo_counts_the_longest_label_with_the_prompt() -> None:
    (request,) = ask(1, (" red river", " new"))
    words = len(request.messages[0]["content"].split())
    assert EchoEngine().prompt_tokens([request]) == [words + 2]
    (fits,) = EchoEngine(words + 2).generate([request])
    assert isinstance(fits, Completion)
    assert (fits.prompt_tokens, fits.prompt_cut_tokens) == (words, 0)
    with pytest.raises(UserError, match="see models"):
        list(EchoEngine(words + 1).generate([request]))


# ---- through a worker


def shard_of(folder: Path, requests: Sequence[Request], tokens: int = 3) -> Shard:
    path = folder / "shards" / "1-of-1.jsonl"
    write_jsonl(path, (with_checksum(request_to_json(request) | {"prompt_tokens": tokens}) for request in requests))
    places = (path, folder / "journal", folder / "parts" / "1-of-1.jsonl", folder / "gpu" / "1-of-1.jsonl")
    return Shard("runs/a", "1-of-1", *places, Worker(gpus=1))


def test_a_likelihood_is_carried_from_the_model_to_the_merged_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*ask(6, LABELS["multi"]), *(replace(one, sample=1, labels=()) for one in ask(3, ()))]
    shard = shard_of(tmp_path, requests)
    model = ModelConfig.model_validate({"source": str(folder), "engine": "auto"})
    weights = prepare("m", model, print)
    run_shard(shard, model, weights, GpusConfig(wait_minutes=0), 1)
    expected = scores(engine_of(folder), requests[:6])
    lines = list(read_jsonl(shard.part))
    found = {line["id"]: line["label_logprobs"] for line in lines if line["sample"] == 0}
    assert found == {name: pytest.approx(list(values), abs=1e-4) for name, values in expected.items()}
    assert not any("label_logprobs" in line for line in lines if line["sample"] == 1)

    before = shard.part.read_bytes()
    shard.part.unlink()
    monkeypatch.setattr(worker, "open_engine", None)  # calling it would fail: the journal has all
    run_shard(shard, model, weights, GpusConfig(wait_minutes=0), 1)
    assert shard.part.read_bytes() == before

    asked = [request_to_json(request) | {"reference": None, "row": {}} for request in requests]
    for line, request in zip(merged(asked, [shard.part]), requests, strict=True):
        assert line.get("label_logprobs") == (found[request.id] if request.labels else None)
        assert ("label_logprobs" in line) == bool(request.labels)
        assert line.get("labels", []) == list(request.labels)


def test_a_renamed_units_likelihoods_are_adopted(tmp_path: Path) -> None:
    echo = ModelConfig(engine="echo")
    weights: JsonDict = {"name": "m", "folder": None, "weights_hash": "e", "context_tokens": None}
    old = shard_of(tmp_path / "old", ask(4, LABELS["multi"]))
    run_shard(old, echo, weights, GpusConfig(wait_minutes=0), 1)
    new = replace(shard_of(tmp_path / "new", ask(4, LABELS["multi"])), left_behind=(old.journal,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "open_engine", None)
        run_shard(new, echo, weights, GpusConfig(wait_minutes=0), 1)
    assert new.part.read_bytes() == old.part.read_bytes()
    assert all(len(line["label_logprobs"]) == 3 for line in read_jsonl(new.part))


def test_labels_travel_into_the_shards_and_what_does_not_fit_is_refused_there(folder: Path, tmp_path: Path) -> None:
    requests = ask(6, LABELS["shared"])
    write_sealed(tmp_path / "requests.jsonl", map(request_to_json, requests))
    spec = ModelSpec(name="m", model=ModelConfig.model_validate({"source": str(folder)}))
    weights = {"name": "m", "folder": str(folder), "weights_hash": "h", "dtype": "float32"}
    longest = max(engine_of(folder).prompt_tokens(requests))
    fits = weights | {"context_tokens": longest}
    split(tmp_path / "requests.jsonl", tmp_path / "shards", 1, spec, fits)
    lines = list(read_jsonl(tmp_path / "shards" / "1-of-1.jsonl"))
    assert [request_from_json(line) for line in lines] == requests
    assert max(line["prompt_tokens"] for line in lines) == longest
    said = rf"longest has {longest} tokens with its longest label, and the context has {longest - 1}; .*on_overflow"
    with pytest.raises(UserError, match=said):
        split(tmp_path / "requests.jsonl", tmp_path / "other", 1, spec, weights | {"context_tokens": longest - 1})


# ---- a real vocabulary


@pytest.mark.model
def test_the_real_models_likelihoods_are_those_of_passes_of_their_own(smollm2_folder: Path) -> None:
    model = ModelConfig.model_validate({"source": str(smollm2_folder), "dtype": "float32"})
    engine = StaticEngine(smollm2_folder, model, 8192, on_gpu=False, log=LOGGED.append)
    texts = ["Is Paris the capital of France? Answer yes or no.", "Is water dry?", "Name a color. " * 20]
    sets = [("Yes", "No"), ("yes, it is", "no, it is not", "no"), ("\nred", "blue-green", "Antidisestablishment")]
    requests = [
        Request(f"r{n}", 0, "", (Message(role="user", content=text),), SAMPLING, labels)
        for n, (text, labels) in enumerate(zip(texts, sets, strict=True))
    ]
    found = scores(engine, requests)
    for request in requests[:2]:
        assert found[request.id] == pytest.approx(naive(engine, request), abs=1e-4)
    # "\n" merges with the line end of the generation prompt: there all labels count from before it
    (asked,) = tokenize(requests[2:], engine._chat)
    start = len(asked.prompt)
    for ids, score in zip(asked.labels, found["r2"], strict=True):
        whole = [*asked.prompt, *ids]
        with torch.inference_mode():
            logs = torch.log_softmax(engine._model(input_ids=torch.tensor([whole])).logits[0].float(), -1)
        assert score == pytest.approx(
            sum(logs[place - 1, whole[place]].item() for place in range(start, len(whole))), abs=1e-4
        )
