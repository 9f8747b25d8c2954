"""The engines, and how one is picked. A model's engine is opened in the job that generates, after the lease.

`auto` takes the fastest installed engine that can do the work; today that is `static`. Why it was picked is returned
with it, for the log and the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gristmill.config.schema import ModelConfig
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
    if model.engine == "continuous":
        from gristmill.engines.continuous import ContinuousEngine

        engine = ContinuousEngine(Path(weights["folder"]), model, context_limit(model, weights), on_gpu, log)
        return engine, "the config says engine: continuous"
    from gristmill.engines.static import StaticEngine

    why = "the config says engine: static" if model.engine == "static" else "auto: generate() works with any device_map"
    return StaticEngine(Path(weights["folder"]), model, context_limit(model, weights), on_gpu, log), why


def context_limit(model: ModelConfig, weights: JsonDict) -> int | None:
    """The most tokens a prompt and its answer may have together; None when there is no known limit."""
    limits = [limit for limit in (model.context_tokens, weights["context_tokens"]) if limit is not None]
    return min(limits, default=None)
