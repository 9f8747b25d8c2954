"""A real SLURM of several nodes on this one machine, for tests: slurmctld, a slurmd a node, munged; no systemd.

    python tests/slurm/cluster.py install     Debian's packages, where they are missing (root)
    python tests/slurm/cluster.py start       two nodes of four GPUs, until `stop`
    python tests/slurm/cluster.py stop

- Its GPUs are links to /dev/null: SLURM hands them out as it does real ones, and CUDA_VISIBLE_DEVICES names them.
- The configuration lies in /etc/slurm, for jobs lose SLURM_CONF on their way; a real cluster's is never touched.
- Partitions: gpu, and urgent, whose jobs take the nodes of gpu's, which are put back into the queue.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/run/gristmill-slurm")
ETC = Path("/etc/slurm")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "munged")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
FIRST_PORT = 26_900
ANSWER_S = 30
HOSTS, MARK = Path("/etc/hosts"), "# gristmill-slurm"


def why_not() -> str | None:
    """What speaks against a cluster on this machine; None when one can be had."""
    if os.geteuid() != 0:
        return "a test cluster needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (python tests/slurm/cluster.py install)"
    for name in ("slurm.conf", "gres.conf"):
        file = ETC / name
        if file.is_symlink() and not str(file.readlink()).startswith(str(FOLDER)):
            return f"{file} is not the test cluster's"
        if file.exists() and not file.is_symlink():
            return f"{file} is a real cluster's"
    return None


def install() -> None:
    """Install what is missing with apt-get."""
    if all(shutil.which(name) for name in PROGRAMS):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print("SLURM is not installed, which takes root and apt-get; its tests will be skipped")
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        words = ["apt-get", "-o", "DPkg::Lock::Timeout=120", *command]
        if subprocess.run(words, check=False, env=environment, stdout=subprocess.DEVNULL).returncode:
            print(f"`{' '.join(words)}` failed; the tests that need SLURM will be skipped")
            return


def until(true: Callable[[], bool], what: str, seconds: float = ANSWER_S) -> None:
    """Wait for something to be true."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.2)


