"""What a worker asks of a cluster beside its GPUs, by Snakemake's standard names.

Host memory is an estimate from above, for a scheduler kills what goes over it:

- A worker on GPUs maps the weights' files and copies them piece by piece; pages of a mapped file can be taken back at
  any time. What it holds: Python, torch and the CUDA context of each of its GPUs, its shard, one weights file.
- A worker on a CPU holds the weights in the dtype it works in, and beside them the cache and what a layer needs.
- What may be offloaded to the CPU is counted as if all of it were.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.files import read_json
from gristmill.keys import WEIGHTLESS
from gristmill.memory.shapes import DTYPE_BYTES
from gristmill.types import JsonDict

#: Python, torch and a shard of some 100,000 rows; measured by benchmarks/slurm_overhead.py --memory.
BASE_MB = 4000
#: A CUDA context with its pinned buffers, or a process of tensor parallelism.
GPU_MB = 3000
#: A worker without a model.
ECHO_MB = 1000
#: Cache, activations and float32 logits beside the weights of a model on the CPU.
CPU_SHARE = 1.5
_MB = 1_000_000
_NAMES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def memory_mb(path: str, model: ModelConfig, gpus: int) -> int:
    """Memory of one worker in MB of 10^6 bytes.

    Args:
        path: results/models/<model>.json.
        model: its config.
        gpus: GPUs of the worker; 0 for one on a CPU.

    Raises:
        FileNotFoundError: the model was not prepared yet; Snakemake asks again before it submits.
    """
    if model.engine in WEIGHTLESS:
        return ECHO_MB
    if not Path(path).exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    described: JsonDict = read_json(Path(path))
    weights = int(described.get("weights_bytes") or 0)
    if not gpus:
        return BASE_MB + int(CPU_SHARE * weights * _widening(described, model) / _MB)
    whole = weights if model.allow_offload or "cpu" in model.max_memory else 0
    largest = max(described.get("files", {}).values(), default=0)
    return BASE_MB + GPU_MB * gpus + (whole + largest) // _MB


def _widening(described: JsonDict, model: ModelConfig) -> float:
    """Bytes of a weight at work on a CPU (auto is float32 there) for each byte of the file."""
    stored = _NAMES.get(str(described.get("dtype")), 2)
    return max(1.0, DTYPE_BYTES["float32" if model.dtype == "auto" else model.dtype] / stored)
