"""What the GPUs do, read once a second by one thread and kept for some minutes.

- Requests are answered from memory: a driver that hangs makes the readings old, and says so, and holds up no answer.
- GPUs, samples, quarantine and leases are those of gristmill.gpu. With GRISTMILL_INVENTORY the list comes from a file;
  what no driver says is None, never 0.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill import locks
from gristmill.errors import UserError
from gristmill.gpu import gpus as devices
from gristmill.gpu import health
from gristmill.gpu.cards import Card, Lost, Nvml, open_nvml
from gristmill.gpu.lease import lease_folder
from gristmill.gpu.monitor import sample
from gristmill.types import Gpu, JsonDict

#: Samples kept of each GPU.
KEPT = 300


@dataclass(frozen=True, slots=True)
class Holder:
    """The job with a lease on a GPU."""

    pid: int
    purpose: str
    since: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU now, and what it did in the last minutes."""

    gpu: Gpu
    #: Lines as monitor.sample makes them, the oldest first; None where nothing is known.
    samples: tuple[JsonDict, ...]
    holder: Holder | None = None
    #: Why leases leave it out; None when they do not.
    set_aside: str | None = None
    lost: bool = False

    @property
    def last(self) -> JsonDict:
        """The newest sample; empty when there is none."""
        return self.samples[-1] if self.samples else {}

    @property
    def memory_used_mib(self) -> int | None:
        """Memory in use: the newest sample's, else the inventory's."""
        used: int | None = self.last.get("memory_used_mib")
        return used


@dataclass(frozen=True, slots=True)
class Readings:
    """All GPUs at one time."""

    gpus: tuple[Reading, ...] = ()
    #: Seconds since 1970; 0: not looked at yet.
    time: float = 0.0
    #: Why the GPUs could not be read.
    error: str | None = None


class GpuReader:
    """Reads all GPUs; for one thread."""

    def __init__(self, log: Callable[[str], None], nvml: Nvml | None = None) -> None:
        """Prepare; nothing is asked yet. `nvml` answers instead of the driver."""
        self._log, self._nvml = log, nvml
        self._opened = nvml is not None
        self._cards: dict[str, Card] = {}
        self._samples: dict[str, deque[JsonDict]] = {}

    def read(self) -> Readings:
        """All GPUs now; a driver that fails is an error in the result."""
        if not self._opened:
            self._nvml, self._opened = open_nvml(self._log), True
        try:
            there = devices.inventory()
            folder = lease_folder()
            sick = health.quarantined(folder, time.time())
            found = tuple(self._read(gpu, sick.get(gpu.uuid)) for gpu in there)
        except UserError as error:
            return Readings(time=time.time(), error=str(error))
        return Readings(found, time.time())

    def _read(self, gpu: Gpu, sick: str | None) -> Reading:
        kept = self._samples.setdefault(gpu.uuid, deque(maxlen=KEPT))
        lost = False
        try:
            card = self._card(gpu)
            kept.append(_only_inventory(gpu) if card is None else sample(card))
        except Lost:
            self._cards.pop(gpu.uuid, None)
            lost = True
        return Reading(gpu, tuple(kept), lease_holder(gpu.uuid), sick, lost)

    def _card(self, gpu: Gpu) -> Card | None:
        """The card that NVML answers for; None where there is no driver, or it does not know the GPU."""
        if self._nvml is None:
            return None
        if gpu.uuid not in self._cards:
            try:
                self._cards[gpu.uuid] = Card(self._nvml, gpu)
            except self._nvml.NVMLError:
                return None
        return self._cards[gpu.uuid]


def _only_inventory(gpu: Gpu) -> JsonDict:
    """A sample of a GPU that no driver answers for."""
    names = ("utilization_ratio", "power_watts", "temperature_celsius", "sm_clock_mhz", "memory_clock_mhz")
    unknown = dict.fromkeys((*names, "throttle_reasons", "energy_joules"))
    clocks = {"time_unix_s": round(time.time(), 3), "monotonic_s": round(time.monotonic(), 3)}
    return {**clocks, "uuid": gpu.uuid, "memory_used_mib": gpu.memory_used_mib, **unknown}


def lease_holder(uuid: str) -> Holder | None:
    """Who has a lease on a GPU now; None when nobody has."""
    path = lease_folder() / f"{uuid}.lock"
    try:
        if not locks.is_held(path):
            return None
        note = json.loads(path.read_text())
        return Holder(int(note["pid"]), str(note["purpose"]), float(note["since"]))
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return Holder(0, "another process", 0.0) if os.path.exists(path) else None


@dataclass(frozen=True, slots=True)
class TestResult:
    """What the self-test found of one GPU."""

    #: Not a test of pytest's, whatever it is called.
    __test__ = False

    gpu: Gpu
    #: passed, failed, or unknown where no driver answers.
    verdict: str
    detail: str


def self_test(log: Callable[[str], None], nvml: Nvml | None = None) -> list[TestResult]:
    """Look at every GPU as a job does before it starts: does it answer, may its memory be trusted, is it set aside.

    Nothing is computed on a GPU and nothing is set aside, so it may run beside jobs.
    """
    there = devices.inventory()
    driver = open_nvml(log) if nvml is None else nvml
    if driver is None:
        return [TestResult(gpu, "unknown", "no driver answers here") for gpu in there]
    try:
        return _examine(driver, there)
    finally:
        if nvml is None:
            driver.nvmlShutdown()


def _examine(nvml: Nvml, there: Sequence[Gpu]) -> list[TestResult]:
    doctor = health.Doctor(nvml)
    sick = health.quarantined(lease_folder(), time.time())
    found = []
    for gpu in there:
        fault = doctor.admit(gpu)
        if fault is not None:
            found.append(TestResult(gpu, "failed", f"{fault.reason}; {fault.next_step}"))
        elif gpu.uuid in sick:
            found.append(TestResult(gpu, "failed", f"set aside: {sick[gpu.uuid]}"))
        else:
            found.append(TestResult(gpu, "passed", "it answers, and no row of its memory waits for a repair"))
    doctor.close()
    return found
