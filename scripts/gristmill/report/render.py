"""Fills the page: one HTML file that opens from a disk and asks the network for nothing.

- Everything is autoescaped; what models wrote reaches the page as text or as JSON data, never as markup or code.
- The browser's rows are JSON, packed by gzip and base64 in a data block, so no text can end the block.
- A Content-Security-Policy forbids every load and every script or style but the two whose hashes it carries.
- Half a surrogate pair has no UTF-8 form: it stays an escape in the data and is shown as U+FFFD elsewhere.
- Nothing here depends on the clock: the same inputs give the same bytes, and days come from the manifests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gristmill import files
from gristmill.config.specs import ReportSpec
from gristmill.report import charts, comparisons, judged, rankings, words
from gristmill.report.charts import Drawing
from gristmill.report.data import Beside, Judge, Report, Run, Slice, gather
from gristmill.report.inputs import Bounds
from gristmill.report.judged import Measure
from gristmill.report.labelled import labelled, sampled, sampled_columns
from gristmill.report.provenance import short, spread, units, versions
from gristmill.report.trainings import Measured, Training, lineups
from gristmill.thinking import UNCLOSED

HERE = Path(__file__).parent / "page"


@dataclass(frozen=True, slots=True)
class SliceView:
    """A per-category chart and its table."""

    data: Slice
    drawing: Drawing
    drawn: int
    listed: list[str]


@dataclass(frozen=True, slots=True)
class JudgeView:
    """A judge target with the text and charts made for it; `outcome` only where a winner may be named."""

    judge: Judge
    words: str
    measures: list[Measure]
    headline: str | None
    labels: list[tuple[str, str, int]]
    label_chart: str
    outcome: Drawing | None
    reasons: list[tuple[str, int]]

    @property
    def strengths(self) -> bool:
        """Whether labels say by how much, which the chart has no room for."""
        return any(meaning in words.STRENGTHS.values() for _, meaning, _ in self.labels)

    @property
    def place(self) -> tuple[float | None, Bounds]:
        """The result and its interval as places from 0 to 1: a score's on its scale."""
        metrics = self.judge.metrics
        if metrics.kind == "score" and metrics.range:
            scale = (metrics.range[0], metrics.range[1])
            return rankings.placed(metrics.mean, scale), rankings.placed_bounds(metrics.ci95, scale)
        pointwise = metrics.kind == "pointwise"
        return (metrics.accuracy, metrics.ci95) if pointwise else (metrics.win_rate, metrics.win_rate_ci95)

    @property
    def reliable(self) -> bool:
        """Whether its result may be believed."""
        return self.judge.metrics.reliable


@dataclass(frozen=True, slots=True)
class TrainingView:
    """A training with its chart, None without a curve, and the evaluations that are worth a line."""

    training: Training
    drawing: Drawing | None
    evaluations: list[tuple[str, Measured]]


def write_report(
    spec: ReportSpec, runs: Mapping[str, Path], judges: Mapping[str, Path], out: Path, beside: Beside | None = None
) -> int:
    """Gather, draw, fill and write the report; returns its size in bytes."""
    page = render(gather(spec, runs, judges, beside)).encode("utf-8")
    files.write_bytes(out, page)
    return len(page)


def render(report: Report) -> str:
    """The whole page as text that has a UTF-8 form."""
    style, script = _source("report.css"), _source("report.js")
    several = sampled(report.runs)
    page = (
        _environment()
        .get_template("report.html.jinja")
        .render(
            report=report,
            slices=[_slice_view(data) for data in report.slices],
            judges=[_judge_view(judge, report.runs) for judge in report.judges],
            labelled=labelled(report.runs),
            unread=any(score.unread for run in report.runs for score in run.metrics.metrics.values()),
            unclosed=any(run.metrics.invalid.get(UNCLOSED) for run in report.runs),
            sampled=several,
            sampled_columns=sampled_columns(several),
            timeline=_timeline(report),
            throughput=_throughput(report),
            spread=spread,
            max_panels=charts.MAX_PANELS,
            max_lines=charts.MAX_LINES,
            measures=set() if report.timeline is None else charts.drawn_measures(report.timeline),
            trainings=[_training_view(training) for training in report.trainings],
            lineups=lineups(report.trainings, report.runs, report.comparisons),
            units=units(report),
            versions=versions(report),
            colour={run.name: run.colour for run in report.runs},
            policy=policy(style, script),
            style=Markup(style),
            script=Markup(script),
            payload=Markup(pack(_payload(report))),
        )
    )
    return files.LONE_SURROGATE.sub("\ufffd", page)


