"""What the NVIDIA driver says about its GPUs, through NVML (nvidia-ml-py), never through torch.

- A card in MIG mode appears as its MIG devices, which are what CUDA can use; they carry the card's index.
- A device that a cgroup hides answers "no permission" and is left out, as CUDA leaves it out.
- What a driver or a container does not tell (processes, links) is left out, never an error: only the list of GPUs and
  their memory is needed to run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.types import Gpu

#: What NVLink adds to the nearness of two cards, which without it is 0 (two sockets) to 50 (one board).
NVLINK = 100
Links = Mapping[frozenset[str], int]


@dataclass(frozen=True, slots=True)
class Use:
    """What runs on a GPU: memory in use, and the processes the driver shows (none from inside a container)."""

    used_mib: int
    processes: tuple[str, ...] = ()


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """The initialized pynvml module, or None where there is no package or no driver; a failing driver raises."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_gpus(nvml: Any) -> list[Gpu]:
    """All devices that CUDA could use here, in the driver's order."""
    return [gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _read_card(nvml, index)]


def read_use(nvml: Any, gpus: Sequence[Gpu]) -> dict[str, Use]:
    """UUID → what runs on it now; devices that do not answer are left out."""
    found: dict[str, Use] = {}
    for gpu in gpus:
        handle = ask(nvml, "nvmlDeviceGetHandleByUUID", gpu.uuid)
        memory = None if handle is None else _memory(nvml, handle)
        if memory is not None:
            found[gpu.uuid] = Use(int(memory.used) // 2**20, tuple(_processes(nvml, handle)))
    return found


def read_links(nvml: Any, gpus: Sequence[Gpu]) -> dict[frozenset[str], int]:
    """Pairs of UUIDs → how near the two are: 0 (two sockets) to 50 (one board), and NVLINK more if it joins them."""
    handles = {gpu.uuid: ask(nvml, "nvmlDeviceGetHandleByUUID", gpu.uuid) for gpu in gpus}
    return {
        frozenset((one, other)): _nearness(nvml, handles[one], handles[other])
        for one, other in itertools.combinations(handles, 2)
        if handles[one] is not None and handles[other] is not None
    }


def ask(nvml: Any, question: str, *args: Any, **options: Any) -> Any:
    """The driver's answer, or None when it has none (not supported, no permission, gone, an older nvidia-ml-py)."""
    try:
        return getattr(nvml, question)(*args, **options)
    except (nvml.NVMLError, AttributeError):
        return None


def _read_card(nvml: Any, index: int) -> list[Gpu]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError_NoPermission:
        return []
    handles = [handle]
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode is not None and mode[0]:
        slots = range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        found = [ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
        handles = [device for device in found if device is not None]
    return [_read_device(nvml, device, index) for device in handles]


def _read_device(nvml: Any, handle: Any, index: int) -> Gpu:
    memory = _memory(nvml, handle)
    total, used = (0, 0) if memory is None else (int(memory.total) // 2**20, int(memory.used) // 2**20)
    return Gpu(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), total, used)


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 leaves the driver's own reserve out of `used`; older drivers have only version 1."""
    second = ask(nvml, "nvmlDeviceGetMemoryInfo", handle, version=getattr(nvml, "nvmlMemory_v2", None))
    return second if second is not None else ask(nvml, "nvmlDeviceGetMemoryInfo", handle)


def _processes(nvml: Any, handle: Any) -> Iterator[str]:
    """`pid 4711 (python, 3400 MiB)` for each process; the name only where /proc shows it."""
    for process in ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or []:
        name = _process_name(process.pid)
        memory = f"{int(process.usedGpuMemory) // 2**20} MiB" if process.usedGpuMemory else ""
        about = ", ".join(word for word in (name, memory) if word)
        yield f"pid {process.pid} ({about})" if about else f"pid {process.pid}"


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _nearness(nvml: Any, one: Any, other: Any) -> int:
    linked = ask(nvml, "nvmlDeviceGetP2PStatus", one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    ancestor = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other)
    near = 0 if ancestor is None else max(0, nvml.NVML_TOPOLOGY_SYSTEM - int(ancestor))
    return near + (NVLINK if linked == nvml.NVML_P2P_STATUS_OK else 0)
