"""Which engine answers, and over how many processes: decided from the config, config.json and what is installed.

Each engine has reasons that speak against it, found before any weights are loaded. `auto` takes the first of vllm,
continuous (on several GPUs: cut over them) and static that none speaks against; static can do all that a config asks.
An engine that the config names, and that has a reason against it, is refused with that reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.engines import ranks
from gristmill.engines.continuous import flash
from gristmill.engines.static.decodable import shared_rope
from gristmill.engines.vllm import limits as vllm_limits
from gristmill.engines.vllm.engine import TEMPERATURES
from gristmill.errors import UserError
from gristmill.keys import dtype_in_force
from gristmill.types import JsonDict, Sampling

#: Kinds of layers that have pages of keys and values.
PAGED_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and why it was taken."""

    engine: str
    why: str
    #: Processes that the model is cut over; 1: it is not.
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What the choice depends on."""

    folder: Path
    model: ModelConfig
    weights: JsonDict
    #: GPUs of the worker; 0: it runs on the CPU.
    gpus: int
    samplings: Collection[Sampling]
    #: Whether some requests ask for the likelihood of labels.
    labelled: bool = False

    @property
    def has_schema(self) -> bool:
        """Whether some answers must follow a JSON Schema."""
        return any(sampling.json_schema for sampling in self.samplings)


def choose(setting: Setting) -> Choice:
    """The engine for a worker.

    Raises:
        UserError: the one that the config names cannot do it.
    """
    model = setting.model
    if model.engine in ("echo", "static"):
        return Choice(model.engine, f"the config says engine: {model.engine}")
    if model.engine != "auto":
        ranks = max(1, setting.gpus) if model.engine == "continuous" else 1
        reason = _against_vllm(setting) if model.engine == "vllm" else _against_continuous(setting)
        if reason is not None:
            raise UserError(f"engine: {model.engine} cannot be used: {reason}; set engine: auto or static")
        return Choice(model.engine, f"the config says engine: {model.engine}", ranks)
    if (no_vllm := _vllm_unasked(setting) or _against_vllm(setting)) is None:
        return Choice("vllm", "auto: vllm is installed and knows the model")
    reason = _slower_on_a_cpu(setting) or _against_continuous(setting) or _unsure(setting)
    if reason is None:
        kind = "continuous batching cut over the group's GPUs" if setting.gpus > 1 else "continuous batching"
        return Choice("continuous", f"auto: {kind}; {no_vllm}", max(1, setting.gpus))
    if model.parallel == "tensor" and setting.gpus > 1:
        raise UserError(f"parallel: tensor cannot be used: {reason}; set parallel: auto or layers")
    return Choice("static", f"auto: {no_vllm}; {reason}")


def _against_vllm(setting: Setting) -> str | None:
    """What vllm cannot do; it is imported only when nothing else speaks against it."""
    if setting.labelled:
        return "vllm gives no likelihood of labels"
    if setting.gpus > 1 and setting.model.parallel == "layers":
        return "vllm takes no layers that lie on several GPUs (parallel: layers)"
    low, high = TEMPERATURES
    if bad := [
        each.temperature for each in setting.samplings if each.temperature and not low <= each.temperature <= high
    ]:
        return f"vllm takes temperatures of 0 and of {low:g} to {high:g}, not {bad[0]:g}"
    return vllm_limits.why_not(setting.folder, setting.model, setting.gpus)


def _vllm_unasked(setting: Setting) -> str | None:
    """What vllm does otherwise than static, so that `auto` does not take it."""
    return "vllm's grammar of a json_schema is not taken unasked" if setting.has_schema else None


def _slower_on_a_cpu(setting: Setting) -> str | None:
    return None if setting.gpus else "static is faster on a CPU"


def _against_continuous(setting: Setting) -> str | None:
    """What continuous batching cannot do, or does not do on these GPUs."""
    return next(_continuous_reasons(setting), None)


def _continuous_reasons(setting: Setting) -> Iterator[str]:
    model, config = setting.model, ranks.text_config(setting.folder)
    if layers := sorted(set(config.get("layer_types") or []) - PAGED_LAYERS):
        yield f"continuous batching has no pages for layers of {', '.join(layers)}"
    if (reason := shared_rope(config.get("rope_parameters") or config.get("rope_scaling"))) is not None:
        yield reason
    if model.allow_offload or model.max_memory or model.device_map != "auto":
        yield "continuous batching takes no device_map, max_memory or allow_offload"
    if setting.gpus > 1:
        if model.parallel == "layers":
            yield "continuous batching takes no layers that lie on several GPUs (parallel: layers)"
        if (reason := ranks.why_not(setting.folder, model, setting.gpus)) is not None:
            yield reason
        if any(sampling.repetition_penalty != 1.0 for sampling in setting.samplings):
            yield "a repetition_penalty needs the static engine, which cannot use a model that is cut"
        if setting.labelled:
            yield "the likelihood of labels needs the static engine, which cannot use a model that is cut"
        if setting.has_schema:
            yield "a json_schema needs the static engine, which cannot use a model that is cut"
    if setting.gpus:
        yield from _flash_reasons(setting, config)


def _flash_reasons(setting: Setting, config: JsonDict) -> Iterator[str]:
    """On a GPU continuous batching is fast only over flash attention."""
    dtype = dtype_in_force(setting.model, setting.weights, on_gpu=True)
    if dtype not in ("bfloat16", "float16"):
        yield f"flash attention needs bfloat16 or float16, and the model runs in {dtype}"
    if setting.model.attention is not None and "flash" not in setting.model.attention:
        yield f"attention: {setting.model.attention} is not a flash attention"
    if flash.offer() == flash.OURS and (reason := flash.why_not(config)) is not None:
        yield reason


def _unsure(setting: Setting) -> str | None:
    """What was never measured to be faster, so that `auto` does not take it."""
    if setting.model.quantization is not None:
        return "continuous batching of quantized models is not taken unasked"
    if setting.model.trust_remote_code:
        return "continuous batching of a model with its own code is not taken unasked"
    return None
