"""The files that the report reads (docs/outputs.md), checked as they come in.

- A missing, torn or incomplete file is a UserError with its path (and line), never a hole in the report.
- Keys that the report does not show may be anything: newer writers can add columns.
- What may be null stays None up to the page, which shows it as a dash or in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill import files
from gristmill.errors import UserError
from gristmill.types import JsonDict

Bounds = tuple[float, float] | None


class InputFile(BaseModel):
    """A part of a JSON file that the report shows."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class Score(InputFile):
    """A share of graded answers with its 95 % interval."""

    n: int
    value: float | None = None
    ci95: Bounds = None
    interval: str | None = None
    #: Answers from which a metric that looks for something could read nothing; None for other metrics.
    unread: int | None = None
    pass_at_k: dict[str, Score] | None = None
    maj_at_k: dict[str, Score] = {}


class Majority(InputFile):
    """What answering the most frequent label always would have scored."""

    label: str
    accuracy: float


class Classification(InputFile):
    """The `classification` section of a labelled run's metrics.json."""

    labels: list[str]
    n: int
    accuracy: float | None = None
    majority: Majority | None = None
    macro: dict[str, float | None] = {}
    per_class: dict[str, dict[str, float]] = {}
    undefined: dict[str, list[str]] = {}
    confusion: list[list[int]]
    confusion_columns: list[str]
    invalid: int
    invalid_ratio: float | None = None


class GpuUsage(InputFile):
    """The `gpu` section of a metrics.json."""

    jobs: int
    gpu_seconds: float
    utilization_mean_ratio: float | None = None
    utilization_p95_ratio: float | None = None
    memory_peak_mib: int | None = None
    energy_joules: float | None = None
    energy_source: str | None = None
    completion_tokens: int | None = None
    tokens_per_joule: float | None = None
    throttled_seconds: dict[str, float] = {}

    @property
    def watts(self) -> float | None:
        """Mean power of a GPU."""
        return self.energy_joules / self.gpu_seconds if self.energy_joules is not None and self.gpu_seconds else None

    @property
    def per_joule(self) -> float | None:
        """Tokens for each joule; None where no token was to be made, as by a judge that is read by likelihood."""
        return self.tokens_per_joule if self.completion_tokens != 0 else None


class RunMetrics(InputFile):
    """runs/<run>/metrics.json."""

    run: str
    dataset: str
    model: str
    prompt: str
    n: int
    rows: int
    samples: int
    no_reference: int = 0
    metric: str | None = None
    accuracy: float | None = None
    ci95: Bounds = None
    invalid: dict[str, int] = {}
    truncated: int = 0
    prompts_cut: int = 0
    cluster: str | None = None
    metrics: dict[str, Score] = {}
    classification: Classification | None = None
    label_mass: float | None = None
    slices: dict[str, dict[str, JsonDict]] = {}
    gpu: GpuUsage | None = None

    def slice_scores(self, column: str, metric: str) -> dict[str, Score]:
        """Value of `column` → the metric's score there."""
        slices = self.slices.get(column, {})
        return {value: Score.model_validate(entry.get(metric) or {"n": 0}) for value, entry in slices.items()}


class Agreement(InputFile):
    """How a pointwise judge compares with the run's own metric."""

    metric: str
    n: int
    percent: float | None = None
    kappa: float | None = None


class Human(InputFile):
    """How a judge compares with what people said."""

    column: str
    n: int
    percent: float | None = None
    kappa: float | None = None
    kappa_weights: str | None = None
    macro_f1: float | None = None
    policy: str
    unreadable: int
    missing: int = 0


class ClassShare(InputFile):
    """One class of a judge that sorts answers."""

    n: int
    share: float | None = None
    ci95: Bounds = None


