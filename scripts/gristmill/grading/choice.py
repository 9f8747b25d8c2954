r"""`choice`: the letter A to J that answers a multiple-choice question.

Looked for from the most to the least explicit:

    [[B]]  \boxed{B}    the last one
    Answer: B           also `the answer is (B)`, `option: B`; the last one
    (B)                 where no other letter stands so
    B                   the last line alone: `B`, `**B.**`, `B) Paris`

Doubt reads as nothing: `A or B`, `not B`, `A good guess`, and two letters of the weakest kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gristmill.errors import UserError
from gristmill.grading.text import alternatives, plain

LETTERS = "ABCDEFGHIJ"
LETTER = r"(?<![^\W_])([A-J])(?![^\W_]|['+#]|[-/.][^\W_])"
WRAPS = r"(?:[\s*_\"'`($\[{]|\\\(|\\(?:boxed|text|textbf|mathbf|mathrm)\{){0,12}"
#: What may follow a declared letter: the end, punctuation or a reason; never just the next word, or another letter.
CLOSES = r"[ \t*_\"'`)\]}$]{0,8}"
REST = rf"(?!{CLOSES}(?:,|/|&|\bor\b|\band\b)[ \t*_\"'`(]{{0,8}}(?:or[ \t]|and[ \t])?[ \t(]{{0,4}}[A-J]\b)" + (
    r"(?=[ \t]{0,8}(?:$|[.,;:!)\]}*_\"'`$(\\]|-[ \t]|(?i:because|since|as)\b))"
)
BRACKETED = re.compile(rf"(?:\[\[|\\boxed\{{)\s{{0,4}}(?:\\text\{{|\()?{LETTER}\)?\}}?\s{{0,4}}(?:\]\]|\}})")
DECLARED = re.compile(
    rf"\b(?i:answer|option|choice)\b[*_\"' \t)]{{0,8}}(?::|=|(?i:is|would be)\b:?){WRAPS}"
    rf"(?:(?i:option|choice)[ \t]{{1,4}}\(?)?{LETTER}{REST}",
    re.MULTILINE,
)
BRACED = re.compile(r"(?<!\w)\(([A-J])\)(?!\w)")
#: The words of a choice behind its letter; with a second letter among them it is a list.
WORDS = r"[).:][ \t*]{1,8}(?!.*\b[A-J][).:])\S.{0,500}"
ALONE = re.compile(rf"[\s*_#>\"'`(\[-]{{0,12}}{LETTER}(?:[\s*_\"'`)\].]{{0,12}}|{WORDS})")
NEGATED = re.compile(r"(?i:\b(?:not|neither|nor|never|isn't|n't)|\bno)[\s*_(]{1,8}\Z")


def read_choice(text: str) -> str | None:
    """The letter that the answer settles on; None when it settles on none."""
    straight = plain(text)
    for pattern in (BRACKETED, DECLARED):
        found = pattern.findall(straight)
        if found:
            return str(found[-1])
    braced = list(_braced(straight))
    return _only(braced) if braced else _last_line(straight)


def expected_choices(reference: object) -> tuple[str, ...]:
    """The letters of the reference's alternatives; an integer is an index: 0 is A. Empty when there is none.

    Raises:
        UserError: an alternative is no letter of A to J and no index of 0 to 9.
    """
    return tuple(_letter(text.strip()) for text in alternatives(reference))


def _letter(text: str) -> str:
    if text.isdecimal() and int(text) < len(LETTERS):
        return LETTERS[int(text)]
    letter = text.strip("()[].: ").upper()
    if len(letter) != 1 or letter not in LETTERS:
        raise UserError(f"the reference {text[:80]!r} is no choice; use a letter A to J, or an index that begins at 0")
    return letter


def _braced(text: str) -> Iterable[str]:
    for match in BRACED.finditer(text):
        yield "not" if NEGATED.search(text[max(0, match.start() - 20) : match.start()]) else match[1]


def _only(found: Iterable[str]) -> str | None:
    """The one letter there is; None for several, or for one that was said not to be it."""
    letters = set(found)
    return letters.pop() if len(letters) == 1 and "not" not in letters else None


def _last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    matches = [ALONE.fullmatch(line) for line in lines[-2:]]
    if not matches or matches[-1] is None:
        return None
    listed = len(matches) == 2 and matches[0] is not None and matches[0][1] != matches[-1][1]
    return None if listed else matches[-1][1]  # a list of the choices is no answer
