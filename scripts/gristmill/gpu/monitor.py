"""What a job's GPUs do, once a second, in a file that is read later: results/<unit>/gpu/<shard>.jsonl.

- A thread of the worker samples; the engine never waits for it. A slow or stuck NVML makes samples late, not the job.
- Every sample has a monotonic time (for durations) and a wall-clock time (to set jobs side by side), so that nothing
  assumes that samples are one second apart.
- The file is only ever appended to and flushed after each sample. Several attempts of a shard share it: each has a
  session id, and a line that a kill tore is ended before the next attempt writes.
- A field that the card does not have is null. `utilization_ratio` is the share of time in which any kernel ran, not how
  much of the GPU it used.
- Cost: 20 to 29 µs a sample and GPU with an NVML that answers at once (benchmarks/sampler_cost.py --fake, 2 shared CPU
  cores, 2026-11-28), in a thread of its own; about 1.1 MB an hour and GPU on disk.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from gristmill.files import dumps
from gristmill.gpu.cards import Card, Lost
from gristmill.gpu.prometheus import Textfiles
from gristmill.types import JsonDict

FORMAT = 1
EVERY_S = 1.0
#: How long the end of a job waits for a sample that is under way.
LAST_SAMPLE_S = 5.0
MIB = 2**20

#: Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h); a bit that is not here is named by its number.
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
#: NVML's numbers: the GPU's temperature sensor, and the clocks of the multiprocessors and of the memory.
_SENSOR_GPU, _CLOCK_SM, _CLOCK_MEMORY = 0, 1, 2


class SampleFile:
    """The samples of one attempt at a shard; the file is opened with the first one."""

    def __init__(self, path: Path, job: JsonDict) -> None:
        """Prepare to append to `path`; `job` (unit, shard, devices …) goes into the session's header."""
        self._path = path
        self._job = job
        self._handle: IO[bytes] | None = None
        self._session = os.urandom(4).hex()

    def write(self, line: JsonDict) -> None:
        """Append one sample, in the operating system's hands when this returns; raises OSError."""
        handle = self._handle or self._open()
        handle.write(dumps({"session": self._session, **line}) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(self._path, "ab+", buffering=0)  # noqa: SIM115 - closed by close()
        if handle.seek(0, os.SEEK_END) > 0:
            handle.seek(-1, os.SEEK_END)
            handle.write(b"" if handle.read(1) == b"\n" else b"\n")  # ends a line that a kill tore
        header = {"gristmill_gpu": FORMAT, "session": self._session, "host": socket.gethostname(), "pid": os.getpid()}
        handle.write(dumps({**header, **clocks(), "every_seconds": EVERY_S, **self._job}) + b"\n")
        self._handle = handle
        return handle


class Monitor:
    """A thread that samples cards until it is stopped."""

    def __init__(
        self,
        cards: Sequence[Card],
        file: SampleFile,
        job: Callable[[], JsonDict],
        examine: Callable[[Card], None],
        textfiles: Textfiles | None,
        log: Callable[[str], None],
    ) -> None:
        """Prepare the thread.

        Args:
            cards: the devices.
            file: where the samples go.
            job: what the job is doing (phase, completion_tokens); it becomes part of each sample.
            examine: called with each card after its sample.
            textfiles: where the last sample goes for Prometheus, if anywhere.
            log: takes messages.
        """
        self._cards, self._file, self._job, self._examine = cards, file, job, examine
        self._textfiles = textfiles
        self._log = log
        self._refused = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpu-monitor")

    def start(self) -> None:
        """Take the first sample soon, and one every second."""
        self._thread.start()

    def stop(self) -> bool:
        """Take a last sample and end; False when NVML is stuck, which is not waited for."""
        self._ended.set()
        self._thread.join(LAST_SAMPLE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        going = True
        while going:
            going = not self._ended.is_set()
            for card in self._cards:
                self._look(card)
            self._ended.wait(EVERY_S)
        self._file.close()
        if self._textfiles is not None:
            self._textfiles.remove()

    def _look(self, card: Card) -> None:
        try:
            line = sample(card)
        except Lost:
            line = None  # `examine` finds out and says so
        if line is not None:
            self._store(card, {**self._job(), **line})
        self._examine(card)

    def _store(self, card: Card, line: JsonDict) -> None:
        """Write a sample; a full disk is said once and must not stop the job."""
        try:
            self._file.write(line)
            if self._textfiles is not None:
                self._textfiles.write(card.gpu, line)
        except OSError as error:
            if not self._refused:
                self._log(f"GPU samples cannot be written: {error}; the job goes on without them")
            self._refused = True


def clocks() -> JsonDict:
    """Now, on both clocks."""
    return {"time_unix_s": round(time.time(), 3), "monotonic_s": round(time.monotonic(), 3)}


def sample(card: Card) -> JsonDict:
    """What NVML says of a device now.

    Raises:
        Lost: the device is gone.
    """
    utilization, used_bytes = card.ask_whole("nvmlDeviceGetUtilizationRates"), card.memory_used_bytes()
    return {
        **clocks(),
        "uuid": card.gpu.uuid,
        "utilization_ratio": None if utilization is None else utilization.gpu / 100,
        "memory_used_mib": None if used_bytes is None else round(used_bytes / MIB),
        "power_watts": _scaled(card.ask_whole("nvmlDeviceGetPowerUsage"), 1000),
        "temperature_celsius": card.ask("nvmlDeviceGetTemperature", _SENSOR_GPU),
        "sm_clock_mhz": card.ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
        "memory_clock_mhz": card.ask("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
        "throttle_reasons": throttle_reasons(_throttle_mask(card)),
        "energy_joules": _scaled(card.ask_whole("nvmlDeviceGetTotalEnergyConsumption"), 1000),
    }


def throttle_reasons(mask: int | None) -> list[str] | None:
    """The names of a mask's bits; an empty list when the clocks are held back by nothing, None when it is not known."""
    if mask is None:
        return None
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return [THROTTLE_REASONS.get(bit, f"bit_{bit.bit_length() - 1}") for bit in bits]


def _throttle_mask(card: Card) -> Any:
    """Drivers before 535 know the question by its older name."""
    mask = card.ask("nvmlDeviceGetCurrentClocksEventReasons")
    return card.ask("nvmlDeviceGetCurrentClocksThrottleReasons") if mask is None else mask


def _scaled(value: int | None, unit: int) -> float | None:
    return None if value is None else value / unit
