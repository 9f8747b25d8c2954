"""Does a model fit its GPUs, and if not, what would: asked at the start of a run and again when its requests are split.

`fits` means: the weights find room under device_map, and one row of the longest prompt and answer beside them. More
rows are a matter of speed, not of fitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.memory.estimate import (
    CONTEXT_MIB,
    GIB,
    MIB,
    Estimate,
    Load,
    cache_bytes_per_token,
    estimate,
    weight_bytes,
)
from gristmill.memory.shapes import Shape

#: Prompt tokens of the row that must fit, before the requests are known.
PROMPT_TOKENS = 1024
_BITS = {None: "", "8bit": " in 8-bit", "4bit": " in 4-bit"}


@dataclass(frozen=True, slots=True)
class Fit:
    """What the plan knows about a model on a worker's GPUs."""

    estimates: list[Estimate] | None
    #: Tokens of key-value cache, over all rows of a batch, that fit beside the weights.
    cache_tokens: int

    @property
    def fits(self) -> bool:
        """Whether one row can be answered."""
        return self.estimates is not None and self.cache_tokens >= 0


def fit(shape: Shape, model: ModelConfig, load: Load, gpus_mib: Sequence[int]) -> Fit:
    """Place a model on GPUs of the given memory."""
    free = [max(0, memory - CONTEXT_MIB) * MIB for memory in gpus_mib]
    found = estimate(shape, model, load, free)
    if found is None:
        return Fit(None, -1)
    left = [
        (bytes_ - one.weights - one.working, one.layers * cache_bytes_per_token(shape, model) // shape.layers)
        for bytes_, one in zip(free, found, strict=True)
    ]
    if any(room < each * load.rows * load.tokens for room, each in left):
        return Fit(found, -1)
    return Fit(found, min((room // each for room, each in left if each), default=0))


def alternatives(shape: Shape, model: ModelConfig, load: Load, gpu_mib: int, most: int) -> dict[str | None, int]:
    """Quantization → the fewest GPUs of a worker that it fits on, among 1, 2, 4, 8, …, up to `most`."""
    found: dict[str | None, int] = {}
    for quantization in _stronger(model.quantization):
        other = model.model_copy(update={"quantization": quantization, "max_memory": {}})
        for gpus in _sizes(most):
            if fit(shape, other, load, [gpu_mib] * gpus).fits:
                found[quantization] = gpus
                break
    return found


def verdict(shape: Shape, model: ModelConfig, load: Load, gpu_mib: int, gpus: int, most: int) -> str:
    """`fits on 1`, or `needs 4; fits in 8-bit on 2`, or `does not fit on 8`, with what else would do."""
    found = alternatives(shape, model, load, gpu_mib, most)
    others = [f"fits{_BITS[how]} on {fewest}" for how, fewest in found.items() if how != model.quantization]
    fewest = found.get(model.quantization) if not isinstance(model.quantization, dict) else None
    if fit(shape, model, load, [gpu_mib] * gpus).fits:
        own = f"fits on {gpus}" + (f" ({fewest} would do)" if fewest is not None and fewest < gpus else "")
        fewer = [text for text, how in zip(others, _others(found, model), strict=True) if found[how] < gpus]
        return "; ".join([own, *fewer])
    return "; ".join([f"needs {fewest}" if fewest else f"does not fit on {most}", *others])


def require_fit(name: str, shape: Shape, model: ModelConfig, load: Load, gpu_mib: int, gpus: int, most: int) -> None:
    """Refuse a plan that cannot work, with the numbers that would.

    A map or an allowed offload is taken as the user wants it.

    Raises:
        UserError: the model does not fit.
    """
    if model.allow_offload or isinstance(model.device_map, dict) or fit(shape, model, load, [gpu_mib] * gpus).fits:
        return
    weights = sum(weight_bytes(shape, model)) / GIB
    said = verdict(shape, model, load, gpu_mib, gpus, most)
    raise UserError(
        f"models.{name} has {weights:.1f} GiB of weights and a row of {load.tokens} tokens, which do not fit on "
        f"{gpus} × {gpu_mib / 1024:.1f} GiB (gpus_per_model {gpus}): {said}; set gpus_per_model or quantization "
        "accordingly, or allow_offload: true"
    )


def _others(found: dict[str | None, int], model: ModelConfig) -> list[str | None]:
    return [how for how in found if how != model.quantization]


def _stronger(quantization: str | dict[str, Any] | None) -> list[str | None]:
    """The config's own quantization and those that take less memory."""
    if isinstance(quantization, dict):
        return []
    known: list[str | None] = [None, "8bit", "4bit"]
    return known[known.index(quantization) :]


def _sizes(most: int) -> list[int]:
    """1, 2, 4, …, and all GPUs there are."""
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return sizes if most in sizes else [*sizes, most]
