"""How much GPU memory a model takes, before it is loaded: weights, key-value cache, working memory, CUDA context.

What is counted on each GPU of a worker, and why:

- Weights: the blocks as device_map lays them out (`spread` repeats accelerate's rules), at the bytes of the dtype: 4 or
  2; 8bit 1; 4bit 0.516 (half a byte and its share of the scales, themselves quantized). Embeddings, norms and head keep
  the dtype.
- Cache: 2 × kv heads × head size × bytes, for each token of each row in each layer that lies on the GPU. One
  layer's keys are there twice for a moment when it grows or rows move; grouped queries under a padding mask
  repeat one layer's keys and values to the full number of heads.
- Prefill: all rows go through a layer at once. The widest moment is the MLP's (three times intermediate_size) or the
  norm's (its input in float32, twice); and the padding mask.
- Logits: only the last token's, once in the dtype and once in float32, on the GPU that has the head; sampling sorts
  them, which takes three copies more.
- CUDA context: what the driver and torch's kernels take outside torch's allocator. NVML shows it, torch does not.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.memory.shapes import DTYPE_BYTES, Shape

MIB, GIB = 2**20, 2**30
#: Driver and kernels of one process on a card: 706 MiB on an H100 with torch 2.11 (benchmarks/memory_planner.py).
CONTEXT_MIB = 720
#: cuBLAS takes its workspace from torch's allocator.
WORKSPACE_BYTES = 40 * MIB
#: Bytes of a weight of a linear layer after bitsandbytes: nf4 with double quantization has an 8-bit scale for 64
#: weights and a float32 for 256 scales.
EIGHT_BIT_BYTES, FOUR_BIT_BYTES = 1.0, 0.5 + 1 / 64 + 4 / (64 * 256)
#: transformers leaves this share of a single GPU free when it places a model.
SINGLE_GPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Load:
    """The batch that is planned for: rows of padded prompts and their answers."""

    rows: int
    prompt_tokens: int
    new_tokens: int
    sampling: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a row at its end."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory on one GPU of a worker, in bytes."""

    weights: int
    cache: int
    #: The largest of prefill and decoding beside weights and cache.
    working: int
    layers: int

    @property
    def torch(self) -> int:
        """What torch's allocator hands out at most (torch.cuda.max_memory_allocated)."""
        return self.weights + self.cache + self.working

    @property
    def total(self) -> int:
        """What the card shows: torch and the CUDA context."""
        return self.torch + CONTEXT_MIB * MIB


def weight_bytes(shape: Shape, model: ModelConfig) -> list[int]:
    """Bytes of each block in the dtype and quantization of the config."""
    plain = dtype_bytes(shape, model)
    linear = linear_bytes(model.quantization) or plain
    return [int(block.linear * linear + block.other * plain + block.packed_bytes) for block in shape.blocks]


def dtype_bytes(shape: Shape, model: ModelConfig) -> int:
    """Bytes of an element at work; 8-bit and 4-bit models work in 16 bits."""
    return shape.stored_bytes if model.dtype == "auto" else DTYPE_BYTES[model.dtype]


def linear_bytes(quantization: str | dict[str, Any] | None) -> float | None:
    """Bytes of a linear layer's weight after quantization at load; None when it is not known to shrink."""
    if isinstance(quantization, dict):
        bits = next((quantization[key] for key in ("bits", "nbits", "weight_bits") if key in quantization), None)
        if quantization.get("load_in_4bit") or bits == 4:
            return FOUR_BIT_BYTES
        return EIGHT_BIT_BYTES if quantization.get("load_in_8bit") or bits == 8 else None
    return {"8bit": EIGHT_BIT_BYTES, "4bit": FOUR_BIT_BYTES, None: None}[quantization]


def cache_bytes_per_token(shape: Shape, model: ModelConfig) -> int:
    """Keys and values of one token over all layers."""
    return shape.layers * shape.cache_elements() * dtype_bytes(shape, model)


def estimate(shape: Shape, model: ModelConfig, load: Load, free: Sequence[int]) -> list[Estimate] | None:
    """Memory on each GPU of a worker.

    Args:
        shape: the model.
        model: its config: dtype, quantization, device_map, max_memory.
        load: the batch.
        free: bytes that are free on each GPU once the CUDA context is there.

    Returns:
        One estimate a GPU; None when the weights do not find room on the GPUs.
    """
    sizes = weight_bytes(shape, model)
    places = even_places(shape, model, free) or spread(sizes, free, model, balance_buffer(shape, sizes))
    if places is None:
        return None
    found: list[Estimate] = []
    for device in range(len(free)):
        here = [index for index, place in enumerate(places) if place == device]
        layers = sum(shape.blocks[index].is_layer for index in here)
        has_head = len(sizes) - 1 in here
        working = max(_prefill_bytes(shape, model, load), _decode_bytes(shape, model, load, has_head)) if here else 0
        cache = layers * shape.cache_elements() * dtype_bytes(shape, model) * load.rows * load.tokens
        found.append(Estimate(sum(sizes[index] for index in here), cache, working, layers))
    return found


