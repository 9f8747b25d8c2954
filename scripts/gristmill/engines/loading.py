"""Load a model onto its group with device_map, and refuse a placement that nobody asked for.

- device_map="auto" spreads layers over the GPUs of the group; what does not fit goes to CPU memory or disk nearly
  silently, a hundred times slower. That is an error unless models.*.allow_offload is set.
- Positions in a map or in max_memory (0, 1, …) count the GPUs of the worker's lease, not those of the host.
- Weights load from safetensors only, remote code stays off, unless the config says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError, some
from gristmill.keys import QUANTIZATION
from gristmill.memory.estimate import GIB, even_places, size_bytes
from gristmill.memory.shapes import block_of, read_shape


def load_model(folder: Path, model: ModelConfig, on_gpu: bool, ranks: int = 1) -> Any:
    """The model in evaluation mode, on the group's GPUs or the CPU; with `ranks`, this process's part of it.

    Raises:
        UserError: torch sees no GPU though the job holds one, or layers would be offloaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if on_gpu:
        if not torch.cuda.is_available():
            raise UserError(f"torch {torch.__version__} sees no GPU though this job holds one; make env DEVICE=gpu")
        # cuDNN plans its attention anew for every shape, and every new token is one (benchmarks/README.md).
        torch.backends.cuda.enable_cudnn_sdp(False)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=_dtype(model, on_gpu),
        **_placement(folder, model, on_gpu, ranks),
        trust_remote_code=model.trust_remote_code,
        attn_implementation=model.attention,
        quantization_config=_quantization(model),
        use_safetensors=None if model.allow_pickle else True,
        local_files_only=True,
    )
    _refuse_offload(loaded, model)
    return loaded.eval()


def idle_gpus(loaded: Any) -> list[int]:
    """Positions of the GPUs that torch sees and that hold nothing of the model."""
    import torch

    used = {str(device).removeprefix("cuda:") for device in _placed(loaded).values()}
    return [device for device in range(torch.cuda.device_count()) if str(device) not in used]


def placement(loaded: Any) -> dict[str, str]:
    """Device → what landed there, layers as ranges: {"0": "model.embed_tokens, model.layers.0-15", "1": …}."""
    found: dict[str, list[str]] = {}
    for module, device in _placed(loaded).items():
        found.setdefault(device, []).append(module)
    return {device: ", ".join(_ranges(modules)) for device, modules in found.items()}


def _placement(folder: Path, model: ModelConfig, on_gpu: bool, ranks: int) -> dict[str, Any]:
    """Where from_pretrained is to put the model: cut over ranks, laid over GPUs, or on the CPU."""
    if ranks > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=ranks)}
    return {"device_map": _device_map(folder, model), "max_memory": _max_memory(model)} if on_gpu else {}


def _device_map(folder: Path, model: ModelConfig) -> str | dict[str, int | str]:
    """The config's map, or an even one where its rule is not good enough (memory.estimate.even_places)."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 1 or isinstance(model.device_map, dict):
        return model.device_map
    shape = read_shape(folder)
    free = [torch.cuda.mem_get_info(device)[0] for device in range(gpus)]
    places = even_places(shape, model, free)
    if places is None:
        return model.device_map
    return module_map(folder, model, dict(zip((block.name for block in shape.blocks), places, strict=True)))


def module_map(folder: Path, model: ModelConfig, devices: Mapping[str, int]) -> dict[str, int | str]:
    """A device_map from the devices of blocks: every module that holds something itself, layers as wholes.

    The modules come from the config alone (meta device, no weights). A head that is the embedding goes where that is.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    trusted = {"trust_remote_code": model.trust_remote_code}
    with init_empty_weights():
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, **trusted)
        empty = AutoModelForCausalLM.from_config(config, **trusted)
    found: dict[str, int | str] = {}
    for name, module in empty.named_modules():
        block = block_of(f"{name}.")
        layer = block.removeprefix("layer ")
        if block.startswith("layer "):
            found[name[: name.index(f".{layer}") + len(layer) + 1]] = devices[block]
        elif any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            found[name] = devices.get(block, devices["embedding"])
    return found


def _placed(loaded: Any) -> dict[str, str]:
    """Module → device. transformers leaves hf_device_map out when all is on one device."""
    devices = getattr(loaded, "hf_device_map", None) or {"": loaded.device}
    return {str(module) or "all": str(device) for module, device in devices.items()}


def _ranges(modules: list[str]) -> list[str]:
    """Module names with neighbours of one numbered list joined: layers.0, layers.1, norm → layers.0-1, norm."""
    runs: list[tuple[str, int, int]] = []  # name before the number, first, last; first -1: no number
    for module in modules:
        head, _, tail = module.rpartition(".")
        number = int(tail) if tail.isdecimal() else -1
        if number > 0 and runs and runs[-1][0] == head and runs[-1][2] == number - 1:
            runs[-1] = (head, runs[-1][1], number)
        else:
            runs.append((head if number >= 0 else module, number, number))
    return [
        head if first < 0 else f"{head}.{first}" + (f"-{last}" if last > first else "") for head, first, last in runs
    ]


def _max_memory(model: ModelConfig) -> dict[int | str, int] | None:
    """max_memory as transformers takes it: positions as numbers, sizes in bytes."""
    sizes = {name: size_bytes(text) for name, text in model.max_memory.items()}
    return {int(name) if name.isdecimal() else name: size for name, size in sizes.items()} or None


def _dtype(model: ModelConfig, on_gpu: bool) -> Any:
    import torch

    if model.dtype == "auto":
        return "auto" if on_gpu else torch.float32
    return getattr(torch, model.dtype)


def _quantization(model: ModelConfig) -> Any:
    if model.quantization is None:
        return None
    if isinstance(model.quantization, dict):
        return _given_quantization(model.quantization)
    import importlib.util

    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {model.quantization} needs bitsandbytes; pip install bitsandbytes")
    return _given_quantization(QUANTIZATION[model.quantization])


def _given_quantization(values: dict[str, Any]) -> Any:
    """A quantization_config of transformers, by its quant_method."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        return AutoQuantizationConfig.from_dict(dict(values))
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"models.*.quantization {values} is refused by transformers: {error}; correct it") from error


def _refuse_offload(loaded: Any, model: ModelConfig) -> None:
    spilled = [module for module, device in _placed(loaded).items() if device in {"cpu", "disk"}]
    if not spilled or not getattr(loaded, "hf_device_map", None) or model.allow_offload:
        return
    modules = dict(loaded.named_modules())
    sizes = {name: sum(p.numel() * p.element_size() for p in modules[name].parameters()) for name in spilled}
    total = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())
    raise UserError(
        f"{len(spilled)} modules ({some(_ranges(spilled))}), {sum(sizes.values()) / GIB:.1f} of {total / GIB:.1f} GiB, "
        f"do not fit on the worker's GPUs ({_free()}) and would run from CPU memory or disk; raise gpus_per_model, set "
        "quantization, or set allow_offload: true"
    )


def _free() -> str:
    """What is left on each GPU, for a message."""
    import torch

    free = [torch.cuda.mem_get_info(device)[0] / GIB for device in range(torch.cuda.device_count())]
    return ", ".join(f"{size:.1f} GiB left on {device}" for device, size in enumerate(free)) or "none seen"
