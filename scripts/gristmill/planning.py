"""How many workers each model gets, said before the first job.

- Tokens are what `--resources gpu=N` gives; without it, the GPUs this machine may use, or on a machine without any
  `gpus.total` (default 1) slots of CPU. On a cluster, where no limit is given, `gpus.total` says how many to plan for.
- A limit above the GPUs that may be used is lowered to them, and the plan says so.
- workers = tokens / gpus_per_model. A model larger than the tokens stops here: Snakemake would silently give it less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.config.schema import Config
from gristmill.errors import UserError
from gristmill.types import Gpu

#: More CPU threads than this do not help a GPU worker; on a machine without GPUs all cores are shared out.
GPU_WORKER_THREADS = 8
#: Threads of a worker when the cores are not known (a cluster).
CLUSTER_THREADS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens, and what they mean for every model."""

    tokens: int
    gpus: tuple[Gpu, ...]
    gpus_per_model: dict[str, int]
    cores: int | None
    #: N of `--resources gpu=N` as it was given.
    limit: int | None = None
    #: The jobs run elsewhere; `gpus` is then empty.
    cluster: bool = False

    def workers(self, model: str) -> int:
        """Groups that can hold a copy of the model at once."""
        return self.tokens // self.gpus_per_model[model]

    def threads(self, model: str) -> int:
        """CPU threads for one worker, so that all workers together fit the cores."""
        if self.cores is None:
            return CLUSTER_THREADS
        share = max(1, self.cores // max(1, self.workers(model)))
        return min(share, GPU_WORKER_THREADS) if self.gpus else share

    def text(self) -> str:
        """The plan for people (results/plan.txt)."""
        lines = [_tokens_line(self)]
        lines += [f"  GPU {gpu.index}  {gpu.name}  {gpu.memory_total_mib} MiB  {gpu.uuid}" for gpu in self.gpus]
        lines += [self._model_line(name) for name in self.gpus_per_model]
        return "\n".join(lines) + "\n"

    def _model_line(self, name: str) -> str:
        size, workers = self.gpus_per_model[name], self.workers(name)
        left = self.tokens - workers * size
        unit = "GPU" if self.gpus or self.cluster else "slot"
        line = f"model {name}: {_count(size, unit)} each, {_count(workers, 'worker')}"
        line += f" with {_count(self.threads(name), 'thread')} each"
        if self.gpus:
            groups = [self.gpus[start : start + size] for start in range(0, workers * size, size)]
            line += ": " + ", ".join("+".join(str(gpu.index) for gpu in group) for group in groups)
            line += " (as long as no other job holds them)"
        return line + (f"; {left} left over" if left else "")


def make_plan(config: Config, usable: Sequence[Gpu], limit: int | None, cores: int | None, cluster: bool) -> Plan:
    """Decide the tokens and check every model against them.

    Args:
        config: the whole config.
        usable: the GPUs this machine may use; empty on a machine without.
        limit: N of `--resources gpu=N`, None when it was not given.
        cores: `--cores`, None on a cluster.
        cluster: whether jobs run elsewhere, so that this machine's GPUs say nothing.

    Raises:
        UserError: a model needs more GPUs than there are tokens, or gpus.devices names none that may be used.
    """
    if not usable and config.gpus.devices != "auto" and not cluster:
        raise UserError(f"gpus.devices is {config.gpus.devices}, but no GPU may be used here; set it to auto")
    tokens = _tokens(config, usable, limit, cluster)
    sizes = {name: model.gpus_per_model for name, model in config.models.items() if _is_used(config, name)}
    for name, size in sizes.items():
        if size > tokens:
            raise UserError(_too_large(name, size, tokens, _source(config, usable, limit, cluster)))
    return Plan(tokens, () if cluster else tuple(usable), sizes, cores, limit, cluster)


def _tokens(config: Config, usable: Sequence[Gpu], limit: int | None, cluster: bool) -> int:
    if limit is not None and limit < 1:
        raise UserError(f"--resources gpu={limit} leaves no token for a job; use 1 or more, also without a GPU")
    there = 0 if cluster else len(usable)
    if there:
        return min(limit or there, there)
    return limit or config.gpus.total or 1


def _source(config: Config, usable: Sequence[Gpu], limit: int | None, cluster: bool) -> str:
    """Where the number of tokens comes from."""
    there = 0 if cluster else len(usable)
    if there and (limit is None or limit > there):
        return "the GPUs that may be used here"
    if limit is not None:
        return f"--resources gpu={limit}"
    return "no --resources gpu was given" if config.gpus.total is None else f"gpus.total is {config.gpus.total}"


def _too_large(name: str, size: int, tokens: int, source: str) -> str:
    fitting = ", ".join(str(count) for count in range(1, tokens + 1) if tokens % count == 0)
    return (
        f"models.{name}.gpus_per_model is {size}, but there are {_count(tokens, 'GPU token')} ({source}); "
        f"use gpus_per_model {fitting}, or --resources gpu={size} on a machine that has them"
    )


def _is_used(config: Config, model: str) -> bool:
    used = {run.model for run in config.runs.values()} | {judge.model for judge in config.judges.values()}
    return model in used


def _tokens_line(plan: Plan) -> str:
    tokens = _count(plan.tokens, "GPU token")
    if plan.gpus:
        lowered = plan.limit is not None and plan.limit > plan.tokens
        there = f" (--resources gpu={plan.limit} asks for more than may be used here)" if lowered else ""
        return f"{tokens} for {_count(len(plan.gpus), 'GPU')}{there}:"
    if plan.cluster:
        return f"{tokens} for jobs on a cluster, each a GPU"
    return f"{tokens}, no GPU on this machine: a token is a CPU slot"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
