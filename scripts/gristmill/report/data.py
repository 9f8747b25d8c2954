"""Gathers everything the report shows from the folders it is given, and nothing else.

- Runs keep the order of the command line; a run's place decides its colour everywhere.
- Scores are only set side by side within one dataset and one metric.
- A run or judge that the spec does not list is shown without its sampling or with the default bars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.config.schema import SamplingConfig
from gristmill.config.specs import ReportJudge, ReportSpec
from gristmill.errors import UserError
from gristmill.gpu.usage import usage_of
from gristmill.report.axis import Axis
from gristmill.report.comparisons import Family, read_comparisons
from gristmill.report.inputs import (
    GpuUsage,
    Invocation,
    JudgeMetrics,
    Manifest,
    RunMetrics,
    Score,
    read_file,
    read_manifest,
)
from gristmill.report.juries import Jury, read_juries
from gristmill.report.rankings import Ranking, read_rankings
from gristmill.report.rows import Browser, JudgeFiles, RunFiles, Shown, join_rows, slice_columns
from gristmill.report.throughput import Throughput, read_jobs, throughput_of
from gristmill.report.timeline import Timeline, read_held, timeline_of
from gristmill.report.trainings import Teacher, Training, read_teachers, read_trainings
from gristmill.report.words import Swaps
from gristmill.types import JsonDict

COLOURS = 8


@dataclass(frozen=True, slots=True)
class Beside:
    """What the report shows beside runs and judges, where the config asks for it."""

    juries: Mapping[str, Path] = field(default_factory=dict)  # <jury>/<target> → its folder
    comparisons: Path | None = None
    rankings: Path | None = None
    trainings: Mapping[str, Path] = field(default_factory=dict)
    logits: Mapping[str, Path] = field(default_factory=dict)
    invocation: Path | None = None  # of the Snakemake; a file that is not there is not shown


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the report shows it. `number` is its place on the command line, `colour` one of COLOURS."""

    name: str
    number: int
    colour: int
    folder: Path
    metrics: RunMetrics
    manifest: Manifest
    sampling: SamplingConfig | None


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge target as the report shows it; `name` is <judge>/<target>."""

    name: str
    folder: Path
    metrics: JudgeMetrics
    manifest: Manifest
    config: ReportJudge
    swaps: Swaps


@dataclass(frozen=True, slots=True)
class Slice:
    """One column's values with the scores by one metric of every run of a dataset that was graded by it."""

    dataset: str
    column: str
    metric: str
    runs: list[Run]
    scores: dict[str, list[Score]]  # value → one score a run


@dataclass(frozen=True, slots=True)
class Report:
    """All that stands on the page."""

    title: str
    runs: list[Run]
    judges: list[Judge]
    slices: list[Slice]
    shown: list[Shown]
    rows: list[JsonDict]
    timeline: Timeline | None = None
    throughput: Throughput | None = None
    comparisons: list[Family] = field(default_factory=list)
    rankings: list[Ranking] = field(default_factory=list)
    juries: list[Jury] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    teachers: list[Teacher] = field(default_factory=list)
    invocation: Invocation | None = None
    #: Teachers and trainings by the names of `units`, and what their jobs used.
    gpu_beside: Mapping[str, GpuUsage] = field(default_factory=dict)

    @property
    def gpu_usage(self) -> dict[str, GpuUsage]:
        """Run, judge target, teacher or training → what its GPU jobs used; only those that had a GPU."""
        runs = {run.name: run.metrics.gpu for run in self.runs}
        judges = {judge.name: judge.metrics.gpu for judge in self.judges}
        return {name: usage for name, usage in (runs | judges).items() if usage is not None} | dict(self.gpu_beside)

    @property
    def datasets(self) -> list[str]:
        """The datasets in the order of their first run."""
        return list(dict.fromkeys(run.metrics.dataset for run in self.runs))

    @property
    def slice_columns(self) -> list[str]:
        """Every column that has scores of its own, for the browser's filters."""
        return slice_columns(run.metrics for run in self.runs)

    @property
    def created(self) -> list[str]:
        """First and last day on which answers were made."""
        manifests = [run.manifest for run in self.runs] + [judge.manifest for judge in self.judges]
        days = sorted(manifest.created[:10] for manifest in manifests if manifest.created)
        return list(dict.fromkeys([*days[:1], *days[-1:]]))