def succeeds(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@dataclass
class Cluster:
    """A cluster of `nodes` nodes node1, node2 … on this host."""

    nodes: int = 2
    gpus: int = 4
    cpus: int = 16
    memory_mb: int = 64_000
    #: Seconds of silence after which a node is down.
    node_timeout_s: int = 10
    #: Jobs that the controller knows at most, ended ones included.
    max_jobs: int = 10_000

    def start(self) -> None:
        """Start everything and wait until a job runs on every node."""
        self.stop()
        for name in ("log", "run", "state", "munge", "dev", "etc"):
            (FOLDER / name).mkdir(parents=True)
        for number in range(self.gpus):
            (FOLDER / f"dev/gpu{number}").symlink_to("/dev/null")
        ETC.mkdir(parents=True, exist_ok=True)
        for name, text in (("slurm.conf", self._configuration()), ("gres.conf", self._devices())):
            (FOLDER / "etc" / name).write_text(text)
            (ETC / name).unlink(missing_ok=True)
            (ETC / name).symlink_to(FOLDER / "etc" / name)
        names = " ".join(f"node{number}" for number in range(1, self.nodes + 1))
        HOSTS.write_text(f"{_other_hosts()}127.0.0.1 {names} {MARK}\n")  # for what meets on a node by its name
        self._start_munge()
        self.start_controller()
        for number in range(1, self.nodes + 1):
            (FOLDER / f"spool/node{number}").mkdir(parents=True)
            self.start_node(number)
        self.until_idle()

    def stop(self) -> None:
        """End every job and daemon, and remove all files."""
        if not FOLDER.exists():
            return
        if succeeds("scontrol", "ping"):
            subprocess.run(["scancel", "--user=root"], check=False, capture_output=True)
            with contextlib.suppress(TimeoutError):
                until(lambda: not self.jobs(), "jobs to end", 15)
        for file in [*sorted((FOLDER / "run").glob("slurmd-*.pid")), FOLDER / "run/slurmctld.pid"]:
            _end(file)
        for pid in _steps():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _end(FOLDER / "munge/pid")
        for name in ("slurm.conf", "gres.conf"):
            if (ETC / name).is_symlink():
                (ETC / name).unlink()
        HOSTS.write_text(_other_hosts())
        shutil.rmtree(FOLDER)

    def start_controller(self) -> None:
        subprocess.run(["slurmctld"], check=True, stdin=subprocess.DEVNULL)
        until(lambda: "UP" in _out("scontrol", "ping"), "slurmctld")

    def kill_controller(self) -> None:
        _end(FOLDER / "run/slurmctld.pid", signal.SIGKILL)

    def set_max_jobs(self, number: int) -> None:
        """How many jobs the controller takes from its next start on."""
        file = FOLDER / "etc/slurm.conf"
        file.write_text(file.read_text().replace(f"MaxJobCount={self.max_jobs}", f"MaxJobCount={number}"))
        self.max_jobs = number

    def start_node(self, number: int) -> None:
        subprocess.run(["slurmd", "-N", f"node{number}"], check=True, stdin=subprocess.DEVNULL)

    def kill_node(self, number: int) -> None:
        """The node dies: its slurmd, and every process of its jobs."""
        _end(FOLDER / f"run/slurmd-node{number}.pid", signal.SIGKILL)
        for pid in _steps(f"node{number}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def until_idle(self) -> None:
        """Wait until all nodes take jobs."""

        def idle() -> bool:
            return _out("sinfo", "-h", "-p", "gpu", "-N", "-o", "%t").split() == ["idle"] * self.nodes

        until(idle, "idle nodes", 90)

    def jobs(self, states: str = "PENDING,RUNNING,COMPLETING,SUSPENDED") -> dict[str, str]:
        """Job → state, of those in the given states."""
        lines = _out("squeue", "-h", f"--states={states}", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def _configuration(self) -> str:
        host, ports = socket.gethostname().split(".")[0], _free_ports(self.nodes + 1)
        names = f"node[1-{self.nodes}]" if self.nodes > 1 else "node1"
        node_ports = f"[{ports[1]}-{ports[-1]}]" if self.nodes > 1 else str(ports[1])
        each = f"CPUs={self.cpus} RealMemory={self.memory_mb} Gres=gpu:{self.gpus} State=UNKNOWN"
        return f"""ClusterName=gristmill
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={FOLDER}/munge/socket
StateSaveLocation={FOLDER}/state
SlurmdSpoolDir={FOLDER}/spool/%n
SlurmctldPidFile={FOLDER}/run/slurmctld.pid
SlurmdPidFile={FOLDER}/run/slurmd-%n.pid
SlurmctldLogFile={FOLDER}/log/slurmctld.log
SlurmdLogFile={FOLDER}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
JobAcctGatherParams=OverMemoryKill
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
MinJobAge=3600
MaxJobCount={self.max_jobs}
SlurmdTimeout={self.node_timeout_s}
MessageTimeout=10
KillWait=10
InactiveLimit=0
AccountingStorageType=accounting_storage/none
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} {each}
PartitionName=gpu Nodes=ALL Default=YES DefaultTime=10 MaxTime=1-00:00:00 PriorityTier=1 GraceTime=10 State=UP
PartitionName=urgent Nodes=ALL DefaultTime=10 PriorityTier=10 State=UP
"""

    def _devices(self) -> str:
        last = f"[0-{self.gpus - 1}]" if self.gpus > 1 else "0"
        return f"Name=gpu File={FOLDER}/dev/gpu{last}\n"

    def _start_munge(self) -> None:
        folder = FOLDER / "munge"
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        subprocess.run(["chown", "-R", "munge:", str(folder)], check=True)
        folder.chmod(0o755)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        subprocess.run(["runuser", "-u", "munge", "--", "munged", *options], check=True, stdin=subprocess.DEVNULL)
        until((folder / "socket").exists, "munged")


@contextlib.contextmanager
def running(**sizes: int) -> Iterator[Cluster]:
    """A cluster for the block."""
    cluster = Cluster(**sizes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _other_hosts() -> str:
    """The hosts file without the nodes."""
    return "".join(line for line in HOSTS.read_text().splitlines(keepends=True) if MARK not in line)


def _out(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def _free_ports(count: int) -> list[int]:
    """Neighbouring ports on which nothing listens."""
    for first in range(FIRST_PORT, FIRST_PORT + 2000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise RuntimeError("no free ports")


def _end(pid_file: Path, how: signal.Signals = signal.SIGTERM) -> None:
    """Signal the daemon of a pid file and wait for its end, in the end with KILL."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return
    for signum in (how, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        with contextlib.suppress(TimeoutError):
            until(lambda: not _lives(pid), "a daemon to end", 10)
            break
    pid_file.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    """Whether a process runs; a zombie, which waits for its parent, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _steps(node: str = "") -> list[int]:
    """Processes of jobs (of one node): they know the cluster's name, and the daemons' children for steps."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
            mine = b"SLURM_CLUSTER_NAME=gristmill" in words and (
                not node or f"SLURMD_NODENAME={node}".encode() in words
            )
            if mine or (not node and b"slurmstepd" in command):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def main() -> None:
    """The commands above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["install", "start", "stop"])
    command = parser.parse_args().command
    if command == "install":
        install()
    elif reason := why_not():
        sys.exit(reason)
    elif command == "start":
        Cluster().start()
    else:
        Cluster().stop()


if __name__ == "__main__":
    main()
