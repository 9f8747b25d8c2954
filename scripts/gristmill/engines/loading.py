"""Load a model onto its group with device_map, and refuse a placement that nobody asked for.

- device_map="auto" spreads layers over the GPUs of the group; what does not fit goes to CPU memory or disk nearly
  silently, a hundred times slower. That is an error unless models.*.allow_offload is set.
- Weights load from safetensors only, remote code stays off, unless the config says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError


def load_model(folder: Path, model: ModelConfig, on_gpu: bool) -> Any:
    """The model in evaluation mode, on the group's GPUs or the CPU.

    Raises:
        UserError: torch sees no GPU though the job holds one, or layers would be offloaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if on_gpu and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no GPU though this job holds one; make env DEVICE=gpu")
    loaded = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=_dtype(model, on_gpu),
        device_map=model.device_map if on_gpu else None,
        trust_remote_code=model.trust_remote_code,
        attn_implementation=model.attention,
        quantization_config=_quantization(model),
        use_safetensors=None if model.allow_pickle else True,
        local_files_only=True,
    )
    _refuse_offload(loaded, model)
    return loaded.eval()


def placement(loaded: Any) -> dict[str, str]:
    """Module → device. transformers leaves hf_device_map out when all is on one device."""
    devices = getattr(loaded, "hf_device_map", None) or {"": loaded.device}
    return {str(module): str(device) for module, device in devices.items()}


def _dtype(model: ModelConfig, on_gpu: bool) -> Any:
    import torch

    if model.dtype == "auto":
        return "auto" if on_gpu else torch.float32
    return getattr(torch, model.dtype)


def _quantization(model: ModelConfig) -> Any:
    if model.quantization is None:
        return None
    import importlib.util

    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {model.quantization} needs bitsandbytes; pip install bitsandbytes")
    import torch
    from transformers import BitsAndBytesConfig

    if model.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _refuse_offload(loaded: Any, model: ModelConfig) -> None:
    spilled = [module for module, device in placement(loaded).items() if device in {"cpu", "disk"}]
    if spilled and getattr(loaded, "hf_device_map", None) and not model.allow_offload:
        raise UserError(
            f"{len(spilled)} modules ({spilled[0]} …) do not fit on the group's GPUs and would run from CPU memory or "
            "disk; raise gpus_per_model, set quantization, or set allow_offload: true"
        )