def gather(
    spec: ReportSpec, runs: Mapping[str, Path], judges: Mapping[str, Path], beside: Beside | None = None
) -> Report:
    """Read the folders.

    Args:
        spec: the config's part.
        runs: run → its folder.
        judges: <judge>/<target> → its folder.
        beside: comparisons, rankings and juries of these runs and judges; trainings and logits.

    Raises:
        UserError: a file is missing, broken or of another config; with its path.
    """
    beside = beside or Beside()
    run_files = [_run_files(name, folder) for name, folder in runs.items()]
    judge_files = [JudgeFiles(folder, read_file(JudgeMetrics, folder / "metrics.json")) for folder in judges.values()]
    browser = join_rows(run_files, judge_files, spec.max_rows)
    shown_runs = [_run(spec, number, files) for number, files in enumerate(run_files)]
    others = {f"teacher {name}": folder for name, folder in beside.logits.items()}
    others |= {f"training {name}": folder for name, folder in beside.trainings.items()}
    units = {**runs, **judges, **others}
    held = read_held({name: folder / "gpu" for name, folder in units.items()})
    jobs = read_jobs({name: folder / "live" for name, folder in units.items()})
    axis = Axis([*held.spans, *(job.span for job in jobs)])
    return Report(
        title=spec.title,
        runs=shown_runs,
        judges=_judges(spec, list(judges), judge_files, browser),
        slices=slices(shown_runs),
        shown=browser.shown,
        rows=browser.rows,
        timeline=timeline_of(held, axis),
        throughput=throughput_of(jobs, axis),
        comparisons=read_comparisons(beside.comparisons, runs),
        rankings=read_rankings(beside.rankings, runs, {files.metrics.judge for files in judge_files}),
        juries=read_juries(
            beside.juries, {name: files.metrics for name, files in zip(judges, judge_files, strict=True)}
        ),
        trainings=read_trainings(beside.trainings, spec.trainings),
        teachers=read_teachers(beside.logits),
        invocation=_invocation(beside.invocation),
        gpu_beside={
            name: GpuUsage.model_validate(usage)
            for name, folder in others.items()
            if (usage := usage_of(folder / "gpu")) is not None
        },
    )


def _invocation(path: Path | None) -> Invocation | None:
    if path is None or not path.exists():
        return None
    try:
        return read_file(Invocation, path)
    except UserError as error:
        raise UserError(f"{str(error).rpartition(';')[0]}; remove it, and the page says nothing of it") from None


def _run_files(name: str, folder: Path) -> RunFiles:
    path = folder / "metrics.json"
    metrics = read_file(RunMetrics, path)
    if metrics.run != name:
        raise UserError(f"{path} is of run {metrics.run!r}, not {name!r}; check --run {name}={folder}")
    return RunFiles(folder, metrics)


def _run(spec: ReportSpec, number: int, files: RunFiles) -> Run:
    return Run(
        name=files.metrics.run,
        number=number,
        colour=number % COLOURS,
        folder=files.folder,
        metrics=files.metrics,
        manifest=read_manifest(files.folder / "manifest.json"),
        sampling=spec.sampling.get(files.metrics.run),
    )


def _judges(spec: ReportSpec, names: list[str], found: list[JudgeFiles], browser: Browser) -> list[Judge]:
    return [
        Judge(
            name=name,
            folder=files.folder,
            metrics=files.metrics,
            manifest=read_manifest(files.folder / "manifest.json"),
            config=spec.judges.get(files.metrics.judge, ReportJudge()),
            swaps=swaps,
        )
        for name, files, swaps in zip(names, found, browser.swaps, strict=True)
    ]


def slices(runs: list[Run]) -> list[Slice]:
    """Every (dataset, column, metric) where the metric is some run's headline, with all runs that were graded by it."""
    headlines = dict.fromkeys(run.metrics.metric for run in runs if run.metrics.metric is not None)
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for metric in headlines:
        for run in runs:
            for column in run.metrics.slices if metric in run.metrics.metrics else ():
                groups.setdefault((run.metrics.dataset, column, metric), []).append(run)
    return [Slice(*key, members, _slice_scores(key[1], key[2], members)) for key, members in groups.items()]


def _slice_scores(column: str, metric: str, runs: list[Run]) -> dict[str, list[Score]]:
    by_run = [run.metrics.slice_scores(column, metric) for run in runs]
    values = dict.fromkeys(value for scores in by_run for value in scores)
    return {value: [scores.get(value, Score(n=0)) for scores in by_run] for value in values}
