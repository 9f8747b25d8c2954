"""The two threads that look: one at the GPUs, which a driver may hold up, and one at the runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gristmill.service.readings import GpuReader, Readings
from gristmill.service.recommendations import ActiveRun, Seen
from gristmill.service.runs import Runs


class Watcher:
    """Looks every second until it is stopped."""

    def __init__(self, runs: Runs, gpus: GpuReader, every_s: float, log: Callable[[str], None]) -> None:
        """Prepare the threads."""
        self._runs, self._gpus, self._every_s, self._log = runs, gpus, every_s, log
        self._ended = threading.Event()
        self._said: dict[str, str] = {}
        self.readings = Readings()
        self.looked = 0.0
        self._threads = [
            threading.Thread(target=self._loop, args=(look,), daemon=True, name=look.__name__)
            for look in (self.look_at_gpus, self.look_at_runs)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; a driver that hangs is not waited for."""
        self._ended.set()
        for thread in self._threads:
            thread.join(2.0)

    def look_at_gpus(self) -> None:
        """Read all GPUs once."""
        self.readings = self._gpus.read()

    def look_at_runs(self) -> None:
        """Read the active runs once."""
        self._runs.refresh()
        self.looked = time.time()

    def age_s(self) -> float:
        """Since both were last looked at."""
        return max(0.0, time.time() - min(self.looked, self.readings.time))

    def seen(self) -> Seen:
        """The machine as last seen, for the recommendations."""
        now = time.time()
        active = [run for run in self._runs.all() if run.is_active]
        runs = [ActiveRun(run.record.id, run.units, max(0.0, now - run.moved)) for run in active]
        return Seen(self.readings.gpus, tuple(runs))

    def _loop(self, look: Callable[[], None]) -> None:
        while not self._ended.is_set():
            try:
                look()
            except Exception as error:  # a disk that is away for a while must not end the thread; what is old shows
                said = f"{look.__name__}: {type(error).__name__}: {error}"
                if self._said.get(look.__name__) != said:
                    self._log(said)
                self._said[look.__name__] = said
            self._ended.wait(self._every_s)
