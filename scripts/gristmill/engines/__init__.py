"""The engines, and how one is opened: in the job that generates, after the lease. engines.choice picks it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.types import Engine, JsonDict, Sampling


def open_engine(
    model: ModelConfig,
    weights: JsonDict,
    on_gpu: bool,
    log: Callable[[str], None],
    samplings: Collection[Sampling] = (),
    labelled: bool = False,
) -> tuple[Engine, str]:
    """Load the model with the engine its config names, or the one that `auto` picks.

    Args:
        model: the model's config.
        weights: results/models/<model>.json.
        on_gpu: whether the job holds GPUs.
        log: takes messages.
        samplings: the sampling settings of the requests to come.
        labelled: whether some of them ask for the likelihood of labels.

    Returns:
        The engine, and why it was picked.

    Raises:
        UserError: the engine that the config names cannot do what it asks.
    """
    limit = context_limit(model, weights)
    if model.engine == "echo":
        from gristmill.engines.echo import EchoEngine

        return EchoEngine(limit, model.on_overflow), "the config says engine: echo"
    if model.endpoint is not None:
        from gristmill.engines.endpoint.engine import EndpointEngine

        return EndpointEngine(model.endpoint, model.on_overflow, log), "the config says engine: endpoint"
    from gristmill.engines.choice import Setting, choose

    folder = Path(weights["folder"])
    choice = choose(Setting(folder, model, weights, _gpus() if on_gpu else 0, samplings, labelled))
    if choice.engine == "continuous":
        from gristmill.engines.continuous.engine import ContinuousEngine

        return ContinuousEngine(folder, model, limit, on_gpu, log, choice.ranks), choice.why
    if choice.engine == "vllm":
        from gristmill.engines.vllm.engine import VllmEngine

        return VllmEngine(folder, model, limit, on_gpu, log), choice.why
    from gristmill.engines.static.engine import StaticEngine

    return StaticEngine(folder, model, limit, on_gpu, log), choice.why


def context_limit(model: ModelConfig, weights: JsonDict) -> int | None:
    """The most tokens a prompt and its answer may have together; None when there is no known limit."""
    limits = [limit for limit in (model.context_tokens, weights["context_tokens"]) if limit is not None]
    return min(limits, default=None)


def _gpus() -> int:
    """The GPUs of the lease; at least 1, so that a torch without CUDA is told of where the model loads."""
    import torch

    return max(1, torch.cuda.device_count())
