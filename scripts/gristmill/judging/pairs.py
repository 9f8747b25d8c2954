"""Two answers compared: from what a judge's labels mean to who won, over the orders in which the two were shown.

- Of labels that say first, second or tie, two that differ between the orders are a tie, `orders_disagree`.
- Where labels also say by how much (much_first, much_second), the orders are combined by sign: a win and a tie are a
  win, two opposite wins a tie, however strong either was. The strength stays in the order's line.
- Likelihoods are averaged over the orders: a preference in 0…1, above 0.5 a win, exactly 0.5 a tie.
- One order that was not read leaves no winner.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from gristmill.types import Reading

TIE = "tie"
DISAGREE = "orders_disagree"
#: Meaning → which of the answers as shown, and how much it is better.
SIDES: dict[str, tuple[str, int]] = {
    "much_first": ("first", 2),
    "first": ("first", 1),
    TIE: (TIE, 0),
    "second": ("second", 1),
    "much_second": ("second", 2),
}
#: What a label is worth for the answer shown first.
_WORTH = {"first": 1.0, TIE: 0.5, "second": 0.0}


def has_strength(meanings: Collection[str]) -> bool:
    """Whether a judge's labels say by how much an answer is better."""
    return any(SIDES[meaning][1] == 2 for meaning in meanings)


def combined(target: Sequence[str], choices: Sequence[str | None], by_sign: bool) -> tuple[str | None, str | None]:
    """(winner, reason) of a pair from what was chosen in each order: a run of `target`, a tie, or None (not read)."""
    if None in choices or not choices:
        return None, "unreadable"
    if by_sign:
        balance = sum((choice == target[0]) - (choice == target[1]) for choice in choices)
        if balance:
            return target[0] if balance > 0 else target[1], None
    same = len(set(choices)) == 1
    return (choices[0], None) if same else (TIE, DISAGREE)


def first_is_better(meanings: Mapping[str, str], reading: Reading) -> float | None:
    """The probability that the answer shown first is better, a tie being half of it; None where nothing was read."""
    if reading.probabilities is None:
        return None
    worths = [_WORTH[SIDES[meaning][0]] for meaning in meanings.values()]
    return math.fsum(share * worth for share, worth in zip(reading.probabilities, worths, strict=True))


def preferred(first: str, second: str, preference: float | None) -> str | None:
    """Which of the two a preference (for `first`) names."""
    if preference is None:
        return None
    return TIE if preference == 0.5 else first if preference > 0.5 else second
