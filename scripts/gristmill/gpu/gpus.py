"""Which GPUs there are, and which of them this process may use.

- NVML answers (nvml.py), never torch: a CUDA context in the planning process would hold memory on every card.
- A mask that is already there (CUDA_VISIBLE_DEVICES from a scheduler or a user) is honoured: numbers or UUIDs, in its
  order. As in CUDA, a number counts the devices seen here (in a container or a cgroup fewer than the host has),
  the mask ends at -1 (or SLURM's NoDevFiles), and an empty one means no GPU. A device named twice counts once.
- GRISTMILL_INVENTORY names a JSON file with a list of GPUs to use instead of NVML: planning for another machine, tests.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.gpu import nvml
from gristmill.types import Gpu

#: What a mask says to hide all GPUs, or those that follow.
_MASK_ENDS = {"-1", "NoDevFiles"}
_INVENTORY_KEYS = {"count", "index", "uuid", "name", "memory_total_mib", "memory_used_mib"}


def inventory(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """All GPUs of this host by index; an empty list where there is no NVIDIA driver.

    Raises:
        UserError: the driver is there and does not work; a run on the CPU instead would take weeks in silence.
    """
    if path := environ.get("GRISTMILL_INVENTORY"):
        return read_inventory(Path(path))
    try:
        with nvml.session() as driver:
            return [] if driver is None else nvml.read_gpus(driver)
    except Exception as error:
        if not type(error).__name__.startswith("NVMLError"):
            raise
        if _masked(environ) == []:
            return []
        raise UserError(
            f"the NVIDIA driver does not answer: {error}; see nvidia-smi, or set CUDA_VISIBLE_DEVICES=-1 to use no GPU"
        ) from error


def read_inventory(path: Path) -> list[Gpu]:
    """The GPUs of an inventory file: a list of {name, memory_total_mib}, with `count` or `index` and `uuid` if need be.

    Raises:
        UserError: the file is not there or not such a list.
    """
    try:
        items = read_json(path)
        return list(_expanded(items))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is no inventory of GPUs: {type(error).__name__}: {error}; "
            'write [{"name": "H100", "memory_total_mib": 81559, "count": 8}]'
        ) from error


def usable(gpus: Sequence[Gpu], environ: Mapping[str, str], devices: str | Sequence[int | str] = "auto") -> list[Gpu]:
    """The GPUs that the mask and the config's `gpus.devices` both allow; of `none`, none.

    Raises:
        UserError: a device in the config or the mask does not exist.
    """
    if devices == "none":
        return []
    names = _masked(environ)
    masked = list(gpus)
    if names is not None and gpus:
        masked = [_find(gpus, name, "CUDA_VISIBLE_DEVICES", range(len(gpus))) for name in names]
    if not isinstance(devices, str):
        indices = [gpu.index for gpu in gpus]
        wanted = [_find(gpus, str(item), "gpus.devices", indices) for item in devices]
        masked = [gpu for gpu in wanted if gpu in masked]
    return list(dict.fromkeys(masked))


def use(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> dict[str, nvml.Use]:
    """UUID → memory in use and processes, now; from the inventory file where that stands in for the driver."""
    if path := environ.get("GRISTMILL_INVENTORY"):
        return {gpu.uuid: nvml.Use(gpu.memory_used_mib) for gpu in read_inventory(Path(path))}
    if not gpus:  # also a driver that fails is not asked when the mask hides all
        return {}
    with nvml.session() as driver:
        return {} if driver is None else nvml.read_use(driver, gpus)


def links(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> nvml.Links:
    """How near the GPUs are to each other; empty where the driver does not say."""
    if environ.get("GRISTMILL_INVENTORY") or len(gpus) < 2:
        return {}
    with nvml.session() as driver:
        return {} if driver is None else nvml.read_links(driver, gpus)


def _expanded(items: Any) -> Iterator[Gpu]:
    """One Gpu for each, with the numbers and UUIDs that the file leaves out."""
    place = 0
    for item in items:
        if unknown := set(item) - _INVENTORY_KEYS:
            raise ValueError(f"unknown key {min(unknown)!r}")
        for _ in range(item.get("count", 1)):
            index = item.get("index", place)
            uuid = item.get("uuid", f"GPU-inventory-{index}")
            yield Gpu(index, uuid, item["name"], int(item["memory_total_mib"]), int(item.get("memory_used_mib", 0)))
            place += 1


def _masked(environ: Mapping[str, str]) -> list[str] | None:
    """The names in CUDA_VISIBLE_DEVICES up to the one that ends it; None when it is not set."""
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return None
    names = [name.strip() for name in mask.split(",") if name.strip()]
    return list(itertools.takewhile(lambda name: name not in _MASK_ENDS, names))


def _find(gpus: Sequence[Gpu], name: str, where: str, numbers: Sequence[int]) -> Gpu:
    """The GPU of a number, a UUID or a UUID's beginning; `numbers` are those that the GPUs go by there."""
    is_uuid = name.startswith(("GPU-", "MIG-"))
    found = [
        gpu
        for gpu, number in zip(gpus, numbers, strict=True)
        if name == str(number) or (is_uuid and gpu.uuid.startswith(name))
    ]
    if len(found) == 1:
        return found[0]
    there = ", ".join(map(str, numbers)) or "none"
    fault = "fits more than one GPU" if found else "is not here"
    raise UserError(f"{where} names GPU {name!r}, which {fault} (indices here: {there}); correct it")
