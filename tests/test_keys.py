"""Facts about keys: what changes an answer changes the key, and nothing else does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill import keys
from gristmill.codec import request_to_json
from gristmill.config.schema import ModelConfig
from gristmill.files import with_checksum, write_jsonl
from gristmill.keys import RequestKeys, code_digest, digest, model_identity, row_seed
from gristmill.types import Request, Sampling
from gristmill.worker import keyed_requests

SAMPLING = Sampling(max_new_tokens=8, temperature=0.5, top_p=0.9, top_k=5, repetition_penalty=1.1, stop=("x",), seed=1)
REQUEST = Request("row-1", 0, "", ({"role": "user", "content": "Why?"},), SAMPLING)
MODEL = ModelConfig(source="org/model")


def key(
    request: Request = REQUEST,
    model: ModelConfig = MODEL,
    weights_hash: str = "abc",
    overflowed: int | None = None,
    dtype: str | None = "bfloat16",
    on_gpu: bool = False,
) -> str:
    weights = {"weights_hash": weights_hash, "dtype": dtype}
    return RequestKeys(model_identity(model, weights, on_gpu), model).key(request, overflowed)


def model(**changes: Any) -> ModelConfig:
    return MODEL.model_copy(update=changes)


def test_a_key_is_32_hex_digits_and_stays_the_same() -> None:
    assert len(key()) == 32
    assert set(key()) <= set("0123456789abcdef")
    assert key() == key(replace(REQUEST), MODEL.model_copy())


def test_the_keys_of_requests_without_labels_and_schema_are_those_of_before_there_were_any() -> None:
    greedy = replace(REQUEST, sampling=replace(SAMPLING, temperature=0.0))
    assert key() == "182f5f9e974e7c081802cf0f0d02d29e"
    assert key(greedy, overflowed=50) == "d25d17ed8ef1d2a45c51a8be38911856"


def test_other_labels_and_another_order_of_them_are_other_questions() -> None:
    orders = [("yes", "no"), ("no", "yes"), ("yes",), ()]
    assert len({key(replace(REQUEST, labels=labels)) for labels in orders}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 9},
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 6},
        {"repetition_penalty": 1.2},
        {"stop": ("y",)},
        {"stop": ("x", "y")},
        {"stop": ()},
        {"seed": 2},
        {"json_schema": '{"type":"object"}'},
    ],
    ids=str,
)
def test_each_sampling_setting_changes_the_key(change: dict[str, Any]) -> None:
    assert key(replace(REQUEST, sampling=replace(SAMPLING, **change))) != key()


def test_every_sampling_setting_is_tried_above() -> None:
    tried = {"max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop", "seed", "json_schema"}
    assert set(Sampling.__dataclass_fields__) == tried


@pytest.mark.parametrize(
    "change",
    [
        {"id": "row-2"},
        {"sample": 1},
        {"variant": "second_first"},
        {"messages": ({"role": "user", "content": "Why? "},)},
        {"messages": ({"role": "system", "content": "Why?"},)},
        {"messages": ({"role": "user", "content": "Wh"}, {"role": "user", "content": "y?"})},
        {"labels": ("yes", "no")},
    ],
    ids=str,
)
def test_row_sample_variant_and_messages_change_the_key(change: dict[str, Any]) -> None:
    assert key(replace(REQUEST, **change)) != key()


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"quantization": "8bit"}, {"quantization": "4bit"}], ids=str)
def test_dtype_and_quantization_change_the_key(change: dict[str, Any]) -> None:
    assert key(model=MODEL.model_copy(update=change)) != key()


def test_dtype_auto_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu() -> None:
    assert key() == key(model=model(dtype="float32")) == key(dtype="float16")
    assert key(on_gpu=True) == key(model=model(dtype="bfloat16"), on_gpu=True)
    assert len({key(), key(on_gpu=True), key(on_gpu=True, dtype="float16"), key(on_gpu=True, dtype=None)}) == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dtype_that_is_named_is_the_same_on_a_cpu_and_on_a_gpu(dtype: str) -> None:
    assert key(model=model(dtype=dtype)) == key(model=model(dtype=dtype), on_gpu=True)


def test_an_echo_model_has_no_dtype_of_its_own() -> None:
    assert key(model=model(engine="echo")) == key(model=model(engine="echo"), on_gpu=True)


def key_of(engine: str, temperature: float) -> str:
    """The key of an answer by an engine."""
    return key(replace(REQUEST, sampling=replace(SAMPLING, temperature=temperature)), model=model(engine=engine))


def test_a_greedy_answer_is_known_whatever_engine_gave_it() -> None:
    assert len({key_of(engine, 0.0) for engine in ("auto", "static", "continuous")}) == 1
    assert key_of("echo", 0.0) != key_of("static", 0.0)


def test_a_sampled_answer_is_known_to_the_engines_that_draw_alike() -> None:
    assert key_of("static", 0.7) == key_of("continuous", 0.7)
    assert len({key_of(engine, 0.7) for engine in ("static", "auto", "echo")}) == 3


def test_a_document_by_a_schema_is_known_to_the_engines_that_write_it_alike_and_a_likelihood_to_all() -> None:
    schema = replace(SAMPLING, temperature=0.0, json_schema='{"type":"object"}')
    labelled = replace(REQUEST, labels=("yes", "no"))
    engines = ("static", "continuous", "vllm", "auto")
    assert len({key(replace(REQUEST, sampling=schema), model=model(engine=engine)) for engine in engines}) == 3
    assert len({key(labelled, model=model(engine=engine)) for engine in engines}) == 1
    assert key(labelled, model=model(engine="echo")) != key(labelled)


@pytest.mark.parametrize("name", ["4bit", "8bit"])
def test_a_short_name_of_a_quantization_is_known_by_the_settings_it_stands_for(name: str) -> None:
    written = dict(keys.QUANTIZATION[name])
    assert key(model=model(quantization=name)) == key(model=model(quantization=written))
    for setting in written:
        other = {**written, setting: "other"}
        assert key(model=model(quantization=other)) != key(model=model(quantization=name))


@pytest.mark.parametrize("name", ["4bit", "8bit"])
def test_the_key_sees_the_quantization_that_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from transformers import BitsAndBytesConfig
    from transformers.quantizers import auto  # noqa: F401 - loaded before find_spec is replaced

    from gristmill.engines import loading

    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())  # bitsandbytes need not be installed
    monkeypatch.setattr(BitsAndBytesConfig, "post_init", lambda self: None)
    loaded = loading._quantization(model(quantization=name)).to_dict()
    written = BitsAndBytesConfig(**{k: v for k, v in keys.QUANTIZATION[name].items() if k != "quant_method"}).to_dict()
    assert {key: value for key, value in loaded.items() if written[key] != value} == {}


def test_the_weights_change_the_key() -> None:
    assert key(weights_hash="abd") != key()


def test_the_generation_version_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(keys, "GENERATION_VERSION", keys.GENERATION_VERSION + 1)
    assert key() != before


def test_a_templates_text_changes_the_key_and_its_name_does_not(tmp_path: Path) -> None:
    texts = {"a.jinja": "{{ messages }}", "b.jinja": "{{ messages }}", "c.jinja": "{{ messages }} "}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    a, b, c = (key(model=MODEL.model_copy(update={"chat_template": str(tmp_path / name)})) for name in texts)
    assert a == b
    assert len({a, c, key()}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"source": "other/place"},
        {"revision": "main"},
        {"gpus_per_model": 4},
        {"device_map": "balanced"},
        {"attention": "sdpa"},
        {"max_memory": {"0": "1GiB"}},
        {"max_batch_rows": 1},
        {"allow_offload": True},
        {"allow_pickle": True},
        {"trust_remote_code": True},
        {"on_overflow": "skip"},
        {"context_tokens": 100},
    ],
    ids=str,
)
def test_where_and_how_a_model_runs_does_not_change_the_key(change: dict[str, Any]) -> None:
    assert key(model=MODEL.model_copy(update=change)) == key()


def test_the_overflow_policy_counts_only_for_a_prompt_that_does_not_fit() -> None:
    policies = [MODEL.model_copy(update={"on_overflow": name}) for name in ("truncate_left", "truncate_middle", "skip")]
    assert len({key(model=model) for model in policies}) == 1
    assert len({key(model=model, overflowed=50) for model in policies} | {key()}) == 4


def test_the_context_counts_only_for_a_prompt_that_does_not_fit_and_as_it_is_in_force() -> None:
    contexts = [MODEL.model_copy(update={"on_overflow": "skip", "context_tokens": size}) for size in (50, 60)]
    assert len({key(model=model) for model in contexts}) == 1
    assert len({key(model=model, overflowed=40) for model in contexts}) == 1  # the model's own limit is lower
    assert key(overflowed=50) != key(overflowed=60)


def shard_line(content: str, prompt_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4, "stop": [], "seed": 0}
    messages = [{"role": "user", "content": content}]
    return {
        "id": content, "sample": 0, "variant": "", "messages": messages, "sampling": sampling,
        "prompt_tokens": prompt_tokens,
    }  # fmt: skip


def test_a_shards_keys_ignore_the_models_name_and_folder(tmp_path: Path) -> None:
    shards = [tmp_path / "1-of-2.jsonl", tmp_path / "3-of-9.jsonl"]
    for path in shards:
        write_jsonl(path, map(with_checksum, [shard_line("a", 1), shard_line("b", 1)]))
    here = {"name": "a", "folder": "/here", "weights_hash": "abc", "context_tokens": 10}
    there = here | {"name": "b", "folder": "/there"}
    assert list(keyed_requests(shards[0], MODEL, here)) == list(keyed_requests(shards[1], MODEL, there))


def test_a_new_overflow_policy_asks_only_the_prompts_that_do_not_fit(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1-of-1.jsonl", map(with_checksum, [shard_line("fits", 6), shard_line("does not", 7)]))
    weights = {"weights_hash": "abc", "context_tokens": 10}
    by_policy: list[dict[str, str]] = []
    for policy in ("skip", "truncate_left"):
        model = MODEL.model_copy(update={"on_overflow": policy})
        found = keyed_requests(tmp_path / "1-of-1.jsonl", model, weights)
        by_policy.append({request.id: name for name, request in found.items()})
    assert by_policy[0]["fits"] == by_policy[1]["fits"]
    assert by_policy[0]["does not"] != by_policy[1]["does not"]


# ---- seeds


def test_a_rows_seed_is_pinned() -> None:
    assert row_seed(REQUEST) == 8_919_724_151_934_432_958


@pytest.mark.parametrize(
    "change",
    [{"id": "row-2"}, {"sample": 1}, {"variant": "v"}, {"sampling": replace(SAMPLING, seed=2)}],
    ids=["id", "sample", "variant", "seed"],
)
def test_every_row_sample_variant_and_seed_draws_from_its_own_stream(change: dict[str, Any]) -> None:
    assert row_seed(replace(REQUEST, **change)) != row_seed(REQUEST)


def test_a_rows_seed_does_not_depend_on_the_prompt_or_the_temperature() -> None:
    other = replace(REQUEST, messages=(), sampling=replace(SAMPLING, temperature=1.0, max_new_tokens=1))
    assert row_seed(other) == row_seed(REQUEST)


def test_seeds_of_many_rows_are_63_bit_and_all_different() -> None:
    requests = [replace(REQUEST, id=str(row), sample=sample) for row in range(500) for sample in range(4)]
    seeds = {row_seed(request) for request in requests}
    assert len(seeds) == len(requests)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_a_row_id_with_a_lone_surrogate_has_a_key_and_a_seed() -> None:
    odd = replace(REQUEST, id="\ud800")
    assert key(odd) != key()
    assert row_seed(odd) != row_seed(REQUEST)


# ---- code


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A library of two modules and a package in place of the real one."""
    monkeypatch.setattr(keys, "__file__", str(tmp_path / "keys.py"))
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    for name in ("one.py", "two.py", "package/__init__.py", "package/page.html"):
        write(name, "")
    return write


