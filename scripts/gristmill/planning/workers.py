"""Workers: which group of GPUs each shard's job runs on. The plan decides it and hands it to the jobs as one argument.

Shard k (from 1) of any number of shards is worker k's. The fastest workers come first: a few requests go to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gristmill.errors import UserError


@dataclass(frozen=True, slots=True)
class Worker:
    """One job on one group of GPUs."""

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
    """The worker of a shard (from 1); more shards than workers (only a target typed by hand has them) go round."""
    return workers[(shard - 1) % len(workers)]
