"""What the samples of a run's GPU jobs add up to: the `gpu` section of metrics.json.

- Pure functions over the lines of gpu/*.jsonl; nothing is asked of a GPU, and memory stays constant (utilization is a
  histogram, everything else a sum).
- A sample stands for the time since the one before it, by the monotonic clock: a mean is over seconds, not samples, so
  a late sample or a longer job weighs what it lasted.
- Energy is the difference of the card's own counter; where that is missing or was reset, power over time (trapezoids).
  When it is unknown for one of the devices it is null: a part would pass for the whole.
- Everything that was spent counts, also loading and attempts that failed. Tokens are those that the sampled jobs made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from gristmill.files import loads
from gristmill.gpu.monitor import FORMAT
from gristmill.types import JsonDict
from gristmill.values import count, number

#: A clock that follows these is not held back.
_NOT_THROTTLED = {"gpu_idle", "applications_clocks_setting", "display_clock_setting"}

#: What a card may not report, and the most that it can.
_MEASURED = {"utilization_ratio": 1.0, "memory_used_mib": inf, "power_watts": inf, "energy_joules": inf}
_UNTOLD = dict.fromkeys([*_MEASURED, "throttle_reasons"])


@dataclass(slots=True)
class _Device:
    """One device in one session."""

    seconds: float = 0.0
    counter: list[float] = field(default_factory=list)  # first and last reading
    power: tuple[float, float] | None = None  # last known (monotonic_s, watts)
    integral: float | None = None
    at: float | None = None

    def add(self, sample: JsonDict) -> float:
        """Take a sample; returns the seconds it stands for."""
        now = sample["monotonic_s"]
        lasted = 0.0 if self.at is None else max(0.0, now - self.at)
        self.at, self.seconds = now, self.seconds + lasted
        if sample["energy_joules"] is not None:
            self.counter = [*self.counter[:1], sample["energy_joules"]]
        if sample["power_watts"] is not None:
            self._integrate(now, sample["power_watts"])
        return lasted

    def energy(self) -> tuple[float, str] | None:
        """(joules, where they come from); None when the card reports neither energy nor power."""
        if len(self.counter) == 2 and self.counter[1] >= self.counter[0]:
            return self.counter[1] - self.counter[0], "counter"
        return None if self.integral is None else (self.integral, "power")

    def _integrate(self, now: float, watts: float) -> None:
        if self.power is not None:
            then, before = self.power
            self.integral = (self.integral or 0.0) + (now - then) * (watts + before) / 2
        self.power = (now, watts)


@dataclass(slots=True)
class Usage:
    """Adds samples up."""

    samples: int = 0
    devices: dict[tuple[str, str], _Device] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    busy: dict[float, float] = field(default_factory=lambda: defaultdict(float))  # utilization → seconds
    throttled: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # reason → seconds
    memory_peak_mib: int | None = None

    def add(self, sample: JsonDict) -> None:
        """Take one sample line."""
        session = sample["session"]
        lasted = self.devices.setdefault((session, sample["uuid"]), _Device()).add(sample)
        self.samples += 1
        self.tokens[session] = max(self.tokens.get(session, 0), sample["completion_tokens"])
        if sample["memory_used_mib"] is not None:
            self.memory_peak_mib = max(self.memory_peak_mib or 0, sample["memory_used_mib"])
        if sample["utilization_ratio"] is not None:
            self.busy[sample["utilization_ratio"]] += lasted
        for reason in set(sample["throttle_reasons"] or ()) - _NOT_THROTTLED:
            self.throttled[reason] += lasted

    def summary(self) -> JsonDict | None:
        """The `gpu` section (docs/outputs.md); None when no GPU was sampled."""
        if not self.samples:
            return None
        energy, source = self._energy()
        tokens = sum(self.tokens.values())
        return {
            "jobs": len(self.tokens),
            "samples": self.samples,
            "gpu_seconds": round(sum(device.seconds for device in self.devices.values()), 1),
            "utilization_mean_ratio": _rounded(mean(self.busy), 4),
            "utilization_p95_ratio": quantile(self.busy, 0.95),
            "memory_peak_mib": self.memory_peak_mib,
            "energy_joules": _rounded(energy, 1),
            "energy_source": source,
            "completion_tokens": tokens,
            "tokens_per_joule": _rounded(tokens / energy, 4) if energy else None,
            "throttled_seconds": {reason: round(lasted, 1) for reason, lasted in sorted(self.throttled.items())},
        }

    def _energy(self) -> tuple[float | None, str | None]:
        """Joules over all devices, and `counter`, `power` or `mixed`."""
        found = [device.energy() for device in self.devices.values() if device.seconds > 0]
        known = [energy for energy in found if energy is not None]
        if not known or len(known) < len(found):
            return None, None
        sources = {source for _, source in known}
        return sum(joules for joules, _ in known), sources.pop() if len(sources) == 1 else "mixed"


def usage_of(folder: Path) -> JsonDict | None:
    """The `gpu` section for a run's or judge target's folder of samples."""
    usage = Usage()
    for line in read_folder(folder):
        if "uuid" in line:
            usage.add(line)
    return usage.summary()


def read_folder(folder: Path) -> Iterator[JsonDict]:
    """Headers (`gristmill_gpu`) and samples (`uuid`) of all files, in the files' order."""
    for path in sorted(folder.glob("*.jsonl")):
        with open(path, "rb") as handle:
            yield from read_lines(handle)


