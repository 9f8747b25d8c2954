"""Tensor parallel: every layer cut over the GPUs of a group, one process a GPU, all working at once.

The job's own process is rank 0: it has the journal and does the talking. It starts the other ranks, which load their
part of the model and do what it does; they take no orders but lines on their standard input, and end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.types import JsonDict

#: After so long without a word from a rank that hangs, NCCL and gloo end the process.
SILENCE_S = 120
#: Seconds that the other ranks get to end.
CLOSE_S = 10.0
#: Linux: a process gets this signal when its parent ends.
_PDEATHSIG = 1


def why_not(folder: Path, model: ModelConfig, ranks: int) -> str | None:
    """Why a model cannot be cut over so many GPUs; None when it can. Reads config.json, no weights."""
    config = text_config(folder)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or config.get("num_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if not heads or heads % ranks or kv_heads % ranks:
        return f"{heads} heads and {kv_heads} key-value heads do not divide by {ranks} GPUs"
    if model.quantization is not None:
        return "a quantized model is not cut"
    if model.max_memory or model.allow_offload or model.device_map != "auto":
        return "device_map, max_memory or allow_offload place whole layers"
    return None if _has_plan(folder, model) else f"transformers has no plan to cut {config.get('model_type')} models"


def text_config(folder: Path) -> JsonDict:
    """The part of config.json that describes the language model."""
    config: JsonDict = read_json(folder / "config.json")
    return config | (config.get("text_config") or {})


def _has_plan(folder: Path, model: ModelConfig) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=model.trust_remote_code
    ).get_text_config()
    return bool(getattr(config, "base_model_tp_plan", None))


class RankGone(UserError):
    """Another process of a model that is cut ended."""


class Ranks:
    """The other processes of a model that is cut over several GPUs."""

    def __init__(self, follower: str, folder: Path, model: ModelConfig, size: int, on_gpu: bool) -> None:
        """Start ranks 1 to size - 1 and meet them; ours is rank 0.

        Args:
            follower: the module that they run; its main calls `serve`.
            folder: the weights.
            model: the model's config.
            size: how many ranks there are with ours.
            on_gpu: whether each has a GPU.
        """
        self._meeting = tempfile.TemporaryDirectory(prefix="gristmill-ranks-")
        place = f"{self._meeting.name}/store"
        told = {"folder": str(folder), "model": model.model_dump(), "size": size, "on_gpu": on_gpu, "place": place}
        self._processes = [_start(follower, told | {"rank": rank}) for rank in range(1, size)]
        try:
            join(0, size, place, on_gpu)
        except BaseException:
            self.close()
            raise

    def tell(self, order: JsonDict) -> None:
        """Tell the others what comes next.

        Raises:
            RankGone: one of them ended.
        """
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
        except BrokenPipeError:
            raise RankGone(
                f"the model cannot go on: {self.gone() or 'another rank ended'}; see the log above, and run again to "
                "go on"
            ) from None

    def gone(self) -> str | None:
        """What is wrong with the other processes; None while all are there."""
        for rank, process in enumerate(self._processes, start=1):
            if (status := process.poll()) is not None:
                return f"the process of rank {rank} ended with status {status}"
        return None

    def close(self) -> None:
        """End the others; one that hangs is killed."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        end = time.monotonic() + CLOSE_S
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._meeting.cleanup()


def join(rank: int, size: int, place: str, on_gpu: bool) -> None:
    """Meet the other ranks in a file of this host; sets the process's device."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # continuous batching never mixes, and is faster for it
    import torch
    import torch.distributed as dist

    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SILENCE_S),
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )


def _start(follower: str, told: JsonDict) -> subprocess.Popen[bytes]:
    """A rank's process; what it says goes to this process's log."""
    library = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", follower, json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),
        env=os.environ | {"PYTHONPATH": path},
    )


def _end_with_parent() -> None:
    """Ask Linux for a SIGKILL when the job's process ends, however it ends; elsewhere the closed pipe must do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def serve(follow: Callable[[JsonDict, Iterator[JsonDict]], None]) -> None:
    """Be rank n of a job: what it is told is its only argument, and each line of standard input an order."""
    _end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to end
    try:
        follow(json.loads(sys.argv[1]), map(json.loads, iter(sys.stdin.buffer.readline, b"")))
    except UserError as error:
        raise SystemExit(str(error)) from None
