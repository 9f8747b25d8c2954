"""Facts about the memory plan: sizes of known models, where transformers would put them, and what is refused."""

import importlib.metadata
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.config.schema import Config, ModelConfig
from gristmill.errors import UserError
from gristmill.memory import estimate as memory
from gristmill.memory.estimate import (
    CONTEXT_MIB,
    GIB,
    Load,
    balance_buffer,
    cache_bytes_per_token,
    estimate,
    even_places,
    evenly,
    size_bytes,
    spread,
    weight_bytes,
)
from gristmill.memory.fitting import fit, require_fit, verdict
from gristmill.memory.shapes import Shape, Tensor, read_header, read_shape, shape_of
from gristmill.planning.memory import load_of, memory_lines, refuse_unfit
from gristmill.planning.plan import make_plan
from gristmill.types import Gpu

H100, RTX = 81559, 24564
ROW = Load(1, 1024, 256)
#: hidden, intermediate, layers, heads, kv heads, vocabulary of Llama 2 7B, CodeLlama 34B, Llama 3.1 70B and 405B.
SIZES = {
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "34B": (8192, 22016, 48, 64, 8, 32000),
    "70B": (8192, 28672, 80, 64, 8, 128256),
    "405B": (16384, 53248, 126, 128, 8, 128256),
}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def config_of(sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A Llama's config.json."""
    known = dict(zip((*KEYS, "vocab_size"), sizes, strict=True))
    return {"model_type": "llama", "max_position_embeddings": 8192, "dtype": "bfloat16", **known, **more}


def tensors_of(sizes: tuple[int, ...]) -> list[Tensor]:
    """What a Llama checkpoint of these sizes holds."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = sizes
    kv = kv_heads * hidden // heads
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate)}
    shapes = {
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        **{f"mlp.{name}": shape for name, shape in mlp.items()},
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layered = [
        Tensor(f"model.layers.{number}.{name}.weight", "BF16", shape)
        for number in range(layers)
        for name, shape in shapes.items()
    ]
    table, norm = (vocabulary, hidden), (hidden,)
    ends = [("model.embed_tokens.weight", table), ("model.norm.weight", norm), ("lm_head.weight", table)]
    return [*layered, *(Tensor(name, "BF16", shape) for name, shape in ends)]


SHAPES = {name: shape_of(config_of(sizes), tensors_of(sizes)) for name, sizes in SIZES.items()}


def model(**settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"source": "somewhere", **settings})


def gigabytes(name: str, quantization: str | None) -> float:
    return sum(weight_bytes(SHAPES[name], model(quantization=quantization))) / 1e9


# ---- sizes


@pytest.mark.parametrize(("name", "billions"), [("7B", 6.738), ("34B", 33.744), ("70B", 70.554), ("405B", 405.853)])
def test_parameters_are_those_of_the_published_models(name: str, billions: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, abs=0.001)


@pytest.mark.parametrize(
    ("name", "bits16", "bits8", "bits4"),
    [("7B", 13.5, 7.0, 3.9), ("34B", 67.5, 34.3, 18.2), ("70B", 141.1, 72.7, 39.5), ("405B", 811.7, 410.1, 215.6)],
)
def test_gigabytes_of_weights_at_16_8_and_4_bits(name: str, bits16: float, bits8: float, bits4: float) -> None:
    found = [gigabytes(name, quantization) for quantization in (None, "8bit", "4bit")]
    assert found == pytest.approx([bits16, bits8, bits4], abs=0.05)


@pytest.mark.parametrize(("quantization", "each"), [(None, 35), ("8bit", 17.5), ("4bit", 9)])
def test_a_70b_takes_35_or_17_or_9_gigabytes_on_each_of_four_gpus(quantization: str | None, each: float) -> None:
    # Embeddings and head keep 16 bits, and 4-bit weights have scales: 18.2 and 9.9 where bits alone say 17.6 and 8.8.
    assert gigabytes("70B", quantization) / 4 == pytest.approx(each, rel=0.1)


def test_a_token_of_cache_is_keys_and_values_of_every_layer() -> None:
    assert cache_bytes_per_token(SHAPES["70B"], model()) == 2 * 80 * 8 * 128 * 2
    assert cache_bytes_per_token(SHAPES["7B"], model(dtype="float32")) == 2 * 32 * 32 * 128 * 4


def test_float32_takes_twice_what_bfloat16_takes() -> None:
    assert sum(weight_bytes(SHAPES["7B"], model(dtype="float32"))) == 2 * sum(weight_bytes(SHAPES["7B"], model()))


def test_what_is_stored_as_integers_counts_as_it_is_stored() -> None:
    packed = Tensor("model.layers.0.mlp.up_proj.qweight", "I32", (512, 11008))
    shape = shape_of(config_of(SIZES["7B"]), [packed])
    assert sum(weight_bytes(shape, model(quantization="4bit"))) == 512 * 11008 * 4


def test_a_tied_head_is_not_counted_twice() -> None:
    tied = shape_of(config_of(SIZES["7B"], tie_word_embeddings=True), tensors_of(SIZES["7B"]))
    assert SHAPES["7B"].parameters - tied.parameters == 32000 * 4096


def test_a_mapping_is_counted_by_its_bits_or_as_unquantized() -> None:
    whole = sum(weight_bytes(SHAPES["7B"], model()))
    gptq = {"quant_method": "gptq", "bits": 4}
    assert sum(weight_bytes(SHAPES["7B"], model(quantization=gptq))) < 0.3 * whole
    assert sum(weight_bytes(SHAPES["7B"], model(quantization={"quant_method": "new"}))) == whole


@pytest.mark.parametrize(("text", "size"), [("70GiB", 70 * GIB), ("70 GB", 70 * 10**9), ("1.5GiB", 3 * GIB // 2)])
def test_a_size_is_read_in_powers_of_1024_or_1000(text: str, size: int) -> None:
    assert size_bytes(text) == size


# ---- what fits


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("7B", 1, "fits on 1"),
        ("34B", 1, "fits on 1"),
        ("70B", 1, "needs 2; fits in 8-bit on 1; fits in 4-bit on 1"),
        ("70B", 4, "fits on 4 (2 would do); fits in 8-bit on 1; fits in 4-bit on 1"),
        ("405B", 8, "does not fit on 8; fits in 8-bit on 8; fits in 4-bit on 4"),
    ],
)
def test_what_fits_eight_cards_of_80_gigabytes(name: str, gpus: int, said: str) -> None:
    assert verdict(SHAPES[name], model(), ROW, H100, gpus, 8) == said


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("7B", {}, "fits on 1"),
        ("34B", {}, "needs 4; fits in 8-bit on 2; fits in 4-bit on 1"),
        ("34B", {"quantization": "8bit"}, "needs 2; fits in 4-bit on 1"),
        ("70B", {}, "does not fit on 4; fits in 8-bit on 4; fits in 4-bit on 2"),
        ("405B", {"quantization": "4bit"}, "does not fit on 4"),
    ],
)
def test_what_fits_four_cards_of_24_gigabytes(name: str, settings: dict[str, Any], said: str) -> None:
    assert verdict(SHAPES[name], model(**settings), ROW, RTX, 1, 4) == said


def test_a_plan_that_cannot_fit_is_refused_with_sizes_and_what_would() -> None:
    with pytest.raises(UserError) as caught:
        require_fit("judge", SHAPES["70B"], model(), ROW, H100, 1, 8)
    assert str(caught.value) == (
        "models.judge has 131.4 GiB of weights and a row of 1280 tokens, which do not fit on 1 × 79.6 GiB "
        "(gpus_per_model 1): needs 2; fits in 8-bit on 1; fits in 4-bit on 1; set gpus_per_model or quantization "
        "accordingly, or allow_offload: true"
    )


def test_an_allowed_offload_and_a_map_of_the_users_own_are_not_refused() -> None:
    for settings in ({"allow_offload": True}, {"device_map": {"model": 0, "lm_head": "cpu"}}):
        require_fit("judge", SHAPES["70B"], model(**settings), ROW, H100, 1, 8)


def test_a_row_whose_cache_has_no_room_does_not_fit() -> None:
    assert fit(SHAPES["7B"], model(), Load(1, 1024, 256), [RTX]).fits
    assert not fit(SHAPES["7B"], model(), Load(1, 1024, 40_000), [RTX]).fits


def test_the_room_for_the_cache_is_what_the_fullest_gpu_leaves() -> None:
    found = fit(SHAPES["70B"], model(), ROW, [H100] * 2)
    assert found.estimates is not None
    first = found.estimates[0]
    left = (H100 - CONTEXT_MIB) * 2**20 - first.weights - first.working
    assert found.cache_tokens <= left // (first.layers * SHAPES["70B"].cache_elements() * 2)


# ---- where the layers go

MODES = ("auto", "balanced_low_0", "sequential")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["7B", "70B"])
def test_the_plan_lays_blocks_out_as_transformers_does(name: str) -> None:
    torch = pytest.importorskip("torch")
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.integrations.accelerate import _get_device_map

    config = LlamaConfig(**{**config_of(SIZES[name]), "tie_word_embeddings": False})
    with init_empty_weights():
        real = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    modules = dict(real.named_modules())
    for mode, gpus, size in itertools.product(MODES, (1, 2, 4, 8), (24, 80)):
        room = {device: size * 10**9 for device in range(gpus)}
        placed = _get_device_map(real, mode, {**room, "cpu": 10**13}, None)
        real_bytes: dict[Any, int] = {}
        for module, device in placed.items():
            total = sum(weight.numel() * 2 for weight in (modules[module] if module else real).parameters())
            real_bytes[device] = real_bytes.get(device, 0) + total
        limited = model(device_map=mode, max_memory={str(device): f"{size}GB" for device in room})
        sizes = weight_bytes(SHAPES[name], limited)
        places = spread(sizes, list(room.values()), limited, balance_buffer(SHAPES[name], sizes))
        if places is None:
            assert {"cpu", "disk"} & set(real_bytes), (mode, gpus, size)
            continue
        planned = {device: sum(b for b, place in zip(sizes, places, strict=True) if place == device) for device in room}
        for device, planned_bytes in planned.items():
            assert planned_bytes == pytest.approx(real_bytes.get(device, 0), abs=2**20), (mode, gpus, size, device)


def test_before_transformers_5_18_a_large_embedding_gave_no_room_to_the_first_gpu() -> None:
    sizes = weight_bytes(SHAPES["70B"], model())
    layer, embedding = sizes[1], sizes[0]
    assert balance_buffer(SHAPES["70B"], sizes, (5, 17)) == int(1.25 * layer)
    assert balance_buffer(SHAPES["70B"], sizes, (5, 18)) == int(1.25 * max(layer, embedding))


#: benchmarks/memory_planner.py on H100 80 GB, 2026-11-28, transformers 5.17.0, torch 2.11.0, bfloat16: shape, rows,
#: prompt, new tokens, and for each GPU the layers that landed there and torch.cuda.max_memory_allocated in MiB.
MEASURED = [
    ("1B", 32, 512, 128, [(16, 4438)]),
    ("3B", 32, 512, 128, [(28, 9871)]),
    ("8B", 32, 512, 128, [(32, 19269)]),
    ("1B", 32, 512, 128, [(4, 2161), (12, 3282)]),
    ("3B", 32, 512, 128, [(11, 4768), (17, 6207)]),
    ("8B", 32, 512, 128, [(14, 9626), (18, 11418)]),
    ("8B", 48, 1536, 256, [(14, 19388), (18, 21626)]),
]
MEASURED_SIZES = {
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "3B": (3072, 8192, 28, 24, 8, 128256),
    "8B": (4096, 14336, 32, 32, 8, 128256),
}


@pytest.mark.parametrize(("name", "rows", "prompt", "new", "gpus"), MEASURED)
def test_estimates_are_within_10_percent_of_what_was_measured_on_h100(
    name: str, rows: int, prompt: int, new: int, gpus: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.17.0")
    memory._transformers_version.cache_clear()
    shape = shape_of(config_of(MEASURED_SIZES[name]), tensors_of(MEASURED_SIZES[name]))
    free = [(H100 - CONTEXT_MIB) * 2**20] * len(gpus)
    found = estimate(shape, model(), Load(rows, prompt, new), free)
    memory._transformers_version.cache_clear()
    assert found is not None
    assert [one.layers for one in found] == [layers for layers, _ in gpus]
    assert [one.torch / 2**20 for one in found] == pytest.approx([measured for _, measured in gpus], rel=0.1)


def test_a_small_quantized_model_fills_every_gpu_of_its_group() -> None:
    three_billion = (3072, 8192, 28, 24, 8, 128256)
    shape = shape_of(config_of(three_billion), tensors_of(three_billion))
    assert even_places(shape, model(quantization="4bit"), [80 * GIB] * 2) == [0] * 15 + [1] * 16
    assert even_places(shape, model(quantization="4bit", max_memory={0: "1GiB"}), [80 * GIB] * 2) is None
    assert even_places(shape, model(quantization="4bit"), [80 * GIB, GIB]) is None  # the second has no room for half
    assert evenly([788, *[50] * 28, 788], 2) == [0] * 15 + [1] * 15
    assert evenly([788, *[50] * 28, 788], 4) == [0] + [1] * 15 + [2] * 13 + [3]
    assert evenly([5, 5], 4) == [0, 1]  # fewer blocks than GPUs


def test_a_model_whose_rule_leaves_no_gpu_empty_keeps_the_rule() -> None:
    assert even_places(SHAPES["7B"], model(), [80 * GIB] * 2) is None
    assert even_places(SHAPES["7B"], model(device_map="sequential"), [80 * GIB] * 2) is None


def test_max_memory_keeps_weights_off_a_gpu() -> None:
    limited = model(device_map="sequential", max_memory={0: "4GiB", "1": "40GiB"})
    found = estimate(SHAPES["7B"], limited, ROW, [80 * GIB] * 2)
    assert found is not None
    assert found[0].weights <= 4 * GIB < found[1].weights


def test_logits_count_on_the_gpu_that_has_the_head() -> None:
    found = estimate(SHAPES["70B"], model(), Load(512, 1, 1), [80 * GIB] * 2)
    assert found is not None
    assert found[1].working > found[0].working
    assert found[1].working >= 512 * 128256 * (2 + 4)


# ---- reading a model folder


def write_safetensors(path: Path, tensors: list[Tensor]) -> None:
    """Only a header: what the plan reads."""
    header = {one.name: {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [0, 0]} for one in tensors}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def write_model(folder: Path, name: str, weights: bool = True) -> Path:
    """A model folder as the plan sees it, in two files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(SIZES[name])))
    tensors = tensors_of(SIZES[name])
    for number, part in enumerate((tensors[:100], tensors[100:]) if weights else ()):
        write_safetensors(folder / f"model-{number}.safetensors", part)
    return folder


