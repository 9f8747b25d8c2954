"""What can go wrong, done on purpose: signals to processes, a full disk, and damaged or foreign files.

Every fault is drawn from a random.Random that the caller seeds. Only processes whose working folder is the round's own
are ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.journal.reading import believed, segments

SIGNALS = {"kill -9": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
#: Job → a result that is there, and newer than what the user edits, once the job will not run again.
JOBS = {
    "prepare_model": "models",
    "render_requests": "runs/plain/requests.jsonl",
    "split": "judges/grader/plain/generations.jsonl",
    "generate": "runs/plain/generations.jsonl",
    "merge": "judges/grader/plain/manifest.json",
    "judge_requests": "judges/grader/plain/requests.jsonl",
    "judge_generate": "judges/grader/plain/generations.jsonl",
    "metrics": "runs/plain/metrics.json",
    "verdicts": "judges/grader/plain/metrics.json",
    "report": "report.html",
}
#: Kind → its targets, and how often it is drawn beside the others.
LIVE = [
    *((kind, job, 4 if job.endswith("generate") else 1) for kind in SIGNALS for job in JOBS),
    *((kind, target, 3) for kind in SIGNALS for target in ("snakemake", "process group")),
    ("kill -9, then new prompt", "snakemake", 3),
    ("full disk", "results/", 8),
    ("second run", "snakemake", 2),
]
FILES = [
    ("cut at a random byte", "segment", 2),
    ("cut in the last record", "segment", 2),
    ("byte flipped", "segment", 3),
    ("foreign file", "journal", 3),
    ("cut at a random byte", "part", 2),
    ("byte flipped", "part", 2),
    ("deleted", "part", 2),
    ("deleted", "shard folder", 2),
    ("deleted", "shard", 1),
]


@dataclass
class Fault:
    """One fault, what it hit and what came of it."""

    kind: str
    target: str
    round: int
    at: float = 0.0
    detail: str = ""
    #: Workers that it could have stopped in the middle of a batch.
    pids: set[int] = field(default_factory=set)
    #: Rows whose records it damaged: (unit, id, sample, variant).
    rows: set[tuple[str, ...]] = field(default_factory=set)
    #: Snakemakes that were started after it until one ended well or met another fault.
    reruns: int = 0
    asked_again: int = 0
    #: The most rows that may be asked again.
    allowed: int = 0
    identical: bool = True


@dataclass(frozen=True)
class Job:
    """A running program of the project."""

    pid: int
    name: str


def running(folder: Path, scripts: Path) -> list[Job]:
    """The project's programs that work in a folder, also those whose Snakemake is gone."""
    found: list[Job] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")
                program = len(words) > 2 and "python" in words[0] and Path(words[1]).parent == scripts
                if program and os.readlink(f"/proc/{entry}/cwd") == str(folder):
                    found.append(Job(int(entry), _name(words)))
    return found


def _name(words: list[str]) -> str:
    name = Path(words[1]).stem
    return f"judge_{name}" if name == "generate" and "judges/" in words[words.index("--unit") + 1] else name


def workers(folder: Path, scripts: Path) -> set[int]:
    """The pids of the jobs that answer requests."""
    return {job.pid for job in running(folder, scripts) if job.name.endswith("generate")}


def is_ahead(folder: Path, job: str) -> bool:
    """Whether a job will run (again): its result is missing or older than what the user edited last."""
    result = folder / "results" / JOBS[job]
    if job == "prepare_model":
        return not result.exists()
    edited = max((folder / name).stat().st_mtime for name in ("rows.jsonl", "ask.jinja"))
    return not result.exists() or result.stat().st_mtime < edited


# ---- a full disk


def mount(results: Path, megabytes: int = 8) -> bool:
    """Put results/ on a small disk of its own; False where mounting is not allowed."""
    results.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(results)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def unmount(results: Path) -> None:
    """Take the small disk away again."""
    subprocess.run(["umount", "-l", str(results)], capture_output=True, check=False)


@contextlib.contextmanager
def full(results: Path, left_bytes: int) -> Iterator[None]:
    """Fill the disk but for so many bytes, and empty it at the end."""
    filler = results / "filler"
    try:
        with open(filler, "wb", buffering=0) as handle, contextlib.suppress(OSError):
            while True:
                handle.write(bytes(4096))
        os.truncate(filler, max(0, filler.stat().st_size - left_bytes))
        yield
    finally:
        filler.unlink(missing_ok=True)


# ---- files


