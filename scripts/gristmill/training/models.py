"""What is trained: a base's weights or fresh ones, with adapters or without; and what becomes of it.

- Fresh weights come from the seed alone, on the CPU, so that they are the same on every process and every machine.
- Whether a row's texts are blind to each other is tried before the first step: a model whose layers carry a state, or
  that makes its mask itself, would train on a mixture in silence.
- The result is a model folder as any other: adapters are merged into the weights, and stand beside them in adapter/.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig, TrainingConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.errors import UserError
from gristmill.logits.vocabulary import vocabulary_size
from gristmill.types import JsonDict
from gristmill.weights import require_prepared

#: Of a model's outputs, in which another text of the row may show by rounding alone.
BLIND_TOLERANCE = 1e-3


def tokenizer_of(weights: JsonDict, model: ModelConfig) -> Any:
    """The tokenizer that the trained model gets."""
    return ChatEncoder(require_prepared(weights), model).tokenizer


def build(training: TrainingConfig, model: ModelConfig, weights: JsonDict, tokenizer: Any, empty: bool = False) -> Any:
    """The model on the CPU, in training mode, with its adapters.

    Args:
        training: the recipe.
        model: of the base, or whose tokenizer it takes.
        weights: results/models/<model>.json of it.
        tokenizer: `tokenizer_of` it.
        empty: leave parameters and buffers without values, and so without memory until another process sends them.

    Raises:
        UserError: an architecture that transformers does not know, or rows that are longer than the model's context.
    """
    import torch

    torch.manual_seed(training.seed)
    with torch.device("meta") if empty else contextlib.nullcontext():
        made = _bare(training, model, weights, tokenizer, empty)
        limit = getattr(made.config, "max_position_embeddings", None)
        if limit is not None and training.sequence_tokens > limit:
            raise UserError(
                f"sequence_tokens={training.sequence_tokens}, but the model reads {limit} tokens; use {limit} or "
                "fewer, or give the architecture more positions"
            )
        if training.gradient_checkpointing:
            made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made = adapted(made, training)
    if empty:
        made.to_empty(device="cpu")  # the system gives memory when somebody writes to it
        made.tie_weights()
    return made.train()


def adapted(model: Any, training: TrainingConfig) -> Any:
    """The model with its adapters, which alone are trained; itself without."""
    if training.lora is None:
        return model
    try:
        import peft
    except ImportError as error:
        raise UserError("lora needs peft; pip install peft") from error
    lora = training.lora
    wanted: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=lora.target_modules, **wanted)
    )


def require_blind(model: Any, autocast: Any) -> None:
    """Refuse packing for a model in which one text of a row sees another.

    Args:
        model: on its device; where it is sharded, every process asks at the same time.
        autocast: the context it computes in.

    Raises:
        UserError: the second text's outputs change with the first text.
    """
    import torch

    device = next(model.parameters()).device
    positions = torch.arange(8, device=device).repeat(2)[None]
    first = torch.arange(16, device=device)[None] % 7
    second = torch.cat([(first[:, :8] + 3) % 7, first[:, 8:]], -1)
    training = model.training
    model.eval()
    with torch.no_grad(), autocast:
        one, other = (
            model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 8:].float()
            for ids in (first, second)
        )
    model.train(training)
    if (one - other).abs().max() > BLIND_TOLERANCE * one.abs().max():
        raise UserError(
            f"in a {model.config.model_type} model with attention {model.config._attn_implementation} the texts of a "
            "row see each other; set packing: false"
        )


def save(state: JsonDict, trained: Any, training: TrainingConfig, tokenizer: Any, folder: Path) -> JsonDict:
    """Write the trained model as a model folder.

    Args:
        state: all parameters by name, on the CPU.
        trained: the model that they are of.
        training: the recipe.
        tokenizer: goes along.
        folder: where to.

    Returns:
        Parameters: `parameters` of the model, and `trained_parameters`.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = getattr(torch, saved_dtype(training))
    config = copy.deepcopy(trained.config)
    fresh = adapted(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, training.dtype)), training)
    fresh.load_state_dict(state)
    counted = {
        "parameters": sum(parameter.numel() for parameter in fresh.parameters()),
        "trained_parameters": sum(parameter.numel() for parameter in fresh.parameters() if parameter.requires_grad),
    }
    if training.lora is not None:
        fresh.save_pretrained(folder / "adapter")
        fresh = fresh.merge_and_unload()
        counted["parameters"] = sum(parameter.numel() for parameter in fresh.parameters())
    fresh.generation_config = trained.generation_config
    fresh.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return counted


def saved_dtype(training: TrainingConfig) -> str:
    """The dtype of the result's weights."""
    if training.saved_dtype != "auto":
        return training.saved_dtype
    return {"bf16": "bfloat16", "fp16": "float16"}.get(training.mixed_precision, training.dtype)


def _bare(training: TrainingConfig, model: ModelConfig, weights: JsonDict, tokenizer: Any, empty: bool) -> Any:
    """The model without adapters; of a base only its config when it is to be empty."""
    if training.architecture is not None:
        return _from_config(_config(dict(training.architecture), tokenizer), training, model)
    folder = require_prepared(weights)
    if not empty:
        return _from_base(training, model, folder)
    from transformers import AutoConfig

    trusted = model.trust_remote_code
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trusted, local_files_only=True)
    return _from_config(config, training, model)


def _from_base(training: TrainingConfig, model: ModelConfig, folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=getattr(torch, training.dtype),
        attn_implementation=training.attention,
        trust_remote_code=model.trust_remote_code,
        use_safetensors=None if model.allow_pickle else True,
        local_files_only=True,
    )


def _from_config(config: Any, training: TrainingConfig, model: ModelConfig) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, training.dtype),
        attn_implementation=training.attention,
        trust_remote_code=model.trust_remote_code,
    )


def _config(keys: dict[str, Any], tokenizer: Any) -> Any:
    """The transformers config of an architecture; its vocabulary and special tokens are the tokenizer's."""
    from transformers import AutoConfig

    kind = keys.pop("model_type")
    try:
        default = AutoConfig.for_model(kind)
    except ValueError as error:
        raise UserError(
            f"architecture.model_type {kind!r} is none of transformers'; for example llama or gpt2"
        ) from error
    known = {*default.to_dict(), *default.attribute_map}
    if unknown := sorted(set(keys) - known):
        raise UserError(f"architecture.{unknown[0]} is no key of a {kind} config; its keys are transformers'")
    size = vocabulary_size(tokenizer)
    if keys.setdefault("vocab_size", size) < size:
        raise UserError(
            f"architecture.vocab_size is {keys['vocab_size']}, and the tokenizer has {size} tokens; leave it out"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        keys.setdefault(name, getattr(tokenizer, name, None))
    try:
        return AutoConfig.for_model(kind, **keys)
    except (TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"architecture is refused by transformers' {kind} config: {said}; correct it") from error
