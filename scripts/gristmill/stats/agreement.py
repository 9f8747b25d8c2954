"""How far raters agree, beyond what chance would give.

- Chance agreement is estimated from the raters' own labels. Where only one label was ever used it is 1, and every
  coefficient here is 0/0: undefined, and None with the reason.
- A rating that is missing is None. `cohen_kappa` and `percent_agreement` take the items that both rated, `fleiss_kappa`
  needs the same number of ratings for every item, `krippendorff_alpha` takes any number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

NOTHING_RATED = "no item was rated by two raters"
ONE_LABEL = "every rating is the same, so agreement beyond chance is 0/0"


@dataclass(frozen=True, slots=True)
class Agreement:
    """A coefficient over n items; `reason` says why it is None."""

    value: float | None
    n: int
    reason: str | None = None


def percent_agreement(first: Sequence[Hashable], second: Sequence[Hashable]) -> Agreement:
    """The share of items that two raters labelled alike, 0 to 1; it says nothing about chance.

    Raises:
        ValueError: the raters have not labelled equally many items.
    """
    both = _both(first, second)
    if not both:
        return Agreement(None, 0, NOTHING_RATED)
    return Agreement(sum(one == other for one, other in both) / len(both), len(both))


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> Agreement:
    """Cohen's kappa of two raters: (p_o − p_e) / (1 − p_e), p_e from each rater's own label shares.

    Cohen 1960, Educational and Psychological Measurement 20:37.

    Raises:
        ValueError: the raters have not labelled equally many items.
    """
    both = _both(first, second)
    if not both:
        return Agreement(None, 0, NOTHING_RATED)
    names: dict[Hashable, int] = {}
    coded = [[names.setdefault(label, len(names)) for label in pair] for pair in both]
    if len(names) == 1:
        return Agreement(None, len(both), ONE_LABEL)
    return Agreement(kappa_of(Counter(map(tuple, coded))), len(both))


def kappa_of(table: Counter[Any], weights: Literal["quadratic"] | None = None) -> float | None:
    """Cohen's kappa of a table (one, other) → count; None where it is 0/0. Weights take whole numbers."""
    from sklearn.metrics import cohen_kappa_score

    counted = {pair: count for pair, count in table.items() if count}
    said = {value for pair in counted for value in pair}
    if len(said) < 2:
        return None
    one, other = zip(*counted, strict=True)
    labels = None if weights is None else list(range(min(said), max(said) + 1))
    counts = list(counted.values())
    return float(cohen_kappa_score(one, other, labels=labels, weights=weights, sample_weight=counts))


def fleiss_kappa(counts: Sequence[Sequence[int]]) -> Agreement:
    """Fleiss' kappa: (P̄ − P̄_e) / (1 − P̄_e), P̄_e from the label shares over all raters.

    Fleiss 1971, Psychological Bulletin 76:378.

    Args:
        counts: for each item, how many raters gave it each label: items × labels. Every item has equally many.

    Raises:
        ValueError: the table is not rectangular.
    """
    from statsmodels.stats.inter_rater import fleiss_kappa as kappa

    if not len(counts):
        return Agreement(None, 0, NOTHING_RATED)
    table = np.asarray(counts)
    if table.ndim != 2:
        raise ValueError("counts must be items × labels, with the same labels for every item")
    raters = np.unique(table.sum(axis=1))
    if len(raters) > 1:
        why = f"items have {raters.min()} to {raters.max()} ratings, and Fleiss' kappa needs as many for each"
        return Agreement(None, len(table), f"{why}; Krippendorff's alpha takes any number")
    if raters[0] < 2:
        return Agreement(None, len(table), NOTHING_RATED)
    if np.count_nonzero(table.sum(axis=0)) == 1:
        return Agreement(None, len(table), ONE_LABEL)
    return Agreement(float(kappa(table, method="fleiss")), len(table))


def krippendorff_alpha(
    ratings: Sequence[Sequence[Hashable]], level: Literal["nominal", "interval"] = "nominal"
) -> Agreement:
    """Krippendorff's alpha: 1 − D_o / D_e, for any number of raters and with missing ratings.

    Hayes & Krippendorff 2007, Communication Methods and Measures 1:77; computed by the package krippendorff. Items with
    one rating or none are left out, and are not in n.

    Args:
        ratings: for each item its ratings, in any order; None is a missing one.
        level: nominal: labels are equal or not. interval: ratings are numbers, and a distance is squared.
    """
    import krippendorff

    items = [[rating for rating in item if rating is not None] for item in ratings]
    items = [item for item in items if len(item) > 1]
    if not items:
        return Agreement(None, 0, NOTHING_RATED)
    domain = list(dict.fromkeys(rating for item in items for rating in item))
    if level == "interval":
        domain = sorted(domain, key=_number)
    if len(domain) == 1:
        return Agreement(None, len(items), ONE_LABEL)
    found = krippendorff.alpha(
        value_counts=[[counted[value] for value in domain] for counted in map(Counter, items)],
        value_domain=list(range(len(domain))) if level == "nominal" else [_number(value) for value in domain],
        level_of_measurement=level,
    )
    return Agreement(float(found), len(items))


def _number(rating: Hashable) -> float:
    if isinstance(rating, str) or not isinstance(rating, int | float):
        raise ValueError(f"{rating!r} is no number; rate as nominal")
    return float(rating)


def _both(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[Hashable, Hashable]]:
    if len(first) != len(second):
        raise ValueError(f"{len(first)} ratings beside {len(second)}; give one of each rater for every item")
    return [pair for pair in zip(first, second, strict=True) if None not in pair]
