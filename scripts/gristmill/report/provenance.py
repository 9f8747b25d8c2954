"""How every number came to be: one entry for each run, judge target, teacher and training, from its manifest.

- Short facts stand in a table; the manifest itself is shown whole under each entry, so that nothing is left out.
- Facts that all workers share are said once; where they differ, each is named.
- Tokens per second stay per worker: after a resume the workers of a unit need not have run side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gristmill.config.schema import SamplingConfig
from gristmill.report.data import Report
from gristmill.report.inputs import Manifest
from gristmill.report.trainings import Teacher, Training
from gristmill.report.words import NONE, as_text, decimal
from gristmill.types import JsonDict
from gristmill.values import number

#: Stands where devices do for a model that is served elsewhere.
SERVED = "a server"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker's part, as text."""

    shard: str
    host: str
    engine: str
    why: str
    devices: str
    dtype: str
    load_s: float | None
    generate_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Unit:
    """One run, judge target, teacher's logits or training."""

    name: str
    kind: str
    manifest: Manifest
    sampling: SamplingConfig | None
    seed: int | None
    answers: int | None
    model: str
    source: str
    weights_hash: str
    engine: str
    dtype: str
    devices: str
    seconds: float | None
    speed: str
    workers: list[Worker]
    raw: str


def units(report: Report) -> list[Unit]:
    """The runs, then the judge targets, the teachers and the trainings."""
    runs = [_unit(run.name, "run", run.metrics.model, run.manifest, run.sampling) for run in report.runs]
    judges = [_unit(judge.name, "judge", judge.metrics.model, judge.manifest, None) for judge in report.judges]
    return [*runs, *judges, *map(_teacher, report.teachers), *map(_training, report.trainings)]


def versions(report: Report) -> list[str]:
    """Every version of gristmill, Python and the packages that had a part, each once: `torch 2.11.0`."""
    manifests = [run.manifest for run in report.runs] + [judge.manifest for judge in report.judges]
    manifests += [teacher.manifest for teacher in report.teachers] + [each.manifest for each in report.trainings]
    found: dict[str, None] = {}
    for manifest in manifests:
        commit = None if manifest.commit is None else f"{manifest.gristmill} ({short(manifest.commit)})"
        named = {"gristmill": commit or manifest.gristmill, "Python": manifest.python, **manifest.packages}
        found |= {f"{name} {version}": None for name, version in named.items() if version is not None}
    return list(found)


def short(commit: str) -> str:
    """`0123456789ab`, and whether files were edited: `0123456789ab, edited`."""
    return commit[:12] + (", edited" if commit.endswith("-dirty") else "")


def _teacher(teacher: Teacher) -> Unit:
    made = _unit(teacher.name, "logits", teacher.metrics.teacher, teacher.manifest, None)
    positions, seconds = teacher.metrics.positions, teacher.metrics.score_seconds
    speed = decimal(positions / seconds, 1) if seconds else NONE
    return replace(made, answers=teacher.metrics.rows, seconds=seconds, speed=speed)


def _training(training: Training) -> Unit:
    """A training has no workers: its processes stand for one job."""
    manifest, metrics = training.manifest, training.metrics
    recipe = manifest.spec.get("training") or {}
    return Unit(
        name=training.name,
        kind="training",
        manifest=manifest,
        sampling=None,
        seed=recipe.get("seed"),
        answers=None,
        model=training.origin.base or "from scratch",
        source=_source(manifest.start),
        weights_hash=as_text(manifest.start.get("weights_hash") or NONE),
        engine=metrics.objective,
        dtype=_all(as_text(recipe[name]) for name in ("dtype", "mixed_precision") if recipe.get(name)),
        devices=_devices(manifest.devices),
        seconds=metrics.seconds,
        speed=decimal(metrics.tokens_per_second, 1),
        workers=[],
        raw=json.dumps(manifest.raw, indent=2, ensure_ascii=False),
    )


def _unit(name: str, kind: str, model: str, manifest: Manifest, sampling: SamplingConfig | None) -> Unit:
    workers = [_worker(worker) for worker in manifest.workers]
    return Unit(
        name=name,
        kind=kind,
        manifest=manifest,
        sampling=sampling,
        seed=sampling.seed if manifest.seed is None and sampling else manifest.seed,
        answers=manifest.requests if manifest.completions is None else manifest.completions,
        model=model,
        source=_source(manifest.weights),
        weights_hash=as_text(manifest.weights.get("weights_hash") or NONE),
        engine=_all(worker.engine for worker in workers),
        dtype=_all(worker.dtype for worker in workers),
        devices=SERVED
        if any("served" in worker for worker in manifest.workers)
        else _devices([device for worker in manifest.workers for device in worker.get("devices") or []]),
        seconds=manifest.seconds,
        speed=spread([worker.tokens_per_s for worker in workers if worker.tokens_per_s is not None]),
        workers=workers,
        raw=json.dumps(manifest.raw, indent=2, ensure_ascii=False),
    )


def _source(weights: JsonDict) -> str:
    """`org/model @ commit`, or what is known of it."""
    pinned = weights.get("commit") or weights.get("revision")
    source = weights.get("source") or weights.get("served_model")
    return " @ ".join(as_text(part) for part in (source, pinned) if part) or NONE


def _worker(worker: JsonDict) -> Worker:
    return Worker(
        shard=_first(worker, "shard"),
        host=_first(worker, "host"),
        engine=_first(worker, "engine"),
        why=_first(worker, "why", "engine_why", "engine_reason", "reason"),
        devices=_devices(worker.get("devices")) if worker.get("served") is None else SERVED,
        dtype=_first(worker, "dtype"),
        load_s=number(worker.get("load_seconds")),
        generate_s=number(worker.get("generate_seconds")),
        tokens_per_s=number(worker.get("tokens_per_second")),
    )


def spread(speeds: list[float]) -> str:
    """`23.1`, or `22.8–23.4` over several workers."""
    if not speeds:
        return NONE
    low, high = (decimal(value, 1) for value in (min(speeds), max(speeds)))
    return low if low == high else f"{low}–{high}"


def _first(worker: JsonDict, *keys: str) -> str:
    return next((as_text(worker[key]) for key in keys if worker.get(key) is not None), NONE)


def _devices(devices: Any) -> str:
    """`NVIDIA H100 (0, 1)`: each kind of device with the indices that were used; the CPU when there is none."""
    if not isinstance(devices, list) or not devices:
        return "CPU"
    named: dict[str, list[str]] = {}
    for device in devices:
        entry = device if isinstance(device, dict) else {"name": as_text(device)}
        indices = named.setdefault(as_text(entry.get("name", "device")), [])
        if entry.get("index") is not None and str(entry["index"]) not in indices:
            indices.append(str(entry["index"]))
    return ", ".join(f"{name} ({', '.join(indices)})" if indices else name for name, indices in named.items())


def _all(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts)) or NONE