def pack(value: Any) -> str:
    """JSON by gzip and base64, which report.js unpacks to the same value; the same value gives the same text."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(_escaped(text).encode(), compresslevel=9, mtime=0)).decode()


def _escaped(text: str) -> str:
    """JSON text that has a UTF-8 form."""
    return files.LONE_SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy: this style, this script, images from data: only, and nothing else."""
    return (
        f"default-src 'none'; style-src '{_sha256(style)}'; script-src '{_sha256(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _source(name: str) -> str:
    """A file to inline, with the line ends that a browser gives it before it hashes."""
    return (HERE / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": words.percent,
        "bounds": words.bounds,
        "count": words.count,
        "decimal": words.decimal,
        "duration": words.duration,
        "short": short,
        "energy": words.energy,
        "sentence": words.sentence,
        "svg": Markup,
        "points": comparisons.points,
        "points_bounds": comparisons.points_bounds,
        "p_value": comparisons.p_value,
        "around_half": comparisons.around_half,
        "rating_bounds": rankings.rating_bounds,
        "placed": rankings.placed,
        "placed_bounds": rankings.placed_bounds,
    }
    environment.globals |= {"estimate": words.estimate, "NONE": words.NONE}
    return environment


def _slice_view(data: Slice) -> SliceView:
    drawn, listed = (charts.largest(data, limit) for limit in (charts.MAX_VALUES, charts.MAX_LISTED))
    return SliceView(data, charts.draw_slice(data), len(drawn), listed)


def _judge_view(judge: Judge, runs: list[Run]) -> JudgeView:
    labels = words.label_meanings(judge.config.labels, judge.metrics.label_counts)
    return JudgeView(
        judge=judge,
        headline=words.headline(judge.metrics),
        words=words.verdict_words(judge.metrics, judge.config.reliability, judge.swaps),
        measures=judged.measures(judge.metrics, judge.config.reliability),
        labels=labels,
        label_chart=charts.draw_labels(judged.chart_bars(judge.metrics, labels)),
        reasons=judged.unreadable_reasons(judge.metrics),
        outcome=_outcome(judge, {run.name: run.colour for run in runs}),
    )


def _training_view(training: Training) -> TrainingView:
    found = training.metrics.evaluation
    named = [("first", found.first), ("best", found.best), ("last", found.last)] if found is not None else []
    return TrainingView(
        training=training,
        drawing=charts.draw_curve(training.curve) if training.curve else None,
        evaluations=[(when, measured) for when, measured in named if measured is not None],
    )


def _timeline(report: Report) -> Drawing | None:
    if report.timeline is None:
        return None
    colours = {run.name: run.colour for run in report.runs}
    return charts.draw_timeline(report.timeline, [colours.get(unit) for unit in report.timeline.units])


def _throughput(report: Report) -> Drawing | None:
    if report.throughput is None:
        return None
    colours = {run.name: run.colour for run in report.runs}
    return charts.draw_throughput(report.throughput, [colours.get(lane.unit) for lane in report.throughput.lanes])


def _outcome(judge: Judge, colour: Mapping[str, int]) -> Drawing | None:
    """The win, tie and loss bar of a reliable pairwise judge."""
    metrics = judge.metrics
    if metrics.kind != "pairwise" or not metrics.reliable or len(metrics.runs) != 2 or metrics.win_rate is None:
        return None
    return charts.draw_outcome(judge, [colour.get(run, 7) for run in metrics.runs])


def _payload(report: Report) -> dict[str, Any]:
    """What report.js reads."""
    return {
        "runs": [
            {"name": run.name, "colour": run.colour, "dataset": run.metrics.dataset, "metric": run.metrics.metric}
            for run in report.runs
        ],
        "judges": [
            {
                "name": judge.name,
                "kind": judge.metrics.kind,
                "runs": judge.metrics.runs,
                "reliable": judge.metrics.reliable,
                "labels": judge.config.labels,
            }
            for judge in report.judges
        ],
        "datasets": report.datasets,
        "slices": report.slice_columns,
        "rows": report.rows,
    }
