"""The engines, and how one is picked. A model's engine is opened in the job that generates, after the lease.

`auto` takes vllm where that is installed and can do what the config asks, else static, which can do all of it. Why one
was picked is returned with it, for the log and the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.types import Engine, JsonDict


def open_engine(model: ModelConfig, weights: JsonDict, on_gpu: bool, log: Callable[[str], None]) -> tuple[Engine, str]:
    """Load the model with the engine its config names.

    Args:
        model: the model's config.
        weights: results/models/<model>.json.
        on_gpu: whether the job holds GPUs.
        log: takes messages.

    Returns:
        The engine, and why it was picked.
    """
    if model.engine == "echo":
        from gristmill.engines.echo import EchoEngine

        return EchoEngine(context_limit(model, weights), model.on_overflow), "the config says engine: echo"
    folder, limit = Path(weights["folder"]), context_limit(model, weights)
    why = f"the config says engine: {model.engine}"
    if model.engine != "static":
        reason = _why_not_vllm(folder, model, on_gpu)
        if reason is None:
            from gristmill.engines.vllm import VllmEngine

            why = "auto: vllm is installed and knows the model" if model.engine == "auto" else why
            return VllmEngine(folder, model, limit, on_gpu, log), why
        if model.engine == "vllm":
            raise UserError(f"engine: vllm cannot be used: {reason}; or set engine: auto")
        why = f"auto: {reason}"
    from gristmill.engines.static import StaticEngine

    return StaticEngine(folder, model, limit, on_gpu, log), why


def _why_not_vllm(folder: Path, model: ModelConfig, on_gpu: bool) -> str | None:
    """What speaks against vllm for this model on the worker's GPUs; None: nothing."""
    from gristmill.engines.vllm_limits import installed, why_not

    if not on_gpu or not installed():
        return why_not(folder, model, 0)
    import torch

    return why_not(folder, model, max(1, torch.cuda.device_count()))


def context_limit(model: ModelConfig, weights: JsonDict) -> int | None:
    """The most tokens a prompt and its answer may have together; None when there is no known limit."""
    limits = [limit for limit in (model.context_tokens, weights["context_tokens"]) if limit is not None]
    return min(limits, default=None)
