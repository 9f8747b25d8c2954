"""What stands beside a job that holds GPUs: a sampler (monitor.py), a doctor (health.py) and a clock for hangs.

    with Watch(devices, place, limits, log) as watch:   # refuses a sick GPU before anything is loaded
        engine = …; watch.loaded()
        for outcome in …: watch.add(outcome)

- Two threads: one asks NVML, which can be slow or stuck on a broken card; one only looks at the clock, and so still
  works then.
- A thread cannot raise in a main thread that hangs in C (a load from a dead disk, a kernel on a lost GPU). So a fault
  ends the process from the thread: the GPU is set aside, one line goes to stderr, and os._exit leaves with FAULT_EXIT.
  Nothing is lost by it: the journal and the samples hand each record to the operating system as it comes, a torn last
  line is dropped by their readers, and the kernel releases the lease.
- A load that hangs while it holds the interpreter's lock stops both threads too. faulthandler's timer needs no lock: it
  ends the process with status 1 and a traceback BACKSTOP_S later, and sets nothing aside.
- Without a driver the clock still runs and nothing is sampled. The engine never waits for any of this.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from gristmill.config.schema import GpusConfig
from gristmill.gpu import health
from gristmill.gpu.cards import Card, Nvml, open_nvml
from gristmill.gpu.health import Doctor, Fault, SickGpu
from gristmill.gpu.lease import lease_folder
from gristmill.gpu.monitor import Monitor, SampleFile
from gristmill.gpu.prometheus import Textfiles
from gristmill.types import Completion, Gpu, JsonDict, Outcome

#: EX_TEMPFAIL of sysexits.h: try again. Elsewhere, perhaps: the GPU is set aside.
FAULT_EXIT = 75
CLOCK_S = 0.5
BACKSTOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """What the samples are of, and the file they go to."""

    unit: str
    shard: str
    samples: Path


class Watch:
    """Watches a job's devices for the length of a `with` block; does nothing for a job that holds none."""

    def __init__(self, devices: Sequence[Gpu], place: Place, config: GpusConfig, log: Callable[[str], None]) -> None:
        """Prepare; nothing is asked before the block begins."""
        self._devices = tuple(devices)
        self._place = place
        self._config = config
        self._log = log
        self._nvml: Nvml | None = None
        self._doctor: Doctor | None = None
        self._monitor: Monitor | None = None
        self._ended = threading.Event()
        self._phase = "load"
        self._since = time.monotonic()
        self._tokens = 0

    def __enter__(self) -> Watch:
        """Check the devices, then watch them.

        Raises:
            SickGpu: one of them may not be used; it is set aside.
        """
        if not self._devices:
            return self
        self._nvml = open_nvml(self._log)
        if self._nvml is not None:
            self._doctor = Doctor(self._nvml)
            self._admit(self._doctor)
            self._monitor = self._start_monitor(self._doctor.cards)
        self._since = time.monotonic()
        threading.Thread(target=self._watch_clock, daemon=True, name="gpu-clock").start()
        if self._config.load_minutes is not None:
            limit_s = self._config.load_minutes * 60 + BACKSTOP_S
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        """Look a last time, which finds the sick GPU behind a CUDA error, and stop; a stuck NVML is left as it is."""
        if isinstance(value, Exception) and self._monitor is not None:
            self._log(f"the job ends with {type(value).__name__}: {value}")
        faulthandler.cancel_dump_traceback_later()
        self._ended.set()
        if self._monitor is None or self._monitor.stop():
            self._close()

    def loaded(self) -> None:
        """The model is there; from now on outcomes are expected."""
        faulthandler.cancel_dump_traceback_later()
        self._since, self._phase = time.monotonic(), "generate"

    def add(self, outcome: Outcome) -> None:
        """An outcome came."""
        self._since = time.monotonic()
        if isinstance(outcome, Completion):
            self._tokens += outcome.completion_tokens

    def hang(self, now: float) -> Fault | None:
        """The fault of a load or a generation that takes longer than the config allows; `now` is monotonic."""
        if self._phase == "load":
            key, minutes, what = "gpus.load_minutes", self._config.load_minutes, "the model did not load"
        else:
            key, minutes, what = "gpus.stall_minutes", self._config.stall_minutes, "no row was answered"
        if minutes is None or now - self._since < minutes * 60:
            return None
        step = f"look at nvidia-smi and at the disk with the weights, or raise {key}"
        return Fault(self._devices, f"{what} within {minutes:g} minutes ({key})", step, health.HANG_HOURS)

    def _admit(self, doctor: Doctor) -> None:
        """Look at each device before anything is loaded."""
        for gpu in self._devices:
            fault = doctor.admit(gpu)
            if fault is None:
                continue
            if not self._config.health or os.environ.get("GRISTMILL_INVENTORY"):  # a made-up list of GPUs
                self._log(f"going on although {gpu.uuid}: {fault.reason}")
                continue
            self._close()
            health.set_aside(lease_folder(), fault)
            raise SickGpu(fault.message(lease_folder()))

    def _start_monitor(self, cards: list[Card]) -> Monitor | None:
        if not cards:
            return None
        place, folder = self._place, self._config.prometheus
        job = {"unit": place.unit, "shard": place.shard, "devices": [asdict(gpu) for gpu in self._devices]}
        textfiles = Textfiles(Path(folder), f"{place.unit}/{place.shard}") if folder is not None else None
        monitor = Monitor(cards, SampleFile(place.samples, job), self._state, self._examine, textfiles, self._log)
        monitor.start()
        return monitor

    def _state(self) -> JsonDict:
        return {"phase": self._phase, "completion_tokens": self._tokens}

    def _examine(self, card: Card) -> None:
        """In the monitor's thread."""
        assert self._doctor is not None
        fault = self._doctor.examine(card) if self._config.health else None
        if fault is not None:
            self._leave(fault)

    def _watch_clock(self) -> None:
        """In a thread of its own, which asks NVML nothing."""
        while not self._ended.wait(CLOCK_S):
            fault = self.hang(time.monotonic())
            if fault is not None:
                self._leave(fault)

    def _leave(self, fault: Fault) -> None:
        """End the process from a thread (see the module's text)."""
        try:
            folder = lease_folder()
            health.set_aside(folder, fault)
            print(f"error: {fault.message(folder)}", file=sys.stderr, flush=True)
        finally:
            os._exit(FAULT_EXIT)

    def _close(self) -> None:
        if self._doctor is not None:
            self._doctor.close()
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
