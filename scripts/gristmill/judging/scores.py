r"""A judge's words to one score of its scale, or to nothing.

Patterns are tried from the strongest to the weakest; within one the last match wins:

    BRACKETED   [[7]]  \boxed{7}
    DECLARED    Rating: [[7]]   **Score:** 7   "score": 7   the final grade is 7/10
    FRACTION    7/10   7 out of 10: only where the number below is the highest score
    ALONE       the last line is just the number: 7   **7**   (7)

- A score outside the range or between two steps is `out_of_range`: never the nearest one, nor a weaker pattern's.
- "7-8", "7 or 8", "70 %" and "8/10" on a scale to 5 are no scores.
- Only the completion is read. A judge that copies a rating out of the judged answer and writes none of its own after it
  is read as if the copy were its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from gristmill.judging.readout import Several, spoken
from gristmill.types import Reading

# The parts; TOP stands for the highest score.
NUMBER = r"(?<![\w.,/])([+-]?\d{1,9}(?:\.\d{1,9})?)"
#: Not the start of a longer number, a percentage, a span or a choice.
END = r"(?![\w%]|[.,/:]\d|[ \t]{0,4}%|[ \t]{0,4}[-–—/][ \t]{0,4}\d|[ \t]{1,4}(?:or|to|and)[ \t]{1,4}\d|[ \t]{0,4}/)"
OF_TOP = r"[ \t]{0,4}(?:/|out of|of)[ \t]{0,4}TOP(?:\.0{1,9})?(?![\w%/]|[.,]\d)"
OPEN = r"[\s*_\"'`(\[{<]{0,20}"
CLOSE = r"[*_\"'`)\]}>]{0,8}"
NAME = r"\b(?i:rating|score|grade|mark|verdict)[\"'`*_)\]\s]{0,8}(?:[:=]|\bis\b:?|\bof\b)"

BRACKETED = r"(?:\[\[|\\boxed\{)\s{0,8}" + NUMBER + r"\s{0,8}(?:/\s{0,4}TOP\s{0,8})?(?:\]\]|\})"
DECLARED = NAME + OPEN + NUMBER + r"(?:" + OF_TOP + r"|" + CLOSE + END + r")"
FRACTION = NUMBER + CLOSE + OF_TOP
ALONE = r"[#>\s]{0,8}" + OPEN + NUMBER + r"(?:" + OF_TOP + r")?" + CLOSE + r"[.!]?" + CLOSE + r"\s{0,8}"


def read_score(text: str, scores: Mapping[str, float], several: Several = "last") -> Reading:
    """The score that a judge's completion gives.

    Args:
        text: the completion, never the prompt.
        scores: how each score is written, and its value, ascending (JudgeConfig.scores); not empty.
        several: whether different numbers, found by the same pattern, are read as the last one or not at all.

    Returns:
        A score's spelling and value; or None with reason `empty`, `no_label`, `out_of_range` or `several_labels`.
    """
    if not text.strip():
        return Reading(None, "empty", text)
    found = [Decimal(number) for number in _Patterns.of(list(scores)[-1]).read(spoken(text))]
    if not found:
        return Reading(None, "no_label", text)
    if several == "unreadable" and len(set(found)) > 1:
        return Reading(None, "several_labels", text)
    return as_score(found[-1], scores, text)


def as_score(number: Decimal, scores: Mapping[str, float], raw: str) -> Reading:
    """A number as one of the scores, or as `out_of_range`."""
    label = next((spelling for spelling in scores if Decimal(spelling) == number), None)
    if label is None:
        return Reading(None, "out_of_range", raw)
    return Reading(label, None, raw, value=scores[label])


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The patterns for one highest score."""

    searched: Sequence[re.Pattern[str]]
    alone: re.Pattern[str]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(top: str) -> _Patterns:
        sources = [source.replace("TOP", re.escape(top)) for source in (BRACKETED, DECLARED, FRACTION, ALONE)]
        *searched, alone = (re.compile(source) for source in sources)
        return _Patterns(tuple(searched), alone)

    def read(self, text: str) -> list[str]:
        """The numbers that the strongest pattern finds, in order and as they are written."""
        for pattern in self.searched:
            found = [match[1] for match in pattern.finditer(text)]
            if found:
                return found
        lines = [line for line in text.split("\n") if line.strip()]
        match = self.alone.fullmatch(lines[-1]) if lines else None
        return [match[1]] if match else []