def read_lines(lines: Iterable[bytes]) -> Iterator[JsonDict]:
    """The lines that are whole; one that a kill tore or that is something else is left out, as are other formats."""
    foreign: set[str] = set()
    for line in lines:
        try:
            value = loads(line)
        except ValueError:
            continue
        if not isinstance(value, dict) or not isinstance(value.get("session"), str):
            continue
        if value.get("gristmill_gpu", FORMAT) != FORMAT:
            foreign.add(value["session"])
        elif value["session"] not in foreign and "uuid" in value and is_sample(value):
            yield _UNTOLD | value
        elif value["session"] not in foreign and "uuid" not in value and is_header(value):
            yield value


def is_sample(value: JsonDict) -> bool:
    """Whether a line is a sample as monitor.py writes it."""
    reasons = value.get("throttle_reasons")
    return (
        isinstance(value["uuid"], str)
        and all(number(value.get(name)) is not None for name in ("time_unix_s", "monotonic_s", "completion_tokens"))
        and all(_is_measure(value.get(name), most) for name, most in _MEASURED.items())
        and (value.get("memory_used_mib") is None or count(value["memory_used_mib"]) is not None)
        and (reasons is None or (isinstance(reasons, list) and all(isinstance(each, str) for each in reasons)))
    )


def _is_measure(value: object, most: float) -> bool:
    found = number(value)
    return value is None or (found is not None and 0 <= found <= most)


def is_header(value: JsonDict) -> bool:
    """Whether a line names the session's GPUs."""
    devices = value.get("devices", [])
    return (
        isinstance(devices, list)
        and isinstance(value.get("host"), str)
        and all(
            isinstance(device, dict) and isinstance(device.get("uuid"), str) and {"index", "name"} <= device.keys()
            for device in devices
        )
    )


def mean(weights: Mapping[float, float]) -> float | None:
    """The weighted mean of the keys; None when nothing was weighed."""
    total = sum(weights.values())
    return sum(value * weight for value, weight in weights.items()) / total if total > 0 else None


def quantile(weights: Mapping[float, float], share: float) -> float | None:
    """The smallest key that at least `share` of the weight does not exceed; None when nothing was weighed."""
    total = sum(weights.values())
    if total <= 0:
        return None
    below = 0.0
    for value in sorted(weights):
        below += weights[value]
        if below >= share * total:
            return value
    return max(weights)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
