"""Domain values to and from the JSON lines of requests, parts and journals: one place where the column names stand.

Columns of a question that is rarely asked (labels, label_logprobs, json_schema) stand only in lines that have them, so
that other requests keep their keys and other answers their lines.
"""

from __future__ import annotations

import functools
from typing import Any

from gristmill.types import Completion, Failure, JsonDict, Request, Sampling

#: dataclasses.asdict copies every value deeply, which takes longer than writing the line.
_SAMPLING_COLUMNS = tuple(name for name in Sampling.__dataclass_fields__ if name != "json_schema")
_COMPLETION_COLUMNS = tuple(name for name in Completion.__dataclass_fields__ if name != "label_logprobs")
_FAILURE_COLUMNS = tuple(Failure.__dataclass_fields__)


def request_to_json(request: Request) -> JsonDict:
    """The columns of a request line; labels and attempt only where there are such: other keys stay what they were."""
    line: JsonDict = {
        "id": request.id,
        "sample": request.sample,
        "variant": request.variant,
        "messages": list(request.messages),
        "sampling": sampling_to_json(request.sampling),
    }
    line |= {"labels": list(request.labels)} if request.labels else {}
    return line | ({"attempt": request.attempt} if request.attempt > 1 else {})


def sampling_to_json(sampling: Sampling) -> JsonDict:
    """The `sampling` column of a request line."""
    schema = {"json_schema": sampling.json_schema} if sampling.json_schema else {}
    return {**_columns(sampling, _SAMPLING_COLUMNS), "stop": list(sampling.stop), **schema}


def request_from_json(line: Any) -> Request:
    """Read a request line; other columns (reference, row, prompt_tokens) are left alone."""
    sampling = _sampling(**{**line["sampling"], "stop": tuple(line["sampling"]["stop"])})
    named, messages = (line["id"], line["sample"], line["variant"]), tuple(line["messages"])
    labels, attempt = tuple(line.get("labels", ())), line.get("attempt", 1)
    return Request(*named, messages, sampling, labels=labels, attempt=attempt)


@functools.lru_cache(maxsize=64, typed=True)  # typed: 1 and 1.0 are two values in a key
def _sampling(**values: Any) -> Sampling:
    """One object for all requests that are drawn alike: a worker holds every request of its shard."""
    return Sampling(**values)


def completion_to_json(completion: Completion) -> JsonDict:
    """The columns of an answer; a skipped prompt has text null."""
    likelihood = completion.label_logprobs
    return _columns(completion, _COMPLETION_COLUMNS) | (
        {} if likelihood is None else {"label_logprobs": list(likelihood)}
    )


def completion_from_json(line: Any) -> Completion:
    """Read an answer line; other columns (key) are left alone."""
    likelihood = line.get("label_logprobs")
    columns = {name: line[name] for name in _COMPLETION_COLUMNS}
    return Completion(**columns, label_logprobs=None if likelihood is None else tuple(likelihood))


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
