"""SLURM's own word, before the first job, on what the jobs will ask of it; and patience while it does not answer.

`sbatch --test-only` says at once what would otherwise come back hours later, once for each job, within a page of text:
a partition or an account that does not exist, more GPUs than any node has. A time limit over the partition's is
accepted by many clusters and then waits for ever; so it is compared here.
"""

from __future__ import annotations

import getpass
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.errors import UserError, some

Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
#: Resource → sbatch's option, as snakemake-executor-plugin-slurm gives them.
_OPTIONS = {
    "slurm_partition": "--partition",
    "slurm_account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "runtime": "--time",
    "mem_mb": "--mem",
    "nodes": "--nodes",
}
_TIMEOUT_S = 60
_NOT_NOW = "temporarily unavailable"
_NO_NODE = "node configuration is not available"
#: States of nodes that take no jobs (the beginnings of sinfo's %t), beside those that do not answer (`idle*`).
_AWAY = ("down", "drain", "drng", "drained", "fail", "maint", "boot", "inval", "unk", "pow", "reboot")
#: The executor looks at most 180 seconds apart, and squeue takes its time.
LONGEST_PAUSE_S = 190
_MINUTES_A_DAY = 1440


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands.

    Raises:
        UserError: there is no such command, or it does not answer.
    """
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{argv[0]} does not answer ({error}); see `scontrol ping`") from error


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job asks of SLURM."""

    #: For messages.
    name: str
    threads: int
    resources: Mapping[str, Any]
    #: Its time at the last attempt, in minutes.
    last_runtime: Any = None

    def options(self) -> list[str]:
        """The options of sbatch; what is not known yet is left out.

        Raises:
            UserError: slurm_extra has a quote that does not end.
        """
        resources = self.resources
        found = [f"{option}={resources[name]}" for name, option in _OPTIONS.items() if _is_known(resources.get(name))]
        if model := resources.get("gpu_model"):  # the executor asks for 1 where a rule says nothing of GPUs
            found.append(f"--gpus={model}:{resources.get('gpu', 1)}")
        elif resources.get("gpu"):
            found.append(f"--gpus={resources['gpu']}")
        found.append(f"--cpus-per-task={resources.get('cpus_per_task') or self.threads}")
        try:
            return found + shlex.split(str(resources.get("slurm_extra") or ""))
        except ValueError as error:
            extra = resources["slurm_extra"]
            raise UserError(f"{self.name}: slurm_extra is {extra!r}, which is no command line ({error})") from error


def require_accepted(
    jobs: Iterable[Wanted], log: Callable[[str], None], also: Sequence[str] = (), run: Run = run
) -> None:
    """Refuse a run of which SLURM would refuse a job.

    While nodes are down or drained SLURM says the same of a job that they could take as of one that none could. If one
    of them is large enough, it is only said, and the job will wait. So it is when the queue is full.

    Args:
        jobs: equal ones are asked about once.
        log: takes what is no refusal.
        also: options that all jobs get (--qos, --reservation).
        run: runs one of SLURM's commands.

    Raises:
        UserError: one line for each kind of job that is refused, or SLURM does not answer.
    """
    asked: dict[tuple[str, ...], Wanted] = {}
    for job in jobs:
        asked.setdefault((*job.options(), *also), job)
    problems: list[str] = []
    for argv, job in asked.items():
        said = _refusal(list(argv), run) or _too_long(job.resources, run) or _not_yours(job.resources, run)
        if said and _NOT_NOW in said:
            log(f"SLURM's queue is full ({said}); sbatch waits and tries again")
        elif said and _NO_NODE in said and (away := _large_but_away(job, run)):
            log(f"{job.name} ({' '.join(argv)}) cannot start as long as {away} (`sinfo -R`); it will wait")
        elif said:
            problems.append(
                f"SLURM refuses {job.name} ({' '.join(argv)}): {said}; see `sinfo`, then the profile or "
                "models.*.resources"
            )
        elif said := _too_long({**job.resources, "runtime": job.last_runtime}, run):
            log(f"the last attempt of {job.name} would wait for ever: {said}; lower what its time grows to")
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def require_states(status_command: str | None, run: Run = run) -> None:
    """Refuse a way to ask for jobs' states that would not see some of them end, and wait for ever.

    Args:
        status_command: the executor's slurm-status-command, sacct or squeue.
        run: runs one of SLURM's commands.

    Raises:
        UserError: sacct where nothing is recorded, or squeue where ended jobs are soon forgotten.
    """
    shown = run(["scontrol", "show", "config"]).stdout
    found = dict(re.findall(r"^(\w+)\s*=\s*(\S+)", shown, re.M))
    if status_command == "sacct" and found.get("AccountingStorageType", "").endswith("/none"):
        raise UserError("this cluster keeps no accounts, so sacct knows no jobs; set slurm-status-command: squeue")
    age = found.get("MinJobAge", "")
    if status_command == "squeue" and age.isdecimal() and int(age) < LONGEST_PAUSE_S:
        raise UserError(
            f"this cluster forgets ended jobs after {age} seconds (MinJobAge), but Snakemake looks up to 180 seconds "
            "apart; set slurm-status-command: sacct"
        )


