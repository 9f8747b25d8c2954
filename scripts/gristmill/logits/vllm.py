"""Teacher forcing with vLLM: the log-probabilities of prompts, which it gives beside an answer of one token.

- Taken only where the config names it (engine: vllm): vLLM hands every number over as an object of Python, so it pays
  where only vLLM can hold the model, not by its speed.
- vLLM's softmax is over all outputs of the head and cannot leave any out, so a teacher with a padded head is refused.
- It gives the k most likely and the target, and no other logit: the tail is log(1 − Σp), so one of less than about 1e-7
  is rounded, at worst to nothing.
- Tokens in a step are few (STEP_TOKENS): vLLM makes float32 logits of all of them at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.config.schema import ModelConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.vllm import engine as vllm
from gristmill.engines.vllm.limits import dtype_of, number_devices, set_environment, why_not
from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.logits.scoring import Kept, kept_count
from gristmill.logits.storage import LogitsRow
from gristmill.logits.texts import Window
from gristmill.logits.vocabulary import vocabulary_size
from gristmill.types import Failure

STEP_TOKENS = 2048
#: Windows that vLLM has at a time: what it gives back takes 100 bytes a number.
AT_A_TIME = 16


class VllmTeacher:
    """One vLLM engine, stepped by hand."""

    name = "vllm"

    def __init__(
        self, folder: Path, model: ModelConfig, top_k: int | None, on_gpu: bool, log: Callable[[str], None]
    ) -> None:
        """Load the weights; see TransformersTeacher.

        Raises:
            UserError: vLLM cannot give what is asked for, or not of this model.
        """
        set_environment()
        if on_gpu:
            number_devices()
        gpus = vllm.gpus_of_lease() if on_gpu else 0
        config = read_json(folder / "config.json")
        self.head_width = int((config.get("text_config") or config)["vocab_size"])
        self.vocab_size = min(vocabulary_size(ChatEncoder(folder, model).tokenizer), self.head_width)
        if (reason := self._against(top_k) or why_not(folder, model, gpus)) is not None:
            raise UserError(f"engine: vllm cannot give these logits: {reason}; set models.*.engine: static")
        self.k = kept_count(top_k, self.vocab_size)
        self.dtype = dtype_of(folder, model, gpus)
        settings = vllm.arguments(folder, model, model.context_tokens, self.dtype, gpus)
        settings |= {"max_logprobs": self.k, "max_num_batched_tokens": STEP_TOKENS, "skip_tokenizer_init": True}
        self._engine = vllm.start(settings | {"enable_chunked_prefill": True})
        self._engine.logger_manager = None
        self._longest = int(self._engine.model_config.max_model_len) - 1  # it writes a token, too
        self._stopped = False
        share = "all" if gpus < 2 else f"1/{gpus} of every layer"
        self.device_map = {str(device): share for device in range(gpus)} or {"cpu": share}

    def score(self, windows: Sequence[tuple[str, Window]]) -> Iterator[tuple[str, LogitsRow | Failure]]:
        """See scoring.Teacher.

        Raises:
            UserError: a window leaves no room for the token that vLLM writes.
        """
        if too_long := next((window for _, window in windows if len(window.tokens) > self._longest), None):
            raise UserError(
                f"{too_long.wid} has {len(too_long.tokens)} tokens, and vllm reads {self._longest} here; set "
                "logits.*.max_tokens to that or less, or models.*.engine: static"
            )
        waiting, numbers = iter(sorted(windows, key=lambda item: -len(item[1].tokens))), map(str, itertools.count())
        running: dict[str, tuple[str, Window]] = {}
        while not self._stopped:
            for item in itertools.islice(waiting, AT_A_TIME - len(running)):
                number = next(numbers)
                self._add(number, item[1])
                running[number] = item
            if not running:
                return
            for output in self._engine.step():
                if output.finished and (ended := running.pop(output.request_id, None)):
                    yield ended[0], self._outcome(*ended, output)
        self._engine.abort_request(list(running))

    def stop(self) -> None:
        """Nothing more is read: a window in flight may take long, and is scored again."""
        self._stopped = True

    def close(self) -> None:
        """Free the model's memory and end vLLM's processes; after a signal the end of this process does that."""
        if not self._stopped:
            self._engine.engine_core.shutdown()
        del self._engine

    def _against(self, top_k: int | None) -> str | None:
        if top_k is None:
            return "full needs every logit, and vllm gives the most likely"
        if self.head_width > self.vocab_size:
            return (
                f"its softmax would take in the {self.head_width - self.vocab_size} outputs of a padded head "
                f"({self.head_width:,} against {self.vocab_size:,} tokens)"
            )
        return None

    def _add(self, number: str, window: Window) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        asked: dict[str, Any] = {"prompt_logprobs": self.k, "flat_logprobs": True, "detokenize": False}
        params = SamplingParams(max_tokens=1, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY, **asked)
        self._engine.add_request(number, tokens_input(list(window.tokens)), params)

    def _outcome(self, key: str, window: Window, output: Any) -> LogitsRow | Failure:
        kept = kept_of(output.prompt_logprobs, window, self.k)
        if not np.isfinite(kept.target_logprob).all():
            detail = f"a log-probability is not finite in {self.dtype}; try another dtype"
            return Failure(window.wid.id, window.wid.sample, window.wid.variant, "non_finite_logits", detail)
        return kept.row(window, key)


def kept_of(flat: Any, window: Window, k: int) -> Kept:
    """What is kept of a window, from vLLM's FlatLogprobs: of each token itself, then of the k most likely."""
    starts = np.asarray(flat.start_indices[window.first :], np.int64)
    places = starts[:, None] + np.arange(k + 1)  # (P, 1 + k)
    ids = np.asarray(flat.token_ids, np.int32)[places]
    logprobs = np.asarray(flat.logprobs, np.float32)[places]
    if not np.array_equal(ids[:, 0], np.asarray(window.tokens[window.first :], np.int32)):
        raise RuntimeError(f"vllm's log-probabilities of {window.wid} do not begin with the texts' tokens")
    rest = 1.0 - np.exp(logprobs[:, 1:].astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore"):
        tail = np.log(np.maximum(rest, 0.0)).astype(np.float32)
    order = np.argsort(-logprobs[:, 1:], axis=1, kind="stable")
    top_ids = np.take_along_axis(ids[:, 1:], order, axis=1)
    top_logprobs = np.take_along_axis(logprobs[:, 1:], order, axis=1)
    return Kept(top_ids, top_logprobs, tail, logprobs[:, 0], np.zeros(len(starts), np.float32))