def damage(fault: Fault, folder: Path, rng: random.Random) -> bool:
    """Do a fault of FILES; False when there is no such file now."""
    results = folder / "results"
    act = {
        "segment": _on_segment,
        "journal": _on_journal,
        "part": _on_part,
        "shard folder": _on_shards,
        "shard": _on_shards,
    }[fault.target]
    fault.at = time.time()
    return act(fault, results, rng)


def _on_segment(fault: Fault, results: Path, rng: random.Random) -> bool:
    found = [path for path in sorted(results.glob("*/**/journal/*.jsonl")) if path.is_file() and path.stat().st_size]
    if not found:
        return False
    path = rng.choice(found)
    before = _rows(path.parent)
    data = path.read_bytes()
    last = data.rfind(b'{"key"')
    if last < 0:
        return False
    if fault.kind == "byte flipped":
        flip(path, rng)
    else:
        end = data.index(b"\n", last) if b"\n" in data[last:] else len(data)
        os.truncate(
            path, rng.randint(last, end) if fault.kind == "cut in the last record" else rng.randrange(len(data))
        )
    fault.rows = {(unit, *row) for unit, _, *row in before - _rows(path.parent)}
    fault.allowed = len(fault.rows)
    fault.detail = f"{fault.detail} {path.parent.parent.name} {len(data)} -> {path.stat().st_size} bytes".strip()
    return True


def flip(path: Path, rng: random.Random) -> int:
    """Flip one bit of a file; returns where."""
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return place


def _rows(journal: Path) -> set[tuple[str, ...]]:
    """The rows that a journal has whole answers to: unit, key, id, sample, variant."""
    unit = "/".join(journal.parent.parts[journal.parent.parts.index("results") + 1 :])
    found: set[tuple[str, ...]] = set()
    for path in segments(journal):
        with contextlib.suppress(OSError):
            for line in believed(path):
                if line.kind == "completion":
                    answer = line.completion()
                    found.add((unit, line.key, *map(str, answer.rid)))
    return found


def _on_journal(fault: Fault, results: Path, rng: random.Random) -> bool:
    found = sorted(results.glob("*/**/journal"))
    if not found:
        return False
    folder = rng.choice(found)
    name, put = rng.choice(FOREIGN)
    fault.detail = name
    put(folder, rng)
    return True


def _text(folder: Path, rng: random.Random) -> None:
    (folder / f"notes-{rng.random()}.jsonl").write_text("remember the milk\n")


def _empty(folder: Path, rng: random.Random) -> None:
    (folder / f"empty-{rng.random()}.jsonl").touch()


def _bytes(folder: Path, rng: random.Random) -> None:
    (folder / f"0-{rng.random()}.jsonl").write_bytes(rng.randbytes(3000))


def _old_format(folder: Path, rng: random.Random) -> None:
    (folder / f"0-{rng.random()}.jsonl").write_text('{"gristmill_journal": 1}\n{"key": "x"}\n')


def _folder(folder: Path, rng: random.Random) -> None:
    (folder / f"0-{rng.random()}.jsonl").mkdir()


def _dangling(folder: Path, rng: random.Random) -> None:
    (folder / f"0-{rng.random()}.jsonl").symlink_to("gone")


def _copy(folder: Path, rng: random.Random) -> None:
    found = [path for path in segments(folder) if path.is_file() and not path.is_symlink()]
    if found:
        shutil.copyfile(rng.choice(found), folder / f"0-{rng.random()}.jsonl")


#: What is put into a journal, and how.
FOREIGN: list[tuple[str, Callable[[Path, random.Random], None]]] = [
    ("text", _text),
    ("an empty file", _empty),
    ("random bytes", _bytes),
    ("a segment of format 1", _old_format),
    ("a folder", _folder),
    ("a dangling link", _dangling),
    ("a copy of a segment", _copy),
]


def _on_part(fault: Fault, results: Path, rng: random.Random) -> bool:
    found = [path for path in sorted(results.glob("*/**/parts/*/*.jsonl")) if path.stat().st_size]
    if not found:
        return False
    path = rng.choice(found)
    if fault.kind == "deleted":
        path.unlink()
    elif fault.kind == "byte flipped":
        flip(path, rng)
    else:
        os.truncate(path, rng.randrange(path.stat().st_size))
    return True


def _on_shards(fault: Fault, results: Path, rng: random.Random) -> bool:
    found = sorted(results.glob("*/**/shards/*" if fault.target == "shard folder" else "*/**/shards/*/*.jsonl"))
    if not found:
        return False
    path = rng.choice(found)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True
