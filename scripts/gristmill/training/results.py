"""What a training leaves: a model folder that `models:` can name, and metrics.json.

The folder's own files have no dates in them: answers are known by a fingerprint of the folder, so a training that is
made again, with the same weights, leaves every answer valid. What differs from time to time is in README.md and in
training/manifest.json, which the fingerprint does not cover.
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import TYPE_CHECKING, Any

from gristmill import __version__, checkout
from gristmill.files import atomic_folder, write_bytes, write_json
from gristmill.manifest import installed_versions
from gristmill.training import TRAINING_VERSION, checkpoint, models
from gristmill.training.card import model_card
from gristmill.training.data import Texts, TokenTexts
from gristmill.training.logs import read_steps
from gristmill.training.throughput import peak_flops
from gristmill.types import JsonDict

if TYPE_CHECKING:
    from gristmill.training.loop import Training

#: The first steps of a process, in which kernels are chosen and memory is found, say nothing about the speed.
WARMING_STEPS = 5


def write_results(done: Training) -> None:
    """Write the model folder and the numbers; the first process does, the others bring their parameters.

    Raises:
        UserError: the disk does not take them.
    """
    state = checkpoint.full_state(done.model)
    done.parallel.together(lambda: _write(done, state) if done.parallel.main else None)


def _write(done: Training, state: JsonDict) -> None:
    task = done.task
    with atomic_folder(task.model) as folder:
        trained = done.parallel.unwrapped(done.model)
        counted = models.save(state, trained, task.training, done.tokenizer, folder)
        metrics = _metrics(done, counted)
        (folder / "training").mkdir()
        write_json(folder / "training" / "manifest.json", _manifest(done, metrics))
        write_bytes(folder / "README.md", model_card(task.spec, task.weights, metrics).encode())
    write_json(task.metrics, metrics)


def _metrics(done: Training, counted: JsonDict) -> JsonDict:
    task = done.task
    lines = list(read_steps(task.steps))
    steps = [line for line in lines if "loss" in line]
    measured = [line for line in lines if "evaluation_loss" in line]
    rates = [line["tokens_per_second"] for line in steps[WARMING_STEPS:] or steps]
    rate = statistics.median(rates) if rates else None
    effective = done.effective
    return {
        "training": task.spec.name,
        "objective": task.training.objective,
        "steps": done.progress.step,
        "stopped_early": done.progress.step < done.steps,
        "result_of_step": done.progress.best_step or done.progress.step,
        "epochs": round(done.order.epochs(done.progress.step), 4),
        "batch": {
            "rows": effective.batch_rows,
            "processes": effective.processes,
            "micro_batch_rows": effective.micro_batch_rows,
            "accumulation": effective.accumulation,
            "factors": str(effective),
        },
        **counted,
        "data": _data(done),
        "tokens": sum(line["tokens"] for line in steps),
        "targets": sum(line["targets"] for line in steps),
        "last_step": steps[-1] if steps else None,
        "evaluation": _evaluation(measured),
        "seconds": round(done.progress.seconds, 3),
        "tokens_per_second": rate,
        "model_flops_utilization": _utilization(done, rate),
        "memory_gib": max((line["memory_gib"] for line in steps), default=None),
        "resumed_from_step": done.resumed_from,
        "curve": str(task.steps),
    }


def _evaluation(measured: list[JsonDict]) -> JsonDict | None:
    if not measured:
        return None
    finite = [line for line in measured if line["evaluation_loss"] is not None]
    best = min(finite, key=lambda line: float(line["evaluation_loss"]), default=None)
    return {"first": measured[0], "last": measured[-1], "best": best}


def _utilization(done: Training, rate: float | None) -> float | None:
    """MFU; None where the GPU's peak or the model's cost is not known."""
    names = [str(device["name"]) for device in done.task.devices]
    peak = peak_flops(names[0], done.task.training) if names else None
    if peak is None or rate is None or done.flops is None:
        return None
    return round(rate * done.flops / (peak * done.parallel.processes), 4)


def _data(done: Training) -> JsonDict:
    found = {"texts": _texts(done.rows.texts), "rows": len(done.rows.rows)}
    found["targets"] = _targets(done.rows)
    found["filled"] = round(done.rows.tokens(range(len(done.rows.rows))) / _room(done), 4)
    if done.measured is not None:
        found["evaluation"] = {"rows": len(done.measured.rows), "targets": _targets(done.measured)}
    return found


def _room(done: Training) -> int:
    """Tokens that the rows have room for."""
    width = done.rows.width or int(done.rows.texts.lengths.max())
    return width * len(done.rows.rows)


def _targets(rows: Any) -> int:
    return int(rows.targets(range(len(rows.rows))))


def _texts(texts: Texts) -> JsonDict:
    found: JsonDict = {"count": len(texts.lengths), "tokens": int(texts.lengths.sum()), "sha256": texts.sha256}
    if isinstance(texts, TokenTexts):
        found |= {name: texts.about[name] for name in ("cut_tokens", "rows_without_targets")}
    return found


def _manifest(done: Training, metrics: JsonDict) -> JsonDict:
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gristmill": __version__,
        "commit": checkout.commit(),
        "training_version": TRAINING_VERSION,
        "python": platform.python_version(),
        "packages": installed_versions(),
        "devices": list(done.task.devices),
        "spec": done.task.spec.model_dump(mode="json"),
        "start": {name: done.task.weights.get(name) for name in ("name", "source", "commit", "weights_hash")},
        "metrics": metrics,
    }
