"""`label`: which of a run's labels an answer gives, or none. A label that was not offered is never a class.

- The last label or alias that stands as a word, in any case; the longest first, so `non-hateful` is no `hateful`.
- Spaces, hyphens and underscores inside a label are one: `non hateful` is `non-hateful`.
- A label behind `not`, `non` or `no` that no longer label or alias covers reads as nothing: negation is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gristmill.errors import UserError, some
from gristmill.grading.text import alternatives, last_of, plain

#: Not inside a longer word or number: not hate in hate_speech, non-hate or hate's, and not 1 in 1.5 or C in C++.
BEFORE = r"(?<![^\W_])(?<![^\W_][-'_/])(?<!\d[.,])"
AFTER = r"(?![-'_/]?[^\W_]|[.,]\d|[+#])"
#: What may stand between the words of a label.
INNER = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W_])")
NEGATED = re.compile(r"(?:\b(?:not|non|no|never|neither|nor|hardly|isn't|aren't|cannot be)|n't)[\s\"'*_(-]{1,8}\Z")
#: Where a negation is looked for, in characters before a label.
NEGATION_CHARACTERS = 24


class LabelReader:
    """Reads one run's labels."""

    def __init__(self, labels: Mapping[str, Sequence[str]]) -> None:
        """Compile the labels; `labels` has each with its aliases."""
        self.labels = tuple(labels)
        self._names = {label_key(name): label for label, aliases in labels.items() for name in (label, *aliases)}
        spelt = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(BEFORE + "(" + "|".join(map(_spelling, spelt)) + ")" + AFTER)

    def read(self, text: str) -> str | None:
        """The label that the text ends with; None when it has none, or denies it."""
        words = plain(text).casefold()
        last = last_of(self._pattern.finditer(words))
        if last is None or NEGATED.search(words[max(0, last.start() - NEGATION_CHARACTERS) : last.start()]):
            return None
        return self._names[label_key(last[1])]

    def expected(self, reference: object) -> str | None:
        """The reference's label; None when there is no reference.

        Raises:
            UserError: the reference is no label or alias, or more than one.
        """
        texts = alternatives(reference)
        found = {self._names.get(label_key(text)) for text in texts}
        if len(found) > 1:
            raise UserError(f"the reference is {some(list(texts))}, and a row has one label; name one")
        label = found.pop() if found else None
        if texts and label is None:
            raise UserError(
                f"the reference {texts[0][:80]!r} is none of the labels {some(list(self.labels))}; "
                "add it to labels, or as an alias"
            )
        return label


def label_key(text: str) -> str:
    """What two spellings of one label share."""
    return INNER.sub(" ", plain(text).casefold().strip())


def _spelling(key: str) -> str:
    unsigned = "(?<!-)" if key[:1].isdigit() else ""  # 1 is not in -1
    return unsigned + r"[\s_-]{1,3}".join(map(re.escape, key.split(" ")))