def test_a_shape_is_read_from_the_headers_of_all_files(tmp_path: Path) -> None:
    assert read_shape(write_model(tmp_path / "m", "70B")) == SHAPES["70B"]


@pytest.mark.slow
def test_a_config_alone_gives_the_same_shape_through_a_meta_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shape = read_shape(write_model(tmp_path / "m", "7B", weights=False))
    assert shape.parameters == SHAPES["7B"].parameters
    assert weight_bytes(shape, model()) == weight_bytes(SHAPES["7B"], model())


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors is no whole safetensors file"):
        list(read_header(tmp_path / "model.safetensors"))


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no readable config\.json"):
        read_shape(tmp_path)


# ---- in the plan


def config(folder: Path, **settings: Any) -> Config:
    return Config.model_validate(
        {
            "datasets": {"d": {"path": "d.jsonl"}},
            "models": {"m": {"source": str(folder), **settings}},
            "prompts": {"p": {"file": "p.jinja"}},
            "runs": {"r": {"dataset": "d", "model": "m", "prompt": "p", "sampling": {"max_new_tokens": 300}}},
        }
    )


def cards(count: int, memory_mib: int) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index}", "card", memory_mib, 0) for index in range(count)]


def test_a_plan_names_parameters_fit_and_room_for_the_cache(tmp_path: Path) -> None:
    there = config(write_model(tmp_path / "m", "70B"), gpus_per_model=4)
    lines = memory_lines(there, make_plan(there, cards(8, H100), None, 8, False), "m")
    assert lines[0] == "70.55 billion parameters, 131.4 GiB in 16-bit; 0.312 MiB of cache a token"
    assert lines[1] == "4 × 79.6 GiB: fits on 4 (2 would do); fits in 8-bit on 1; fits in 4-bit on 1"
    assert lines[2].startswith("weights 32.2 + 35.1 + 35.1 + 29.1 GiB; beside them room for ")


