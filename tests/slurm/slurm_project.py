"""Running the real workflow on a real SLURM (cluster.py); skipped with the reason where none can be had."""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cluster
import pytest
from conftest import ROOT, SNAKEMAKE, Project, echo_config

#: As in the profile, but looking every two seconds: what is waited for here takes seconds.
FAST = [
    "--slurm-init-seconds-before-status-checks",
    "2",
    "--seconds-between-status-checks",
    "2",
    "--latency-wait",
    "10",
]
H100S = [{"name": "H100", "memory_total_mib": 81559, "count": 4}]


@dataclass(frozen=True)
class ClusterProject(Project):
    """A user's folder, run with profiles/slurm."""

    def command(self, *arguments: str, gpu: int | None = None) -> list[str]:
        words = [str(SNAKEMAKE), "--snakefile", str(ROOT / "Snakefile"), "--directory", str(self.folder)]
        words += ["--configfile", str(self.folder / "config.yaml")]
        words += ["--workflow-profile", str(ROOT / "profiles" / "slurm"), *FAST, *arguments]
        return words + (["--resources", f"gpu={gpu}"] if gpu else [])

    def environment(self, **extra: str) -> dict[str, str]:
        """Nodes whose GPUs are those of an inventory: SLURM's own are names only."""
        (self.folder / "inventory.json").write_text(json.dumps(H100S))
        inventory = {"GRISTMILL_INVENTORY": str(self.folder / "inventory.json")}
        return super().environment(**inventory, **extra) | {"PATH": os.environ["PATH"]}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start snakemake; its output goes to snakemake.log in the folder."""
        with (self.folder / "snakemake.log").open("a") as log:
            return subprocess.Popen(
                self.command(*arguments),
                cwd="/",
                env=self.environment(**environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )

    def said(self) -> str:
        return (self.folder / "snakemake.log").read_text()

    def finished(self, process: subprocess.Popen[str], seconds: float = 300) -> str:
        """Wait for success and give back what was printed."""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"snakemake did not end within {seconds:g} s:\n{self.said()[-4000:]}")
        assert code == 0, self.said()[-4000:]
        return self.said()

    def answered(self, unit: str = "runs/plain") -> list[str]:
        """Row ids in the journal's segments, also while they are written."""
        paths = sorted((self.folder / "results" / unit / "journal").glob("*.jsonl"))
        lines = [line for path in paths for line in path.read_bytes().split(b"\n") if line.startswith(b'{"key"')]
        return [json.loads(line)["completion"]["id"] for line in lines if line.endswith(b"}")]

    def answers(self) -> list[dict[str, Any]]:
        """generations.jsonl without what differs from one time to the next."""
        return [line | {"seconds": 0} for line in self.lines("runs/plain/generations.jsonl")]

    def logs(self, unit: str = "runs/plain") -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "results" / unit / "logs").glob("gen*")))


@dataclass
class Sampler:
    """SLURM's own word, twice a second, on which GPUs its running jobs have."""

    samples: list[dict[str, tuple[str, frozenset[int]]]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Sampler":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def gpus(self) -> dict[str, frozenset[int]]:
        """Job → its GPUs, of every job that was seen running."""
        return {job: gpus for sample in self.samples for job, (_, gpus) in sample.items()}

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            shown = subprocess.run(["scontrol", "-d", "-o", "show", "job"], capture_output=True, text=True, check=False)
            running = [line for line in shown.stdout.splitlines() if "JobState=RUNNING" in line]
            self.samples.append(dict(filter(None, map(_placed, running))))


def _placed(line: str) -> tuple[str, tuple[str, frozenset[int]]] | None:
    """A line of `scontrol -d show job`: job → node and the GPUs' numbers there."""
    job, node = re.search(r"JobId=(\d+)", line), re.search(r" Nodes=(\S+)", line)
    given = re.search(r"GRES=gpu[^(]*\(IDX:([0-9,-]+)\)", line)
    if not (job and node and given):
        return None
    ends = [part.split("-") for part in given[1].split(",")]
    numbers = frozenset(number for end in ends for number in range(int(end[0]), int(end[-1]) + 1))
    return job[1], (node[1], numbers)


def on_cluster(**sizes: int) -> Any:
    """A fixture: a cluster for the tests of a module."""

    @pytest.fixture(scope="module")
    def found() -> Iterator[cluster.Cluster]:
        if reason := cluster.why_not():
            pytest.skip(f"no SLURM: {reason}")
        with cluster.running(**sizes) as there:
            yield there

    return found


def new_project(tmp_path: Path) -> ClusterProject:
    """24 rows for an echo model that takes two of SLURM's GPUs, planned for two workers."""
    folder = tmp_path / "my project"
    folder.mkdir()
    made = ClusterProject(folder)
    made.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(24))
    made.write_prompt("ask.jinja", "{{ question }}")
    made.write_config(cluster_config())
    return made


def cluster_config(total: int = 4, gpus_per_model: int = 2, **resources: Any) -> dict[str, Any]:
    model = {"engine": "echo", "gpus_per_model": gpus_per_model, "resources": {"runtime": 5, **resources}}
    return echo_config(models={"echo": model}, gpus={"total": total})


def until(true: Callable[[], bool], project: ClusterProject, seconds: float = 120) -> None:
    """Wait for something that a run is to do; what it printed stands in the failure."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s:\n{project.said()[-4000:]}"
        time.sleep(0.2)


def slurm(command: str) -> str:
    """What one of SLURM's commands prints."""
    return subprocess.run(shlex.split(command), capture_output=True, text=True, check=True).stdout
