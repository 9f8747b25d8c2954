"""May this judge be believed? Each check returns a sentence when the judge misses a bar of the config, else None.

- A judge that was asked nothing, or of which nothing could be read, is unreliable.
- So is one that always says the same, whatever the bars allow: it says nothing about the answers, even if it is right.
- A sentence gives the count, the share and the bar, so that a reader can check it without opening a file.
- What cannot be computed (no metric to agree with, kappa of two constant raters, pairs asked once) misses no bar.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from gristmill.config.schema import ReliabilityBar

#: Up to this share of choices for the answer in one place, a preference for the place is not worth a word.
EVEN_SHARE = 0.6


class Share(NamedTuple):
    """A part of a whole, both counted."""

    part: int
    whole: int

    @property
    def ratio(self) -> float | None:
        """The part over the whole; None when there is no whole."""
        return self.part / self.whole if self.whole else None


def nothing_readable(unreadable: Share) -> str | None:
    """A judge without a single verdict."""
    if unreadable.whole == 0:
        return "it was asked nothing"
    if unreadable.part == unreadable.whole:
        return f"none of its {unreadable.whole} verdicts could be read"
    return None


def too_unreadable(unreadable: Share, bar: ReliabilityBar) -> str | None:
    """A judge whose words often give no label."""
    ratio = unreadable.ratio
    if ratio is None or ratio == 1 or ratio <= bar.max_unreadable_ratio:
        return None
    return (
        f"{unreadable.part} of its {unreadable.whole} verdicts could not be read "
        f"({percent(ratio)}, bar {percent(bar.max_unreadable_ratio)})"
    )


def too_uniform(labels: Counter[str], meanings: dict[str, str], bar: ReliabilityBar) -> str | None:
    """A judge that nearly always writes the same label, or labels of one meaning."""
    readable = labels.total()
    if not readable:
        return None
    label, count = labels.most_common(1)[0]
    share = count / readable
    if share == 1 or share > bar.max_label_share:
        return (
            f"it wrote {label!r} in {count} of {readable} readable verdicts "
            f"({percent(share)}, bar {percent(bar.max_label_share)})"
        )
    said = {meanings[label] for label, count in labels.items() if count}
    return f"all its {readable} readable verdicts mean {said.pop()!r}" if len(said) == 1 else None


def too_inconsistent(agreed: Share, shown_first: Share, bar: ReliabilityBar) -> str | None:
    """A pairwise judge whose choice depends on the order in which the answers are shown."""
    if agreed.ratio is None or agreed.ratio >= bar.min_consistency:
        return None
    orders = (
        f"both orders agreed in {agreed.part} of {agreed.whole} pairs "
        f"({percent(agreed.ratio)}, bar {percent(bar.min_consistency)})"
    )
    place, count = "first", shown_first.part
    if 2 * count < shown_first.whole:
        place, count = "second", shown_first.whole - count
    if count <= EVEN_SHARE * shown_first.whole:  # no side is preferred: the choices are erratic, not biased
        return orders
    return f"it chose the answer shown {place} in {count} of {shown_first.whole} choices; {orders}"


def too_far_from_metric(metric: str, kappa: float | None, bar: ReliabilityBar) -> str | None:
    """A pointwise judge that hardly agrees with the run's own metric beyond chance."""
    if kappa is None or kappa >= bar.min_kappa:
        return None
    return f"kappa with {metric} is {kappa:.2f} (bar {bar.min_kappa:g})"


def percent(ratio: float) -> str:
    """`98 %`, or with a decimal where that says more: `94.6 %`."""
    return f"{100 * ratio:.1f}".removesuffix(".0") + " %"
