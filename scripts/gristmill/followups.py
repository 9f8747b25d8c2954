"""What can be asked now, and what is final: requests that depend on earlier answers of the same job.

- A later turn of a conversation has null in its messages where the answers of the turns before it go. It can be asked
  when they are there; its key is that of the filled messages, so another first answer makes another question.
- A turn after one without a text (skipped, failed) is not asked, and says so: `no_earlier_answer`.
- A judge's answer that cannot be read is asked again as attempt 2, 3, …, each with a key of its own.
- Nothing is read or written here: the worker gives the answers that it knows, the merge those of a part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from gristmill.codec import completion_to_json, request_from_json, request_to_json, unanswered_to_json
from gristmill.errors import UserError
from gristmill.keys import digest
from gristmill.types import NO_EARLIER_ANSWER, Completion, Failure, JsonDict, Message, Request

Text = TypeVar("Text")
#: The key of a request whose prompt has so many tokens.
KeyOf = Callable[[Request, int], str]


_TURN = re.compile(r"turn_(\d+)")


def turn_variant(number: int) -> str:
    """The variant of a row's turn, 1, 2, …"""
    return f"turn_{number}"


def turn_number(variant: str) -> int | None:
    """The number of a turn, by its variant; None for a request that is no turn."""
    found = _TURN.fullmatch(variant)
    return int(found[1]) if found else None


