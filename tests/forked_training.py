"""A training's processes forked from one that has imported all they need, which saves ten seconds a process.

Everything but their start is as in a run of scripts/train.py. How they are started in earnest, by torchrun or SLURM,
and what becomes of them then, is in test_training_faults.py, test_training_workflow.py and slurm/.
"""

import contextlib
import io
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from gristmill.errors import run_main
from gristmill.training.launching import Launch, free_port

IMPORTED = (
    "gristmill.training.loop",
    "accelerate",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
TIMEOUT_S = 300.0


def run_forked(command: Sequence[str], environ: Mapping[str, str], processes: int) -> "CompletedProcess[str]":
    """Run the command of scripts/train.py here, its processes forked; what all of them said is in .stdout."""
    import train

    words, said, status = list(command[1:]), io.StringIO(), 0

    def run(launch: Launch) -> int:
        for left in (launch.stop, launch.error):
            left.unlink(missing_ok=True)
        found, text = _forked(launch.command, launch.environ, processes)
        said.write(text)
        return found

    with (
        mock.patch.object(Launch, "run", run),
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ, environ, clear=True),
        contextlib.redirect_stderr(said),
    ):
        try:
            run_main(train.main)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return CompletedProcess(words, status, said.getvalue())


def _forked(command: Sequence[str], environ: Mapping[str, str], processes: int) -> tuple[int, str]:
    """Start so many processes and wait for them: the first exit status that is not 0, and what was said."""
    task = Path(command[-1])
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    places = [dict(environ)]
    if processes > 1:
        group = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_PORT": free_port()}
        places = [{**environ, "MASTER_ADDR": "127.0.0.1"} for _ in range(processes)]
        for rank, place in enumerate(places):
            place |= {name: str(value) for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()}
    logs = [task.with_name(f"said-{rank}.log") for rank in range(len(places))]
    children = [context.Process(target=_rank, args=(task, place, log)) for place, log in zip(places, logs, strict=True)]
    for child in children:
        child.start()
    for child in children:
        child.join(TIMEOUT_S)
    lasting = [child for child in children if child.is_alive()]
    for child in lasting:
        child.kill()
    said = "".join(log.read_text() for log in logs)
    assert not lasting, said
    return next((child.exitcode for child in children if child.exitcode), 0), said


def _rank(task: Path, environ: dict[str, str], log: Path) -> None:
    """In a forked process: what scripts/train_rank.py does."""
    from gristmill.training.rank import run_rank

    os.environ.clear()
    os.environ.update(environ)
    with open(log, "w") as handle:
        for descriptor in (1, 2):
            os.dup2(handle.fileno(), descriptor)
    raise SystemExit(run_rank(task))
