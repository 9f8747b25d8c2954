"""What a judge is held to and what it wrote, as lines of its card.

- A number that a bar is for stands beside the bar and whether it holds; the others stand alone.
- Unreadable verdicts are told by their reason, in words where there are words for it.
- A scale of many scores is drawn in at most MAX_BARS bars of equal width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.config.schema import ReliabilityBar
from gristmill.report.inputs import Human, JudgeMetrics
from gristmill.report.words import STRENGTHS, bounds, count, decimal, percent

MAX_BARS = 21
REASONS = {
    "empty": "no words",
    "no_label": "no label in the words",
    "several_labels": "several labels",
    "out_of_range": "a number off the scale",
    "not_json": "no JSON",
    "other_keys": "JSON with other keys",
    "no_likelihood": "no likelihoods",
    "unclosed_thinking": "thinking without an end",
    "skipped": "the judge’s prompt was too long",
}
POLICIES = {"wrong": "counted as wrong", "tie": "counted as ties", "dropped": "left out"}


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the reliability panel. `holds` is None where there is no bar."""

    name: str
    value: str
    bar: str = ""
    holds: bool | None = None


def measures(metrics: JudgeMetrics, bars: ReliabilityBar) -> list[Measure]:
    """The numbers that a judge's reliability rests on, each with the bar it is held to."""
    rows = [
        _at_most("could not be read", metrics.unreadable_ratio, bars.max_unreadable_ratio, _of_asked(metrics)),
        _at_most(f"wrote {metrics.top_label or 'one label'}", metrics.top_label_share, bars.max_label_share),
    ]
    if metrics.kind == "pointwise":
        rows += _pointwise_measures(metrics, bars)
    elif metrics.kind == "pairwise":
        rows += _pairwise_measures(metrics, bars)
    rows += _human_measures(metrics.human, bars) if metrics.human is not None else []
    if metrics.label_mass is not None:
        rows.append(Measure("mean mass of the labels", percent(metrics.label_mass), "of all words"))
    if metrics.asked_again is not None:
        failed = f"{count(metrics.unreadable_attempts)} answers in all could not be read"
        rows.append(Measure("asked again", count(metrics.asked_again), failed))
    return [*rows, Measure("cut by max_new_tokens", count(metrics.truncated))]


def _human_measures(human: Human, bars: ReliabilityBar) -> list[Measure]:
    """How far the judge agrees with people, and what that leaves out."""
    weighted = f", {human.kappa_weights} weights" if human.kappa_weights else ""
    holds = None if human.kappa is None else human.kappa >= bars.min_kappa
    rows = [
        Measure(f"agrees with people ({human.column})", f"{percent(human.percent)} of {count(human.n)}"),
        Measure(f"Cohen’s kappa with people{weighted}", decimal(human.kappa), _at_least(bars.min_kappa), holds),
    ]
    if human.macro_f1 is not None:
        rows.append(Measure("macro F1, people being right", decimal(human.macro_f1)))
    treated = POLICIES.get(human.policy, human.policy)
    rows.append(Measure(f"unreadable beside people, {treated}", count(human.unreadable), f"policy: {human.policy}"))
    return [*rows, Measure("without a person’s word", count(human.missing), "left out")]


def _at_least(bar: float) -> str:
    return f"at least {decimal(bar)}"


def _pointwise_measures(metrics: JudgeMetrics, bars: ReliabilityBar) -> list[Measure]:
    agreement = metrics.agreement
    if agreement is None:
        return [Measure("agreement with a metric", "none to compare with")]
    kappa = agreement.kappa
    bar = _at_least(bars.min_kappa)
    return [
        Measure(f"agrees with {agreement.metric}", f"{percent(agreement.percent)} of {count(agreement.n)}"),
        Measure("Cohen’s kappa", decimal(kappa), bar, None if kappa is None else kappa >= bars.min_kappa),
    ]


def _pairwise_measures(metrics: JudgeMetrics, bars: ReliabilityBar) -> list[Measure]:
    value = metrics.consistency
    bar = f"at least {_whole(bars.min_consistency)}"
    holds = None if value is None else value >= bars.min_consistency
    rows = [
        Measure("same choice in both orders", "asked once" if value is None else percent(value), bar, holds),
        Measure("chose the answer shown first", percent(metrics.first_position_share), "50 % is even"),
        Measure("winner is the longer answer", percent(metrics.longer_wins_share), "50 % is even"),
    ]
    if metrics.self_preference is not None:
        rows.append(Measure("wins that went to the judge’s own model", percent(metrics.self_preference)))
    if metrics.preference is not None:
        ends = f"{percent(metrics.preference)} {bounds(metrics.preference_ci95)}".rstrip()
        rows.append(Measure(f"mean preference for {metrics.runs[0]}", ends, "50 % is even"))
    return rows


def _at_most(name: str, value: float | None, bar: float, shown: str | None = None) -> Measure:
    holds = None if value is None else value <= bar
    return Measure(name, shown or percent(value), f"at most {_whole(bar)}", holds)


def _of_asked(metrics: JudgeMetrics) -> str:
    return f"{count(metrics.unreadable)} of {count(metrics.asked)} ({percent(metrics.unreadable_ratio)})"


def _whole(share: float) -> str:
    return f"{100 * share:g} %"


def unreadable_reasons(metrics: JudgeMetrics) -> list[tuple[str, int]]:
    """(reason in words, how often) of what could not be read."""
    return [(REASONS.get(name, name.replace("_", " ")), n) for name, n in metrics.unreadable_reasons.items()]


def chart_bars(metrics: JudgeMetrics, labels: Sequence[tuple[str, str, int]]) -> list[tuple[str, int]]:
    """(text, how often) for each bar of what the judge wrote; of a long scale a bar for several scores."""
    short = [(label, "" if meaning in STRENGTHS.values() else meaning, n) for label, meaning, n in labels]
    bars = [(f"{label} · {meaning}" if meaning else label, n) for label, meaning, n in short]
    if metrics.kind == "score" and len(bars) > MAX_BARS:
        width = -(-len(bars) // MAX_BARS)
        groups = [bars[start : start + width] for start in range(0, len(bars), width)]
        bars = [(_span([label for label, _ in group]), sum(n for _, n in group)) for group in groups]
    return [*bars, ("unreadable", metrics.unreadable)]


def _span(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]}"