def gaps(messages: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Where the answers of earlier turns go: the places of the messages without a content."""
    return tuple(place for place, message in enumerate(messages) if message["content"] is None)


def filled(messages: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> tuple[Message, ...]:
    """The messages with the earlier answers in their gaps, in order."""
    answers = iter(texts)
    return tuple(
        {"role": message["role"], "content": next(answers) if message["content"] is None else message["content"]}
        for message in messages
    )


def unfilled(messages: Sequence[Mapping[str, Any]], places: Sequence[int]) -> list[JsonDict]:
    """The messages with their gaps again."""
    return [dict(message) | ({"content": None} if place in places else {}) for place, message in enumerate(messages)]


def known_part(line: JsonDict) -> Request:
    """A request line as a request, with empty texts for the answers that are not there yet."""
    messages = line["messages"]
    places = gaps(messages)
    return request_from_json(line | {"messages": filled(messages, [""] * len(places))} if places else line)


def pending_key(line: JsonDict) -> str:
    """The key of a turn that was not asked, by the line with its gaps: it is in no journal."""
    return digest(request_to_json(known_part(line)) | {"messages": line["messages"]})


def not_asked(line: JsonDict) -> JsonDict:
    """The columns of the answer of a turn that was not asked: no text, the reason."""
    named = {name: line[name] for name in ("id", "sample", "variant")}
    nothing = {"text": None, "finish_reason": NO_EARLIER_ANSWER, "prompt_tokens": 0, "completion_tokens": 0}
    return named | nothing | {"seconds": 0.0, "prompt_cut_tokens": 0}


class Earlier(Generic[Text]):
    """The answers of the conversation that lines belong to, as they pass turn by turn, in the files' order."""

    def __init__(self) -> None:
        """No line has passed."""
        self._of: tuple[str, int] | None = None
        self._texts: list[Text] = []

    def before(self, name: tuple[str, int], count: int) -> list[Text]:
        """What stands for the answers of the first `count` turns.

        Raises:
            UserError: they have not passed.
        """
        texts = self._texts if self._of == name else []
        if count > len(texts):
            raise UserError(f"{name[0]}#{name[1]}: a turn does not stand right after the turns before it")
        return texts[:count]

    def add(self, name: tuple[str, int], text: Text) -> None:
        """A line passed; a row's next sample begins anew."""
        if self._of != name:
            self._of, self._texts = name, []
        self._texts.append(text)


@dataclass(frozen=True, slots=True)
class Again:
    """When and how a judge is asked again."""

    retries: int
    #: For a greedy judge, which would repeat itself.
    temperature: float
    readable: Callable[[Completion], bool]

    def unreadable(self, answer: Completion) -> bool:
        """Whether there are words that cannot be read; a skipped prompt has none, and would be skipped again."""
        return answer.text is not None and not self.readable(answer)

    def wanted(self, request: Request, answer: Completion) -> bool:
        """Whether the next attempt is to be made after this answer."""
        return request.attempt <= self.retries and self.unreadable(answer)

    def next(self, request: Request) -> Request:
        """The next attempt, whose seed is another."""
        sampling = request.sampling
        drawn = sampling if sampling.temperature > 0 else replace(sampling, temperature=self.temperature)
        return replace(request, sampling=drawn, attempt=request.attempt + 1)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that can be asked: its prompt is whole."""

    request: Request
    prompt_tokens: int
    key: str
    #: Of the attempts before, whose words could not be read.
    earlier_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Line:
    """A request line; one with gaps keeps its messages as they stand in the file."""

    request: Request
    prompt_tokens: int
    pending: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, line: JsonDict) -> _Line:
        pending = tuple(line["messages"]) if gaps(line["messages"]) else ()
        return cls(known_part(line), line["prompt_tokens"], pending)

    @property
    def name(self) -> tuple[str, int]:
        return self.request.id, self.request.sample

    @property
    def turns_before(self) -> int:
        return len(gaps(self.pending))

    def as_json(self) -> JsonDict:
        return request_to_json(self.request) | {"messages": list(self.pending)}


class _Waiting:
    """Stands for an answer that is still to come."""


WAITING = _Waiting()


class Followups:
    """A shard's requests and how far each has come, given the answers so far.

    Answers are given by key; the texts of one key never change, so what was filled once stays.
    """

    def __init__(
        self, lines: Iterable[JsonDict], key: KeyOf, count: Callable[[Request], int], again: Again | None = None
    ) -> None:
        """Take a shard's lines.

        Args:
            lines: in the shard's order, turns right after the turns before them.
            key: a request's key.
            count: the prompt tokens of a turn whose earlier answers are filled in; may refuse one that does not fit.
            again: when to ask again; None: never.

        Raises:
            UserError: a turn without the turns before it.
        """
        self._lines = [_Line.of(line) for line in lines]
        self._now: list[_Asked | None] = [None] * len(self._lines)
        self._key, self._count, self._again = key, count, again
        #: Lines without a final answer, as `open` last saw it.
        self.left = len(self._lines)
        earlier: Earlier[None] = Earlier()
        for line in self._lines:
            earlier.before(line.name, line.turns_before)
            earlier.add(line.name, None)

    def __len__(self) -> int:
        """How many lines there are."""
        return len(self._lines)

    def open(self, known: Mapping[str, Completion], failed: Mapping[str, Failure] | None = None) -> dict[str, Request]:
        """What can be asked now and has no answer, by key, in the lines' order.

        Args:
            known: completions by key.
            failed: failures of this job by key, which are not asked again now.
        """
        found: dict[str, Request] = {}
        earlier: Earlier[str | _Waiting | None] = Earlier()
        self.left = 0
        for place, line in enumerate(self._lines):
            texts = earlier.before(line.name, line.turns_before)
            text: str | _Waiting | None = None
            if not any(text is None for text in texts):
                asked = self._advance(place, texts, known)
                if asked is not None and asked.key in known:
                    text = known[asked.key].text
                elif asked is None or asked.key not in (failed or {}):
                    text = WAITING
                    found |= {asked.key: asked.request} if asked is not None else {}
            self.left += text is WAITING
            earlier.add(line.name, text)
        return found

    def answers(self, known: Mapping[str, Completion], failed: Mapping[str, Failure]) -> Iterator[tuple[str, JsonDict]]:
        """Every line's key and final answer, in order, when `open` gives nothing any more."""
        for line, asked in zip(self._lines, self._now, strict=True):
            if asked is None:
                yield pending_key(line.as_json()), not_asked(line.as_json())
            elif asked.key in known:
                yield asked.key, completion_to_json(known[asked.key]) | self._attempts(asked, known[asked.key])
            else:
                yield asked.key, unanswered_to_json(failed[asked.key])

    def unasked(self) -> int:
        """Lines that were not asked, for want of an earlier answer."""
        return sum(asked is None for asked in self._now)

    def kinds(self) -> list[Request]:
        """One request of each kind that an engine may be asked: they differ in more than whose they are."""
        kinds = {replace(line.request, id="", sample=0, variant="", messages=()): line.request for line in self._lines}
        again = self._again if self._again is not None and self._again.retries else None
        return [*kinds.values(), *(again.next(request) for request in kinds.values() if again is not None)]

    def _advance(
        self, place: int, texts: Sequence[str | _Waiting | None], known: Mapping[str, Completion]
    ) -> _Asked | None:
        """The request that a line has come to; None while earlier turns have no answer."""
        asked = self._now[place]
        if asked is None:
            whole = [text for text in texts if isinstance(text, str)]
            if len(whole) < len(texts):
                return None
            asked = self._first(self._lines[place], whole)
        while self._again and asked.key in known and self._again.wanted(asked.request, known[asked.key]):
            again = self._asked(self._again.next(asked.request), asked.prompt_tokens)
            asked = replace(again, earlier_keys=(*asked.earlier_keys, asked.key))
        self._now[place] = asked
        return asked

    def _first(self, line: _Line, texts: Sequence[str]) -> _Asked:
        if not line.pending:
            return self._asked(line.request, line.prompt_tokens)
        request = replace(line.request, messages=filled(line.pending, texts))
        return self._asked(request, self._count(request))

    def _asked(self, request: Request, prompt_tokens: int) -> _Asked:
        return _Asked(request, prompt_tokens, self._key(request, prompt_tokens))

    def _attempts(self, asked: _Asked, answer: Completion) -> JsonDict:
        """The columns about a judge that was asked again; none without retries or where the first answer was read."""
        if self._again is None or not self._again.retries:
            return {}
        attempt, earlier = asked.request.attempt, list(asked.earlier_keys)
        unreadable = len(earlier) + self._again.unreadable(answer)
        counted = {"attempt": attempt, "earlier_keys": earlier} if attempt > 1 else {}
        return counted | ({"unreadable_attempts": unreadable} if unreadable else {})
