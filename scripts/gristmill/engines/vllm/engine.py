"""The vllm engine: continuous batching in vLLM, every row given back in the step that ends it.

- Prompts go in as token ids and answers come out as token ids, through the same templates, end tokens and reading as
  in the other engines. vLLM's own reading of generation_config.json is switched off.
- A window of rows is with vLLM at a time, twice what it can run at once; the next are tokenized between its steps.
- One process holds scheduler and model, so an error is an exception here and no orphan keeps a GPU; with several GPUs
  vLLM starts a process for each and cuts every layer over them (tensor parallel).
- A row's draws come from its own seed, so they do not depend on its neighbours; as in every batched engine their
  logits do in bfloat16, by rounding. vLLM takes temperatures of 0 and of 0.01 to 2; others are refused.
- NaN in a row's logits ends the row at that token (VLLM_COMPUTE_NANS_IN_LOGITS, which 0 in the environment switches
  off). Infinite logits without a NaN pass: vLLM does not look for them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.engines.answers import not_finite, out_of_memory, read_answer, timed_out
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.prepared import Prepared, prepare
from gristmill.engines.tokens import tokenize
from gristmill.engines.vllm.limits import dtype_of, number_devices, set_environment
from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.gpu import gpus as devices
from gristmill.keys import row_seed
from gristmill.types import Completion, JsonDict, Outcome, Request

#: Rows that are tokenized between two steps of vLLM: as many as it can begin in one, and a few milliseconds of work.
FEED_ROWS = 128
#: Share of the free memory of the GPU with the least that vLLM takes for weights, cache and activations.
FREE_SHARE = 0.9
#: What vLLM's limits on temperature are, 0 aside: it would refuse a higher one and raise a lower one.
TEMPERATURES = (0.01, 2.0)


class VllmEngine:
    """One vLLM engine, stepped by hand."""

    name = "vllm"

    def __init__(
        self, folder: Path, model: ModelConfig, context_tokens: int | None, on_gpu: bool, log: Callable[[str], None]
    ) -> None:
        """Load tokenizer and weights; imports vllm, which imports torch and transformers."""
        set_environment()
        if on_gpu:
            number_devices()
        gpus = gpus_of_lease() if on_gpu else 0
        self._config = model
        self._context_tokens = context_tokens
        self._stopped = False
        self._chat = ChatEncoder(folder, model)
        self._stop_ids = self._chat.stop_ids()
        self.dtype = dtype_of(folder, model, gpus)
        self._engine = start(arguments(folder, model, context_tokens, self.dtype, gpus))
        self._engine.logger_manager = None  # a server's dashboard: a histogram's entry for every token
        self._window = 2 * int(self._engine.vllm_config.scheduler_config.max_num_seqs)
        self._longest = int(self._engine.model_config.max_model_len)
        if context_tokens is not None and self._longest < context_tokens:
            log(f"rows of up to {self._longest} tokens fit in vllm's cache; the context is {context_tokens}")
        share = "all" if gpus < 2 else f"1/{gpus} of every layer"
        self.device_map = {str(device): share for device in range(gpus)} or {"cpu": share}
        #: vLLM's name of a row → the row, for those that vLLM has.
        self._rows: dict[str, Prepared] = {}
        self._numbers = map(str, itertools.count())

    @property
    def batch_rows(self) -> int:
        """Rows that vLLM has, those that wait there among them, for whoever watches."""
        return len(self._rows)

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Tokens of each prompt, chat template and longest label included."""
        return [asked.tokens for asked in tokenize(requests, self._chat)]

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Answer the requests, begun in their order, each given as it ends.

        Raises:
            UserError: a request asks for the likelihood of labels, or vLLM refuses one.
        """
        if labelled := next((request for request in requests if request.labels), None):
            raise UserError(f"{labelled.rid}: vllm gives no likelihood of labels; set models.*.engine: auto or static")
        for start in range(0, len(requests), FEED_ROWS):
            if self._stopped:
                break
            chunk = requests[start : start + FEED_ROWS]
            for item in prepare(chunk, self._chat, self._config, self._context_tokens):
                if isinstance(item, Completion):
                    yield item
                elif item.tokens > self._longest:
                    yield out_of_memory(item)
                else:
                    self._add(item)
            yield from self._ended_in_step()
            yield from self._run_down_to(self._window)
        yield from self._run_down_to(0)

    def stop(self) -> None:
        """The rows in flight are the last."""
        self._stopped = True

    def close(self) -> None:
        """Free the model's memory, also for the driver, and end vLLM's processes and process groups.

        After a signal the end of this process does that: vLLM takes seconds for it, and there may be two left.
        """
        import gc

        import torch

        if self._stopped:
            return
        self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _add(self, item: Prepared) -> None:
        """Hand a row to vLLM, which queues it."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        settings = sampling_arguments(item.request, self._stop_ids)
        number = next(self._numbers)
        try:
            if schema := item.request.sampling.json_schema:
                settings["structured_outputs"] = StructuredOutputsParams(json=schema)
            params = SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)
            self._engine.add_request(number, tokens_input(item.ids), params)
        except _refusals() as error:
            raise UserError(f"{item.request.rid}: vllm refuses it: {_first_line(error)}; correct the row") from error
        self._rows[number] = item

    def _run_down_to(self, most: int) -> Iterator[Outcome]:
        """Step until no more than so many rows are with vLLM; when stopped, until those in flight have ended."""
        while len(self._rows) > most or (self._stopped and self._rows):
            if self._stopped:
                self._drop([number for number, stats in self._running() if not stats.scheduled_ts])
            yield from self._ended_in_step()

    def _ended_in_step(self) -> Iterator[Outcome]:
        """One step of vLLM, a token for each row that runs: the rows that ended in it."""
        if not self._rows:
            return
        try:
            outputs = self._engine.step()
        except Exception as error:
            if self._stopped:  # its processes got the signal too
                self._rows.clear()
                return
            raise RuntimeError(f"vllm's engine ended: {_first_line(error)}; run again to go on") from error
        for output in outputs:
            if output.finished and (item := self._rows.pop(output.request_id, None)):
                yield self._outcome(item, output)
        yield from self._given_up()

    def _outcome(self, item: Prepared, output: Any) -> Outcome:
        """What vLLM's last word on a row means."""
        (answer,), stats = output.outputs, output.metrics
        if stats.is_corrupted:
            return not_finite(item, stats.num_generation_tokens - 1, self.dtype)
        if answer.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vllm ended {item.request.rid} with {answer.finish_reason}; run again to go on")
        seconds = stats.last_token_ts - stats.scheduled_ts
        completion = read_answer(item, list(answer.token_ids), self._chat, seconds)
        if isinstance(answer.stop_reason, str) and completion.finish_reason == "length":
            # A stop text that only token by token is there: the tokenizer tidies a whole text.
            return replace(completion, text=answer.text, finish_reason="stop")
        return completion

    def _given_up(self) -> Iterator[Outcome]:
        """Rows that ran over their time, or whose logits are not finite, taken back from vLLM."""
        limit_s, now_s = self._config.timeout_seconds, time.monotonic()
        over: dict[str, Outcome] = {}
        for number, stats in self._running():
            if stats.is_corrupted:
                over[number] = not_finite(self._rows[number], stats.num_generation_tokens - 1, self.dtype)
            elif limit_s is not None and stats.scheduled_ts and now_s - stats.scheduled_ts > limit_s:
                over[number] = timed_out(self._rows[number], stats.num_generation_tokens, limit_s)
        self._drop(list(over))
        yield from over.values()

    def _running(self) -> Iterator[tuple[str, Any]]:
        """The rows that vLLM has, with its RequestStateStats; scheduled_ts (time.monotonic) is 0 for one that waits."""
        for state in self._engine.output_processor.request_states.values():
            yield state.external_req_id, state.stats

    def _drop(self, numbers: Sequence[str]) -> None:
        """Take rows back from vLLM."""
        if numbers:
            self._engine.abort_request(list(numbers))
            for number in numbers:
                del self._rows[number]


