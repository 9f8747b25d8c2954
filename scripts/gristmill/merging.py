"""Join the workers' parts back into one file, and prove that nothing is missing, doubled or foreign.

- Every part keeps the dataset's order (shards.py), so the merge walks the requests once and takes each answer from the
  front of the part that has it: constant memory, and any deviation shows at the row where it happens.
- The proof is by name (id, sample, variant), not by count: a hole and a duplicate cannot cancel out.
- Every line of a part has a checksum, as every record of the journal has: a flipped bit is no answer.
- A later turn is filled with the answers before it, and its key must be that of the filled prompt: an answer that
  belongs to another first turn is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gristmill.errors import UserError, some
from gristmill.files import check_seal, checked, read_json, read_jsonl, with_checksum
from gristmill.followups import Earlier, filled, gaps, known_part, pending_key
from gristmill.types import FAILURE_REASONS, NO_EARLIER_ANSWER, JsonDict, Request, RequestId

#: The keys that a request may have, whether or not its prompt fits.
KeysOf = Callable[[Request], Collection[str]]


def merged(requests: Iterable[JsonDict], parts: Sequence[Path], keys: KeysOf | None = None) -> Iterator[JsonDict]:
    """The generations in the requests' order: each request's columns and its answer's.

    Args:
        requests: the lines of requests.jsonl.
        parts: all parts.
        keys: the keys of a request; needed where turns depend on the answers before them.

    Raises:
        UnusableParts: a request without an answer, an answer twice, or an answer to no request; the message names them.
    """
    waiting: dict[RequestId, _Head] = {}
    for path in parts:
        _await(_Head(path), waiting)
    earlier: Earlier[str | None] = Earlier()
    for request in requests:
        rid = _rid(request)
        head = waiting.pop(rid, None)
        if head is None:
            raise UnusableParts(_diagnose(rid, waiting.values(), parts))
        yield _request_columns(_as_asked(request, head, earlier, keys)) | head.answer
        earlier.add((rid.id, rid.sample), head.answer["text"])
        head.advance()
        _await(head, waiting)
    if waiting:
        left = [f"{head.rid} in {head.path}" for head in waiting.values()]
        raise UnusableParts(f"answers to no request, or twice: {some(left)}; {_REMEDY}")


def parts_beside(first: Path) -> list[Path]:
    """All parts, from the path of the first: 1-of-3.jsonl to 3-of-3.jsonl."""
    shards = int(first.stem.rpartition("-")[2])
    return [first.with_name(f"{shard}-of-{shards}.jsonl") for shard in range(1, shards + 1)]


def part_line(key: str, answer: JsonDict) -> JsonDict:
    """A line of a part: an answer's columns, its key and a checksum of both."""
    return with_checksum({"key": key, **answer})


def within_limit(generations: Iterable[JsonDict], max_failed_ratio: float) -> Iterator[JsonDict]:
    """Pass the generations on; at their end stop when more rows have failed than the run may go on without.

    Raises:
        UnusableParts: names the failed rows.
    """
    count, failed = 0, 0
    names: list[str] = []
    for line in generations:
        count += 1
        if line["finish_reason"] in FAILURE_REASONS:
            failed += 1
            names += [f"{_rid(line)} ({line['finish_reason']})"] if failed <= _NAMED else []
        yield line
    if failed > allowed(max_failed_ratio, count):
        raise UnusableParts(
            f"{failed} of {count} rows failed, over max_failed_ratio {max_failed_ratio:g}: "
            f"{', '.join(names)}{' …' if failed > _NAMED else ''}; run again to ask only these, or raise it"
        )


def allowed(max_failed_ratio: float, requests: int) -> int:
    """How many of so many requests may fail; a ratio of 0.29 means 29 of 100, which floats make 28.999…"""
    return int(max_failed_ratio * requests + 1e-9)