def test_a_code_digest_follows_the_named_modules_only(library: Callable[[str, str], None]) -> None:
    before = code_digest("one", "package")
    library("two.py", "changed")
    library("package/__pycache__/one.pyc", "changed")
    assert code_digest("one", "package") == before
    library("package/page.html", "changed")
    assert code_digest("one", "package") != before


def test_a_code_digest_finds_a_module_inside_a_package(library: Callable[[str, str], None]) -> None:
    library("package/inner.py", "a")
    before = code_digest("package.inner")
    library("package/inner.py", "b")
    assert code_digest("package.inner") != before


def test_a_code_digest_of_a_module_that_is_gone_is_an_error(library: Callable[[str, str], None]) -> None:
    with pytest.raises(FileNotFoundError, match="renamed"):
        code_digest("one", "renamed")


@pytest.mark.parametrize("overflowed", [None, 512])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_key_is_the_hash_of_model_overflow_and_request(overflowed: int | None, temperature: float) -> None:
    asked = replace(REQUEST, sampling=replace(SAMPLING, temperature=temperature))
    identity = {"weights": "w", "engine": "rows", "chat_template": "{{ x }} \u00e9 \ud800"}
    policy = None if overflowed is None else ["error", overflowed]
    entered = identity if temperature else identity | {"engine": None}
    whole = {"request": request_to_json(asked), "model": entered, "overflow": policy}
    made = RequestKeys(identity, MODEL)
    assert made.key(asked, overflowed) == digest(whole)
    assert made.key(asked, overflowed) == digest(whole)  # a second key begins anew
