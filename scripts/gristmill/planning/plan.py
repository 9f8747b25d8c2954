"""How many workers each model gets and on which GPUs, said before the first job (text.py says it).

- Tokens are what `--resources gpu=N` gives; without it, the GPUs this machine may use, or on a machine without any
  `gpus.total` (default 1) slots of CPU. On a cluster, where no limit is given, `gpus.total` says how many to plan for.
- A limit above the GPUs that may be used is lowered to them, and the plan says so.
- GPUs that others fill without a lease are left out, unless that leaves none: then the jobs wait for them.
- workers = tokens / gpus_per_model. A model larger than the tokens stops here: Snakemake would silently give it less.
- A model that is served elsewhere (engine: endpoint) has one worker without a GPU.
- With `gpus.groups` every group has workers of its own: of the group's gpus_per_model, or of the model's where that is
  larger. A model never gets fewer GPUs than it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gristmill.config.schema import Config, GpusConfig, ModelConfig
from gristmill.errors import UserError
from gristmill.gpu.gpus import usable as usable_of
from gristmill.planning.workers import Worker
from gristmill.types import Gpu

#: More CPU threads than this do not help a GPU worker; on a machine without GPUs all cores are shared out.
GPU_WORKER_THREADS = 8
#: Threads for each GPU of a worker when the cores are not known (a cluster).
CLUSTER_THREADS = 4
#: Split and merge hold a file of every shard open, and a process may have 1,024 (ulimit -n) on most machines.
MAX_SHARDS = 1000


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that are alike."""

    gpus: tuple[Gpu, ...]
    #: GPUs of one worker at least.
    gpus_per_model: int = 1
    speed: float = 1.0
    #: Position in gpus.groups; None for the group of all GPUs.
    number: int | None = None

    @property
    def memory_mib(self) -> int | None:
        """Memory of the smallest GPU."""
        return min((gpu.memory_total_mib for gpu in self.gpus), default=None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens, and what they mean for every model."""

    tokens: int
    gpus: tuple[Gpu, ...]
    #: What each model asks for itself; 0: it is served elsewhere.
    gpus_per_model: dict[str, int]
    cores: int | None
    #: N of `--resources gpu=N` as it was given.
    limit: int | None = None
    #: The jobs run elsewhere; `gpus` is then empty.
    cluster: bool = False
    #: What gpus.groups says; empty: all GPUs are one group.
    groups: tuple[Group, ...] = ()
    #: gpus.devices is none: tokens are CPU slots also where there are GPUs.
    cpu_only: bool = False
    #: GPUs that may be used but that others fill or that are set aside, UUID → why; the plan does without them.
    busy: Mapping[str, str] = field(default_factory=dict)

    def workers(self, model: str) -> int:
        """Groups that can hold a copy of the model at once."""
        return len(self.workers_of(model))

    def workers_of(self, model: str) -> list[Worker]:
        """The model's workers, the fastest first; whose a shard is says `worker_of`."""
        size, left = self.gpus_per_model[model], self.tokens
        if not size:
            return [Worker(0)]
        if not self.groups:
            memory_mib = Group(self.gpus).memory_mib
            return [Worker(size, memory_mib=memory_mib)] * (left // size)
        found: list[Worker] = []
        for group in sorted(self.groups, key=lambda group: -group.speed):
            each = max(size, group.gpus_per_model)
            count = min(len(group.gpus), left) // each
            found += [Worker(each, group.speed, group.number, group.memory_mib)] * count
            left -= count * each
        return found

    def all_workers(self) -> dict[str, list[Worker]]:
        """Model → workers."""
        return {name: self.workers_of(name) for name in self.gpus_per_model}

    def threads(self, model: str) -> int:
        """CPU threads for one worker, so that all workers together fit the cores."""
        if not self.gpus_per_model[model]:
            return 1
        if self.cores is None:
            return CLUSTER_THREADS * self.gpus_per_model[model]
        share = max(1, self.cores // max(1, self.workers(model)))
        return min(share, GPU_WORKER_THREADS) if self.gpus else share


def make_plan(
    config: Config,
    usable: Sequence[Gpu],
    limit: int | None,
    cores: int | None,
    cluster: bool,
    busy: Mapping[str, str] | None = None,
) -> Plan:
    """Decide the tokens and check every model against them.

    Args:
        config: the whole config.
        usable: the GPUs this machine may use; empty on a machine without.
        limit: N of `--resources gpu=N`, None when it was not given.
        cores: `--cores`, None on a cluster.
        cluster: whether jobs run elsewhere, so that this machine's GPUs say nothing.
        busy: UUID → why, for the GPUs that others fill without a lease and those that are set aside.

    Raises:
        UserError: a model needs more GPUs than there are tokens or makes too many shards, or gpus.devices names none
            that may be used.
    """
    if not usable and not isinstance(config.gpus.wanted(), str) and not cluster:
        key, step = ("groups names", "remove gpus.groups") if config.gpus.groups else ("devices is", "set it to auto")
        raise UserError(f"gpus.{key} {config.gpus.wanted()}, but no GPU may be used here; {step}")
    if cluster and not isinstance(config.gpus.wanted(), str):
        key = "groups" if config.gpus.groups else "devices"
        raise UserError(
            f"gpus.{key} names GPUs of this machine, but the jobs run on a cluster, which gives them GPUs of its own; "
            f"remove gpus.{key}"
        )
    free = [gpu for gpu in usable if gpu.uuid not in (busy or {})] or list(usable)
    groups = _groups(config.gpus, free)
    tokens = _tokens(config, free, limit, cluster)
    sizes = {name: _gpus_of(model) for name, model in config.models.items() if _is_used(config, name)}
    here = () if cluster else tuple(free)
    cores = None if cluster else cores
    plan = Plan(tokens, here, sizes, cores, limit, cluster, groups, config.gpus.devices == "none", busy or {})
    for name in sizes:
        if not plan.workers_of(name):
            raise UserError(_too_large(plan, name, _source(config, free, limit, cluster)))
        _refuse_too_many_shards(name, config.models[name].shards_per_worker, plan.workers(name))
    return plan


def numbers_that_work(plan: Plan, most: int) -> str:
    """The values of gpus_per_model that leave no GPU over, as text."""
    pools = [len(group.gpus) for group in plan.groups] or [most]
    fitting = [size for size in range(1, max(pools) + 1) if all(pool % size == 0 for pool in pools)]
    return ", ".join(map(str, fitting))


def count(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _groups(config: GpusConfig, free: Sequence[Gpu]) -> tuple[Group, ...]:
    """The groups of the config with those of their GPUs that are free."""
    found: list[Group] = []
    taken: set[Gpu] = set()
    for number, group in enumerate(config.groups):
        gpus = _chosen(free, group.devices)
        if twice := taken.intersection(gpus):
            raise UserError(f"gpus.groups name GPU {min(gpu.index for gpu in twice)} twice; a GPU belongs to one group")
        taken.update(gpus)
        found.append(Group(tuple(gpus), group.gpus_per_model, group.speed, number))
    return tuple(found)


def _chosen(free: Sequence[Gpu], devices: Sequence[int | str]) -> list[Gpu]:
    """Those of the named devices that are free; a name that fits none is masked or busy, or was refused before."""
    found: list[Gpu] = []
    for device in devices:
        try:
            found += usable_of(free, {}, [device])
        except UserError:
            continue
    return list(dict.fromkeys(found))


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


def _too_large(plan: Plan, name: str, source: str) -> str:
    size, tokens = plan.gpus_per_model[name], plan.tokens
    if plan.groups:
        sizes = ", ".join(f"{len(group.gpus)} with {group.gpus_per_model} a worker" for group in plan.groups)
        return (
            f"models.{name}.gpus_per_model is {size}, but no group of gpus.groups has room for a worker "
            f"({sizes} GPUs; {count(tokens, 'GPU token')}: {source}); lower gpus_per_model of the model or of a group, "
            "or name more devices"
        )
    busy = "".join(f"; {uuid} left out, {why}" for uuid, why in plan.busy.items())
    fitting = ", ".join(str(number) for number in range(1, tokens + 1) if tokens % number == 0)
    return (
        f"models.{name}.gpus_per_model is {size}, but there are {count(tokens, 'GPU token')} ({source}{busy}); "
        f"use gpus_per_model {fitting}, or --resources gpu={size} on a machine that has them"
    )


def _refuse_too_many_shards(name: str, shards_per_worker: int, workers: int) -> None:
    if shards_per_worker > 1 and shards_per_worker * workers > MAX_SHARDS:
        raise UserError(
            f"models.{name}.shards_per_worker is {shards_per_worker}: {count(workers, 'worker')} would make "
            f"{shards_per_worker * workers} shards, over the {MAX_SHARDS} that are merged at once; "
            f"use {max(1, MAX_SHARDS // workers)} or less"
        )


def _gpus_of(model: ModelConfig) -> int:
    return 0 if model.endpoint is not None else model.gpus_per_model


def _is_used(config: Config, model: str) -> bool:
    used = {run.model for run in config.runs.values()} | {judge.model for judge in config.judges.values()}
    return model in used | {logits.model for logits in config.logits.values()}