def test_a_run_stops_before_its_first_job_when_a_model_cannot_fit(tmp_path: Path) -> None:
    there = config(write_model(tmp_path / "m", "70B"))
    with pytest.raises(UserError, match=r"models\.m has 131\.4 GiB.*needs 2"):
        refuse_unfit(there, make_plan(there, cards(8, H100), None, 8, False))
    refuse_unfit(there, make_plan(there, [], None, 8, False))  # a machine without GPUs


def test_weights_that_are_not_here_yet_are_judged_later(tmp_path: Path) -> None:
    there = config(tmp_path / "gone")
    plan = make_plan(there, cards(1, H100), None, 8, False)
    refuse_unfit(there, plan)
    assert memory_lines(there, plan, "m") == [
        "memory: known when the weights are here; checked before any job waits for a GPU"
    ]


def test_the_row_that_must_fit_has_the_longest_answer_that_is_asked_for(tmp_path: Path) -> None:
    there = config(write_model(tmp_path / "m", "7B"), context_tokens=1000)
    assert load_of(there, "m", SHAPES["7B"]) == Load(1, 700, 300)


def test_a_shape_compares_by_its_values() -> None:
    assert isinstance(SHAPES["7B"], Shape)
    assert SHAPES["7B"] == shape_of(config_of(SIZES["7B"]), tensors_of(SIZES["7B"]))


def test_a_model_of_states_alone_is_planned_and_one_whose_heads_are_missing_is_refused() -> None:
    mamba = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 16}
    shape = shape_of(mamba, [Tensor("backbone.layers.0.mixer.in_proj.weight", "BF16", (256, 64))])
    assert (shape.heads, shape.hidden) == (1, 64)
    with pytest.raises(
        UserError, match=r"config\.json has none of n_head, num_attention_heads, num_heads, .* fetch it"
    ):
        shape_of({name: value for name, value in mamba.items() if name != "state_size"}, [])
