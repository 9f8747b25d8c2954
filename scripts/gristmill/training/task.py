"""What one training is, as the launcher hands it to its processes: one JSON file that each of them reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gristmill.config.schema import TrainingConfig
from gristmill.config.specs import TrainingSpec
from gristmill.errors import UserError
from gristmill.files import read_json, write_json
from gristmill.keys import digest
from gristmill.training import TRAINING_VERSION
from gristmill.types import JsonDict


@dataclass(frozen=True, slots=True)
class Effective:
    """The effective batch and its factors."""

    batch_rows: int
    processes: int
    micro_batch_rows: int

    @property
    def accumulation(self) -> int:
        """Micro-batches of one process in a step."""
        return self.batch_rows // (self.processes * self.micro_batch_rows)

    def __str__(self) -> str:
        counts = ((self.processes, "process"), (self.micro_batch_rows, "row"), (self.accumulation, "micro-batch"))
        return (
            f"{self.batch_rows} rows a step = {' × '.join(f'{count} {_plural(noun, count)}' for count, noun in counts)}"
        )

    @classmethod
    def of(cls, training: TrainingConfig, processes: int) -> Effective:
        """Of so many processes.

        Raises:
            UserError: they cannot share the rows evenly.
        """
        at_once = processes * training.micro_batch_rows
        if training.batch_rows % at_once:
            raise UserError(
                f"batch_rows={training.batch_rows} is no multiple of {at_once} = {processes} processes × "
                f"micro_batch_rows {training.micro_batch_rows}; change micro_batch_rows or the number of GPUs (the "
                "training stays the same), or batch_rows"
            )
        return cls(training.batch_rows, processes, training.micro_batch_rows)


def _plural(noun: str, count: int) -> str:
    if count == 1:
        return noun
    return f"{noun}s" if noun == "row" else f"{noun}es"


@dataclass(frozen=True, slots=True)
class Task:
    """One training, and where it runs."""

    spec: TrainingSpec
    #: results/models/<model>.json of the base, or of the model whose tokenizer it takes.
    weights: JsonDict
    #: A folder of texts.write_texts, or of logits.
    data: Path
    #: results/trainings/<name>: checkpoints, steps.jsonl, tensorboard.
    work: Path
    #: The folder of the result, and the file with its numbers.
    model: Path
    metrics: Path
    processes: int
    on_gpu: bool
    threads: int = 1
    #: The GPUs of the launcher's lease, for the record.
    devices: tuple[JsonDict, ...] = ()

    @property
    def training(self) -> TrainingConfig:
        """The recipe."""
        return self.spec.training

    @property
    def stop(self) -> Path:
        """A file whose being there asks for a checkpoint and an end."""
        return self.work / "stop"

    @property
    def error(self) -> Path:
        """Where the first process that fails says why."""
        return self.work / "error.txt"

    @property
    def steps(self) -> Path:
        """A line for every step and evaluation."""
        return self.work / "steps.jsonl"

    def write(self, path: Path) -> None:
        """For `read_task`."""
        paths = {name: str(getattr(self, name)) for name in ("data", "work", "model", "metrics")}
        plain = {"processes": self.processes, "on_gpu": self.on_gpu, "threads": self.threads, "devices": self.devices}
        write_json(path, {"spec": self.spec.model_dump(mode="json"), "weights": self.weights, **paths, **plain})


def read_task(path: Path) -> Task:
    """What `Task.write` wrote."""
    found: JsonDict = read_json(path)
    paths: JsonDict = {name: Path(found.pop(name)) for name in ("data", "work", "model", "metrics")}
    spec, devices = TrainingSpec.model_validate(found.pop("spec")), tuple(found.pop("devices"))
    return Task(**found, **paths, spec=spec, devices=devices)


def recipe_digest(task: Task, data_sha256: str) -> str:
    """What a checkpoint belongs to: all that decides the result, but not where it runs."""
    bare = TrainingSpec.unplaced_of(task.spec)
    named = {"spec": bare.model_dump(mode="json"), "weights": task.weights["weights_hash"], "data": data_sha256}
    return digest({**named, "version": TRAINING_VERSION})[:12]
