"""A teacher of random weights in a folder: a few words, a chat template, a head wider than its vocabulary."""

from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.config.specs import LogitsSpec
from gristmill.types import JsonDict
from gristmill.weights import prepare

WORDS = ["<pad>", "<eos>", "<unk>", "ask", ":", "say", *(f"w{number}" for number in range(44))]
#: Outputs of the head beyond the vocabulary.
PADDING = 14
CHAT = (
    "ask : {% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}say {% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_teacher(folder: Path, kind: str = "Llama", padding: int = PADDING, **settings: Any) -> Path:
    """Config, float32 weights and tokenizer; the same every time."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT, **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(WORDS) + padding, **SIZES, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():  # far from uniform, as a trained model is
        if parameter.dim() == 2:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"source": str(folder), "engine": "static", "dtype": "float32", **settings})


def described(folder: Path) -> JsonDict:
    return prepare("teacher", config_of(folder), print)


def spec_of(folder: Path, path: Path, model: ModelConfig | None = None, **texts: Any) -> LogitsSpec:
    """Plain texts of a dataset's column `text`, unless `texts` says otherwise."""
    return LogitsSpec.model_validate(
        {
            "teacher": {"name": "teacher", "model": (model or config_of(folder)).model_dump()},
            "texts": {"model": "teacher", "dataset": "d", "text_field": "text", **texts},
            "dataset": {"path": str(path)},
        }
    )
