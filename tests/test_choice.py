"""Facts about the choice of an engine: what auto takes, and what speaks against the others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.config.schema import ModelConfig
from gristmill.engines import choice
from gristmill.engines.choice import Setting, choose
from gristmill.engines.continuous import flash
from gristmill.errors import UserError
from gristmill.types import Sampling

LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512}


@pytest.fixture(autouse=True)
def a_card_with_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a card says, which this machine may not have; and no vllm, whatever is installed."""
    monkeypatch.setattr(flash, "offer", lambda: flash.OURS)
    monkeypatch.setattr(flash, "capability", lambda: (9, 0))
    monkeypatch.setattr(choice.vllm_limits, "why_not", lambda *_: "vllm is not installed")


def setting(folder: Path, gpus: int = 1, config: dict[str, Any] | None = None, **settings: Any) -> Setting:
    (folder / "config.json").write_text(json.dumps(LLAMA | (config or {})))
    penalty = settings.pop("repetition_penalty", 1.0)
    model = ModelConfig.model_validate({"source": str(folder), **settings})
    return Setting(folder, model, {"dtype": "bfloat16"}, gpus, {Sampling(8, repetition_penalty=penalty)})


def test_auto_is_continuous_on_one_gpu_and_cut_over_several(tmp_path: Path) -> None:
    one, four = choose(setting(tmp_path)), choose(setting(tmp_path, gpus=4))
    assert (one.engine, one.ranks, one.why) == (
        "continuous", 1, "auto: continuous batching; vllm is not installed",
    )  # fmt: skip
    assert (four.engine, four.ranks) == ("continuous", 4)
    assert "cut over the group's GPUs" in four.why


def test_auto_is_static_on_a_cpu(tmp_path: Path) -> None:
    found = choose(setting(tmp_path, gpus=0))
    assert (found.engine, found.why) == ("static", "auto: vllm is not installed; static is faster on a CPU")


@pytest.mark.parametrize(
    ("gpus", "config", "settings", "reason"),
    [
        (1, {"layer_types": ["full_attention", "linear_attention"]}, {}, "no pages for layers of linear_attention"),
        (1, {}, {"dtype": "float32"}, "flash attention needs bfloat16 or float16, and the model runs in float32"),
        (1, {}, {"attention": "eager"}, "attention: eager is not a flash attention"),
        (1, {}, {"allow_offload": True}, "takes no device_map, max_memory or allow_offload"),
        (1, {}, {"quantization": "4bit"}, "quantized models is not taken unasked"),
        (1, {}, {"trust_remote_code": True}, "its own code is not taken unasked"),
        (1, {"head_dim": 512}, {}, "heads of 512 are larger than the 256 of flash attention"),
        (1, {"attn_logit_softcapping": 50.0}, {}, "its attention is soft-capped"),
        (1, {"model_type": "gpt_oss"}, {}, "its attention has sinks"),
        (1, {"rope_parameters": {"rope_type": "dynamic"}}, {}, "scaled by the longest row (dynamic rope)"),
        (1, {"rope_scaling": {"type": "longrope"}}, {}, "scaled by the longest row (longrope rope)"),
        (1, {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, {}, "scaled by the longest row"),
        (2, {"model_type": "gpt2", "num_attention_heads": None, "n_head": 4}, {}, "no plan to cut gpt2 models"),
        (3, {}, {}, "8 heads and 4 key-value heads do not divide by 3 GPUs"),
        (2, {}, {"parallel": "layers"}, "parallel: layers"),
        (2, {}, {"repetition_penalty": 1.2}, "a repetition_penalty needs the static engine"),
        (2, {"model_type": "gpt2"}, {}, "no plan to cut gpt2 models"),
    ],
)  # fmt: skip
def test_auto_is_static_where_something_speaks_against_continuous_and_says_what(
    tmp_path: Path, gpus: int, config: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    found = choose(setting(tmp_path, gpus, config, **settings))
    assert found.engine == "static"
    assert reason in found.why


def test_a_repetition_penalty_on_one_gpu_leaves_continuous_to_the_other_rows(tmp_path: Path) -> None:
    assert choose(setting(tmp_path, repetition_penalty=1.2)).engine == "continuous"


def test_a_named_engine_is_taken_or_refused_with_the_reason(tmp_path: Path) -> None:
    assert choose(setting(tmp_path, engine="continuous", quantization="4bit")).engine == "continuous"
    assert choose(setting(tmp_path, gpus=0, engine="continuous")).engine == "continuous"
    assert choose(setting(tmp_path, gpus=3, engine="static")).engine == "static"
    with pytest.raises(UserError, match=r"engine: continuous cannot be used: 8 heads .* 3 GPUs; set engine: auto"):
        choose(setting(tmp_path, gpus=3, engine="continuous"))
    with pytest.raises(UserError, match="engine: vllm cannot be used: vllm is not installed"):
        choose(setting(tmp_path, engine="vllm"))


def test_tensor_parallel_that_is_asked_for_and_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"parallel: tensor cannot be used: .* set parallel: auto or layers"):
        choose(setting(tmp_path, gpus=3, parallel="tensor"))
    assert choose(setting(tmp_path, gpus=2, parallel="tensor")).ranks == 2
    with pytest.raises(ValueError, match="parallel: tensor needs engine: continuous or auto"):
        setting(tmp_path, engine="static", parallel="tensor")


def test_vllm_is_left_where_it_would_change_a_temperature_or_lay_layers_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice.vllm_limits, "why_not", lambda *_: None)
    assert choose(setting(tmp_path)).engine == "vllm"
    assert choose(setting(tmp_path, gpus=2, parallel="layers")).engine == "static"
    hot = dataclasses.replace(setting(tmp_path), samplings={Sampling(8, temperature=3.0)})
    assert "vllm takes temperatures of 0 and of 0.01 to 2, not 3" in choose(hot).why


