"""The plan for people: results/plan.txt, what a run prints first, `snakemake plan` and scripts/plan.py show it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from gristmill.config.schema import Config
from gristmill.gpu import nvml, topology
from gristmill.planning.memory import Where, local_folder, memory_lines
from gristmill.planning.plan import Group, Plan, count, numbers_that_work
from gristmill.types import Gpu


def plan_text(
    config: Config,
    plan: Plan,
    uses: Mapping[str, nvml.Use] | None = None,
    links: nvml.Links | None = None,
    where: Where = local_folder,
    configfiles: Sequence[str] = (),
) -> str:
    """Who gets which GPUs, what fits them, and the commands to run.

    Args:
        config: the whole config.
        plan: what was decided.
        uses: UUID → what runs on it now (gpus.use).
        links: how near the GPUs are to each other (gpus.links).
        where: finds a model's weights.
        configfiles: what --configfile named.
    """
    lines = [_tokens_line(plan)]
    lines += [_gpu_line(gpu, (uses or {}).get(gpu.uuid)) for gpu in plan.gpus]
    lines += [f"  left out: {uuid}, {why}" for uuid, why in plan.busy.items()]
    for name in plan.gpus_per_model:
        lines.append(_model_line(plan, name, links or {}))
        lines += [f"  {line}" for line in _shard_lines(config.models[name].shards_per_worker, plan.workers(name))]
        lines += [f"  {line}" for line in memory_lines(config, plan, name, where)]
    return "\n".join([*lines, _commands(plan, configfiles)]) + "\n"


def _tokens_line(plan: Plan) -> str:
    tokens = count(plan.tokens, "GPU token")
    if plan.gpus:
        lowered = plan.limit is not None and plan.limit > plan.tokens
        there = f" (--resources gpu={plan.limit} asks for more than may be used here)" if lowered else ""
        return f"{tokens} for {count(len(plan.gpus), 'GPU')}{there}:"
    if plan.cpu_only:
        return f"{tokens}, no GPU (gpus.devices is none): a token is a CPU slot"
    if plan.cluster:
        return f"{tokens} for jobs on a cluster, each a GPU"
    return f"{tokens}, no GPU on this machine: a token is a CPU slot"


def _gpu_line(gpu: Gpu, use: nvml.Use | None) -> str:
    line = f"  GPU {gpu.index}  {gpu.name}  {gpu.memory_total_mib} MiB  {gpu.uuid}"
    if use is None or not (use.used_mib or use.processes):
        return line
    return f"{line}  {use.used_mib} MiB in use" + "".join(f", {process}" for process in use.processes)


def _model_line(plan: Plan, name: str, links: nvml.Links) -> str:
    if not plan.gpus_per_model[name]:
        return f"model {name}: served elsewhere, no GPU, {_worker_words(plan, name)}"
    if plan.groups:
        return "\n".join([f"model {name}: {_worker_words(plan, name)}", *_group_lines(plan, name, links)])
    size, workers = plan.gpus_per_model[name], plan.workers(name)
    unit = "GPU" if plan.gpus or (plan.cluster and not plan.cpu_only) else "slot"
    line = f"model {name}: {count(size, unit)} each, {_worker_words(plan, name)}"
    if plan.gpus:
        line += f": {_sets(plan.gpus, size, workers, links)} (as long as no other job holds them)"
    return line + _left_over(plan, plan.tokens - workers * size, plan.tokens)


def _shard_lines(each: int, workers: int) -> list[str]:
    """How often the model is loaded, where that is not once a worker."""
    if each == 1:
        return []
    return [f"{each} shards a worker: up to {count(each * workers, 'job')} for a run or judge target, a load each"]


def _group_lines(plan: Plan, name: str, links: nvml.Links) -> list[str]:
    """One line a group: its workers, what they get and what is left over."""
    return [_group_line(plan, group, name, links) for group in plan.groups]


def _group_line(plan: Plan, group: Group, name: str, links: nvml.Links) -> str:
    size = max(plan.gpus_per_model[name], group.gpus_per_model)
    here = [worker for worker in plan.workers_of(name) if worker.group == group.number]
    line = f"  group {group.number}, speed {group.speed:g}: {count(size, 'GPU')} each, {count(len(here), 'worker')}"
    if here:
        line += f": {_sets(group.gpus, size, len(here), links)} (as long as no other job holds them)"
    left = len(group.gpus) - len(here) * size
    if left >= size:
        return f"{line}; {left} left over ({count(plan.tokens, 'GPU token')} for all groups)"
    return line + _left_over(plan, left, len(group.gpus))


def _worker_words(plan: Plan, name: str) -> str:
    return f"{count(plan.workers(name), 'worker')} with {count(plan.threads(name), 'thread')} each"


def _sets(gpus: tuple[Gpu, ...], size: int, workers: int, links: nvml.Links) -> str:
    """`0+1, 2+3`: what the workers get when they start on free GPUs."""
    groups = topology.groups_of(gpus, size, links)[:workers]
    return ", ".join("+".join(str(gpu.index) for gpu in group) for group in groups)


def _left_over(plan: Plan, left: int, there: int) -> str:
    return f"; {left} left over (gpus_per_model {numbers_that_work(plan, there)} would use all)" if left else ""


def _commands(plan: Plan, configfiles: Sequence[str]) -> str:
    limit = "" if plan.cluster else f" --resources gpu={plan.tokens}"
    profile = " --workflow-profile profiles/slurm" if plan.cluster else " --cores all"
    config = f" --configfile {shlex.join(configfiles)}" if configfiles else ""
    return f"run:   snakemake{profile}{limit}{config}\nlook:  snakemake{profile}{config} -n"
