"""Which GPUs there are, and which of them this process may use.

- NVML answers (nvidia-ml-py), never torch: a CUDA context in the planning process would hold memory on every card.
- A mask that is already there (CUDA_VISIBLE_DEVICES from a scheduler or a user) is honoured: indices or UUIDs, in its
  order. As in CUDA, it ends at -1 (or SLURM's NoDevFiles), and an empty one means no GPU. A device named twice counts
  once.
- GRISTMILL_INVENTORY names a JSON file with a list of GPUs to use instead of NVML: planning for another machine, tests.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.types import Gpu

#: What a mask says to hide all GPUs, or those that follow.
_MASK_ENDS = {"-1", "NoDevFiles"}


def inventory(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """All GPUs of this host by index; an empty list where there is no NVIDIA driver.

    Raises:
        UserError: the driver is there and does not work; a run on the CPU instead would take weeks in silence.
    """
    if path := environ.get("GRISTMILL_INVENTORY"):
        return [Gpu(**item) for item in read_json(Path(path))]
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        if _masked(environ) == []:
            return []
        raise UserError(
            f"the NVIDIA driver does not answer: {error}; see nvidia-smi, or set CUDA_VISIBLE_DEVICES=-1 to use no GPU"
        ) from error
    try:
        return [_read_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def usable(gpus: Sequence[Gpu], environ: Mapping[str, str], devices: str | Sequence[int | str] = "auto") -> list[Gpu]:
    """The GPUs that the mask and the config's `gpus.devices` both allow.

    Raises:
        UserError: a device in the config or the mask does not exist.
    """
    names = _masked(environ)
    masked = list(gpus)
    if names is not None and gpus:
        masked = [_find(gpus, name, "CUDA_VISIBLE_DEVICES") for name in names]
    if not isinstance(devices, str):
        wanted = [_find(gpus, str(item), "gpus.devices") for item in devices]
        masked = [gpu for gpu in wanted if gpu in masked]
    return list(dict.fromkeys(masked))


def _masked(environ: Mapping[str, str]) -> list[str] | None:
    """The names in CUDA_VISIBLE_DEVICES up to the one that ends it; None when it is not set."""
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return None
    names = [name.strip() for name in mask.split(",") if name.strip()]
    return list(itertools.takewhile(lambda name: name not in _MASK_ENDS, names))


def _find(gpus: Sequence[Gpu], name: str, where: str) -> Gpu:
    """The GPU of an index, a UUID or a UUID's beginning."""
    is_uuid = name.startswith(("GPU-", "MIG-"))
    found = [gpu for gpu in gpus if name == str(gpu.index) or (is_uuid and gpu.uuid.startswith(name))]
    if len(found) == 1:
        return found[0]
    there = ", ".join(str(gpu.index) for gpu in gpus) or "none"
    fault = "fits more than one GPU" if found else "is not here"
    raise UserError(f"{where} names GPU {name!r}, which {fault} (indices here: {there}); correct it")


def _read_gpu(index: int) -> Gpu:
    import pynvml as nvml

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_total_mib=int(memory.total) // 2**20,
        memory_used_mib=int(memory.used) // 2**20,
    )
