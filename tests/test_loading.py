"""Facts about placing a model: what the log says of it, and what transformers is given."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gristmill.config.schema import ModelConfig
from gristmill.config.specs import ModelSpec, decode, encode
from gristmill.engines.loading import _given_quantization, _max_memory, module_map, placement
from gristmill.errors import UserError


def test_layers_are_told_as_ranges_of_each_device() -> None:
    layers = {f"model.layers.{number}": int(number >= 16) for number in range(32)}
    placed = {"model.embed_tokens": 0, **layers, "model.norm": 1, "lm_head": 1}
    assert placement(SimpleNamespace(hf_device_map=placed)) == {
        "0": "model.embed_tokens, model.layers.0-15",
        "1": "model.layers.16-31, model.norm, lm_head",
    }


def test_a_gap_in_the_layers_and_a_single_one_are_told() -> None:
    placed = {"layers.0": 0, "layers.1": 0, "layers.3": 0, "layers.4": "cpu"}
    assert placement(SimpleNamespace(hf_device_map=placed)) == {"0": "layers.0-1, layers.3", "cpu": "layers.4"}


def test_a_model_on_one_device_is_there_as_a_whole() -> None:
    assert placement(SimpleNamespace(device="cuda:0")) == {"cuda:0": "all"}


def test_max_memory_and_a_map_reach_transformers_as_numbers_after_the_way_through_json() -> None:
    model = ModelConfig.model_validate(
        {"source": "x", "max_memory": {0: "70GiB", "cpu": "1GB"}, "device_map": {"model": 0, "lm_head": "cpu"}}
    )
    back = decode(ModelSpec, encode(ModelSpec(name="m", model=model))).model
    assert _max_memory(back) == {0: 70 * 2**30, "cpu": 10**9}
    assert back.device_map == {"model": 0, "lm_head": "cpu"}
    assert _max_memory(ModelConfig(source="x")) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_memory": {"gpu0": "70GiB"}}, "max_memory names 'gpu0'"),
        ({"max_memory": {0: "70"}}, "pattern"),
        ({"device_map": "balance"}, "balanced_low_0"),
        ({"quantization": {"bits": 4}}, "quantization has no quant_method"),
    ],
)
def test_a_placement_that_means_nothing_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig.model_validate({"source": "x", **settings})


def test_a_quantization_that_transformers_does_not_know_is_refused() -> None:
    pytest.importorskip("torch")
    with pytest.raises(UserError, match="refused by transformers"):
        _given_quantization({"quant_method": "no-such-method"})


def test_a_quantization_config_of_transformers_is_taken_as_it_is() -> None:
    pytest.importorskip("torch")
    found = _given_quantization({"quant_method": "gptq", "bits": 4, "group_size": 64})
    assert (found.bits, found.group_size) == (4, 64)


@pytest.mark.parametrize("tied", [False, True])
def test_a_map_of_blocks_reaches_every_module_of_the_model(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("torch")
    from accelerate import init_empty_weights
    from accelerate.utils import check_device_map
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(hidden_size=64, num_hidden_layers=12, num_attention_heads=4, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    layers = {f"layer {number}": int(number > 6) for number in range(12)}
    found = module_map(tmp_path, ModelConfig(source="x"), {"embedding": 0, **layers, "rest": 1, "head": 1})
    with init_empty_weights():
        check_device_map(AutoModelForCausalLM.from_config(config), found)
    assert (found["model.layers.1"], found["model.layers.11"]) == (0, 1)
    assert found["model.norm"] == found["model.rotary_emb"] == found["lm_head"] == 1
    shared = module_map(tmp_path, ModelConfig(source="x"), {"embedding": 0, **layers, "rest": 1})
    assert shared["lm_head"] == shared["model.embed_tokens"] == 0
