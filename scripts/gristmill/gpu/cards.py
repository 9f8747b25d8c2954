"""The GPUs a job holds, as NVML answers for them: a value or None, and a lost device told apart.

- Devices are found by UUID, the name that a lease, CUDA and a MIG slice share; NVML does not look at the mask
  CUDA_VISIBLE_DEVICES.
- A field that a card, a MIG slice, a driver or the installed nvidia-ml-py does not have is None, never 0.
- Events belong to the physical card. Energy, power and utilization of a MIG slice are not known, and those of its card
  would count the neighbours' work: they stay None.
- The module that answers is passed in, so that everything runs against another one (tests, benchmarks --dry).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gristmill.types import Gpu

#: nvidia-ml-py is only partly typed, and a stand-in may answer in its place.
Nvml = Any

#: What NVML calls no instance: the event concerns the whole card.
ALL_INSTANCES = 0xFFFFFFFF


class Lost(Exception):
    """The device no longer answers, or not without a reset."""


class Card:
    """One GPU, or one MIG slice, that NVML answers for."""

    def __init__(self, nvml: Nvml, gpu: Gpu) -> None:
        """Find the device; raises nvml.NVMLError when there is none of this UUID."""
        self.gpu = gpu
        self._nvml = nvml
        lost = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")
        self._lost = tuple(getattr(nvml, name) for name in lost if hasattr(nvml, name))
        self._handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        self._is_slice = gpu.uuid.startswith("MIG-")
        parent = self.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle") if self._is_slice else None
        self._physical = self._handle if parent is None else parent
        self._instance = self.ask("nvmlDeviceGetGpuInstanceId") if self._is_slice else None
        self._events = self._subscribe()

    def ask(self, function: str, *arguments: Any) -> Any:
        """What an NVML function says of the device; None when it cannot say.

        Raises:
            Lost: the device is gone.
        """
        return self._call(function, self._handle, *arguments)

    def ask_whole(self, function: str, *arguments: Any) -> Any:
        """The same where the answer is the device's own: None for a MIG slice."""
        return None if self._is_slice else self._call(function, self._handle, *arguments)

    def ask_card(self, function: str, *arguments: Any) -> Any:
        """The same of the physical card, also for a MIG slice."""
        return self._call(function, self._physical, *arguments)

    def memory_used_bytes(self) -> int | None:
        """Memory in use. Version 2 leaves the driver's own reserve out; older drivers have only version 1."""
        second = getattr(self._nvml, "nvmlMemory_v2", None)
        found = self.ask("nvmlDeviceGetMemoryInfo", second) if second is not None else None
        found = self.ask("nvmlDeviceGetMemoryInfo") if found is None else found
        return None if found is None else int(found.used)

    def xids(self) -> list[int]:
        """The Xids reported since the last call, without those of other MIG slices."""
        found: list[int] = []
        while self._events is not None:
            event = self._call("nvmlEventSetWait_v2", self._events, 0)
            if event is None:  # NVMLError_Timeout: nothing more
                break
            if self._instance is None or event.gpuInstanceId in (ALL_INSTANCES, self._instance):
                found.append(int(event.eventData))
        return found

    def close(self) -> None:
        """Give the event set back."""
        if self._events is not None:
            self._call("nvmlEventSetFree", self._events)
            self._events = None

    def _call(self, function: str, *arguments: Any) -> Any:
        call = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self._lost as error:
            raise Lost(str(error)) from error
        except self._nvml.NVMLError:
            return None

    def _subscribe(self) -> Any:
        """An event set for the card's Xids; None where events cannot be had."""
        events = self._call("nvmlEventSetCreate")
        if events is None:
            return None
        try:
            self._nvml.nvmlDeviceRegisterEvents(self._physical, self._nvml.nvmlEventTypeXidCriticalError, events)
        except self._nvml.NVMLError:
            self._nvml.nvmlEventSetFree(events)
            return None
        return events


def open_nvml(log: Callable[[str], None]) -> Nvml | None:
    """NVML, ready to answer; None with a word in the log where there is no driver. Close it with nvmlShutdown()."""
    try:
        import pynvml
    except ImportError:
        log("GPUs are not watched: nvidia-ml-py is not installed")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log(f"GPUs are not watched: {error}")
        return None
    return pynvml
