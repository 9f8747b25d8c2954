"""A model's shape and the sizes of its blocks, without loading weights: what the memory plan is made of.

- Sizes come from the headers of the safetensors files (a few KB a file, read without torch), or from a meta model that
  the config describes (accelerate's init_empty_weights: torch and transformers, no weights).
- A block is what device_map cannot split: the embedding, one decoder layer, what stands outside the layers, the head.
- Quantization shrinks linear layers only; embeddings, norms and the head keep 16 bits. A checkpoint that is already
  quantized holds integers, which count as they are stored.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.types import JsonDict

#: What to do about files that are not whole.
AGAIN = "remove the folder if a training made it, else fetch it again"
#: Bytes of an element, by safetensors' and torch's names.
DTYPE_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1},
    **{"U8": 1, "BOOL": 1, "float32": 4, "float16": 2, "bfloat16": 2},
}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|embeddings?)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")
#: Longest header that is believed; real ones stay below 1 MB.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: its name, its dtype as safetensors spells it, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """What goes onto one GPU as a whole."""

    name: str
    #: Elements of linear layers, which quantization shrinks; of other floats; bytes of what is stored as integers.
    linear: int = 0
    other: int = 0
    packed_bytes: int = 0
    is_layer: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What the memory of a decoder depends on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context_tokens: int | None
    #: Bytes of an element in the checkpoint.
    stored_bytes: int
    blocks: tuple[Block, ...]

    @property
    def parameters(self) -> int:
        """Weights that are stored as floats (integers of a quantized checkpoint are packed and not counted)."""
        return sum(block.linear + block.other for block in self.blocks)

    def cache_elements(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_size


_HEAD_COUNTS = {"num_attention_heads", "n_head", "num_heads"}


def read_shape(folder: Path) -> Shape:
    """The shape of a model folder: from the headers of its weights, or from its config alone where there are none.

    Raises:
        UserError: there is no config.json, or neither weights nor transformers to build a meta model.
    """
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no readable config.json ({error}); a model folder needs one") from error
    files = sorted(folder.glob("*.safetensors"))
    tensors = [tensor for path in files for tensor in read_header(path)] if files else list(meta_tensors(folder))
    return shape_of(config, tensors)


def shape_of(config: JsonDict, tensors: Iterable[Tensor]) -> Shape:
    """The shape from a transformers config and the parameters."""
    text = config.get("text_config") or config
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    # A model of states alone (Mamba) has no heads: it is planned as if it had one, which is more than it takes.
    states = bool(text.get("state_size") or text.get("ssm_state_size"))
    heads = 1 if states and not _HEAD_COUNTS & text.keys() else _number(text, *sorted(_HEAD_COUNTS))
    found = list(tensors)
    if text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)):
        found = [tensor for tensor in found if not _HEAD.search(tensor.name)]
    stored = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    return Shape(
        layers=_number(text, "num_hidden_layers", "n_layer", "num_layers"),
        hidden=hidden,
        intermediate=text.get("intermediate_size") or text.get("n_inner") or 4 * hidden,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_size=text.get("head_dim") or hidden // heads,
        vocabulary=_number(text, "vocab_size"),
        context_tokens=text.get("max_position_embeddings") or text.get("n_positions"),
        stored_bytes=DTYPE_BYTES.get(stored) or _most_common_bytes(found),
        blocks=blocks_of(found),
    )


def blocks_of(tensors: Iterable[Tensor]) -> tuple[Block, ...]:
    """Embedding, layers in order, the rest, the head: the order in which device_map fills the GPUs."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for tensor in tensors:
        place = _place(tensor.name)
        totals = sizes.setdefault(place, [0, 0, 0])
        totals[_kind(tensor, place)] += _counted(tensor)
    return tuple(_block(_name(place), totals, place[0] == 1) for place, totals in sorted(sizes.items()))


def block_of(parameter: str) -> str:
    """The name of the block that a parameter belongs to: `embedding`, `layer 7`, `rest` or `head`."""
    return _name(_place(parameter))


def read_header(path: Path) -> Iterator[Tensor]:
    """The tensors of a safetensors file (raw_header)."""
    header, _ = raw_header(path)
    yield from (Tensor(name, item["dtype"], tuple(item["shape"])) for name, item in header.items())


def raw_header(path: Path) -> tuple[JsonDict, int]:
    """A safetensors file's header and where it ends: JSON behind an 8-byte length, tensor → dtype, shape, data_offsets.

    Raises:
        UserError: the file is torn or no safetensors file (a Git LFS pointer, for example).
    """
    with open(path, "rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
        text = handle.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        header = {name: item for name, item in json.loads(text).items() if name != "__metadata__"}
        whole = all({"dtype", "shape", "data_offsets"} <= item.keys() for item in header.values())
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no whole safetensors file; {AGAIN}") from error
    if not whole:
        raise UserError(f"{path} is no whole safetensors file; {AGAIN}")
    return header, len(start) + length


def meta_tensors(folder: Path) -> Iterator[Tensor]:
    """The parameters of a model that its config describes, on the meta device: names and shapes, no memory."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder), local_files_only=True))
    for name, parameter in model.named_parameters():
        yield Tensor(name, "BF16" if parameter.element_size() == 2 else "F32", tuple(parameter.shape))


def _block(name: str, totals: list[int], is_layer: bool) -> Block:
    linear, other, packed_bytes = totals
    return Block(name, linear, other, packed_bytes, is_layer)


def _place(name: str) -> tuple[int, int]:
    """Where a parameter stands in the order of blocks."""
    if match := _LAYER.search(name):
        return 1, int(match[1])
    if _EMBEDDING.search(name):
        return 0, 0
    return (3, 0) if _HEAD.search(name) else (2, 0)


def _name(place: tuple[int, int]) -> str:
    part, number = place
    return f"layer {number}" if part == 1 else {0: "embedding", 2: "rest", 3: "head"}[part]


def _kind(tensor: Tensor, place: tuple[int, int]) -> int:
    if tensor.dtype not in _FLOATS:
        return 2
    return 0 if place[0] == 1 and len(tensor.shape) >= 2 else 1


def _counted(tensor: Tensor) -> int:
    return tensor.elements if tensor.dtype in _FLOATS else tensor.elements * DTYPE_BYTES.get(tensor.dtype, 1)


def _most_common_bytes(tensors: list[Tensor]) -> int:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        size = DTYPE_BYTES.get(tensor.dtype, 2)
        sizes[size] = sizes.get(size, 0) + tensor.elements
    return max(sizes, key=lambda size: sizes[size], default=2)


def _number(config: JsonDict, *names: str) -> int:
    for name in names:
        if config.get(name):
            return int(config[name])
    raise UserError(f"the model's config.json has none of {', '.join(names)}, so its memory cannot be planned; {AGAIN}")
