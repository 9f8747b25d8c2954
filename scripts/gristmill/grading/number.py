r"""`number`: the number that an answer ends with.

Looked for from the most to the least explicit, the last one of its kind each time:

    #### 18          GSM8K's own mark; a heading (`#### 1. Add`) is none
    A: 18            also `answer: 18`, `the answer is 18`
    \boxed{18}
    18               any number that stands by itself

Thousands commas and spaces (1 000), signs, `$` and `%` are read and left out; 1,000, 1000 and 1000.0 are one number. A
fraction, a date or a version (3/4, 1.2.3) is no number, and an answer that declares one has none.
"""

from __future__ import annotations

import re

from gristmill.errors import UserError
from gristmill.grading.text import alternatives, last_of, plain

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
#: A sign may stand before or after the currency.
VALUE = rf"([+-]?)(?:\\?[$€£])?[ ]?([+-]?)({DIGITS})(?![0-9])"
#: What makes a declared number something else: the rest of a fraction, a date or a version.
TAIL = r"((?:[.,/][0-9]+)*)"
#: What markup may stand before a declared number.
MARKUP = r"(?:[\s*_\"'`(]|\\\(|\\\[|\\boxed\{|\$(?=\\)){0,12}"
HASHES = re.compile(rf"####[ \t]{{0,8}}{VALUE}{TAIL}(?![.)][ \t]+\S|:)", re.ASCII)
DECLARED = re.compile(
    rf"(?:^[ \t*_]{{0,8}}A[*_]{{0,4}}:|\b(?i:answer)[*_\"' \t]{{0,8}}(?::|=|(?i:is\b):?)){MARKUP}{VALUE}{TAIL}(?!\^)",
    re.ASCII | re.MULTILINE,
)
BOXED = re.compile(rf"\\boxed\{{[ ]?{VALUE}{TAIL}", re.ASCII)
STANDING = re.compile(rf"(?<![\w.^])(?<![0-9][,/]){VALUE}()(?!\w|[.,/][0-9]|\^)", re.ASCII)


def read_number(text: str) -> str | None:
    """The number in its shortest form (`-1234.5`); None when there is none."""
    straight = plain(text)
    for pattern in (HASHES, DECLARED, BOXED, STANDING):
        if (last := last_of(pattern.finditer(straight))) is not None:
            return None if last[4] else _shortest("-" if "-" in (last[1], last[2]) else "", last[3])
    return None


def expected_numbers(reference: object) -> tuple[str, ...]:
    """The numbers of the reference's alternatives, each a number or a whole solution; empty when there is none.

    Raises:
        UserError: an alternative holds no number.
    """
    found = {text: read_number(text) for text in alternatives(reference)}
    for text, number in found.items():
        if number is None:
            raise UserError(f"the reference {text[:80]!r} holds no number; correct it, or use the metric exact_match")
    return tuple(number for number in found.values() if number is not None)


def _shortest(sign: str, digits: str) -> str:
    whole, _, fraction = digits.replace(",", "").replace(" ", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    text = f"{whole}.{fraction}" if fraction else whole
    return text if text == "0" else sign + text
