"""The memory of a config's models on the GPUs of a plan: what stops a plan that cannot fit, and the plan's lines on it.

Only weights that lie on this machine are looked at, through their headers: at the start of every run this must take
milliseconds. A model that is still to be fetched is checked when its requests are split, before a job waits for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gristmill.config.schema import Config, ModelConfig
from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.keys import WEIGHTLESS
from gristmill.memory.estimate import GIB, MIB, Load, cache_bytes_per_token, dtype_bytes, weight_bytes
from gristmill.memory.fitting import PROMPT_TOKENS, fit, require_fit, verdict
from gristmill.memory.shapes import Shape, read_shape
from gristmill.planning.plan import Plan
from gristmill.planning.workers import Worker
from gristmill.weights import expanded

_BYTES_NAMES = {4: "32-bit", 2: "16-bit", 1: "8-bit"}
#: Says where a model's folder is; None while it is not on this machine.
Where = Callable[[str, ModelConfig], Path | None]


def local_folder(name: str, model: ModelConfig) -> Path | None:
    """Where a model's weights are: as an earlier run described them, a folder of the config, or the hub's cache."""
    described = Path("results/models") / f"{name}.json"
    if described.is_file() and read_json(described).get("source") == model.source:
        folder = read_json(described).get("folder")
        return Path(folder) if folder and Path(folder).is_dir() else None
    if model.source and Path(model.source).is_dir():
        return Path(model.source)
    return _cached(model)


def load_of(config: Config, name: str, shape: Shape) -> Load:
    """One row of the longest answer that the config asks of the model, with room for a prompt of 1,024 tokens."""
    samplings = [run.sampling for run in config.runs.values() if run.model == name]
    samplings += [judge.sampling for judge in config.judges.values() if judge.model == name]
    new_tokens = max((sampling.max_new_tokens for sampling in samplings), default=256)
    limits = [limit for limit in (config.models[name].context_tokens, shape.context_tokens) if limit]
    prompt_tokens = max(1, min([PROMPT_TOKENS, *(limit - new_tokens for limit in limits)]))
    return Load(1, prompt_tokens, new_tokens, any(sampling.temperature > 0 for sampling in samplings))


def refuse_unfit(config: Config, plan: Plan, where: Where = local_folder, from_config: bool = False) -> None:
    """Stop before the first job when a model cannot fit the GPUs of its workers.

    Args:
        config: the whole config.
        plan: what was decided.
        where: finds a model's weights.
        from_config: also judge models of which only config.json is here; that takes torch and seconds.

    Raises:
        UserError: one line for each such model.
    """
    problems: list[str] = []
    for name in plan.gpus_per_model:
        model = config.models[name]
        folder = where(name, model) if model.engine not in WEIGHTLESS else None
        if folder is None or not (from_config or any(folder.glob("*.safetensors"))):
            continue
        shape = read_shape(folder)
        try:
            for worker in dict.fromkeys(plan.workers_of(name)):
                check_worker(name, shape, model, load_of(config, name, shape), worker, plan.tokens)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


def check_worker(name: str, shape: Shape, model: ModelConfig, load: Load, worker: Worker, most: int) -> None:
    """Refuse one worker whose GPUs cannot hold the model; `most` is the largest number of GPUs to propose."""
    if worker.memory_mib is not None:
        require_fit(name, shape, model, load, worker.memory_mib, worker.gpus, most)


def memory_lines(config: Config, plan: Plan, name: str, where: Where = local_folder) -> list[str]:
    """What the plan says about a model's memory; one line where its weights are not here yet."""
    model = config.models[name]
    if model.engine == "echo":
        return ["engine echo: no weights"]
    if model.endpoint is not None:
        key = model.endpoint.key_env
        unset = f"; {key} is not set here" if key and not os.environ.get(key) else ""
        return [f"engine endpoint: {model.endpoint.model} at {model.endpoint.base_url}{unset}"]
    folder = where(name, model)
    if folder is None:
        return ["memory: known when the weights are here; checked before any job waits for a GPU"]
    try:
        shape = read_shape(folder)
    except UserError as error:
        return [f"memory: not known: {error}"]
    lines = [_weights_line(shape, model)]
    for worker in dict.fromkeys(plan.workers_of(name)):
        if worker.memory_mib is not None:
            lines += _worker_lines(shape, model, load_of(config, name, shape), worker, plan)
    return lines


def _weights_line(shape: Shape, model: ModelConfig) -> str:
    how = model.quantization if isinstance(model.quantization, str) else None
    bits = {"8bit": "8-bit", "4bit": "4-bit"}.get(how or "", _BYTES_NAMES[dtype_bytes(shape, model)])
    cache = cache_bytes_per_token(shape, model) / MIB
    size = sum(weight_bytes(shape, model)) / GIB
    return (
        f"{shape.parameters / 1e9:.2f} billion parameters, {size:.1f} GiB in {bits}; {cache:.3f} MiB of cache a token"
    )


def _worker_lines(shape: Shape, model: ModelConfig, load: Load, worker: Worker, plan: Plan) -> list[str]:
    assert worker.memory_mib is not None
    said = verdict(shape, model, load, worker.memory_mib, worker.gpus, plan.tokens)
    line = f"{worker.gpus} × {worker.memory_mib / 1024:.1f} GiB: {said}"
    found = fit(shape, model, load, [worker.memory_mib] * worker.gpus)
    if found.estimates is None or not found.fits:
        return [line]
    weights = " + ".join(f"{one.weights / GIB:.1f}" for one in found.estimates)
    return [line, f"weights {weights} GiB; beside them room for {found.cache_tokens:,} tokens of cache in a batch"]


def _cached(model: ModelConfig) -> Path | None:
    """The snapshot in the hub's cache, by its path: importing huggingface_hub would cost every run 0.3 seconds."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = expanded(model.cache_dir, "models.*.cache_dir") if model.cache_dir is not None else None
    cache = (
        hub or Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    ) / f"models--{(model.source or '').replace('/', '--')}"
    reference = cache / "refs" / (model.revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else (model.revision or "main")
    snapshot = cache / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None
