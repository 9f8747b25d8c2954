"""The GPUs that a scheduler gave a job for itself alone: taken as they are, without a lease.

- SLURM names them in SLURM_JOB_GPUS (the job) or SLURM_STEP_GPUS (a step) as the node counts them, and in
  CUDA_VISIBLE_DEVICES as the process sees them: under cgroups that hide the others, from 0. Only the latter is read.
- A part of a GPU (shard, MPS) is no GPU for one job alone: several jobs see the same device, and leases part them.
- A job that finds other than the number it asked for stops: a model laid over fewer GPUs fails an hour later, and one
  that takes more takes what is another's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from gristmill.errors import UserError
from gristmill.gpu import health
from gristmill.gpu.lease import Foreign, lease_folder
from gristmill.types import Gpu

_GIVEN = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
_SHARED = ("SLURM_SHARDS_ON_NODE", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
#: How long what an earlier job left on a GPU may take to go away.
GRACE_S = 60.0


def owner(environ: Mapping[str, str] = os.environ) -> str | None:
    """The scheduler's job that the GPUs in the mask belong to alone, by name; None where nobody says so."""
    job = environ.get("SLURM_JOB_ID")
    if not job or not any(environ.get(name) for name in _GIVEN) or any(environ.get(name) for name in _SHARED):
        return None
    return f"SLURM job {job}"


def require_some(there: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a cluster's job that is to run on GPUs and sees none: on the CPU it would take weeks in silence.

    Raises:
        UserError: there is no GPU.
    """
    if there:
        return
    where = f"SLURM job {environ['SLURM_JOB_ID']}" if environ.get("SLURM_JOB_ID") else "this job"
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    said = "CUDA_VISIBLE_DEVICES is not set" if mask is None else f"CUDA_VISIBLE_DEVICES is {mask!r}"
    raise UserError(
        f"{where} sees no GPU on {os.uname().nodename} ({said}); see nvidia-smi there, or set gpus.devices: none to "
        "run on CPUs"
    )


def take(there: Sequence[Gpu], count: int, giver: str, foreign: Foreign, log: Callable[[str], None]) -> list[Gpu]:
    """Exactly the GPUs that were given, made the only ones CUDA shows.

    Args:
        there: the GPUs in the mask.
        count: GPUs of one worker.
        giver: `owner`'s name of the job.
        foreign: says which devices others fill.
        log: takes progress messages.

    Raises:
        UserError: their number is another, one is set aside (health.py), or another process stays on one.
    """
    if len(there) != count:
        raise UserError(
            f"{giver} has {len(there)} GPUs ({', '.join(str(gpu.index) for gpu in there)}), but the worker is of "
            f"{count}; let the profile's resources leave gpu alone, which comes from gpus_per_model"
        )
    health.refuse_sick(there, count, lease_folder())
    deadline, said = time.monotonic() + GRACE_S, False
    while full := foreign(there):
        names = "; ".join(f"GPU {gpu.index} by {full[gpu.uuid]}" for gpu in there if gpu.uuid in full)
        if time.monotonic() >= deadline:
            raise UserError(f"{giver} was given GPUs that others fill: {names}; end those, or see gpus.busy_memory_mib")
        if not said:
            log(f"waiting for what fills the GPUs of {giver}: {names}")
            said = True
        time.sleep(1.0)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in there)
    return list(there)