def sampling_arguments(request: Request, stop_ids: Sequence[int]) -> JsonDict:
    """The arguments of vLLM's SamplingParams for a request.

    Raises:
        UserError: a temperature that vLLM would refuse or change.
    """
    sampling = request.sampling
    low, high = TEMPERATURES
    if sampling.temperature and not low <= sampling.temperature <= high:
        raise UserError(
            f"temperature {sampling.temperature:g} is not 0 and not between {low:g} and {high:g}, which is what vllm "
            "takes; change it or set models.*.engine: static"
        )
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # 0: no limit, as here
        "repetition_penalty": sampling.repetition_penalty,
        "seed": row_seed(request),
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "detokenize": bool(sampling.stop),  # vLLM looks for stop texts in the text; nothing else here needs it
    }


def arguments(folder: Path, model: ModelConfig, context_tokens: int | None, dtype: str, gpus: int) -> JsonDict:
    """The arguments of vLLM's EngineArgs.

    Args:
        folder: the model folder.
        model: the model's config; `vllm_limits.why_not` has nothing against it.
        context_tokens: the most tokens of prompt and answer together.
        dtype: the dtype in force; vLLM's own "auto" would make float16 of float32.
        gpus: how many GPUs the worker holds; 0: the CPU.
    """
    found: JsonDict = {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": _longest(folder, context_tokens),
        "max_num_seqs": model.max_batch_rows,
        "tensor_parallel_size": max(1, gpus),
        "trust_remote_code": model.trust_remote_code,
        "load_format": "auto" if model.allow_pickle else "safetensors",
        "quantization": "bitsandbytes" if model.quantization == "4bit" else None,
        "generation_config": "vllm",  # not the checkpoint's, which would add sampling of its own
        "language_model_only": True,
        "enforce_eager": gpus == 0,  # on a CPU compiling takes a minute or more, and gains a third
        "disable_log_stats": False,  # they carry the times and the NaNs of each row
        "use_tqdm_on_load": False,
    }
    return found | ({"gpu_memory_utilization": _free_share()} if gpus else {})


