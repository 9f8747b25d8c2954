"""Whether vLLM can run a model as its config asks, told before any weights are loaded.

- Every reason is something that vLLM would ignore or refuse: an architecture or quantization it does not know, a
  placement of layers, heads that do not divide. `auto` then takes another engine and gives the reason.
- vLLM is imported only when nothing else speaks against it: its import takes ten seconds.
- Its variables are set here, before that import, and only where the environment does not set them.
- What it knows is asked of the installed version: 0.26 loads bitsandbytes' 4 bits, 0.32 no longer does.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.files import read_json
from gristmill.gpu import gpus as devices
from gristmill.keys import dtype_in_force
from gristmill.types import JsonDict
from gristmill.weights import stored_dtype

_DTYPES = ("bfloat16", "float16", "float32")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",  # the group is on one host; without this vLLM asks the network for its name
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; on a CPU only, as the next
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default every worker would bind to the same cores
}


def installed() -> bool:
    """Whether there is a vllm; importing it is another matter."""
    return importlib.util.find_spec("vllm") is not None


def why_not(folder: Path, model: ModelConfig, gpus: int) -> str | None:
    """The first reason that speaks against vLLM, or None.

    Args:
        folder: the model folder; its config.json is read.
        model: the model's config.
        gpus: how many GPUs the worker holds; 0: it runs on the CPU.
    """
    if not installed():
        return "vllm is not installed (pip install 'vllm>=0.26', the extra vllm)"
    config = read_json(folder / "config.json")
    return next(_reasons(folder, config, model, gpus), None)


def set_environment() -> None:
    """Set vLLM's variables, each only where the environment does not set it; some are read when vllm is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def number_devices() -> None:
    """Name the leased GPUs by number in CUDA_VISIBLE_DEVICES: vLLM cannot read the UUIDs that a lease writes there.

    The numbers are the driver's, which CUDA counts by only in the order of the bus. Call it before CUDA begins.
    """
    there = devices.usable(devices.inventory(), os.environ)
    if there and not any(gpu.uuid.startswith("MIG-") for gpu in there):
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in there)


def dtype_of(folder: Path, model: ModelConfig, gpus: int) -> str:
    """The dtype that the model runs in, as it enters the keys."""
    return dtype_in_force(model, {"dtype": stored_dtype(folder)}, on_gpu=gpus > 0)


def _reasons(folder: Path, config: JsonDict, model: ModelConfig, gpus: int) -> Iterator[str]:
    """What speaks against it, cheap questions first."""
    yield from _placement(model)
    yield from _heads(config.get("text_config") or config, gpus)
    dtype = dtype_of(folder, model, gpus)
    if dtype not in _DTYPES:
        yield f"the model is in dtype {dtype}, and vllm takes {', '.join(_DTYPES)}"
    if model.quantization == "8bit" or isinstance(model.quantization, dict):
        yield f"vllm does not take quantization {model.quantization!r} (only 4bit, or a checkpoint that is quantized)"
    yield from _installed(config, model, gpus)


def _placement(model: ModelConfig) -> Iterator[str]:
    """Settings of device_map and its kin: vLLM cuts every layer over all GPUs of the group instead."""
    if model.device_map not in ("auto", "balanced"):
        yield "vllm cuts every layer over the group's GPUs and takes no device_map"
    for name in ("max_memory", "allow_offload", "attention"):
        if getattr(model, name):
            yield f"vllm does not honour models.*.{name}"


def _heads(config: JsonDict, gpus: int) -> Iterator[str]:
    """Attention heads must divide over the GPUs; key-value heads too, or GPUs over them."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = config.get(name)
        if gpus > 1 and heads and heads % gpus and (name == "num_attention_heads" or gpus % heads):
            fit = [str(size) for size in range(1, gpus) if heads % size == 0]
            yield f"{name}={heads} does not divide over {gpus} GPUs; with gpus_per_model {' or '.join(fit)} it would"


def _installed(config: JsonDict, model: ModelConfig, gpus: int) -> Iterator[str]:
    """What the installed vLLM says."""
    set_environment()
    try:
        import vllm
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
        from vllm.platforms import current_platform

        known = vllm.ModelRegistry.get_supported_archs()
    except Exception as error:  # a build for another torch or CUDA fails in many ways
        yield f"vllm cannot be imported ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        return
    if current_platform.is_cpu() == (gpus > 0) or not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        build = current_platform.device_type or "no device"
        yield f"vllm {vllm.__version__} is a build for {build}, and this job runs on {'GPUs' if gpus else 'the CPU'}"
    names = config.get("architectures") or []
    if not set(names) & set(known):
        yield f"vllm {vllm.__version__} does not know the architecture {', '.join(names) or '(none in config.json)'}"
    stored = (config.get("quantization_config") or {}).get("quant_method")
    for method in filter(None, (stored, "bitsandbytes" if model.quantization == "4bit" else None)):
        if method not in QUANTIZATION_METHODS or (method == "bitsandbytes" and not gpus):
            yield f"vllm {vllm.__version__} does not take {method} weights{'' if gpus else ' on a CPU'}"
        if method == "bitsandbytes" and importlib.util.find_spec("bitsandbytes") is None:
            yield "quantization 4bit needs bitsandbytes; pip install bitsandbytes"
