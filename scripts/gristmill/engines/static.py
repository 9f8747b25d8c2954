"""The static engine: transformers' generate() over batches, longest first, on any device_map.

- Longest first: the batch that needs the most memory comes at once, not after a night's work.
- A batch is filled to a token budget: rows × (longest prompt + max_new_tokens) of key-value cache that fit in the
  memory left after loading. An out-of-memory error halves the batch, and the smaller size is kept.
- Greedy answers in float32 do not depend on the batch; in bfloat16 they may, as in every batched engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.engines.answers import first_end, not_finite, out_of_memory, read_answer, timed_out
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.deadline import Deadline
from gristmill.engines.finite_rows import FiniteRows
from gristmill.engines.loading import idle_gpus, load_model, placement, release_memory
from gristmill.engines.prepared import Prepared, by_sampling, prepare
from gristmill.engines.row_sampler import RowSampler
from gristmill.keys import row_seed
from gristmill.types import Completion, Outcome, Request, Sampling

#: Share of the free GPU memory that the key-value cache may take; the rest is for activations and fragmentation.
CACHE_SHARE = 0.6
#: Rows a batch on a CPU, where larger ones gain little and cost cache misses; and the most on a GPU.
CPU_BATCH_ROWS, GPU_BATCH_ROWS = 32, 256


class StaticEngine:
    """Batches through model.generate()."""

    name = "static"

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        context_tokens: int | None,
        on_gpu: bool,
        log: Callable[[str], None],
        loaded: tuple[ChatEncoder, Any] | None = None,
    ) -> None:
        """Load tokenizer and weights, or take what another engine `loaded`; imports torch and transformers."""
        self._config = model
        self._context_tokens = context_tokens
        self._on_gpu = on_gpu
        self._log = log
        self._stopped = False
        #: Rows × tokens of a batch after one that ran out of memory; None: none has.
        self._most_tokens: int | None = None
        self._chat, self._model = loaded or (ChatEncoder(folder, model), load_model(folder, model, on_gpu))
        self._stop_ids = self._chat.stop_ids()
        if on_gpu and loaded is None and (idle := idle_gpus(self._model)):
            log(f"the model holds nothing on {len(idle)} GPUs of the worker ({idle}); fewer gpus_per_model would do")
        self._max_rows = model.max_batch_rows or (GPU_BATCH_ROWS if on_gpu else CPU_BATCH_ROWS)
        self.device_map = placement(self._model)
        self.dtype = str(self._model.dtype).removeprefix("torch.")

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Tokens of each prompt, chat template included."""
        return [len(ids) for ids in self._chat.encode([request.messages for request in requests])]

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Answer the requests, a batch at a time, longest first."""
        items: list[Prepared] = []
        for item in prepare(requests, self._chat, self._config, self._context_tokens):
            if isinstance(item, Completion):
                yield item
            else:
                items.append(item)
        for same in by_sampling(items):
            yield from self._generate_alike(sorted(same, key=lambda item: -item.tokens))

    def stop(self) -> None:
        """The batch in flight is the last."""
        self._stopped = True

    def close(self) -> None:
        """Free the model's memory, also for the driver: whoever leases the devices next looks there."""
        del self._model
        release_memory(self._on_gpu)

    def _generate_alike(self, items: list[Prepared]) -> Iterator[Outcome]:
        """Items of one sampling setting, longest first."""
        import torch

        position = 0
        while position < len(items) and not self._stopped:
            batch = items[position : position + self._rows_that_fit(items[position].tokens)]
            try:
                outcomes: list[Outcome] = list(self._run(batch))
            except torch.OutOfMemoryError:
                release_memory(self._on_gpu)
                if len(batch) > 1:
                    self._most_tokens = len(batch) // 2 * batch[0].tokens
                    self._log(
                        f"out of memory with {len(batch)} rows of {batch[0].tokens} tokens; going on with at most "
                        f"{self._most_tokens} tokens in a batch"
                    )
                    continue
                outcomes = [out_of_memory(batch[0])]
            yield from outcomes
            position += len(batch)

    def _rows_that_fit(self, tokens: int) -> int:
        """How many rows of `tokens` tokens fit: no more than what ran out of memory, and the cache's share of it."""
        most = self._max_rows if self._most_tokens is None else min(self._max_rows, self._most_tokens // tokens)
        return max(1, min(most, self._rows_with_room(tokens)) if self._on_gpu else most)

    def _rows_with_room(self, tokens: int) -> int:
        """How many rows' keys and values fit into the cache's share of the free memory."""
        import torch

        free = min(_free_bytes(device) for device in range(torch.cuda.device_count()))
        budget_tokens = CACHE_SHARE * free / max(1, self._cache_bytes_per_token() / torch.cuda.device_count())
        return int(budget_tokens / tokens)

    def _cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers: 2 × layers × kv heads × head size × bytes."""
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * size * self._model.dtype.itemsize)

    def _run(self, batch: Sequence[Prepared]) -> Iterator[Outcome]:
        """One call of generate() for a batch of one sampling setting."""
        import torch

        sampling = batch[0].request.sampling
        start = time.perf_counter()
        width = max(len(item.ids) for item in batch)
        pad = self._pad_id()
        device = self._model.device
        input_ids = torch.tensor(
            [[pad] * (width - len(item.ids)) + item.ids for item in batch], device=device
        )  # (B, T)
        mask = torch.tensor([[0] * (width - len(item.ids)) + [1] * len(item.ids) for item in batch], device=device)
        finite = FiniteRows(width)
        settings = self._settings(sampling, [item.request for item in batch], finite)
        deadline = Deadline(self._config.timeout_seconds)
        settings["stopping_criteria"] = [deadline]
        with torch.inference_mode():
            output = self._model.generate(input_ids, attention_mask=mask, **settings)  # (B, T + N)
        seconds = time.perf_counter() - start
        for item, row, broken in zip(batch, output[:, width:].tolist(), finite.first_steps(), strict=True):
            end = first_end(row, self._chat)
            if broken is not None and (end is None or broken <= end):
                yield not_finite(item, broken, self.dtype)
                continue
            completion = read_answer(item, row, self._chat, seconds)
            cut_short = completion.finish_reason == "length" and len(row) < sampling.max_new_tokens
            if deadline.passed and cut_short:
                yield timed_out(item, len(row), self._config.timeout_seconds)
            else:
                yield completion

    def _settings(self, sampling: Sampling, requests: Sequence[Request], finite: FiniteRows) -> dict[str, Any]:
        """Arguments of generate(); the model's own generation config must not add sampling of its own."""
        from transformers import GenerationConfig

        settings: dict[str, Any] = {
            "generation_config": GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,
                repetition_penalty=sampling.repetition_penalty,
                eos_token_id=self._stop_ids or None,
                pad_token_id=self._pad_id(),
            ),
            "logits_processor": [finite],
        }
        if sampling.temperature > 0:
            seeds = [row_seed(request) for request in requests]
            sampler = RowSampler(seeds, sampling.temperature, sampling.top_k, sampling.top_p)
            settings["logits_processor"].append(sampler)
        if sampling.stop:
            settings |= {"stop_strings": list(sampling.stop), "tokenizer": self._chat.tokenizer}
        return settings

    def _pad_id(self) -> int:
        """Any id will do under a mask; 0 exists in every vocabulary."""
        pad = self._chat.tokenizer.pad_token_id
        return int(pad) if pad is not None else (self._stop_ids or [0])[0]


def _free_bytes(device: int) -> int:
    """Free memory of a device: what the driver has, and what torch holds without using it."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
