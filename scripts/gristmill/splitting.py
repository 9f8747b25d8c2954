"""Requests into shards: measured with the model's tokenizer, checked against its context, dealt out evenly.

The length check stands here, in a job that needs no GPU, so that a prompt that does not fit is said before any queue
wait and before any answer is paid for. Of a later turn only what is known is measured: its earlier answers count with
their max_new_tokens where lengths are balanced, and are checked when they are there (worker.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.config.specs import ModelSpec
from gristmill.engines import context_limit
from gristmill.engines.overflow import overflows, refuse_empty, refuse_overflow
from gristmill.errors import UserError
from gristmill.files import LONE_SURROGATE, atomic_folder, check_seal, dumps, read_jsonl, with_checksum
from gristmill.followups import gaps, known_part
from gristmill.keys import WEIGHTLESS
from gristmill.memory.estimate import Load
from gristmill.memory.shapes import read_shape
from gristmill.planning.memory import check_worker
from gristmill.planning.workers import Worker, worker_of
from gristmill.shards import assign
from gristmill.types import JsonDict, Request
from gristmill.weights import weights_folder

#: Requests that are tokenized and held at once.
CHUNK = 1000
_SHARD_COLUMNS = ("id", "sample", "variant", "messages", "sampling", "labels")


def split(
    requests: Path, folder: Path, shards: int, spec: ModelSpec, weights: JsonDict, workers: Sequence[Worker] = ()
) -> list[int]:
    """Write `folder`/<k>-of-<shards>.jsonl for k = 1 … shards; returns the number of requests in each.

    Args:
        requests: requests.jsonl.
        folder: where the shards go.
        shards: how many.
        spec: the model's part of the config.
        weights: results/models/<model>.json.
        workers: the plan's workers, whose speeds the shards follow; empty: all alike.

    Raises:
        UserError: a prompt does not fit and the policy is `error`, or the model does not fit a worker's GPUs.
    """
    check_seal(requests)
    lengths = measure(requests, spec.model, weights)
    _refuse_unfit(requests, lengths, spec, weights, workers[:shards])
    speeds = [worker_of(workers, shard).speed for shard in range(1, shards + 1)] if workers else None
    conversation, most = _conversations(requests, lengths)
    shard_of = assign(most, shards, speeds)
    assignment = [shard_of[number] for number in conversation]
    with atomic_folder(folder) as temporary, contextlib.ExitStack() as stack:
        names = [temporary / f"{shard}-of-{shards}.jsonl" for shard in range(1, shards + 1)]
        handles = [stack.enter_context(open(name, "wb")) for name in names]
        for line, tokens, shard in zip(read_jsonl(requests), lengths, assignment, strict=True):
            columns = {name: line[name] for name in _SHARD_COLUMNS if name in line} | {"prompt_tokens": tokens}
            handles[shard].write(dumps(with_checksum(columns)) + b"\n")
        for handle in handles:
            handle.flush()
            os.fsync(handle.fileno())
    counts = Counter(assignment)
    return [counts[shard] for shard in range(shards)]


def measure(requests: Path, model: ModelConfig, weights: JsonDict) -> list[int]:
    """Prompt tokens of every request, those of the longest label included, refusing what does not fit.

    Of a later turn they are those without the answers before it.
    """
    count = token_counter(model, weights)
    limit = context_limit(model, weights)
    lengths: list[int] = []
    too_long: list[tuple[Request, int]] = []
    for chunk in _chunks(read_jsonl(requests)):
        batch = [known_part(line) for line in chunk]
        if model.engine != "echo":
            _refuse_surrogates(batch)
        tokens = count(batch)
        lengths += tokens
        pairs = zip(batch, tokens, strict=True)
        if model.engine != "echo":
            refuse_empty([request for request, size in zip(batch, tokens, strict=True) if not size])
        too_long += [(replace(r, messages=()), n) for r, n in pairs if overflows(r, n, limit)]
    refuse_overflow(too_long, limit, model)
    return lengths


def _conversations(requests: Path, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The conversation that each request is part of, and the most prompt tokens that each has.

    All turns of a conversation are answered by one job. A request without earlier turns begins one.
    """
    conversation: list[int] = []
    most: list[int] = []
    for line, tokens in zip(read_jsonl(requests), lengths, strict=True):
        before = len(gaps(line["messages"]))
        if not before or not most:
            most.append(0)
        conversation.append(len(most) - 1)
        most[-1] += tokens + before * line["sampling"]["max_new_tokens"]
    return conversation, most


def _refuse_surrogates(batch: Sequence[Request]) -> None:
    """A lone surrogate is JSON and stays in the files, but has no UTF-8 form, and tokenizers raise a TypeError."""
    for request in batch:
        for text in (*(message["content"] for message in request.messages), *request.labels):
            if half := LONE_SURROGATE.search(text):
                raise UserError(
                    f"{request.rid}: the prompt holds {half[0]!r}, half of a surrogate pair, which no tokenizer reads; "
                    "correct the row"
                )


def _refuse_unfit(
    requests: Path, lengths: list[int], spec: ModelSpec, weights: JsonDict, workers: Sequence[Worker]
) -> None:
    """Stop before any job waits for a GPU: here the weights are known, and the longest prompt and answer too."""
    if spec.model.engine == "echo" or not lengths or all(worker.memory_mib is None for worker in workers):
        return
    new_tokens, sampled, longest = 0, False, 1
    for line, tokens in zip(read_jsonl(requests), lengths, strict=True):
        longest = max(longest, tokens + len(gaps(line["messages"])) * line["sampling"]["max_new_tokens"])
        new_tokens = max(new_tokens, line["sampling"]["max_new_tokens"])
        sampled = sampled or line["sampling"]["temperature"] > 0
    limit = context_limit(spec.model, weights)
    longest = longest if limit is None else max(1, min(longest, limit - new_tokens))
    load = Load(1, longest, new_tokens, sampled)
    shape = read_shape(weights_folder(weights))
    most = sum(worker.gpus for worker in workers)
    for worker in dict.fromkeys(workers):
        check_worker(spec.name, shape, spec.model, load, worker, most)


def token_counter(model: ModelConfig, weights: JsonDict) -> Callable[[Sequence[Request]], list[int]]:
    """What counts the prompt tokens of requests; loads the tokenizer, not the model."""
    if model.engine in WEIGHTLESS:  # words: a server's tokenizer is not here, and only the balance depends on it
        from gristmill.engines.echo import EchoEngine

        return EchoEngine().prompt_tokens
    from gristmill.engines.chat import ChatEncoder
    from gristmill.engines.tokens import tokenize

    encoder = ChatEncoder(weights_folder(weights), model)
    return lambda requests: [asked.tokens for asked in tokenize(requests, encoder)]


def _chunks(lines: Iterator[JsonDict]) -> Iterator[list[JsonDict]]:
    while chunk := list(itertools.islice(lines, CHUNK)):
        yield chunk
