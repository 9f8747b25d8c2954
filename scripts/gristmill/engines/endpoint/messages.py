"""What is sent to /chat/completions, and how its answers are read.

- A sampled row sends `seed`: the upper 31 of row_seed's 63 bits, since every server takes 32-bit signed ones. Whether
  it is honoured is the server's affair; a greedy row sends none.
- Thoughts that a server puts beside the answer (`reasoning_content`, `reasoning`) stand before it as <think>…</think>,
  as a local model would write them; thoughts that max_new_tokens cut have no end tag.
- An answer that was filtered is a Failure (`refused_by_server`), never a text; one that cannot be read is Unreadable.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from gristmill.config.endpoint import EndpointConfig
from gristmill.errors import UserError
from gristmill.keys import row_seed
from gristmill.types import Completion, Failure, FinishReason, JsonDict, Outcome, Request

#: finish_reason of OpenAI, vLLM and llama.cpp, and of older TGI servers.
_FINISH: dict[str, FinishReason] = {"stop": "stop", "eos_token": "stop", "stop_sequence": "stop", "length": "length"}
_FILTERED = "content_filter"
SEED_BITS = 31


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    finish_reason: str
    message: _Message


class _Said(BaseModel):
    """What is read of a body; other keys are left alone."""

    choices: Annotated[list[_Choice], Field(min_length=1)]
    model: Any = None
    system_fingerprint: Any = None
    usage: Any = None


class Unreadable(Exception):
    """A 200 whose body is no chat completion."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome, and what the server said about itself."""

    outcome: Outcome
    model: str | None
    fingerprint: str | None
    #: Whether the server counted tokens; without that, both counts are 0.
    counted: bool


def refuse_unasked(endpoint: EndpointConfig, request: Request) -> None:
    """Stop on what chat completions cannot do.

    Raises:
        UserError: a sampling setting that has no key, or labels to be scored.
    """
    if (refusal := endpoint.refusal(request.sampling)) is not None:
        raise UserError(f"{request.rid}: {refusal}")
    if request.labels:
        raise UserError(
            f"{request.rid}: labels are to be scored, which engine: endpoint cannot do; let the judge write its label, "
            "or use a model that runs here"
        )


def body(endpoint: EndpointConfig, request: Request) -> JsonDict:
    """The JSON body of a request."""
    sampling = request.sampling
    asked: JsonDict = {
        "model": endpoint.model,
        "messages": list(request.messages),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "n": 1,
        "stream": False,
    }
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if sampling.temperature > 0:
        asked["seed"] = row_seed(request) >> (63 - SEED_BITS)
    if schema := sampling.json_schema:
        named = {"name": "answer", "schema": json.loads(schema), "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    asked |= endpoint.extra
    return {key: value for key, value in asked.items() if key not in endpoint.extra or value is not None}


def read_answer(request: Request, content: bytes, seconds: float) -> Answer:
    """The outcome in a body.

    Raises:
        Unreadable: it is no chat completion with one answer.
    """
    try:
        said = _Said.model_validate_json(content)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"])) or "its JSON"
        raise Unreadable(f"the answer is no chat completion (in {place})") from error
    finish, message = said.choices[0].finish_reason, said.choices[0].message
    about = (_text(said.model), _text(said.system_fingerprint))
    if finish == _FILTERED:
        failure = Failure(*request.rid, "refused_by_server", f"the server filtered the answer ({_FILTERED})")
        return Answer(failure, *about, counted=True)
    if finish not in _FINISH:
        raise Unreadable(f"finish_reason is {finish[:40]!r}, not stop or length")
    prompt_tokens, completion_tokens, counted = _usage(said.usage)
    text = _whole_text(message, cut=finish == "length")
    sizes = (prompt_tokens, completion_tokens, seconds)
    return Answer(Completion(*request.rid, text, _FINISH[finish], *sizes), *about, counted)


def _whole_text(message: _Message, cut: bool) -> str:
    """The answer with the thoughts before it."""
    content = message.content
    thoughts = next((found for found in (message.reasoning_content, message.reasoning) if found), None)
    if thoughts is None:
        content = message.refusal if content is None else content
        if content is None:
            raise Unreadable("the answer has no text")
        return content
    return f"<think>{thoughts}" if cut and not content else f"<think>{thoughts}</think>{content or ''}"


def _usage(usage: Any) -> tuple[int, int, bool]:
    found = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
    counts = [count for count in found if type(count) is int and count >= 0]
    return (counts[0], counts[1], True) if len(counts) == 2 else (0, 0, False)


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None
