"""Numbers as text, and what may be said about a judge.

- A value is never shown without its interval where there is one: `62.5 % [50.1, 73.4]`.
- None is a dash: nothing that could not be measured becomes a 0.
- No winner is named for an unreliable judge, nor when the interval of a reliable one includes 50 %.
- The sentences say what was counted ("wrote A in 120 of 120 verdicts"), so that a reader can check them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gristmill import files
from gristmill.config.schema import ReliabilityBar
from gristmill.report.inputs import Bounds, JudgeMetrics

NONE = "–"
#: Meanings of a pairwise judge that say by how much.
STRENGTHS = {"much_first": "first, much better", "much_second": "second, much better"}


@dataclass(frozen=True, slots=True)
class Swaps:
    """Pairs that were asked in both orders with both labels read, and how many of them got one label twice."""

    pairs: int = 0
    same_label: int = 0
    top_label_twice: int = 0


def percent(value: float | None) -> str:
    """`62.5 %`."""
    if value is None:
        return NONE
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def bounds(ends: Bounds) -> str:
    """`[50.1, 73.4]`, empty when there is no interval."""
    return "" if ends is None else f"[{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def estimate(value: float | None, ends: Bounds) -> str:
    """`62.5 % [50.1, 73.4]`."""
    return percent(value) if value is None else f"{percent(value)} {bounds(ends)}".rstrip()


def count(value: int | None) -> str:
    """`1,234`."""
    return NONE if value is None else f"{value:,}"


def decimal(value: float | None, digits: int = 2) -> str:
    """`−0.05`, with a real minus sign."""
    return NONE if value is None else f"{value:,.{digits}f}".replace("-", "\u2212")


def duration(seconds: float | None) -> str:
    """`12.3 s`, `4 min 05 s` or `2 h 03 min`."""
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def energy(joules: float | None) -> str:
    """`850 J`, `12.3 kJ` or `1.25 kWh`."""
    if joules is None:
        return NONE
    if joules < 1000:
        return f"{joules:.0f} J"
    return f"{joules / 1000:,.1f} kJ" if joules < 360_000 else f"{joules / 3_600_000:,.2f} kWh"


def as_text(value: Any) -> str:
    """A JSON value for reading: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    return files.dumps(value).decode("utf-8")


def readable(metrics: JudgeMetrics) -> int:
    """How many labels the judge wrote that could be read."""
    return sum(metrics.label_counts.values())


def verdict_words(metrics: JudgeMetrics, bars: ReliabilityBar, swaps: Swaps) -> str:
    """What the judge's result means, in one or two sentences."""
    if not metrics.reliable:
        return unreliable_words(metrics, bars, swaps)
    if metrics.kind == "pointwise":
        return f"The judge called {count(metrics.correct)} of {count(metrics.n)} answers correct."
    return (
        _preference(metrics) if metrics.kind == "pairwise" else f"{sentence(headline(metrics) or 'nothing was read')}"
    )


def headline(metrics: JudgeMetrics) -> str | None:
    """A score's mean or the classes' shares in words; None for the other kinds, and where nothing was read."""
    if metrics.kind == "score" and metrics.mean is not None:
        low, high = (f"{end:g}" for end in metrics.range)
        ends = "" if metrics.ci95 is None else " [{:.2f}, {:.2f}]".format(*metrics.ci95)
        return f"mean score {metrics.mean:.2f}{ends} on a scale from {low} to {high}"
    shares = [f"{name} {percent(each.share)}" for name, each in metrics.classes.items() if each.share is not None]
    return ", ".join(shares) or None


def unreliable_words(metrics: JudgeMetrics, bars: ReliabilityBar, swaps: Swaps) -> str:
    """Why nothing follows from this judge, counted out; never names a winner."""
    said = [*_label_words(metrics, bars, swaps), *_unreadable_words(metrics, bars)]
    if metrics.kind == "pointwise":
        said += _agreement_words(metrics, bars)
    elif metrics.kind == "pairwise":
        said += _order_words(metrics, bars, said)
    if not said:
        said = [sentence(reason) for reason in metrics.unreliable_because] or ["The judge is marked unreliable."]
    abouts = {"pointwise": "how many answers are correct", "pairwise": "which run is better"}
    about = abouts.get(metrics.kind, "the answers")
    return " ".join([*said, f"This says nothing about {about}."])


def _preference(metrics: JudgeMetrics) -> str:
    if metrics.win_rate is None or metrics.win_rate_ci95 is None or len(metrics.runs) < 2:
        return "No pair could be compared."
    low, high = metrics.win_rate_ci95
    if low <= 0.5 <= high:
        return "No clear winner: the interval includes 50\u00a0%."
    better, worse = metrics.runs if low > 0.5 else metrics.runs[::-1]
    return f"The judge prefers {better} to {worse}: the interval lies clear of 50\u00a0%."


def _label_words(metrics: JudgeMetrics, bars: ReliabilityBar, swaps: Swaps) -> list[str]:
    label, share = metrics.top_label, metrics.top_label_share
    if label is None or share is None or (share <= bars.max_label_share and share < 1):
        return []
    times = f"{count(metrics.label_counts.get(label))} of {count(readable(metrics))}"
    wrote = f"The judge wrote {label} in {times} {'readable ' if metrics.unreadable else ''}verdicts"
    if not swaps.pairs:
        return [wrote + "."]
    always = swaps.top_label_twice == swaps.pairs
    pairs = "" if always else f" in {count(swaps.top_label_twice)} of {count(swaps.pairs)} pairs"
    return [f"{wrote}; when the two answers were swapped it still wrote {label}{pairs}."]


def _unreadable_words(metrics: JudgeMetrics, bars: ReliabilityBar) -> list[str]:
    if metrics.unreadable_ratio is None or metrics.unreadable_ratio <= bars.max_unreadable_ratio:
        return []
    return [f"{count(metrics.unreadable)} of its {count(metrics.asked)} verdicts could not be read."]


def _order_words(metrics: JudgeMetrics, bars: ReliabilityBar, said: list[str]) -> list[str]:
    if metrics.consistency is None or metrics.consistency >= bars.min_consistency or "swapped" in "".join(said):
        return []
    kept = percent(metrics.consistency)
    return [f"When the two answers were swapped, it kept its choice in only {kept} of the pairs."]


def _agreement_words(metrics: JudgeMetrics, bars: ReliabilityBar) -> list[str]:
    kappa = metrics.agreement.kappa if metrics.agreement else None
    if metrics.agreement is None or kappa is None or kappa >= bars.min_kappa:
        return []
    return [f"Beyond chance it hardly agrees with {metrics.agreement.metric} (kappa {decimal(kappa)})."]


def sentence(text: str) -> str:
    """A clause with a capital and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def label_meanings(labels: Mapping[str, str], counts: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """(label, its meaning, how often), known labels first; one that was never written has 0."""
    order = [*labels, *(label for label in counts if label not in labels)]
    return [(label, meaning_words(label, labels.get(label, "")), counts.get(label, 0)) for label in order]


def meaning_words(label: str, meaning: str) -> str:
    """What a label means, for reading; nothing where it means itself, as a score does."""
    return "" if meaning == label else STRENGTHS.get(meaning, meaning)
