"""Answers through the model's own generate(), a batch at a time: for models that the decode loop cannot run.

A batch lasts as long as its longest answer, and its rows come when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gristmill.engines.answers import first_end, out_of_memory
from gristmill.engines.prepared import Prepared
from gristmill.engines.row_sampler import RowSampler
from gristmill.engines.static.deadline import Deadline
from gristmill.engines.static.finite_rows import FiniteRows
from gristmill.engines.static.grammar import GrammarProcessor
from gristmill.engines.static.loaded import Loaded
from gristmill.engines.static.token_budget import release_memory
from gristmill.keys import row_seed
from gristmill.types import Outcome, Request, Sampling


def answer_in_batches(loaded: Loaded, items: Sequence[Prepared], stopped: Callable[[], bool]) -> Iterator[Outcome]:
    """Answer items of one sampling setting, longest first; after `stopped` the batch in flight is the last."""
    position = 0
    while position < len(items) and not stopped():
        loaded.budget.look(loaded.model)
        batch = items[position : position + loaded.budget.rows(items[position].tokens)]
        loaded.budget.running = len(batch)
        outcomes = _unless_out_of_memory(loaded, batch)
        if outcomes is None:  # out here, where no traceback holds on to the batch's memory
            release_memory(loaded.on_gpu)
            if len(batch) > 1:
                loaded.budget.halve(len(batch), batch[0].tokens)
                continue
            outcomes = [out_of_memory(batch[0])]
        yield from outcomes
        position += len(batch)


def _unless_out_of_memory(loaded: Loaded, batch: Sequence[Prepared]) -> list[Outcome] | None:
    import torch

    try:
        return list(_answer(loaded, batch))
    except torch.OutOfMemoryError:
        return None


def _answer(loaded: Loaded, batch: Sequence[Prepared]) -> Iterator[Outcome]:
    """One call of generate() for a batch."""
    import torch

    start = time.perf_counter()
    width = max(len(item.ids) for item in batch)
    padded = [[loaded.pad_id] * (width - len(item.ids)) + item.ids for item in batch]
    masked = [[0] * (width - len(item.ids)) + [1] * len(item.ids) for item in batch]
    device = loaded.model.device
    input_ids, mask = torch.tensor(padded, device=device), torch.tensor(masked, device=device)  # (B, T) each
    finite, deadline = FiniteRows(width), Deadline(loaded.timeout_s)
    settings = _settings(loaded, batch[0].request.sampling, [item.request for item in batch], finite, width)
    with torch.inference_mode():
        output = loaded.model.generate(
            input_ids, attention_mask=mask, stopping_criteria=[deadline], **settings
        )  # (B, T + N)
    seconds = time.perf_counter() - start
    for item, row, broken in zip(batch, output[:, width:].tolist(), finite.first_steps(), strict=True):
        end = first_end(row, loaded.chat)
        spoiled = broken is not None and (end is None or broken <= end)
        yield loaded.outcome(item, row, seconds, broken if spoiled else None, deadline.passed)


def _settings(
    loaded: Loaded, sampling: Sampling, requests: Sequence[Request], finite: FiniteRows, width: int
) -> dict[str, Any]:
    """Arguments of generate(); the model's own generation config must not add sampling of its own."""
    from transformers import GenerationConfig

    settings: dict[str, Any] = {
        "generation_config": GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=loaded.chat.stop_ids() or None,
            pad_token_id=loaded.pad_id,
        ),
        "logits_processor": [finite],
    }
    if loaded.grammar is not None:
        settings["logits_processor"].append(GrammarProcessor(loaded.grammar, len(requests), width))
    if sampling.temperature > 0:
        seeds = [row_seed(request) for request in requests]
        sampler = RowSampler(seeds, sampling.temperature, sampling.top_k, sampling.top_p)
        settings["logits_processor"].append(sampler)
    if sampling.stop:
        settings |= {"stop_strings": list(sampling.stop), "tokenizer": loaded.chat.tokenizer}
    return settings