def _longest(folder: Path, context_tokens: int | None) -> int:
    """max_model_len: -1, the model's own as far as the cache has room, unless the config wants another limit."""
    config = read_json(folder / "config.json")
    config = config.get("text_config") or config
    own = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    long_rope = "longrope" in (rope.get("rope_type"), rope.get("type"))  # of it vLLM would take the short context
    return -1 if context_tokens is None or (context_tokens == own and not long_rope) else context_tokens


def start(settings: JsonDict) -> Any:
    """A vLLM engine with weights and cache.

    Raises:
        UserError: vLLM refuses the model or finds no room for it.
    """
    import torch
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    try:
        # The context of offline work has the larger batches.
        return LLMEngine.from_engine_args(EngineArgs(**settings), usage_context=UsageContext.LLM_CLASS)
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        raise UserError(
            f"vllm cannot start with this model: {_first_line(error)}; see docs/troubleshooting.md, or set "
            "models.*.engine: static"
        ) from error


def _refusals() -> tuple[type[Exception], ...]:
    """How vLLM says that it does not take a request; of its own kind since 0.32, before that a ValueError."""
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return (ValueError,)
    return (ValueError, VLLMValidationError)


def gpus_of_lease() -> int:
    """How many GPUs torch sees: those of the lease."""
    import torch

    return int(torch.cuda.device_count())


def _free_share() -> float:
    """The share of a GPU's memory that vLLM may take; asked of the driver, for torch would open a context on each."""
    there = devices.usable(devices.inventory(), os.environ)
    free = [1 - gpu.memory_used_mib / gpu.memory_total_mib for gpu in there]
    return round(FREE_SHARE * min(free, default=1.0), 3)


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, for a message of one line; pydantic's first line only counts the errors."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[2] if len(lines) > 2 and "validation error" in lines[0] else lines[0]) if lines else repr(error)
