"""The readings in Prometheus' text format, in base units.

GPUs carry the names of the textfiles that jobs write (gpu/prometheus.py); what is not known has no line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gristmill.gpu.monitor import MIB
from gristmill.gpu.prometheus import METRICS
from gristmill.service.readings import Readings
from gristmill.service.records import State
from gristmill.service.runs import Seen

_GPU = ["uuid", "index", "name"]


class MachineCollector(Collector):
    """Says what was last read, when Prometheus asks."""

    def __init__(self, readings: Callable[[], Readings], runs: Callable[[], list[Seen]]) -> None:
        """Keep where the last readings are had from."""
        self._readings, self._runs = readings, runs

    @classmethod
    def register(
        cls, registry: CollectorRegistry, readings: Callable[[], Readings], runs: Callable[[], list[Seen]]
    ) -> None:
        """Add one to a registry."""
        registry.register(cls(readings, runs))

    def collect(self) -> Iterator[Metric]:
        """All metrics of the machine."""
        yield from _gpus(self._readings())
        yield from _runs(self._runs())


def _gpus(readings: Readings) -> Iterator[Metric]:
    read = GaugeMetricFamily("gristmill_service_readings_time_seconds", "When the GPUs were last read, since 1970.")
    read.add_metric([], readings.time)
    yield read
    total = GaugeMetricFamily("gristmill_gpu_memory_total_bytes", "Memory of the GPU.", labels=_GPU)
    held = GaugeMetricFamily("gristmill_gpu_held", "1 while a job has a lease on the GPU.", labels=_GPU)
    fit = GaugeMetricFamily("gristmill_gpu_fit", "0 while the GPU is set aside or does not answer.", labels=_GPU)
    throttled = GaugeMetricFamily(
        "gristmill_gpu_throttled", "1 while the clocks are held back for this reason.", labels=[*_GPU, "reason"]
    )
    named = {gpu.gpu.uuid: [gpu.gpu.uuid, str(gpu.gpu.index), gpu.gpu.name] for gpu in readings.gpus}
    for gpu in readings.gpus:
        labels = named[gpu.gpu.uuid]
        total.add_metric(labels, gpu.gpu.memory_total_mib * MIB)
        held.add_metric(labels, float(gpu.holder is not None))
        fit.add_metric(labels, float(gpu.set_aside is None and not gpu.lost))
        for reason in gpu.last.get("throttle_reasons") or ():
            throttled.add_metric([*labels, reason], 1.0)
    yield from (total, held, fit, throttled)
    for name, (kind, text, key, factor) in METRICS.items():
        family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=_GPU)
        for gpu in readings.gpus:
            if not gpu.lost and gpu.last.get(key) is not None:
                family.add_metric(named[gpu.gpu.uuid], gpu.last[key] * factor)
        yield family


def _runs(runs: list[Seen]) -> Iterator[Metric]:
    states = GaugeMetricFamily("gristmill_runs", "Runs by state.", labels=["state"])
    for state in get_args(State):
        states.add_metric([state], sum(seen.state == state for seen in runs))
    yield states
    labels = ["run", "unit"]
    families: dict[str, GaugeMetricFamily] = {
        "rows": GaugeMetricFamily("gristmill_run_rows", "Rows that an active run is asked for.", labels=labels),
        "done": GaugeMetricFamily("gristmill_run_rows_done", "Rows of an active run with an answer.", labels=labels),
        "failed": GaugeMetricFamily("gristmill_run_rows_failed", "Rows of an active run that failed.", labels=labels),
        "tokens_per_second_now": GaugeMetricFamily(
            "gristmill_run_tokens_per_second", "Tokens a second of an active run over the last 30 s.", labels=labels
        ),
    }
    workers = GaugeMetricFamily("gristmill_run_workers", "Workers of an active run.", labels=[*labels, "state"])
    for run, unit in [(seen.record.id, unit) for seen in runs if seen.is_active for unit in seen.units]:
        for key, family in families.items():
            if (value := getattr(unit, key)) is not None:
                family.add_metric([run, unit.unit], value)
        for state, count in unit.worker_states.items():
            workers.add_metric([run, unit.unit, state], count)
    yield from (*families.values(), workers)
