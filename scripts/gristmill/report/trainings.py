"""Trainings on the page: how they went, what their teachers left, and each trained model beside its base and teacher.

- The numbers are those of trainings/<name>/metrics.json and logits/<name>/metrics.json; the curve is steps.jsonl beside
  the former, which may be gone: the page then says so.
- Runs stand side by side only over one dataset, one prompt and one metric. A difference from the base is that of the
  paired comparison; nothing is computed here.
- A curve is drawn with at most MAX_POINTS points, each the mean of as many steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.config.specs import ReportTraining
from gristmill.errors import UserError
from gristmill.report.comparisons import Comparison, Family
from gristmill.report.inputs import Bounds, InputFile, Manifest, read_file, read_manifest
from gristmill.report.words import count
from gristmill.training.logs import read_steps
from gristmill.types import JsonDict

if TYPE_CHECKING:
    from gristmill.report.data import Run

MAX_POINTS = 300
#: Roles in the order in which they stand: where a training began, what it made, who taught it.
BASE, STUDENT, TEACHER = "base", "trained", "teacher"
ROLES = (BASE, STUDENT, TEACHER)
#: Panels of the curve, from the top: their titles and the keys of steps.jsonl that they draw.
PANELS = {
    "loss": ("loss", "evaluation_loss"),
    "learning rate": ("learning_rate",),
    "gradient norm": ("gradient_norm",),
    "tokens/s": ("tokens_per_second",),
}


class Measured(InputFile):
    """One evaluation of a training."""

    step: int
    evaluation_loss: float | None = None


class Evaluations(InputFile):
    """The evaluations that a training's metrics.json names."""

    first: Measured
    last: Measured
    best: Measured | None = None


class Batch(InputFile):
    """The effective batch."""

    factors: str


class Texts(InputFile):
    """What a training's texts were, and what of them is left out."""

    count: int
    cut_tokens: int = 0
    rows_without_targets: int = 0


class TrainingData(InputFile):
    """The `data` section of a training's metrics.json."""

    texts: Texts


class TrainingMetrics(InputFile):
    """trainings/<name>/metrics.json."""

    training: str
    objective: str
    steps: int
    result_of_step: int
    stopped_early: bool = False
    epochs: float | None = None
    batch: Batch
    parameters: int
    trained_parameters: int
    tokens: int
    data: TrainingData | None = None
    evaluation: Evaluations | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    model_flops_utilization: float | None = None
    memory_gib: float | None = None
    resumed_from_step: int | None = None


class TeacherMetrics(InputFile):
    """logits/<name>/metrics.json."""

    unit: str
    teacher: str
    k: int
    rows: int
    positions: int
    perplexity: float | None = None
    target_is_top1: float | None = None
    tail_mass_mean: float | None = None
    bytes_per_position: float | None = None
    plain_bytes_per_position: float | None = None
    failed: int = 0
    skipped: dict[str, int] = {}
    rows_without_positions: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    score_seconds: float | None = None

    @property
    def left_out(self) -> list[str]:
        """What of the texts is not there, counted."""
        parts = [f"{count(self.failed)} windows failed"] if self.failed else []
        parts += [f"{count(n)} skipped: {reason.replace('_', ' ')}" for reason, n in self.skipped.items() if n]
        parts += [f"{count(self.rows_without_positions)} without a position"] if self.rows_without_positions else []
        return parts + ([f"{count(self.cut_tokens)} tokens cut off {count(self.cut_rows)}"] if self.cut_rows else [])


@dataclass(frozen=True, slots=True)
class Point:
    """The mean of one key over neighbouring steps, at the last of them."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Training:
    """A training as the report shows it; `curve`: key of steps.jsonl → its points, empty where the file is gone."""

    name: str
    folder: Path
    metrics: TrainingMetrics
    manifest: Manifest
    origin: ReportTraining
    curve: dict[str, list[Point]]


@dataclass(frozen=True, slots=True)
class Teacher:
    """What a teacher left."""

    name: str
    metrics: TeacherMetrics
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Standing:
    """One run of a model that a training has to do with. `difference`: of its metric from the base's, paired."""

    run: Run
    role: str
    difference: float | None = None
    ci95: Bounds = None


@dataclass(frozen=True, slots=True)
class Lineup:
    """Base, trained models and teachers over one dataset with one prompt; `missing`: role → models without a run."""

    dataset: str
    prompt: str
    metric: str
    standings: list[Standing]
    missing: dict[str, list[str]]


def read_trainings(folders: Mapping[str, Path], origins: Mapping[str, ReportTraining]) -> list[Training]:
    """The trainings in the order of the folders.

    Args:
        folders: training → its folder.
        origins: training → the models that it has to do with; one that is not listed has none.

    Raises:
        UserError: a file is missing or broken, or is of another training.
    """
    return [_training(name, folder, origins.get(name, ReportTraining())) for name, folder in folders.items()]


