"""Domain values to and from the JSON lines of requests, parts and journals: one place where the column names stand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gristmill.types import Completion, Failure, JsonDict, Request, Sampling


def request_to_json(request: Request) -> JsonDict:
    """The columns of a request line."""
    return {
        "id": request.id,
        "sample": request.sample,
        "variant": request.variant,
        "messages": list(request.messages),
        "sampling": {**asdict(request.sampling), "stop": list(request.sampling.stop)},
    }


def request_from_json(line: Any) -> Request:
    """Read a request line; other columns (reference, row, prompt_tokens) are left alone."""
    sampling = {**line["sampling"], "stop": tuple(line["sampling"]["stop"])}
    return Request(line["id"], line["sample"], line["variant"], tuple(line["messages"]), Sampling(**sampling))


def completion_to_json(completion: Completion) -> JsonDict:
    """The columns of an answer; a skipped prompt has text null."""
    return asdict(completion)


def completion_from_json(line: Any) -> Completion:
    """Read an answer line; other columns (key) are left alone."""
    return Completion(**{name: line[name] for name in Completion.__dataclass_fields__})


def failure_to_json(failure: Failure) -> JsonDict:
    """The columns of a failure record."""
    return asdict(failure)


def unanswered_to_json(failure: Failure) -> JsonDict:
    """The columns of an answer for a row that failed and that the run may go on without: no text, the reason."""
    nothing = {"text": None, "finish_reason": failure.reason, "prompt_tokens": 0, "completion_tokens": 0}
    named = {"id": failure.id, "sample": failure.sample, "variant": failure.variant}
    return named | nothing | {"seconds": 0.0, "prompt_cut_tokens": 0}
