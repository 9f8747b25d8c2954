r"""A judge's words to one of its labels, or to nothing.

Patterns are tried from the strongest to the weakest; within one the last match wins, since a judge that thinks aloud
settles at the end:

    BRACKETED   [[A]]  \boxed{A}
    DECLARED    Verdict: A   **Winner:** Assistant B   {"choice": "A"}   Final answer: B   the verdict is A
    ALONE       the last line, or else the first, is just the label: A   (A)   **A**   Answer B.
    LEADING     the text begins with the label and a reason: A: correct   B) because …   Incorrect. The year is wrong.

- Doubt reads as nothing: "A good answer", "neither A nor B", "A or B", "Verdict: not correct", "8/10", "A's", "A+".
- A label is a whole word: "A" is not in "AB", "correct" not in "incorrect" or "partially correct". One-character
  labels match exactly, longer ones in any case.
- ALONE (first line) and LEADING are not read where several labels stand so: that is a list of both answers.
- "Answer" counts only at the start of a line or clause and with a colon: "the student's answer: B" is a quotation.
- A label in brackets that a judge copies from the judged answer is read as its own if it writes none after it.
- A reasoning model's words up to </think> are not read; while it still thinks, nothing is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gristmill import thinking
from gristmill.types import Reading

#: What different labels mean that one pattern finds: the last of them, or nothing.
Several = Literal["last", "unreadable"]
#: Raised whenever the same words may be read differently; recorded with every verdict.
PARSER_VERSION = 2

#: A pattern that matches nowhere.
NOTHING = r"(?!)"

# The parts. LABEL stands for any of the labels; a pattern's one group is the label as the judge spelt it. Repeats are
# bounded, so that a model stuck on one character cannot make the search slow.
#: Not inside a longer word or number: not A1, A's, A-level, A+, 1.5 or 8/10.
BEFORE = r"(?<![^\W_])(?<![^\W_][.'’/-])"
AFTER = r"(?![+]|[_.,'’/-]?[^\W_])"
#: A label, after what the judge may call an answer: `Assistant B`.
NOUN = r"(?:(?i:answer|assistant|response|option|choice|candidate|model|label)[ \t]{1,8})?"
NAMED = NOUN + BEFORE + r"(LABEL)" + AFTER
OPEN = r"[\s*_\"'`\u201c\u2018(\[{<]{0,20}"
CLOSE = r"[*_\"'`\u201d’)\]}]{0,8}"
#: Not the first of several: not "A or B", "A, B", "A (or B)".
SEVERAL = r"[ \t*_\"'`)\]]{0,8}(?:,|/|\||&|\(?(?:or|and|nor|vs)\b)[ \t*_\"'`(\[]{0,8}(?:(?:and|or)\b[ \t]{0,8})?"
ONLY = r"(?!" + SEVERAL + NOUN + r"LABEL" + AFTER + r")"
#: What may follow a declared label: the end of its line, punctuation or a reason, never just the next word.
REST = r"(?=[ \t]{0,8}(?:$|[.,;:!)\]}*_\"'`\u201d’(]|</|[-–—][ \t]|(?i:because|since|as|due)\b))"
VERDICT = r"\b(?i:verdict|winner|judge?ment|choice)[\"'`*_)\]\s]{0,8}(?:[:=>]|\bis\b:?|[-–—]|\n)"
CLAUSE = r"(?:^|[.!?;,:]\s|[*_#>{\"'-])[ \t]{0,8}(?i:(?:so|thus|therefore|hence),?[ \t]{1,8})?"
ANSWER = CLAUSE + r"(?i:(?:the|my|your|final|overall)[ \t]{1,8}){0,4}(?i:answer)[\"'`*_)\]\s]{0,8}(?i:is\b)?[:=>]"
REASON = r"(?:[.:;!)\]]|(?<=\w\w),|[ \t][-–—][ \t]|[ \t]{1,8}(?i:because|since)\b)"

BRACKETED = r"(?:\[\[|\\boxed\{(?:\\text\{)?)\s{0,8}" + NAMED + r"\s{0,8}(?:\]\]|\})"
DECLARED = r"(?:" + VERDICT + r"|" + ANSWER + r")" + OPEN + NAMED + ONLY + REST
ALONE = r"[#>-]{0,8}" + OPEN + NAMED + CLOSE + r"[.!,;]?" + CLOSE + r"\s{0,8}"
LEADING = r"^[#>]{0,8}" + OPEN + NAMED + ONLY + CLOSE + REASON


def read_label(text: str, labels: Sequence[str], several: Several = "last") -> Reading:
    """The label that a judge's completion gives.

    Args:
        text: the completion, never the prompt: words inside the judged answer cannot be taken for the judge's.
        labels: what the judge was told to write.
        several: whether different labels, found by the same pattern, are read as the last one or not at all.

    Returns:
        A label of `labels`; or None with reason `empty`, `no_label` or `several_labels`. `raw` is the text as it was.
    """
    if not text.strip():
        return Reading(None, "empty", text)
    found = _Patterns.of(tuple(labels)).read(spoken(text))
    if several == "unreadable" and len(set(found)) > 1:
        return Reading(None, "several_labels", text)
    return Reading(found[-1], None, text) if found else Reading(None, "no_label", text)


def spoken(text: str) -> str:
    """The words after the reasoning block; none of them while it is still open."""
    return (thinking.after_block(text) or "").strip()


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The patterns for one set of labels."""

    labels: tuple[str, ...]
    bracketed: re.Pattern[str]
    declared: re.Pattern[str]
    alone: re.Pattern[str]
    leading: re.Pattern[str]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(labels: tuple[str, ...]) -> _Patterns:
        """Compile the patterns; longer labels are tried first, blank ones never."""
        spelt = [_spelling(label) for label in sorted(labels, key=len, reverse=True) if label.strip()]
        any_label = f"(?:{'|'.join(spelt)})" if spelt else NOTHING
        sources = (BRACKETED, DECLARED, ALONE, LEADING)
        return _Patterns(labels, *(re.compile(source.replace("LABEL", any_label), re.MULTILINE) for source in sources))

    def read(self, text: str) -> list[str]:
        """The labels that the strongest pattern finds, in order; none where no pattern matches."""
        for pattern in (self.bracketed, self.declared):
            found = self._found(pattern, text)
            if found:
                return found
        label = self._alone(text) or self._leading(text)
        return [] if label is None else [label]

    def _found(self, pattern: re.Pattern[str], text: str) -> list[str]:
        return [self._label(match) for match in pattern.finditer(text)]

    def _alone(self, text: str) -> str | None:
        lines = [line for line in text.split("\n") if line.strip()]
        matches = [self.alone.fullmatch(line) for line in lines]
        if not matches:
            return None
        if matches[-1] is not None:
            return self._label(matches[-1])
        if matches[0] is None:
            return None
        return _only({self._label(match) for match in matches if match is not None})

    def _leading(self, text: str) -> str | None:
        match = self.leading.match(text)
        if match is None:
            return None
        return _only({self._label(match), *self._found(self.leading, text)})

    def _label(self, match: re.Match[str]) -> str:
        """The label as the config spells it; the pattern itself compares, since case has more than one rule."""
        written = match[1]
        if written in self.labels:
            return written
        return next(label for label in self.labels if label.strip() and re.fullmatch(_spelling(label), written))


def _spelling(label: str) -> str:
    """A label as a pattern: any run of whitespace for a space, any case unless it is one character."""
    pattern = r"\s+".join(re.escape(word) for word in label.split())
    return pattern if len(label.strip()) == 1 else f"(?i:{pattern})"


def _only(labels: set[str]) -> str | None:
    return labels.pop() if len(labels) == 1 else None
