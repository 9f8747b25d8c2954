"""Requests into shards: measured with the model's tokenizer, checked against its context, dealt out evenly.

The length check stands here, in a job that needs no GPU, so that a prompt that does not fit is said before any queue
wait and before any answer is paid for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gristmill.codec import request_from_json
from gristmill.config.schema import ModelConfig
from gristmill.engines import context_limit
from gristmill.engines.overflow import refuse_overflow
from gristmill.files import dumps, read_jsonl
from gristmill.shards import assign
from gristmill.types import JsonDict, Request

#: Requests that are tokenized and held at once.
CHUNK = 1000
_SHARD_COLUMNS = ("id", "sample", "variant", "messages", "sampling")


def split(requests: Path, folder: Path, shards: int, model: ModelConfig, weights: JsonDict) -> list[int]:
    """Write `folder`/<k>-of-<shards>.jsonl for k = 1 … shards; returns the number of requests in each.

    Raises:
        UserError: a prompt does not fit and the policy is `error`.
    """
    lengths = measure(requests, model, weights)
    assignment = assign(lengths, shards)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        names = [temporary / f"{shard}-of-{shards}.jsonl" for shard in range(1, shards + 1)]
        handles = [stack.enter_context(open(name, "wb")) for name in names]
        for line, tokens, shard in zip(read_jsonl(requests), lengths, assignment, strict=True):
            handles[shard].write(
                dumps({name: line[name] for name in _SHARD_COLUMNS} | {"prompt_tokens": tokens}) + b"\n"
            )
        for handle in handles:
            handle.flush()
            os.fsync(handle.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    return [assignment.count(shard) for shard in range(shards)]


def measure(requests: Path, model: ModelConfig, weights: JsonDict) -> list[int]:
    """Prompt tokens of every request, refusing what does not fit."""
    count = _token_counter(model, weights)
    limit = context_limit(model, weights)
    lengths: list[int] = []
    too_long: list[tuple[Request, int]] = []
    for chunk in _chunks(read_jsonl(requests)):
        batch = [request_from_json(line) for line in chunk]
        tokens = count(batch)
        lengths += tokens
        if limit is not None:
            pairs = zip(batch, tokens, strict=True)
            too_long += [(r, n) for r, n in pairs if n + r.sampling.max_new_tokens > limit]
    refuse_overflow(too_long, limit, model)
    return lengths


def _token_counter(model: ModelConfig, weights: JsonDict) -> Callable[[Sequence[Request]], list[int]]:
    if model.engine == "echo":
        from gristmill.engines.echo import EchoEngine

        return EchoEngine().prompt_tokens
    from gristmill.engines.chat import ChatEncoder

    encoder = ChatEncoder(Path(weights["folder"]), model)
    return lambda requests: [len(ids) for ids in encoder.encode([request.messages for request in requests])]


def _chunks(lines: Iterator[JsonDict]) -> Iterator[list[JsonDict]]:
    while chunk := list(itertools.islice(lines, CHUNK)):
        yield chunk
