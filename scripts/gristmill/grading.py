"""Is an answer right? `exact_match` and `contains`, against one reference or a list of alternatives.

Both sides are normalized first: Unicode NFKC, straight quotes and hyphens, case folded, whitespace collapsed, and
punctuation stripped from both ends, signs (- + # % $ & @ /) kept. Articles stay: dropping them, as SQuAD does, is
English only and would erase the answer "A".

- exact_match: the normalized answer is the normalized reference.
- contains: it is found in the answer as whole words: 12 is not in 112 or 12.5, "no" not in "know", "C" not in "C++".
  Scripts whose words run on (Chinese, Japanese, Korean, Thai, …) are searched as they are.
- A number is compared by value: 1000, "1,000" and "1000.0" are one; 007 is a name, not a number, and so is 12,5.
- Any alternative of a list may match. A reference that is null, blank or an empty list is none: the grade is null.
- true and false are the words; an object cannot be a reference.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from gristmill.config.schema import MetricName
from gristmill.errors import UserError
from gristmill.types import JsonDict

#: Punctuation that carries meaning at the end of a word (C#, 50%), where other punctuation is stripped.
KEPT_PUNCTUATION = "-#%&@/\\"
#: Not punctuation to Unicode, but markup around a word.
MARKUP = "`~"
#: A leading full stop or comma stays, since it may begin a number (.5).
KEPT_IN_FRONT = ".,"
#: One spelling for apostrophes, quotes, and hyphens, dashes and minus signs.
STRAIGHTENED = str.maketrans(
    "\u2018\u2019\u201a\u201c\u201d\u201e\u2010\u2011\u2012\u2013\u2014\u2212", "'''" + '"""' + "-" * 6
)
#: NFKC alone would read 10² as 102.
SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")

DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+|0|[1-9]\d*)"
UNSIGNED = rf"(?:{DIGITS}(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"[+-]?{UNSIGNED}", re.ASCII)
#: A number in running text: not part of a word, a power, a longer number or a version (1.2.3); 5-12 is 5 and 12.
NUMBER_IN_TEXT = re.compile(rf"(?<![\w.^])(?<!\d,)[+-]?{UNSIGNED}(?!\w|[.,]\d|\^)")
#: Scripts whose words run on without spaces or with endings attached: Thai, Lao, Myanmar, Khmer, kana, Han, Hangul.
RUN_ON = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff]"
)
WORD_START = r"(?<!\w)"
#: A + or # at a word's end is part of it: C++, C#, A+.
WORD_END = r"(?!\w|[+#](?!\w))"


@functools.lru_cache(maxsize=64)  # every metric asks for the same answer and references
def normalize(text: str) -> str:
    """The form in which answers and references are compared; never empty unless the text is blank."""
    words = " ".join(_plain(text).casefold().split())
    end = len(words)
    while end and _is_edge(words[end - 1]):
        end -= 1
    start = 0
    while start < end and _is_edge(words[start]) and words[start] not in KEPT_IN_FRONT:
        start += 1
    return words[start:end] or words


def _plain(text: str) -> str:
    """One spelling for characters that mean the same; ASCII has no others."""
    if text.isascii():
        return text
    powers = SUPERSCRIPT.sub(lambda match: "^" + match[0], text)
    return unicodedata.normalize("NFKC", powers).translate(STRAIGHTENED)


def _is_edge(character: str) -> bool:
    """Whether a character is stripped from the ends of an answer."""
    punctuation = unicodedata.category(character).startswith("P") and character not in KEPT_PUNCTUATION
    return punctuation or character in MARKUP or character == " "


def exact_match(answer: str, reference: Any) -> bool | None:
    """Whether the answer is the reference; None when there is no reference."""
    return _any_alternative(_equal, answer, reference)


def contains(answer: str, reference: Any) -> bool | None:
    """Whether the answer has the reference in it as whole words; None when there is no reference."""
    return _any_alternative(_found, answer, reference)


GRADERS: dict[MetricName, Callable[[str, Any], bool | None]] = {"exact_match": exact_match, "contains": contains}


def grade(line: JsonDict, metrics: Sequence[MetricName]) -> JsonDict:
    """A line of grades.jsonl for a line of generations.jsonl.

    An answer that is missing or blank is wrong without being read, and `invalid` says why.
    """
    invalid = invalid_reason(line["text"], line["finish_reason"])
    try:
        grades = {name: GRADERS[name](line["text"] or "", line["reference"]) for name in metrics}
    except UserError as error:
        raise UserError(f"row {line['id']}: {error}") from error
    if invalid is not None:
        grades = {name: None if value is None else False for name, value in grades.items()}
    variant = {"variant": line["variant"]} if line["variant"] else {}
    return {
        "id": line["id"],
        "sample": line["sample"],
        **variant,
        "grades": grades,
        "invalid": invalid,
        "truncated": line["finish_reason"] == "length",
    }


def invalid_reason(text: str | None, finish_reason: str) -> str | None:
    """Why an answer is not read: `empty` for a blank one, else why there is none; None for one to be read."""
    if text is None:
        return finish_reason
    return None if text.strip() else "empty"


def alternatives(reference: Any) -> tuple[str, ...]:
    """The reference's alternatives as text; empty when the row has no reference.

    Raises:
        UserError: the reference is an object or holds one.
    """
    values = reference if isinstance(reference, list) else [reference]
    texts = [_as_text(value) for value in values if value is not None]
    return tuple(text for text in texts if text.strip())


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):  # 1e+21 in full, so that it reads as a number
        return format(Decimal(repr(value)), "f")
    if isinstance(value, (str, int)):
        return str(value)
    raise UserError(f"the reference is {value!r}; use text, a number, true or false, or a list of these")


def _any_alternative(matches: Callable[[str, str], bool], answer: str, reference: Any) -> bool | None:
    expected = alternatives(reference)
    if not expected:
        return None
    normalized = normalize(answer)
    return bool(normalized) and any(matches(normalized, normalize(text)) for text in expected)


def _equal(answer: str, expected: str) -> bool:
    number = _number(expected)
    return answer == expected or (number is not None and number == _number(answer))


def _found(answer: str, expected: str) -> bool:
    number = _number(expected)
    if number is not None:
        return any(_number(match[0]) == number for match in NUMBER_IN_TEXT.finditer(answer))
    return _whole_words(expected).search(answer) is not None


def _number(text: str) -> Decimal | None:
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else None


@functools.lru_cache(maxsize=1024)
def _whole_words(expected: str) -> re.Pattern[str]:
    before = WORD_START if _is_word(expected[0]) else ""
    after = WORD_END if _is_word(expected[-1]) else ""
    return re.compile(before + re.escape(expected) + after)


def _is_word(character: str) -> bool:
    """Whether words made of such characters are told apart by what stands beside them."""
    return (character.isalnum() or character == "_") and not RUN_ON.match(character)
