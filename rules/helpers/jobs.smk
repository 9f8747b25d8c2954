# What the job of a shard works for, and what it asks for: its GPUs, memory, threads, tokens.

import functools

from snakemake.resources import Resource

from gristmill.config.check import rows_up_to
from gristmill.config.resources import value_at
from gristmill.planning.resources import memory_mb
from gristmill.planning.workers import worker_of
from gristmill.shards import requests_to_count, shard_count


def unit_of(wildcards):
    """The run, judge or logits that a job works for: what has a model."""
    if hasattr(wildcards, "logits"):
        return CONFIG.logits[wildcards.logits]
    return CONFIG.runs[wildcards.run] if hasattr(wildcards, "run") else CONFIG.judges[wildcards.judge]


def dataset_of(wildcards):
    return CONFIG.datasets[CONFIG.runs[wildcards.run].dataset]


def prompt_of(wildcards):
    return CONFIG.prompts[unit_of(wildcards).prompt]


def target_runs(wildcards):
    """The run, or the two runs of a pair, that a judge target stands for."""
    judge = CONFIG.judges[wildcards.judge]
    targets = dict(zip(judge.targets(), judge.pairs or [[run] for run in judge.runs]))
    return list(targets[wildcards.target])


@functools.cache
def rows_counted(dataset, limit):
    """min(limit, rows), read once: Snakemake asks for every job, and a .json file can only be read whole."""
    return rows_up_to(CONFIG, dataset, limit)


def shards_of(wildcards):
    """shards_per_worker for every worker, but never more than the dataset has requests."""
    model = unit_of(wildcards).model
    speeds = [worker.speed for worker in PLAN.workers_of(model)]
    each = CONFIG.models[model].shards_per_worker
    return shard_count(speeds, requests_up_to(wildcards, requests_to_count(speeds, each)), each)


def requests_up_to(wildcards, limit):
    """How many requests a unit has, no more rows counted than `limit`; of a split text each window is one more."""
    if hasattr(wildcards, "logits"):
        unit = unit_of(wildcards)
        run = CONFIG.runs[unit.run] if unit.run else None
        texts = rows_counted(run.dataset if run else unit.dataset, limit) * (run.sampling.samples if run else 1)
        return limit if unit.on_overflow == "split" else min(texts, unit.max_samples or texts)
    run = unit_of(wildcards) if hasattr(wildcards, "run") else CONFIG.runs[target_runs(wildcards)[0]]
    return rows_counted(run.dataset, limit) * run.sampling.samples


def worker_of_shard(wildcards):
    return worker_of(PLAN.workers_of(unit_of(wildcards).model), int(wildcards.shard))


def gpus_of(wildcards):
    """The tokens of a shard's job; none of a cluster's GPUs where all models run on CPUs."""
    return 0 if PLAN.cluster and PLAN.cpu_only else worker_of_shard(wildcards).gpus


def worker_memory(wildcards, attempt):
    """Host memory of a shard's job in MB: what models.<name>.resources says, else an estimate; more at each attempt."""
    name = unit_of(wildcards).model
    model = CONFIG.models[name]
    if "mem_mb" in model.resources:
        return value_at("mem_mb", model.resources["mem_mb"], attempt)
    return memory_mb(MODEL.format(model=name), model, gpus_of(wildcards)) * attempt


def model_resources(wildcards):
    """models.<name>.resources of a shard's job."""
    return CONFIG.models[unit_of(wildcards).model].resources


def asked_of_cluster(name, resources_of):
    """An input function for one resource that a section's `resources` may name; where it does not, what the profile says."""
    default = workflow.resource_settings._parsed_default_resources.get(name)

    def value(wildcards, input, attempt, threads, rulename):
        given = resources_of(wildcards)
        if name in given:
            return value_at(name, given[name], attempt)
        if default is None:
            return None
        return default.evaluate(wildcards, input=input, attempt=attempt, threads=threads, rulename=rulename).value

    return value


def asked_by(sections, resources_of):
    """Resource → input function, of all that any of the sections names."""
    return {name: asked_of_cluster(name, resources_of) for section in sections for name in section.resources}


ASKED = asked_by(CONFIG.models.values(), model_resources)
# The GPUs of a worker are on one node; SLURM's --gpus alone may take them from several.
WORKER_RESOURCES = ASKED | {"mem_mb": worker_memory, "nodes": 1} if PLAN.cluster else {}


def beside(rule):
    """Whether a step without a model runs where Snakemake does, also with a cluster: unless a profile groups it.

    Ten thousand such jobs would wait in the queue for longer than they take.
    """
    return rule not in workflow.group_settings.overwrite_groups


def gpus_in(group):
    """An input function for the tokens of one group: a shard's GPUs if its worker is of that group, else none."""
    return lambda w: gpus_of(w) if worker_of_shard(w).group == group else 0


def asks(name):
    """An input function for the token of one served model: 1 for its jobs."""
    return lambda w: 1 if unit_of(w).model == name else 0


# A job that waits for a lease holds its tokens. With tokens of its own for each of gpus.groups, no job starts while its
# group is taken, and none keeps another group's GPUs idle.
GROUP_TOKENS = {f"gpu_group_{group.number}": gpus_in(group.number) for group in PLAN.groups}
for group in PLAN.groups:
    workflow.register_resource(f"gpu_group_{group.number}", Resource(f"gpu_group_{group.number}", len(group.gpus)))

# A served model's limits (max_concurrent, requests_per_minute) hold for one job, so it has one at a time.
SERVED = [name for name, model in CONFIG.models.items() if model.endpoint is not None]
GROUP_TOKENS |= {f"endpoint_{number}": asks(name) for number, name in enumerate(SERVED)}
for number in range(len(SERVED)):
    workflow.register_resource(f"endpoint_{number}", Resource(f"endpoint_{number}", 1))


def may_fail(wildcards):
    """Share of the rows that may fail; another share asks the failed rows again."""
    return unit_of(wildcards).max_failed_ratio


def threads_of(wildcards):
    return PLAN.threads(unit_of(wildcards).model)
