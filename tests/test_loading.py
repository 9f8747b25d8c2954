"""Facts about placing a model: what the log says of it, and what transformers is given."""

from types import SimpleNamespace

import pytest

from gristmill.config.schema import ModelConfig
from gristmill.config.specs import ModelSpec, decode, encode
from gristmill.engines.loading import _given_quantization, _max_memory, placement
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
