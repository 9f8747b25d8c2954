"""What a judge is shown: one answer of a run, or the two answers that a pair of runs gave to one row and sample.

- Asking and reading walk the same items and take from them what is asked, so the two cannot differ.
- A pair is joined by position, and every (id, sample, variant) must match: two runs that answer different rows are
  refused. Each turn of a row is an item of its own.
- An answer that does not exist (its prompt was skipped) is not judged; an empty answer exists and is.
- Two answers that differ only in surrounding whitespace are identical, and the judge is not asked which is better.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gristmill.errors import UserError, some
from gristmill.followups import turn_number
from gristmill.thinking import spoken
from gristmill.types import JsonDict, Message, RequestId

FIRST_SECOND = "first_second"
SECOND_FIRST = "second_first"


@dataclass(frozen=True, slots=True)
class Item:
    """The answers to one row, sample and turn, in the order of the judged runs; None is one that does not exist."""

    id: str
    sample: int
    answers: tuple[str | None, ...]
    reference: Any
    row: JsonDict
    #: The turn, for a row with turns; else empty.
    variant: str = ""
    #: Of a turn: what each answer answers, the turns before it and the question.
    conversations: tuple[tuple[Message, ...], ...] = ()

    @property
    def not_asked(self) -> Literal["no_answer", "identical"] | None:
        """Why the judge is not asked; None when it is."""
        texts = [answer for answer in self.answers if answer is not None]
        if len(texts) < len(self.answers):
            return "no_answer"
        if len(texts) == 2 and texts[0].strip() == texts[1].strip():
            return "identical"
        return None

    def asked(self, both_orders: bool) -> list[RequestId]:
        """The questions put to the judge about this item."""
        if self.not_asked is not None:
            return []
        orders = [""] if len(self.answers) == 1 else [FIRST_SECOND, SECOND_FIRST][: 1 + both_orders]
        return [RequestId(self.id, self.sample, "/".join(filter(None, (self.variant, order)))) for order in orders]

    @property
    def name(self) -> JsonDict:
        """The columns of a verdict line that name what was judged; `variant` only for a turn."""
        return {"id": self.id, "sample": self.sample} | ({"variant": self.variant} if self.variant else {})


def is_swapped(variant: str) -> bool:
    """Whether a question about a pair shows the second run's answer first."""
    return variant.rpartition("/")[2] == SECOND_FIRST


def items(target: Sequence[str], generations: Sequence[Iterable[JsonDict]]) -> Iterator[Item]:
    """The items of a judge's target, in the runs' order and in constant memory.

    Args:
        target: the judged run, or the two runs of a pair.
        generations: the parsed lines of each run's generations.jsonl.

    Raises:
        UserError: the runs of a pair do not answer the same rows and samples.
    """
    if len(target) != len(generations) or len(target) not in (1, 2):
        raise UserError(f"a judge takes one run or two, with one --generations file each; got {len(target)} runs and "
                        f"{len(generations)} files")  # fmt: skip
    if len(target) == 1:
        return (_item(line) for line in generations[0])
    return (_item(first, second) for first, second in _pairs(target, *generations))


def line_rid(line: JsonDict) -> RequestId:
    """The name of a request or generation line."""
    return RequestId(line["id"], line["sample"], line["variant"])


def answer_of(line: JsonDict) -> tuple[str, int, str]:
    """The answer that a line is about: row, sample and turn, which only lines about turns have."""
    return line["id"], line["sample"], line.get("variant", "")


def _item(first: JsonDict, *others: JsonDict) -> Item:
    answers = tuple(_said(line["text"]) for line in (first, *others))
    there = all(answer is not None for answer in answers) and turn_number(first["variant"]) is not None
    conversations = tuple(_conversation(line) for line in (first, *others)) if there else ()
    return Item(
        first["id"], first["sample"], answers, first["reference"], first["row"], first["variant"], conversations
    )


def _said(text: str | None) -> str | None:
    """An answer without its reasoning; one that never came to an end of it said nothing."""
    return None if text is None else spoken(text) or ""


def _conversation(line: JsonDict) -> tuple[Message, ...]:
    """A turn's messages without what the prompt puts before them: two for each turn before it, and the question."""
    before = 2 * (turn_number(line["variant"]) or 1) - 1
    return tuple(line["messages"][-before:])


def _pairs(
    target: Sequence[str], first: Iterable[JsonDict], second: Iterable[JsonDict]
) -> Iterator[tuple[JsonDict, JsonDict]]:
    """The lines of two runs side by side."""
    left, right = iter(first), iter(second)
    samples = 1
    for one, other in itertools.zip_longest(left, right):
        if one is None or other is None or line_rid(one) != line_rid(other):
            rest = [_rest(one, left), _rest(other, right)]
            raise _mismatch(target, rest[0], rest[1], samples)
        samples = max(samples, one["sample"] + 1)
        yield one, other


def _rest(line: JsonDict | None, lines: Iterator[JsonDict]) -> dict[RequestId, None]:
    """The names from here on, in order; only read to explain a mismatch."""
    here = [] if line is None else [line]
    return dict.fromkeys(line_rid(each) for each in itertools.chain(here, lines))


def _mismatch(
    target: Sequence[str], left: dict[RequestId, None], right: dict[RequestId, None], samples: int
) -> UserError:
    counts = [max([samples, *(rid.sample + 1 for rid in rest)]) for rest in (left, right)]
    if counts[0] != counts[1]:
        return UserError(
            f"{target[0]} has {counts[0]} answers per row and {target[1]} has {counts[1]}; give both runs the same "
            "sampling.samples"
        )
    alone = [
        f"only {name} has {some([str(rid) for rid in rest if rid not in other])}"
        for name, rest, other in ((target[0], left, right), (target[1], right, left))
        if rest.keys() - other.keys()
    ]
    if not alone:
        return UserError(f"{target[0]} and {target[1]} order their rows differently from {next(iter(left))} on; "
                         "run both on one dataset")  # fmt: skip
    return UserError(
        f"{target[0]} and {target[1]} do not answer the same rows: {'; '.join(alone)}; run both on one dataset"
    )
