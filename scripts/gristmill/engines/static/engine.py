"""The static engine: transformers' models over batches, longest first, on any device_map.

- Longest first: the batch that needs the most memory comes at once, not after a night's work.
- A batch is filled to a token budget (token_budget.py). An out-of-memory error halves it, and the smaller one is kept.
- Rows leave a batch when they end and others take their place (decoding.py). A model whose cache or inputs do not allow
  that answers in whole batches through its own generate() (whole_batches.py); the log says so.
- Requests with labels ask for likelihoods and generate nothing (likelihood.py).
- Greedy answers in float32 do not depend on the batch; in bfloat16 they may, as in every batched engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.loading import idle_gpus, load_model, placement
from gristmill.engines.prepared import Prepared, by_sampling, prepare
from gristmill.engines.static.decodable import obstacle
from gristmill.engines.static.decoding import DecodeLoop
from gristmill.engines.static.grammar import Grammar
from gristmill.engines.static.likelihood import likelihoods
from gristmill.engines.static.loaded import Loaded
from gristmill.engines.static.token_budget import TokenBudget, release_memory
from gristmill.engines.static.whole_batches import answer_in_batches
from gristmill.engines.tokens import tokenize
from gristmill.types import Completion, Outcome, Request


class StaticEngine:
    """Answers with a model of transformers."""

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
        self._stopped = False
        self._chat, self._model = loaded or (ChatEncoder(folder, model), load_model(folder, model, on_gpu))
        if on_gpu and loaded is None and (idle := idle_gpus(self._model)):
            log(f"the model holds nothing on {len(idle)} GPUs of the worker ({idle}); fewer gpus_per_model would do")
        self._obstacle = obstacle(self._model)
        if self._obstacle and loaded is None:
            log(f"answers come in whole batches, each as long as its longest answer: {self._obstacle}")
        self._budget = TokenBudget(model.max_batch_rows, on_gpu, log)
        self.device_map = placement(self._model)
        self.dtype = str(self._model.dtype).removeprefix("torch.")

    @property
    def batch_rows(self) -> int:
        """Rows in work at the same time, for whoever watches."""
        return self._budget.running

    @property
    def retries(self) -> int:
        """How often a batch was halved."""
        return self._budget.halved

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Tokens of each prompt, chat template and longest label included."""
        return [asked.tokens for asked in tokenize(requests, self._chat)]

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Answer the requests, longest first."""
        items: list[Prepared] = []
        for item in prepare(requests, self._chat, self._config, self._context_tokens):
            if isinstance(item, Completion):
                yield item
            else:
                items.append(item)
        if labelled := [item for item in items if item.labels]:
            yield from likelihoods(self._loaded(), labelled, self._obstacle is None, lambda: self._stopped)
        for same in by_sampling([item for item in items if not item.labels]):
            yield from self._answer_alike(sorted(same, key=lambda item: -item.tokens))

    def stop(self) -> None:
        """The rows in flight are the last."""
        self._stopped = True

    def close(self) -> None:
        """Free the model's memory, also for the driver: whoever leases the devices next looks there."""
        del self._model
        release_memory(self._on_gpu)

    def _answer_alike(self, items: list[Prepared]) -> Iterator[Outcome]:
        """Items of one sampling setting, longest first."""
        loaded = self._loaded(items[0].request.sampling.json_schema)
        if self._obstacle:
            return answer_in_batches(loaded, items, lambda: self._stopped)
        return DecodeLoop(loaded, items, lambda: self._stopped).outcomes()

    def _loaded(self, json_schema: str = "") -> Loaded:
        timeout_s = self._config.timeout_seconds
        tokens = self._model.config.get_text_config().vocab_size
        grammar = Grammar(json_schema, self._chat, tokens) if json_schema else None
        return Loaded(self._model, self._chat, self.dtype, timeout_s, self._on_gpu, self._budget, grammar)
