"""What a model's jobs ask of a cluster, under the names that Snakemake and its executors have for it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

#: The planner's own, and where they come from.
DECIDED = {
    "gpu": "gpus_per_model",
    "gpus": "gpus_per_model",
    "nodes": "gpus_per_model (the GPUs of a worker are on one node)",
    "gres": "gpus_per_model and resources.gpu_model",
    "threads": "the plan; set resources.cpus_per_task",
}

#: What people write for it elsewhere, and its name here.
MEANT = {
    **{"partition": "slurm_partition", "account": "slurm_account", "time": "runtime", "walltime": "runtime"},
    **{"mem": "mem_mb", "memory": "mem_mb", "disk": "disk_mb", "cpus": "cpus_per_task", "gpu_type": "gpu_model"},
}

Amount = Annotated[int, Field(ge=0, strict=True)]
Value = Amount | Annotated[str, StringConstraints(min_length=1)]


def _decided_elsewhere(name: str) -> str:
    if name in MEANT:
        raise ValueError(f"resources.{name} is called {MEANT[name]} here; rename it")
    if name in DECIDED or name.startswith(("_", "gpu_group_", "endpoint_")):
        raise ValueError(f"resources.{name} is decided by {DECIDED.get(name, 'the plan')}; remove it")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*$"), AfterValidator(_decided_elsewhere)]
#: What grows with the attempt where one number is given: a job that was too short or too small asks for more.
GROWING = frozenset({"runtime", "mem_mb", "mem_mib", "disk_mb", "disk_mib"})
#: What else is a number.
_NUMBERS = GROWING | {"cpus_per_task", "cpus_per_gpu", "tasks_per_gpu", "mem_mb_per_cpu"}


def _numbers_are_numbers(resources: dict[str, int | str | list[int | str]]) -> dict[str, int | str | list[int | str]]:
    for name, given in resources.items():
        values = given if isinstance(given, list) else [given]
        wrong = [value for value in values if name in _NUMBERS and (not isinstance(value, int) or value < 1)]
        if wrong:
            unit = {"runtime": " of minutes"}.get(name, " of MB" if "mem" in name or "disk" in name else "")
            raise ValueError(f"resources.{name} is {wrong[0]!r}; it is a whole number{unit} from 1")
    return resources


#: Name → a value, or one for each attempt, of which the last holds for all that follow.
Resources = Annotated[
    dict[Name, Value | Annotated[list[Value], Field(min_length=1)]], AfterValidator(_numbers_are_numbers)
]


def value_at(name: str, given: int | str | list[int | str], attempt: int) -> int | str:
    """A resource's value at an attempt, which counts from 1."""
    if isinstance(given, list):
        return given[min(attempt, len(given)) - 1]
    return given * attempt if isinstance(given, int) and name in GROWING else given