def proven(generations: Path) -> Iterator[JsonDict]:
    """The lines of a generations.jsonl as the merge wrote it, and at their end the proof that they are as many.

    A file without a seal and a manifest beside it is taken as it is.

    Raises:
        UserError: lines are missing or were added.
    """
    check_seal(generations)
    count = 0
    for line in read_jsonl(generations):
        count += 1
        yield line
    manifest = generations.with_name("manifest.json")
    wanted = read_json(manifest)["requests"] if manifest.exists() else count
    if count != wanted:
        raise UserError(
            f"{generations} has {count} lines, and {manifest.name} says {wanted}: the file was cut or edited; "
            "remove it and run again, and it is made anew from the journal"
        )


class UnusableParts(UserError):
    """The parts do not make a result. They hold nothing that the journal does not: without them the next run makes new
    ones from it, and asks again what failed."""


_NAMED = 5
_REMEDY = "the parts are removed; run again (the journal keeps the answers)"
_END: Any = object()
#: Columns of answers that were asked for again (followups.py).
_ATTEMPT_COLUMNS = ("attempt", "earlier_keys", "unreadable_attempts")
_ANSWER_COLUMNS = (
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "prompt_cut_tokens",
    "seconds",
    "key",
)
#: Only in the answers to requests with labels.
_LIKELIHOOD = "label_logprobs"


class _Head:
    """The front of one part: the answer that comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = read_jsonl(path)
        self.answer: JsonDict = {}
        self.rid: RequestId | None = None
        self.advance()

    def advance(self) -> None:
        try:
            line = next(self._lines, _END)
            line = line if line is _END else checked(line)
            self.rid = None if line is _END else _rid(line)
            self.answer = {} if line is _END else _answer_columns(line)
        except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnusableParts(f"{self.path} cannot be read ({type(error).__name__}: {error}); {_REMEDY}") from error


def _as_asked(request: JsonDict, head: _Head, earlier: Earlier[str | None], keys: KeysOf | None) -> JsonDict:
    """A request's line with the earlier answers in its messages, proven to be what was answered."""
    if not (places := gaps(request["messages"])):
        return request
    if keys is None:
        raise ValueError("a turn that depends on earlier ones can only be proven by its key")
    texts = earlier.before((request["id"], request["sample"]), len(places))
    whole = [text for text in texts if text is not None]
    if len(whole) < len(texts):
        there, allowed_keys = request, [pending_key(request)]
    else:
        there = request | {"messages": list(filled(request["messages"], whole))}
        allowed_keys = list(keys(known_part(there)))
    unasked = head.answer["finish_reason"] == NO_EARLIER_ANSWER
    if head.answer["key"] not in allowed_keys or unasked != (len(whole) < len(texts)):
        raise UnusableParts(f"{head.rid} in {head.path} answers a turn after other answers than are there; {_REMEDY}")
    return there


def _answer_columns(line: JsonDict) -> JsonDict:
    there = [*_ANSWER_COLUMNS, *(name for name in (_LIKELIHOOD, *_ATTEMPT_COLUMNS) if name in line)]
    return {name: line[name] for name in there}


def _await(head: _Head, waiting: dict[RequestId, _Head]) -> None:
    """Put a part among those that wait for their next answer's turn; one that has ended waits for nothing."""
    if head.rid is None:
        return
    if head.rid in waiting:
        raise UnusableParts(f"{head.rid} is answered twice, in {waiting[head.rid].path} and {head.path}; {_REMEDY}")
    waiting[head.rid] = head


def _rid(line: JsonDict) -> RequestId:
    return RequestId(line["id"], line["sample"], line["variant"])


def _request_columns(request: JsonDict) -> JsonDict:
    names = ("id", "sample", "variant", "messages", "reference", "row", "labels")
    return {name: request[name] for name in names if name in request or name != "labels"}


def _diagnose(rid: RequestId, heads: Iterable[_Head], parts: Sequence[Path]) -> str:
    """Why the next request has no answer at the front of any part."""
    fronts = [f"{head.rid} in {head.path}" for head in heads]
    if not fronts:
        return f"no answer for {rid}: all {len(parts)} parts have ended; {_REMEDY}"
    return (
        f"no answer for {rid}: the parts go on with {some(fronts)}, so it is missing, or they hold a row that is "
        f"foreign, doubled or out of order; {_REMEDY}"
    )
