"""What is asked, the same of every way: countdowns of uneven lengths, or chat prompts for a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from countdown import MOST, SHAPES, Lengths, items

from gristmill.types import JsonDict, Message, Request, Sampling

#: For a real chat model: tasks whose answers have uneven lengths, on as many topics.
TASKS = (
    "Name one word that goes with {topic}.",
    "Write a short story about {topic}.",
    "Is {topic} older than bread? Answer yes or no.",
    "Explain {topic} to a child in three sentences.",
    "List five facts about {topic}.",
    "Write a headline about {topic}.",
    "Compare {topic} with a bicycle.",
    "Translate the word for {topic} into French.",
)
TOPICS = ("glass", "the moon", "a river", "paper", "music", "salt", "a lighthouse", "rain")


@dataclass(frozen=True, slots=True)
class Work:
    """A workload as it is described to a process of its own: the same values give the same requests."""

    #: A key of countdown.SHAPES, or "chat".
    kind: str
    requests: int
    max_new_tokens: int = MOST
    seed: int = 0
    lengths: Lengths = field(default_factory=Lengths)

    def drawn(self) -> list[tuple[int, int]]:
        """(prompt, answer) tokens of each countdown."""
        return self.lengths.draw(self.requests, self.seed)

    def to_json(self) -> JsonDict:
        """For a process's standard input, and for the results."""
        return asdict(self)


def work_from_json(value: JsonDict) -> Work:
    """Read it back."""
    return Work(**{**value, "lengths": Lengths(**value["lengths"])})


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the only right answer where there is one."""

    request: Request
    answer: str | None
    answer_tokens: int | None

    def is_right(self, text: str | None, tokens: int) -> bool:
        """Whether an answer may count."""
        return self.answer is None or (text == self.answer and tokens == self.answer_tokens)


def asked(work: Work, turn: int) -> list[Asked]:
    """The requests of a pass; each has other filler words, so that no cache of prefixes helps the second one."""
    sampling = Sampling(max_new_tokens=work.max_new_tokens)
    if work.kind == "chat":
        prompts = [TASKS[n % len(TASKS)].format(topic=_topic(n // len(TASKS))) for n in range(work.requests)]
        return [Asked(_request(f"r{n}", text, sampling), None, None) for n, text in enumerate(prompts)]
    found = items(work.drawn(), SHAPES[work.kind].vocabulary, work.seed + turn)
    return [Asked(_request(item.id, item.prompt, sampling), item.answer, item.answer_tokens) for item in found]


def batches(count: int, rows: int, prompt_tokens: Sequence[int], longest_first: bool) -> list[list[int]]:
    """Positions of the requests in batches of so many rows, in the file's order or sorted by their prompts."""
    order = sorted(range(count), key=lambda place: -prompt_tokens[place]) if longest_first else list(range(count))
    return [order[start : start + rows] for start in range(0, count, rows)]


def _topic(number: int) -> str:
    again = number // len(TOPICS)
    return TOPICS[number % len(TOPICS)] + (f" number {again + 1}" if again else "")


def _request(name: str, text: str, sampling: Sampling) -> Request:
    return Request(name, 0, "", (Message(role="user", content=text),), sampling)
