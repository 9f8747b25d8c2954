"""A small Llama of random weights with a tokenizer of a few words and a chat template: a model without a download."""

from __future__ import annotations

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
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}word{% endif %}"
#: 200 million parameters, nearly all of them in the 16 layers that device_map spreads.
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def make_model(folder: Path) -> Path:
    """Write config, bfloat16 safetensors, tokenizer and template; the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    _save_tokenizer(folder, vocabulary)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, eos_token_id=1, bos_token_id=None, **SIZES)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def _save_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=CHAT, **special).save_pretrained(folder)