def _training(name: str, folder: Path, origin: ReportTraining) -> Training:
    path = folder / "metrics.json"
    metrics = read_file(TrainingMetrics, path)
    if metrics.training != name:
        raise UserError(f"{path} is of training {metrics.training!r}, not {name!r}; check --training {name}={folder}")
    manifest = read_manifest(folder / "model" / "training" / "manifest.json")
    return Training(name, folder, metrics, manifest, origin, curve(read_steps(folder / "steps.jsonl")))


def read_teachers(folders: Mapping[str, Path]) -> list[Teacher]:
    """What the teachers left, in the order of the folders.

    Raises:
        UserError: a file is missing or broken, or is of other logits.
    """
    return [_teacher(name, folder) for name, folder in folders.items()]


def _teacher(name: str, folder: Path) -> Teacher:
    path = folder / "metrics.json"
    metrics = read_file(TeacherMetrics, path)
    if metrics.unit != f"logits/{name}":
        raise UserError(f"{path} is of {metrics.unit}, not logits/{name}; check --logits {name}={folder}")
    return Teacher(name, metrics, read_manifest(folder / "manifest.json"))


def curve(lines: Iterable[JsonDict]) -> dict[str, list[Point]]:
    """Key of steps.jsonl → its points, thinned; a value that is not finite is left out."""
    wanted = [key for keys in PANELS.values() for key in keys]
    found: dict[str, list[Point]] = {}
    for line in lines:
        for key in wanted:
            if isinstance(value := line.get(key), int | float):
                found.setdefault(key, []).append(Point(int(line["step"]), float(value)))
    return {key: thinned(points) for key, points in found.items()}


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS, each the mean of as many neighbours; the last may be of fewer."""
    size = -(-len(points) // MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [Point(part[-1].step, sum(point.value for point in part) / len(part)) for part in parts]


def lineups(trainings: Sequence[Training], runs: Sequence[Run], families: Sequence[Family]) -> list[Lineup]:
    """Where trained models have runs: those beside the runs of their bases and teachers."""
    roles = roles_of(training.origin for training in trainings)
    bases = {model: training.origin.base for training in trainings for model in training.origin.models}
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        if run.metrics.model in roles and run.metrics.metric is not None:
            groups.setdefault((run.metrics.dataset, run.metrics.prompt, run.metrics.metric), []).append(run)
    compared = [comparison for family in families for comparison in family.comparisons]
    return [
        _lineup(key, members, roles, bases, compared)
        for key, members in groups.items()
        if any(STUDENT in roles[run.metrics.model] for run in members)
    ]


def roles_of(origins: Iterable[ReportTraining]) -> dict[str, list[str]]:
    """Model → its roles, in the order of ROLES; a student may be another one's base."""
    found: dict[str, set[str]] = {}
    for origin in origins:
        named = [(origin.base, BASE), (origin.teacher, TEACHER), *((model, STUDENT) for model in origin.models)]
        for model, role in named:
            if model is not None:
                found.setdefault(model, set()).add(role)
    return {model: sorted(roles, key=ROLES.index) for model, roles in found.items()}


def _lineup(
    key: tuple[str, str, str],
    members: Sequence[Run],
    roles: Mapping[str, Sequence[str]],
    bases: Mapping[str, str | None],
    compared: Sequence[Comparison],
) -> Lineup:
    dataset, prompt, metric = key
    standings = [Standing(run, " and ".join(roles[run.metrics.model])) for run in members]
    standings.sort(key=lambda each: ROLES.index(roles[each.run.metrics.model][0]))
    wanted = [each for each in compared if each.dataset == dataset and each.metric == metric]
    named: dict[str, list[str]] = {}
    for run in members:
        named.setdefault(run.metrics.model, []).append(run.name)
    standings = [_against(each, named.get(bases.get(each.run.metrics.model) or "", []), wanted) for each in standings]
    there = {run.metrics.model for run in members}
    missing = {role: [model for model in roles if role in roles[model] and model not in there] for role in ROLES}
    return Lineup(dataset, prompt, metric, standings, {role: models for role, models in missing.items() if models})


def _against(standing: Standing, bases: Sequence[str], compared: Sequence[Comparison]) -> Standing:
    """With its difference from its own base, where that has one run here and the two are compared."""
    if len(bases) != 1:
        return standing
    for each in compared:
        if each.runs == (standing.run.name, bases[0]):
            return replace(standing, difference=each.difference, ci95=each.ci95)
        if each.runs == (bases[0], standing.run.name) and each.difference is not None:
            turned = None if each.ci95 is None else (-each.ci95[1], -each.ci95[0])
            return replace(standing, difference=-each.difference, ci95=turned)
    return standing