class JudgeMetrics(InputFile):
    """judges/<judge>/<target>/metrics.json."""

    judge: str
    kind: Literal["pointwise", "pairwise", "score", "classification"]
    model: str
    target: str
    runs: list[str]
    n: int
    asked: int
    reliable: bool
    unreliable_because: list[str] = []
    unreadable: int = 0
    unreadable_ratio: float | None = None
    truncated: int = 0
    label_counts: dict[str, int] = {}
    top_label: str | None = None
    top_label_share: float | None = None
    mean: float | None = None
    range: list[float] = []
    scored: int | None = None
    classes: dict[str, ClassShare] = {}
    unreadable_reasons: dict[str, int] = {}
    label_mass: float | None = None
    asked_again: int | None = None
    unreadable_attempts: int = 0
    correct: int | None = None
    incorrect: int | None = None
    accuracy: float | None = None
    ci95: Bounds = None
    agreement: Agreement | None = None
    human: Human | None = None
    self_preference: float | None = None
    preference: float | None = None
    preference_ci95: Bounds = None
    wins: dict[str, int] = {}
    ties: int = 0
    disagreements: int = 0
    identical: int = 0
    unreadable_pairs: int = 0
    no_answer: int = 0
    win_rate: float | None = None
    win_rate_ci95: Bounds = None
    consistency: float | None = None
    first_position_share: float | None = None
    longer_wins_share: float | None = None
    gpu: GpuUsage | None = None

    @property
    def all_ties(self) -> int:
        """Pairs that count as a tie: said so, orders that disagree, and identical answers."""
        return self.ties + self.disagreements + self.identical


class Manifest(InputFile):
    """manifest.json of a run, a judge target, a teacher's logits or a training; `raw` is the file as it was."""

    created: str | None = None
    gristmill: str | None = None
    commit: str | None = None
    python: str | None = None
    packages: dict[str, Any] = {}
    spec: JsonDict = {}
    weights: JsonDict = {}
    seed: int | None = None
    requests: int | None = None
    completions: int | None = None
    from_journal: int | None = None
    generated: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float | None = None
    workers: list[JsonDict] = []
    #: Of a training: its GPUs, and the model that it began from.
    devices: list[JsonDict] = []
    start: JsonDict = {}
    raw: JsonDict = {}


class Invocation(InputFile):
    """results/invocation.json: how Snakemake was called last, and with what config."""

    started: str
    command: str
    gristmill: str
    commit: str | None = None
    config: JsonDict

    @property
    def config_text(self) -> str:
        """The config as JSON, in its own order."""
        return json.dumps(self.config, indent=2, ensure_ascii=False)


M = TypeVar("M", bound=InputFile)


def read_file(kind: type[M], path: Path) -> M:
    """One JSON file as `kind`.

    Raises:
        UserError: the file is missing, is not JSON, or lacks a key; with its path.
    """
    value = _read_json(path)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise UserError(f"{path}: {_problem(error)}; make the file again") from None


def read_manifest(path: Path) -> Manifest:
    """A manifest, with the file itself kept for the provenance section."""
    manifest = read_file(Manifest, path)
    return manifest.model_copy(update={"raw": _read_json(path)})


def read_lines(path: Path, columns: Sequence[str]) -> Iterator[JsonDict]:
    """The objects of a JSON Lines file in constant memory; each has all of `columns`."""
    try:
        with open(path, "rb") as handle:
            for number, line in enumerate(handle, start=1):
                yield _object(line, columns, f"{path}, line {number}")
    except OSError as error:
        raise UserError(_unreadable(path, error)) from None


def _object(line: bytes, columns: Sequence[str], where: str) -> JsonDict:
    try:
        value = files.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); make the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object; make the file again")
    missing = [column for column in columns if column not in value]
    if missing:
        raise UserError(f"{where} has no {missing[0]!r}; make the file again")
    return value


def _read_json(path: Path) -> Any:
    try:
        return files.read_json(path)
    except OSError as error:
        raise UserError(_unreadable(path, error)) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); make the file again") from None


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} is missing; run the step that makes it, or leave the folder out of the report"
    return f"{path} cannot be read: {error.strerror}"


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{key} is missing" if first["type"] == "missing" else f"{key}: {first['msg']}"
