"""The job of a training: alone with its folder, a lease on its GPUs, a watch over them, and the processes.

Where there is no GPU, `processes` of them run on the CPU and speak by gloo. On several nodes SLURM has given the GPUs
to this job alone, so no lease is taken.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gristmill import fence, locks
from gristmill.config.schema import GpusConfig
from gristmill.config.specs import TrainingSpec
from gristmill.errors import UserError
from gristmill.gpu.watch import Place, Watch
from gristmill.job import device_names, held, usable
from gristmill.planning.workers import Worker
from gristmill.progress import log
from gristmill.training import checkpoint
from gristmill.training.launching import GROUP, SHUTDOWN, Launch, slurm_command, started_here
from gristmill.training.logs import read_steps
from gristmill.training.task import Effective, Task
from gristmill.types import Completion, Gpu, JsonDict

#: By how much a file system's clock may be behind ours.
CLOCK_S = 60.0
SCRIPT = Path(__file__).parents[2] / "train_rank.py"


class Stopped(Exception):
    """A signal ended the training; a checkpoint is there."""

    def __init__(self, signum: int) -> None:
        """Keep the signal for the exit status."""
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True, slots=True)
class Places:
    """The files and folders of a training."""

    data: Path
    work: Path
    model: Path
    metrics: Path


def run_training(
    spec: TrainingSpec,
    weights: JsonDict,
    places: Places,
    config: GpusConfig,
    threads: int,
    scheduled: bool = False,
    script: Path = SCRIPT,
) -> None:
    """Train to the end, or to a signal.

    Args:
        spec: the recipe, placed.
        weights: results/models/<model>.json of the base or the tokenizer's model.
        places: where everything is.
        config: the gpus section.
        threads: CPU threads of all processes of this machine together.
        scheduled: a cluster's scheduler gave this job its GPUs.
        script: what each process runs.

    Raises:
        UserError: it failed; the message says why, and where the next run goes on.
        Stopped: a signal came.
    """
    training, purpose = spec.training, f"train {spec.name}"
    places.work.mkdir(parents=True, exist_ok=True)
    with locks.held(places.work / "train.lock", purpose, config.wait_minutes * 60, log):
        there = usable(Worker(training.gpus), spec.model.model, config, scheduled)
        with _devices(spec, there, config, scheduled) as devices:
            local = training.gpus if there else training.processes
            count = local * training.nodes
            effective = Effective.of(training, count)
            log(f"{spec.name}: {effective}, on {device_names(devices)}")
            each = max(1, threads // local)
            found = tuple(asdict(gpu) for gpu in devices)
            task = Task(
                spec, weights, places.data, places.work, places.model, places.metrics, count, bool(there), each, found
            )
            path = places.work / "task.json"
            task.write(path)
            _run(task, local, [str(script), str(path)], config, devices)


def _run(task: Task, local: int, program: list[str], config: GpusConfig, devices: Sequence[Gpu]) -> None:
    training = task.training
    command = slurm_command(local, training.nodes, program) if training.nodes > 1 else started_here(local, program)
    task.metrics.unlink(missing_ok=True)
    begun = time.time() - CLOCK_S
    place = Place(f"trainings/{task.spec.name}", "training", task.work / "gpu" / "training.jsonl")
    with Watch(devices, place, config, log) as watch:
        launch = Launch(command, _environment(task), task.stop, task.error, log, _beat(task.steps, watch))
        ended = threading.Event()
        fenced = threading.Thread(
            target=fence.watch, args=(ended.wait, lambda: launch.end(15)), daemon=True, name="fence"
        )
        fenced.start()
        try:
            status = launch.run()
        finally:
            ended.set()
    if task.metrics.exists():
        return
    if launch.signum is not None or (status == 0 and not task.error.exists()):
        raise Stopped(launch.signum or 15)
    raise UserError(f"{_reason(task, status)}; {_going_on(task, begun)}")


@contextmanager
def _devices(spec: TrainingSpec, there: Sequence[Gpu], config: GpusConfig, scheduled: bool) -> Iterator[list[Gpu]]:
    if spec.training.nodes > 1:
        yield list(there)
        return
    with held(there, Worker(spec.training.gpus), f"train {spec.name}", config, scheduled) as devices:
        yield devices


def _environment(task: Task) -> dict[str, str]:
    # accelerate would take settings from its variables that the recipe does not have.
    own = [name for name in os.environ if name not in GROUP and not name.startswith("ACCELERATE_")]
    found = {name: os.environ[name] for name in own}
    environ = {**found, **SHUTDOWN, "OMP_NUM_THREADS": str(task.threads), "TOKENIZERS_PARALLELISM": "false"}
    if task.training.deterministic:
        environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS repeats its bits only with a workspace of fixed size
    return environ


def _beat(steps: Path, watch: Watch) -> Callable[[], None]:
    """Tell the watch of each step that was written: a training without one for too long hangs."""
    seen = [0, steps.stat().st_size if steps.exists() else 0]

    def beat() -> None:
        with suppress(OSError):
            size = steps.stat().st_size
            if size == seen[1]:
                return
            if not seen[0]:
                watch.loaded()
            seen[:] = [seen[0] + 1, size]
            watch.add(Completion("step", seen[0], "", None, "stop", 0, 0, 0.0))

    return beat


def _reason(task: Task, status: int) -> str:
    if task.error.exists() and (said := task.error.read_text("utf-8").strip()):
        return said
    if status < 0 and status != -signal.SIGKILL:
        return f"the training was ended by signal {-status} ({signal.strsignal(-status)})"
    if status < 0:
        return "the training was killed (SIGKILL), by the system when memory ran out (dmesg) or by someone"
    return (
        f"a process of the training ended without a reason (exit status {status}); see above, and where nothing is "
        "said it was killed, by the system when memory ran out (dmesg) or by someone"
    )


def _going_on(task: Task, begun: float) -> str:
    """Where the next run of the recipe that was at work goes on."""
    recipes = sorted(task.work.glob("checkpoints/*"), key=lambda path: path.stat().st_mtime)
    if not recipes or recipes[-1].stat().st_mtime < begun:
        return "it had not begun"
    there = checkpoint.steps_there(recipes[-1], log)
    last = there[-1] if there else 0
    done = max((line["step"] for line in read_steps(task.steps)), default=0)
    return f"{done} steps were done, and the next run goes on from {f'step {last}' if last else 'the start'}"