def even_places(shape: Shape, model: ModelConfig, free: Sequence[int]) -> list[int] | None:
    """The GPU of each block where device_map's rule is not good enough, and blocks are laid out evenly; None otherwise.

    - 8bit and 4bit: the rule takes sizes that differ from what is loaded, and the first GPU keeps room for the largest
      block. A 3B in 4 bits, small beside its embedding, all went to the second of two H100s.
    - Any model of which the rule would leave a GPU of the group empty.

    A limit or a map of the config stands as it is.
    """
    if len(free) == 1 or model.max_memory or model.device_map not in ("auto", "balanced"):
        return None
    sizes = weight_bytes(shape, model)
    places = spread(sizes, free, model, balance_buffer(shape, sizes))
    if places is None or (len(set(places)) == len(free) and not isinstance(model.quantization, str)):
        return None
    even = evenly(sizes, len(free))
    held = [sum(size for size, place in zip(sizes, even, strict=True) if place == gpu) for gpu in range(len(free))]
    return even if all(need <= room for need, room in zip(held, free, strict=True)) else None


def evenly(sizes: Sequence[int], gpus: int) -> list[int]:
    """Neighbouring blocks together, the fullest GPU as empty as can be: the least cap that needs no more GPUs."""
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if max(_filled(sizes, middle)) < gpus else (middle + 1, high)
    return _filled(sizes, high)


def _filled(sizes: Sequence[int], cap: int) -> list[int]:
    """GPUs filled one after the other up to a cap that no block exceeds."""
    places: list[int] = []
    device, used = 0, 0
    for size in sizes:
        if used + size > cap:
            device, used = device + 1, 0
        used += size
        places.append(device)
    return places


def balance_buffer(shape: Shape, sizes: Sequence[int], version: tuple[int, int] | None = None) -> int:
    """What a balanced device_map gives each GPU beyond its even share: 1.25 times a layer, or, since transformers 5.18,
    1.25 times the largest block, which is often the embedding. `version` is the installed transformers when None.
    """
    leaves_count = (version or _transformers_version()) >= (5, 18)
    counted = [size for size, block in zip(sizes, shape.blocks, strict=True) if block.is_layer or leaves_count]
    return int(1.25 * max(counted, default=0))


@functools.cache
def _transformers_version() -> tuple[int, int]:
    """Major and minor, from the package's metadata: importing transformers takes seconds."""
    try:
        major, minor = importlib.metadata.version("transformers").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return (6, 0)  # planning without it: the rule of the newest
    return int(major), int(minor)


def spread(sizes: Sequence[int], free: Sequence[int], model: ModelConfig, buffer: int) -> list[int] | None:
    """The GPU of each block, as transformers and accelerate place them; None when a block would go to CPU or disk.

    A map in the config is the user's own affair: it counts as balanced. `buffer` is balance_buffer's.
    """
    room = _room(sizes, free, model, buffer)
    places: list[int] = []
    device, used = 0, 0
    for index, size in enumerate(sizes):
        while device < len(room):
            # The first GPU keeps room for the largest block that is left, should it have to come back from the CPU.
            kept = max(sizes[index:]) if device == 0 else 0
            if used + size <= room[device] - kept:
                break
            device, used = device + 1, 0
        if device == len(room):
            return None
        used += size
        places.append(device)
    return places


def _room(sizes: Sequence[int], free: Sequence[int], model: ModelConfig, buffer: int) -> list[int]:
    """What device_map may fill of each GPU with weights."""
    limits = {int(name): size_bytes(text) for name, text in model.max_memory.items() if name.isdecimal()}
    room = [min(limits.get(device, bytes_), bytes_) for device, bytes_ in enumerate(free)]
    if len(room) == 1:
        return room if limits or model.device_map == "sequential" else [int(SINGLE_GPU_SHARE * room[0])]
    if model.device_map == "sequential":
        return room
    low_zero = model.device_map == "balanced_low_0"
    each = sum(sizes) // (len(room) - low_zero) + buffer
    balanced = [min(each, bytes_) for bytes_ in room[:-1]] + [room[-1]]
    if low_zero:
        balanced[0] = min(max(0, sum(sizes) - sum(balanced[1:])), room[0])
    return balanced


def _prefill_bytes(shape: Shape, model: ModelConfig, load: Load) -> int:
    size = dtype_bytes(shape, model)
    tokens = load.rows * load.prompt_tokens
    mlp = (3 * shape.intermediate + 2 * shape.hidden) * size
    norm = shape.hidden * (2 * size + 8)
    heads = (shape.heads + shape.kv_heads) * shape.head_size
    attention = (2 * shape.hidden + 4 * heads) * size
    mask = load.rows * load.prompt_tokens**2 * (1 + size)
    if model.attention == "eager":
        mask += load.rows * shape.heads * load.prompt_tokens**2 * (4 + size)
    return tokens * max(mlp, norm, attention) + mask + WORKSPACE_BYTES


def _decode_bytes(shape: Shape, model: ModelConfig, load: Load, has_head: bool) -> int:
    size = dtype_bytes(shape, model)
    one_layer = load.rows * load.tokens * shape.cache_elements() * size
    repeated = one_layer * shape.heads // shape.kv_heads if shape.heads > shape.kv_heads else 0
    logits = load.rows * shape.vocabulary * (size + 4 + (12 if load.sampling else 0)) if has_head else 0
    return max(one_layer // 2 + repeated, logits) + WORKSPACE_BYTES


def size_bytes(text: str) -> int:
    """Bytes of `70GiB` (powers of 1024) or `70GB` (powers of 1000)."""
    number, unit = text[: -len(text.lstrip("0123456789. "))].strip(), text.lstrip("0123456789. ")
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** (1 + "KMGT".index(unit[0])))
