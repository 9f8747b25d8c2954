"""The last sample of a GPU as a Prometheus textfile, for node_exporter's textfile collector (gpus.prometheus).

- One file a GPU, replaced atomically and removed when the job ends: two workers never write one file, and what a killed
  job left is overwritten by the next one on that GPU (node_exporter exports node_textfile_mtime_seconds to notice).
- Base units and names as Prometheus asks for: ratio, bytes, watts, celsius, hertz, joules_total.
- What a card does not report has no line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gristmill.files import write_bytes
from gristmill.types import Gpu, JsonDict

#: Metric → (type, help, key of the sample, factor to the base unit).
METRICS = {
    "gristmill_gpu_utilization_ratio": ("gauge", "Share of time in which any kernel ran.", "utilization_ratio", 1),
    "gristmill_gpu_memory_used_bytes": ("gauge", "Memory in use.", "memory_used_mib", 2**20),
    "gristmill_gpu_power_watts": ("gauge", "Power drawn.", "power_watts", 1),
    "gristmill_gpu_temperature_celsius": ("gauge", "Temperature of the GPU.", "temperature_celsius", 1),
    "gristmill_gpu_sm_clock_hertz": ("gauge", "Clock of the multiprocessors.", "sm_clock_mhz", 1_000_000),
    "gristmill_gpu_memory_clock_hertz": ("gauge", "Clock of the memory.", "memory_clock_mhz", 1_000_000),
    "gristmill_gpu_energy_joules_total": ("counter", "Energy since the driver was loaded.", "energy_joules", 1),
}


class Textfiles:
    """The textfiles of one job's GPUs."""

    def __init__(self, folder: Path, job: str) -> None:
        """Prepare to write below `folder`; `job` becomes a label."""
        self._folder = folder
        self._job = job
        self._written: set[Path] = set()

    def write(self, gpu: Gpu, sample: JsonDict) -> None:
        """Replace a GPU's textfile; raises OSError."""
        path = self._folder / f"gristmill-{gpu.uuid.replace('/', '_')}.prom"
        labels = {"uuid": gpu.uuid, "index": str(gpu.index), "name": gpu.name, "job": self._job}
        write_bytes(path, exposition(labels, sample).encode())
        self._written.add(path)

    def remove(self) -> None:
        """Take this job's files away: what they say is no longer so."""
        for path in self._written:
            path.unlink(missing_ok=True)


def exposition(labels: Mapping[str, str], sample: JsonDict) -> str:
    """One sample in Prometheus' text format."""
    text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    blocks = [
        f"# HELP {metric} {help_text}\n# TYPE {metric} {kind}\n{metric}{{{text}}} {sample[key] * factor}\n"
        for metric, (kind, help_text, key, factor) in METRICS.items()
        if sample.get(key) is not None
    ]
    return "".join(blocks)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
