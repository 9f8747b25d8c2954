"""Starting the processes of a training, and ending them: one launcher a training, below it the process or a torchrun.

    scripts/train.py ─ lease, watch ─▶ scripts/train_rank.py, where it is the only one
                                or ─▶ torchrun ─▶ scripts/train_rank.py × GPUs
                                or ─▶ srun ─▶ torchrun on each node ─▶ scripts/train_rank.py × GPUs

- A process alone has nobody to meet, and needs no torchrun: that would take seconds to start, and a group of one.
- On one machine torchrun finds a free port itself (--standalone). On several the first node's launcher finds one, and
  each node's torchrun meets the others there (c10d).
- A signal to the launcher becomes a file named stop: the processes end their step, write a checkpoint and leave. A
  second one, or STOP_S, ends them at once.
- When a process fails it writes why, the first of them only; the others are given FAILED_S, and then the whole group is
  killed. One that is killed from outside says nothing: torchrun, or the launcher itself, sees it go.
- The processes never outlive the launcher, whose lease they use: what it started is killed with it, and what torchrun
  started leaves when that is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.errors import UserError

#: What torchrun says to its processes, and MPI to its own: a process that found it would wait for others.
GROUP = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
)
#: Seconds that a step and a checkpoint may take after a signal, and processes to leave after one of them failed.
STOP_S, FAILED_S = 600.0, 10.0
#: The same when a scheduler signals torchrun itself, which then ends its processes; older ones leave them 30 seconds.
SHUTDOWN = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def started_here(processes: int, program: Sequence[str]) -> list[str]:
    """The command that starts so many processes on this machine."""
    if processes == 1:
        return [sys.executable, *program]
    return [*_run_module(processes), "--standalone", *program]


def torchrun_nodes(
    processes: int, nodes: int, job: str, host: str, port: int, program: Sequence[str], python: str = sys.executable
) -> list[str]:
    """The command that starts this node's processes of several nodes; the same on each.

    Args:
        processes: of each node.
        nodes: how many.
        job: a name that the nodes share and no other training has.
        host: the node where they meet, by a name that the others know.
        port: a free one there.
        program: what each process runs.
        python: the interpreter on the nodes.
    """
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", f"--rdzv-id={job}"]
    return [*_run_module(processes, python), f"--nnodes={nodes}", *meeting, *program]


def slurm_command(
    processes: int,
    nodes: int,
    program: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    nodes_of: Callable[[str], list[str]] | None = None,
    port: int | None = None,
) -> list[str]:
    """The command that starts a torchrun on each node of a SLURM job, from its first node.

    Args:
        processes: of each node.
        nodes: how many the training wants.
        program: what each process runs.
        environ: the job's environment. Snakemake hands on SLURM_JOB_ID and leaves out what says more.
        nodes_of: a job's nodes, the first one first; None: SLURM is asked.
        port: where the nodes meet; None: a free one of this node.

    Raises:
        UserError: this is no SLURM job, or one of another number of nodes.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job:
        raise UserError(f"nodes={nodes}, but this is no job of SLURM; run it with --workflow-profile profiles/slurm")
    found = (nodes_of or _nodes_of)(job)
    if len(found) != nodes:
        raise UserError(
            f"nodes={nodes}, but SLURM job {job} has {len(found)} ({', '.join(found)}); set nodes to the job's number"
        )
    run = torchrun_nodes(processes, nodes, f"gristmill-{job}", found[0], port or free_port(), program)
    # --overlap: what runs the launcher may already hold the job's CPUs and GPUs. A task has all of them on its node, as
    # long as no number of CPUs is named.
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1"]
    return [*step, *run]


@dataclass(slots=True)
class Launch:
    """One start of a training's processes."""

    command: list[str]
    environ: Mapping[str, str]
    stop: Path
    error: Path
    log: Callable[[str], None]
    #: Called now and then, for who watches the GPUs.
    beat: Callable[[], None] = lambda: None
    #: The signal that asked for an end.
    signum: int | None = None
    _deadline: float | None = field(default=None)

    def run(self) -> int:
        """Start the processes and wait for them; gives the exit status of the command, negative for a signal."""
        for left in (self.stop, self.error):
            left.unlink(missing_ok=True)
        with _handled(self._on_signal):
            child = subprocess.Popen(
                self.command, env=dict(self.environ), start_new_session=True, preexec_fn=_die_with_parent
            )
            try:
                while child.poll() is None:
                    self._watch(child)
                    time.sleep(POLL_S)
            finally:
                if child.poll() is None:
                    _kill_group(child)
        if child.returncode:  # the progress bar of a process that was killed has not ended its line
            print(file=sys.stderr, flush=True)
        return child.returncode

    def end(self, signum: int) -> None:
        """Ask for a checkpoint and an end."""
        self.signum = self.signum or signum
        self.stop.touch()
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + STOP_S)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if self.signum is not None:
            self._deadline = 0.0
            return
        self.log(f"{signal.Signals(signum).name}: the step in flight ends and a checkpoint is written")
        self.end(signum)

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        self.beat()
        now = time.monotonic()
        if self.error.exists() and self._deadline is None:
            self._deadline = now + FAILED_S
        if self._deadline is not None and now > self._deadline:
            self.log("the processes did not leave in time; they are killed")
            _kill_group(child)


def _run_module(processes: int, python: str = sys.executable) -> list[str]:
    # Logs go where the launcher's go; without a place that is none, torchrun leaves a folder of each start in /tmp.
    said = f"--log-dir={os.devnull}"
    return [python, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--max-restarts=0", said]


def _nodes_of(job: str) -> list[str]:
    """The nodes of a SLURM job."""
    names = _said("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    return _said("scontrol", "show", "hostnames", names).split() if names else []


def _said(*argv: str) -> str:
    """What one of SLURM's commands prints."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{argv[0]} does not say where this job runs ({error}); see `scontrol ping`") from error


@contextlib.contextmanager
def _handled(handler: Callable[[int, object], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started: its group, and sessions of processes that torchrun gave one of their own."""
    below = _below(child.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def _below(pid: int) -> list[int]:
    """The processes below one, where /proc tells."""
    found: list[int] = []
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_below(child)]
    return found


def _die_with_parent() -> None:
    """In the child before it becomes the command: be killed when the launcher dies (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
