"""The domain in one file: what flows from a dataset row to a line in the report.

    Row ─▶ Request ─▶ Completion | Failure ─▶ Verdict / Grade

- Everything is frozen: a step makes new values and never edits the ones it was given.
- `(id, sample, variant)` names a request within one run or judge target; a key (keys.py) names it by content.
- An answer that does not exist is None with a reason, never an empty string or a 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, get_args

JsonDict = dict[str, Any]

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length", "skipped"]
#: finish_reason of a turn that was not asked: an earlier turn of its row was skipped or failed.
NO_EARLIER_ANSWER = "no_earlier_answer"
FailureReason = Literal["out_of_memory", "non_finite_logits", "timeout", "server_error", "refused_by_server"]
#: In generations.jsonl they stand as finish_reason of a row that a run may go on without (max_failed_ratio).
FAILURE_REASONS: tuple[FailureReason, ...] = get_args(FailureReason)


class Message(TypedDict):
    """One chat turn."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One dataset record. `id` is text and unique in its dataset; `fields` keeps every value's JSON type."""

    id: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an answer is drawn. temperature 0 is greedy; `seed` is the run's seed, from which each row's is derived."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    #: A JSON Schema as JSON text, which the answer follows; its properties come in the schema's order. "": none.
    json_schema: str = ""


class RequestId(NamedTuple):
    """Names one request in a run or judge target: row, sample (0-based), and variant (a turn, a pairwise order)."""

    id: str
    sample: int
    variant: str

    def __str__(self) -> str:
        return f"{self.id}#{self.sample}" + (f"/{self.variant}" if self.variant else "")


@dataclass(frozen=True, slots=True)
class Request:
    """One rendered prompt for a model: for an answer or, with `labels`, for the likelihood of each of them.

    The likelihood of a label is log P(label | prompt): the sum of the natural log probabilities, a softmax over the
    whole vocabulary in float32, of the label's tokens after the prompt. The prompt is the chat through its template,
    generation prompt included; a label's tokens are those by which prompt and label, tokenized as one text, differ from
    the prompt tokenized alone. Where a label merges with the prompt's last tokens, all of the request's labels are
    counted from the first of those, so that they stay comparable. There is no normalization by length. exp of it is the
    label's mass; what is missing in their sum to 1 is the mass of everything else.
    """

    id: str
    sample: int
    variant: str
    messages: tuple[Message, ...]
    sampling: Sampling
    #: Not empty: nothing is generated, and what is asked for is log P(label | prompt) of each.
    labels: tuple[str, ...] = ()
    #: How often this was asked, this time included: more than 1 where a judge's answers could not be read.
    attempt: int = 1

    @property
    def rid(self) -> RequestId:
        """The request's name within its run."""
        return RequestId(self.id, self.sample, self.variant)


@dataclass(frozen=True, slots=True)
class Completion:
    """A model's answer to one request; to one with labels, the most likely label (the first of equal ones)."""

    id: str
    sample: int
    variant: str
    #: None when the prompt was skipped, and only then.
    text: str | None
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    #: How many prompt tokens were cut to make the prompt fit the context (0: none; see models.*.on_overflow).
    prompt_cut_tokens: int = 0
    #: log P(label | prompt) in the order of the request's labels (see Request); None where none was asked for.
    label_logprobs: tuple[float, ...] | None = None

    @property
    def rid(self) -> RequestId:
        """The name of the request this answers."""
        return RequestId(self.id, self.sample, self.variant)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that got no answer. It is recorded and asked again next time; it never counts as a result."""

    id: str
    sample: int
    variant: str
    reason: FailureReason
    detail: str

    @property
    def rid(self) -> RequestId:
        """The name of the request that failed."""
        return RequestId(self.id, self.sample, self.variant)


Outcome = Completion | Failure


class Engine(Protocol):
    """What answers requests. Implementations live in engines/; `engines.open_engine` picks one."""

    name: str

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Each request's prompt length in tokens, chat template and longest label included, before any shortening."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Answer every request once, in any order, each outcome as soon as it is there."""
        ...

    def stop(self) -> None:
        """Begin nothing new: `generate` gives what is in flight and ends. Called from a signal's handler."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device a worker may hold. `index` is the physical one (nvidia-smi's), not a position in a mask."""

    index: int
    uuid: str
    name: str
    memory_total_mib: int
    memory_used_mib: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a parser read from a judge's words; `label` is None when nothing could be read, and `reason` says why."""

    label: str | None
    reason: str | None
    raw: str
    #: Of a score, the number; read as a likelihood, the mean over the scores.
    value: float | None = None
    #: Read as a likelihood: the labels' shares among themselves, in their order, and what they have of all words.
    probabilities: tuple[float, ...] | None = None
    label_mass: float | None = None
