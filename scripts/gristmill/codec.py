"""Domain values to and from the JSON lines of requests, parts and journals: one place where the column names stand."""

from __future__ import annotations

import functools
from typing import Any

from gristmill.types import Completion, Failure, JsonDict, Request, Sampling

#: dataclasses.asdict copies every value deeply, which takes longer than writing the line.
_SAMPLING_COLUMNS = tuple(Sampling.__dataclass_fields__)
_COMPLETION_COLUMNS = tuple(Completion.__dataclass_fields__)
_FAILURE_COLUMNS = tuple(Failure.__dataclass_fields__)


def request_to_json(request: Request) -> JsonDict:
    """The columns of a request line; `attempt` only from the second on, so that other keys are what they were."""
    again = {"attempt": request.attempt} if request.attempt > 1 else {}
    return {
        "id": request.id,
        "sample": request.sample,
        "variant": request.variant,
        "messages": list(request.messages),
        "sampling": sampling_to_json(request.sampling),
        **again,
    }


def sampling_to_json(sampling: Sampling) -> JsonDict:
    """The `sampling` column of a request line."""
    return {**_columns(sampling, _SAMPLING_COLUMNS), "stop": list(sampling.stop)}


def request_from_json(line: Any) -> Request:
    """Read a request line; other columns (reference, row, prompt_tokens) are left alone."""
    sampling = _sampling(**{**line["sampling"], "stop": tuple(line["sampling"]["stop"])})
    named = (line["id"], line["sample"], line["variant"])
    return Request(*named, tuple(line["messages"]), sampling, attempt=line.get("attempt", 1))


@functools.lru_cache(maxsize=64, typed=True)  # typed: 1 and 1.0 are two values in a key
def _sampling(**values: Any) -> Sampling:
    """One object for all requests that are drawn alike: a worker holds every request of its shard."""
    return Sampling(**values)


def completion_to_json(completion: Completion) -> JsonDict:
    """The columns of an answer; a skipped prompt has text null."""
    return _columns(completion, _COMPLETION_COLUMNS)


def completion_from_json(line: Any) -> Completion:
    """Read an answer line; other columns (key) are left alone."""
    return Completion(*[line[name] for name in _COMPLETION_COLUMNS])


def failure_to_json(failure: Failure) -> JsonDict:
    """The columns of a failure record."""
    return _columns(failure, _FAILURE_COLUMNS)


def unanswered_to_json(failure: Failure) -> JsonDict:
    """The columns of an answer for a row that failed and that the run may go on without: no text, the reason."""
    nothing = {"text": None, "finish_reason": failure.reason, "prompt_tokens": 0, "completion_tokens": 0}
    named = {"id": failure.id, "sample": failure.sample, "variant": failure.variant}
    return named | nothing | {"seconds": 0.0, "prompt_cut_tokens": 0}


def _columns(value: Completion | Failure | Sampling, names: tuple[str, ...]) -> JsonDict:
    return {name: getattr(value, name) for name in names}
