"""Asking a judge: again where its answer cannot be read, and no further where none can.

- An answer is read as verdicts.py reads it. Another reader asks nothing again that was answered: the journal has it.
- A streak counts verdicts in the order in which they come, with all their attempts used up, and only those of this job.
- Until a first verdict is read, at most as many are asked at a time as make a streak, so that a judge that writes no
  verdicts is not asked about every row before its second attempts show it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

from gristmill.config.schema import JudgeConfig
from gristmill.errors import UserError
from gristmill.followups import Again
from gristmill.judging.reading import Reader
from gristmill.types import Completion, Request

#: Of a judge's words in a message.
EXCERPT_CHARACTERS = 200
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Asking:
    """What of a judge decides whether it is asked again, or not any more."""

    name: str
    judge: JudgeConfig
    again: Again

    @classmethod
    def of(cls, name: str, judge: JudgeConfig) -> Asking:
        """From the judge's config."""
        reader = Reader.of(judge)

        def readable(answer: Completion) -> bool:
            likelihoods = getattr(answer, "label_logprobs", None)  # of engines that give them
            return answer.text is not None and reader.read(answer.text, likelihoods).label is not None

        return cls(name, judge, Again(judge.retries, judge.retry_temperature, readable))


class UnreadableStreak:
    """Ends the job of a judge whose verdicts, so many in a row, cannot be read."""

    def __init__(self, asking: Asking | None) -> None:
        """Begin; None, a run's, never ends anything."""
        self._asking = asking
        self._limit = asking.judge.stop_after_unreadable if asking is not None else None
        self._count = 0
        self._any_read = False

    def first(self, open_requests: dict[Key, Request]) -> dict[Key, Request]:
        """Those of the open requests to ask at a time."""
        retried = self._asking is not None and self._asking.judge.retries > 0
        if self._limit is None or self._any_read or not retried:
            return open_requests
        return dict(itertools.islice(open_requests.items(), self._limit))

    def add(self, request: Request, answer: Completion) -> None:
        """Count an answer.

        Raises:
            UserError: it is the last of too many that cannot be read.
        """
        if self._asking is None or answer.text is None:
            return
        if not self._asking.again.unreadable(answer):
            self._count, self._any_read = 0, True
        elif not self._asking.again.wanted(request, answer):
            self._count += 1
            if self._limit is not None and self._count >= self._limit:
                raise UserError(_message(self._asking, self._count, answer.text))


def _message(asking: Asking, count: int, text: str) -> str:
    excerpt = repr(text)
    if len(excerpt) > EXCERPT_CHARACTERS:
        excerpt = f"{excerpt[: EXCERPT_CHARACTERS - 1]}…"
    labels = ", ".join(asking.judge.meanings())
    return (
        f"judges.{asking.name}: {count} verdicts in a row cannot be read, the last is {excerpt}; have the prompt ask "
        f"for one of {labels}, or raise max_new_tokens, or raise stop_after_unreadable (now {count}; null: never); "
        "run again to go on: finished rows are in the journal"
    )
