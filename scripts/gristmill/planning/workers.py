"""Workers: which group of GPUs each shard's job runs on. The plan decides it and hands it to the jobs as one argument.

Shards go round the workers: of W workers, shard k (from 1) is worker ((k - 1) mod W) + 1's. `worker_of` is the one
place that says so. What follows from it:

- With shards_per_worker S there are W x S shards (shards.shard_count), and each worker has S of them: its size and its
  speed hold for each, and S need not travel to the jobs.
- The fastest workers come first: where there are fewer requests than workers, they go to them.
- A worker is a size, a speed and a group, not a process. Which job runs when is Snakemake's choice, and workers of one
  group are alike: a GPU that is early takes whichever of the group's shards is next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gristmill.errors import UserError


@dataclass(frozen=True, slots=True)
class Worker:
    """One group of GPUs, which runs one job at a time."""

    gpus: int
    #: Compared with the other workers of the model.
    speed: float = 1.0
    #: Position in gpus.groups; None: any GPU that may be used.
    group: int | None = None
    #: Memory of its smallest GPU; None where the plan does not know the machine (a cluster, a CPU).
    memory_mib: int | None = None


def encode_workers(workers: Mapping[str, Sequence[Worker]]) -> str:
    """Model → workers as one argument of a job."""
    plain = {name: [asdict(worker) for worker in found] for name, found in workers.items()}
    return json.dumps(plain, separators=(",", ":"))


def decode_workers(text: str) -> dict[str, list[Worker]]:
    """Read the argument back.

    Raises:
        UserError: it is not one.
    """
    try:
        plain: dict[str, list[dict[str, Any]]] = json.loads(text)
        return {name: [Worker(**item) for item in found] for name, found in plain.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--workers is not what the plan writes: {error}; see `snakemake -p`") from error


def worker_of(workers: Sequence[Worker], shard: int) -> Worker:
    """The worker of a shard (from 1): shards go round."""
    return workers[(shard - 1) % len(workers)]
