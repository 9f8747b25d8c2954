"""One process of a training: it runs the loop, and if that fails it says why, once for all processes.

What a library raises when another process is gone or does not answer is said in one line: which step it was does not
matter, since the last checkpoint decides where the next run goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from gristmill.errors import UserError
from gristmill.progress import log
from gristmill.training.task import Task, read_task

#: Words in the errors of gloo, NCCL and their store when another process is gone or silent.
_LOST_WORDS = ("timed out", "timeout", "connection closed by peer", "connection reset", "broken pipe", "recv failed")
_OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate")
PARENT_S = 1.0
#: Seconds that this process may take to see for itself that another one is gone. One that waits inside NCCL never does.
LOST_S = 10.0


def run_rank(path: Path) -> int:
    """Run one process of the training in a task's file; gives its exit status."""
    task = read_task(path)
    finished = threading.Event()
    threading.Thread(target=_leave_with_others, args=(task, os.getppid(), finished), daemon=True, name="others").start()
    try:
        _train(task, finished)
        return 0
    except UserError as error:
        _say(task, str(error))
    except Exception as error:
        traceback.print_exc()
        _say(task, explain(error, task))
    sys.stderr.flush()
    os._exit(2)  # a library's thread that waits for another process would keep this one


def explain(error: BaseException, task: Task) -> str:
    """One line for what a library raised."""
    said = " ".join(str(error).split())[:300]
    rank = os.environ.get("RANK", "0")
    if any(word in said for word in _OUT_OF_MEMORY):
        return (
            f"process {rank} is out of memory ({said[:120]}); lower micro_batch_rows, set gradient_checkpointing: true "
            "or mixed_precision: bf16, or sharding: fsdp with more GPUs (the effective batch stays)"
        )
    if any(word in said.lower() for word in _LOST_WORDS):
        return (
            f"process {rank} waited in vain for the others: one of them died or hangs (timeout_minutes="
            f"{task.training.timeout_minutes:g}; {said[:160]}); see above and dmesg, then run again to go on"
        )
    return f"process {rank}: {type(error).__name__}: {said}"


def _train(task: Task, finished: threading.Event) -> None:
    from gristmill.training.loop import Training

    training = Training(task, log)
    if not training.run() and training.parallel.main:
        log(f"stopped after step {training.progress.step}, whose checkpoint is written")
    finished.set()
    training.parallel.close()


def _say(task: Task, message: str) -> None:
    """Leave the reason for the launcher, if no other process has."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), open(task.error, "x", encoding="utf-8") as handle:
        handle.write(message)


def _leave_with_others(task: Task, parent: int, finished: threading.Event) -> None:
    """In a thread: end this process when what started it is gone, whose lease it uses, or another of its processes.

    torchrun asks those that are left to leave when one is gone, but a process inside a kernel that waits for the other
    does not hear it, and torchrun leaves it the time of a checkpoint (launching.SHUTDOWN).
    """
    import psutil

    starter, count = psutil.Process(parent), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    met, deadline = False, float("inf")
    while os.getppid() == parent:
        with contextlib.suppress(psutil.Error):
            there = sum(child.status() != psutil.STATUS_ZOMBIE for child in starter.children())
            met = met or there >= count
            if met and there < count and not finished.is_set():
                deadline = min(deadline, time.monotonic() + LOST_S)
        if time.monotonic() > deadline and not finished.is_set():
            rank = os.environ.get("RANK", "0")
            _say(task, f"process {rank} waited in vain: another one is gone without a word (killed, or out of host "
                 "memory: see dmesg)")  # fmt: skip
            os._exit(2)
        time.sleep(PARENT_S)
    print("what started this process is gone; leaving", file=sys.stderr, flush=True)
    os._exit(4)