def keep_unanswered(executor: Any) -> None:
    """Make the executor's class keep the jobs that it could not ask about, and ask again.

    snakemake-executor-plugin-slurm (2.8) forgets all its jobs when every question of a round fails, as while slurmctld
    is started again, and then waits for them for ever. What it neither reports nor gives back is given back here.
    """
    ask = executor.check_active_jobs
    if getattr(ask, "keeps_unanswered", False):
        return
    reported: set[int] = set()

    def noting(report: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Any, job: Any, *args: Any, **more: Any) -> None:
            reported.add(id(job))
            report(self, job, *args, **more)

        return noted

    async def check_active_jobs(self: Any, active_jobs: list[Any]) -> AsyncIterator[Any]:
        reported.clear()
        given: set[int] = set()
        async for job in ask(self, active_jobs):
            given.add(id(job))
            yield job
        for job in active_jobs:
            if id(job) not in given | reported:
                yield job

    check_active_jobs.keeps_unanswered = True  # type: ignore[attr-defined]
    executor.check_active_jobs = check_active_jobs
    for name in ("report_job_success", "report_job_error"):
        setattr(executor, name, noting(getattr(executor, name)))


def _refusal(argv: list[str], run: Run) -> str | None:
    """Why sbatch would not take a job; None when it would."""
    tried = run(["sbatch", "--test-only", *argv, "--wrap=true"])
    if tried.returncode == 0:
        return None
    words = [line.partition(": ")[2] or line for line in tried.stderr.splitlines() if line.strip()]
    said = words[-1].strip() if words else f"sbatch ended with {tried.returncode}"
    if "ontact" in said:  # Unable to contact slurm controller
        raise UserError(f"SLURM does not answer: {said}; see `scontrol ping`, then run again")
    return said


def _large_but_away(job: Wanted, run: Run) -> str | None:
    """The nodes of the partition that take no jobs now but are as large as a job asks, with their states."""
    partition = job.resources.get("slurm_partition")
    chosen = [f"--partition={partition}"] if partition else []
    found: set[str] = set()
    for line in run(["sinfo", "-h", "-N", "-o", "%N %t %c %m %G", *chosen]).stdout.splitlines():
        name, state, cpus, memory_mb, gres = line.split(maxsplit=4)
        if (state.startswith(_AWAY) or state.endswith("*")) and _fits(job, cpus, memory_mb, gres):
            found.add(f"{name} is {state}")
    return some(sorted(found)) if found else None


def _fits(job: Wanted, cpus: str, memory_mb: str, gres: str) -> bool:
    """Whether a node of sinfo's words is as large as a job on one node asks."""
    model, resources = job.resources.get("gpu_model"), job.resources
    gpus = sum(int(count) for kind, count in re.findall(r"gpu(?::([\w.]+?))?:(\d+)", gres) if model in (None, kind))
    memory = resources.get("mem_mb")
    nodes = int(resources.get("nodes") or 1)
    return (
        nodes * gpus >= int(resources.get("gpu") or 0)
        and int(cpus.rstrip("+")) >= int(resources.get("cpus_per_task") or job.threads)
        and int(memory_mb.rstrip("+")) >= (memory if isinstance(memory, int) else 0)
    )


def _too_long(resources: Mapping[str, Any], run: Run) -> str | None:
    """A time limit over the partition's, which SLURM may take and never start."""
    partition, minutes = resources.get("slurm_partition"), resources.get("runtime")
    if not partition or not isinstance(minutes, int):
        return None
    lines = run(["sinfo", "-h", "-o", "%l", "-p", str(partition)]).stdout.split()
    limits = [limit for line in lines if (limit := limit_minutes(line)) is not None]
    if len(limits) == len(lines) and limits and minutes > max(limits):  # of several partitions one may have no limit
        return f"runtime is {minutes} minutes, over the {max(limits)} of partition {partition}"
    return None


def _not_yours(resources: Mapping[str, Any], run: Run) -> str | None:
    """An account that is none of the user's, which SLURM may take and the executor does not."""
    given = [name for name in re.split(r"[,\s]+", str(resources.get("slurm_account") or "")) if name]
    if not given:
        return None
    user = getpass.getuser()
    listed = run(["sacctmgr", "--noheader", "--parsable2", "list", "assoc", f"user={user}", "format=account"])
    there = sorted({line.strip() for line in listed.stdout.splitlines() if line.strip()})
    if listed.returncode != 0:
        return f"slurm_account is {', '.join(given)}, but this cluster keeps no accounts; leave it out"
    wrong = [name for name in given if name.lower() not in {known.lower() for known in there}]
    if wrong and there:
        return f"slurm_account is {wrong[0]}, and the accounts of {user} are {', '.join(there)}"
    return None


def limit_minutes(text: str) -> int | None:
    """Minutes of sinfo's %l: `30:00`, `4:00:00`, `1-00:00:00`; None for `infinite` and what is no time."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]) or not parts[0]:
        return None
    hours, minutes, seconds = ([0] * (3 - len(parts)) + [int(part) for part in parts])[-3:]
    if dash and len(parts) < 3:
        return None
    return int(days or 0) * _MINUTES_A_DAY + hours * 60 + minutes + (seconds > 0)


def _is_known(value: Any) -> bool:
    return value not in (None, "") and str(value) != "<TBD>"
