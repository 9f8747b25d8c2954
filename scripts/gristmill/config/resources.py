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

Amount = Annotated[int, Field(ge=0, strict=True)]
Value = Amount | Annotated[str, StringConstraints(min_length=1)]


def _decided_elsewhere(name: str) -> str:
    if name in DECIDED or name.startswith(("_", "gpu_group_", "endpoint_")):
        raise ValueError(f"resources.{name} is decided by {DECIDED.get(name, 'the plan')}; remove it")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*$"), AfterValidator(_decided_elsewhere)]
#: Name → a value, or one for each attempt, of which the last holds for all that follow.
Resources = dict[Name, Value | Annotated[list[Value], Field(min_length=1)]]

#: What grows with the attempt where one number is given: a job that was too short or too small asks for more.
GROWING = frozenset({"runtime", "mem_mb", "mem_mib", "disk_mb", "disk_mib"})


def value_at(name: str, given: int | str | list[int | str], attempt: int) -> int | str:
    """A resource's value at an attempt, which counts from 1."""
    if isinstance(given, list):
        return given[min(attempt, len(given)) - 1]
    return given * attempt if isinstance(given, int) and name in GROWING else given
