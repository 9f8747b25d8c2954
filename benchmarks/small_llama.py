"""A small Llama of random weights with a tokenizer of a few words and a chat template: a model without a download."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = [
    "tell",
    "me",
    "a",
    "word",
    "about",
    "the",
    "red",
    "blue",
    "green",
    "old",
    "new",
    "small",
    "large",
    "river",
    "stone",
    "house",
    "tree",
    "bird",
    "number",
]
CHAT = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}word {% endif %}"
)
#: 180 million parameters, nearly all of them in the 16 layers that device_map spreads.
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def make_model(folder: Path, sizes: Mapping[str, Any] = SIZES, device: str = "cpu") -> Path:
    """Write config, bfloat16 safetensors, tokenizer and template; on one device the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    _save_tokenizer(folder, vocabulary)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path) -> Path:
    """The tokenizer with the smallest model that a model folder needs around it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    _save_tokenizer(folder, vocabulary)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
    return folder


def make_giant(folder: Path) -> Path:
    """A 405B Llama of which only config and safetensors header are there: enough to plan with, nothing to load."""
    hidden, inner, kv, vocabulary, layers = 16384, 53248, 1024, 128256, 126
    layer = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    layer |= {f"self_attn.{name}_proj": (kv, hidden) for name in "kv"}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()}
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        start, end = end, end + 2 * rows * columns
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **sizes}))
    return folder


def _save_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=CHAT, **special).save_pretrained(folder)