SCHEMA = Sampling(8, json_schema='{"type":"object"}')


def test_vllm_is_left_for_likelihoods_and_unless_it_is_named_for_schemas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice.vllm_limits, "why_not", lambda *_: None)
    plain, named = setting(tmp_path), setting(tmp_path, engine="vllm")
    assert (choose(plain).engine, choose(named).engine) == ("vllm", "vllm")
    labelled = choose(dataclasses.replace(plain, labelled=True))
    assert (labelled.engine, "vllm gives no likelihood of labels" in labelled.why) == ("continuous", True)
    followed = choose(dataclasses.replace(plain, samplings={Sampling(8), SCHEMA}))
    assert (followed.engine, "json_schema is not taken unasked" in followed.why) == ("continuous", True)
    assert choose(dataclasses.replace(named, samplings={SCHEMA})).engine == "vllm"
    said = "engine: vllm cannot be used: vllm gives no likelihood of labels; set engine: auto or static"
    with pytest.raises(UserError, match=said):
        choose(dataclasses.replace(named, labelled=True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labelled": True}, "the likelihood of labels needs the static"),
        ({"samplings": {SCHEMA}}, "a json_schema needs"),
    ],
)
def test_a_model_that_is_cut_over_gpus_has_no_static_engine_to_turn_to(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    found = choose(dataclasses.replace(setting(tmp_path, gpus=2), **changes))
    assert (found.engine, reason in found.why) == ("static", True)
    with pytest.raises(UserError, match=f"engine: continuous cannot be used: {reason}"):
        choose(dataclasses.replace(setting(tmp_path, gpus=2, engine="continuous"), **changes))
    assert choose(dataclasses.replace(setting(tmp_path), **changes)).engine == "continuous"


def test_an_older_card_has_no_flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "capability", lambda: (7, 5))
    assert "compute capability 8.0, and this GPU has 7.5" in choose(setting(tmp_path)).why
