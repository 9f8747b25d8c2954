"""What every step of a run costs from ten thousand to a million rows: seconds, CPU seconds and peak memory.

    python benchmarks/scale.py                                     10,000 and 100,000 rows, 4 shards: two minutes
    python benchmarks/scale.py --rows 1000000 --shards 64          a quarter of an hour and 8 GB of disk
    python benchmarks/scale.py --folder FOLDER --out FILE          work below FOLDER, write the numbers to FILE

- The real thing: snakemake runs this checkout's Snakefile with the echo engine, one run and one pointwise judge, in a
  folder of its own. The rows have 300 to 900 characters, two metrics and a slice.
- Each Python process says at its end what it took (benchmarks/meter); generate is the sum of its jobs' seconds and the
  peak of the largest. Linux only.
- Then snakemake runs again: `no-op` is how long it takes to find that there is nothing to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from gristmill.files import dumps, write_json, write_jsonl  # noqa: E402
from gristmill.manifest import installed_versions  # noqa: E402

SNAKEMAKE = Path(sys.executable).parent / "snakemake"
TOPICS = ("arithmetic", "biology", "chemistry", "geography", "history", "language", "music", "physics")
WORDS = ("time", "year", "people", "way", "day", "thing", "world", "school", "state", "family", "student", "country")
CONFIG: dict[str, Any] = {
    "datasets": {"rows": {"path": "rows.jsonl"}},
    "models": {"echo": {"engine": "echo"}},
    "prompts": {"ask": {"file": "ask.jinja"}, "grade": {"file": "grade.jinja"}},
    "runs": {
        "plain": {
            "dataset": "rows",
            "model": "echo",
            "prompt": "ask",
            "metrics": ["contains", "exact_match"],
            "slices": ["topic"],
        }
    },
    "judges": {"grader": {"kind": "pointwise", "model": "echo", "prompt": "grade", "runs": ["plain"]}},
}
#: The echo engine answers with what it is asked, so a judge's answer can stand in its prompt; one in seven is B.
GRADE = "Verdict: {{ 'B' if row.number % 7 == 0 else 'A' }}"


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took; several jobs are added up, and the peak is the largest one's."""

    name: str
    jobs: int
    wall_s: float
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Scale:
    """One size."""

    rows: int
    shards: int
    steps: list[Step]
    whole_s: float
    no_op_s: float
    results_mib: float
    results_peak_mib: float
    report_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder that is removed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "scale.json")
    args = parser.parse_args()
    sizes = []
    for rows in args.rows:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            sizes.append(measure(Path(folder), rows, args.shards, args.cores))
        print(table(sizes[-1]), flush=True)
    write_json(args.out, about(args) | {"sizes": [asdict(size) for size in sizes]})


def measure(folder: Path, rows: int, shards: int, cores: int) -> Scale:
    write_jsonl(folder / "rows.jsonl", dataset(rows))
    (folder / "ask.jinja").write_text("{{ question }}\nAnswer with one word.")
    (folder / "grade.jinja").write_text(GRADE)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    command = [str(SNAKEMAKE), "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    command += ["--workflow-profile", str(ROOT / "profiles" / "default"), "--configfile", str(folder / "config.yaml")]
    command += ["--cores", str(cores), "--resources", f"gpu={shards}"]
    results = folder / "results"
    with Sizes(results) as sizes:
        start = time.monotonic()
        said, records = metered(command, folder)
        whole_s = time.monotonic() - start
    start = time.monotonic()
    said, again = metered(command, folder)
    no_op_s = time.monotonic() - start
    if "Nothing to be done" not in said:
        sys.exit(f"the second run did something:\n{said[-2000:]}")
    steps = summed(records, step_name) + summed(again, lambda _: "snakemake, no-op")
    report_mib = (results / "report.html").stat().st_size / 2**20
    return Scale(rows, shards, steps, whole_s, no_op_s, mib(results), sizes.peak_mib, report_mib)


def dataset(rows: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(0)
    for number in range(rows):
        words = " ".join(chosen.choices(WORDS, k=chosen.randint(50, 150)))
        topic = TOPICS[number % len(TOPICS)]
        reference = chosen.choice(["time", "planet", number])
        yield {"id": f"r{number:07}", "number": number, "topic": topic, "question": words, "reference": reference}


def metered(command: list[str], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Run to the end; what was said, and what each Python process left."""
    left = folder / "meter"
    shutil.rmtree(left, ignore_errors=True)
    left.mkdir()
    meter = {"PYTHONPATH": str(ROOT / "benchmarks" / "meter"), "GRISTMILL_METER": str(left), "OMP_NUM_THREADS": "1"}
    leases = {"GRISTMILL_LEASES": str(folder / "leases")}
    done = subprocess.run(
        command,
        env={**os.environ, **meter, **leases},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    records = [json.loads(path.read_bytes()) for path in left.iterdir()]
    return done.stdout, sorted(records, key=lambda record: record["start_unix_s"])


def step_name(argv: list[str]) -> str:
    """`generate`, `judge: generate`, `snakemake`."""
    name = Path(argv[0]).stem
    of_judge = name != "report" and any("results/judges/" in word for word in argv)
    return f"judge: {name.removeprefix('judge_')}" if of_judge else name


def summed(records: Iterable[dict[str, Any]], name_of: Callable[[list[str]], str]) -> list[Step]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if record["argv"] != ["-c"]:  # helpers of libraries
            groups.setdefault(name_of(record["argv"]), []).append(record)
    return [
        Step(
            name,
            len(group),
            sum(record["wall_s"] for record in group),
            sum(record["cpu_s"] for record in group),
            max(record["peak_mib"] for record in group),
        )
        for name, group in groups.items()
    ]


class Sizes:
    """Watches the size of a folder while it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_mib = 0.0

    def __enter__(self) -> Sizes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.peak_mib = max(self.peak_mib, mib(self._folder))


def mib(folder: Path) -> float:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # a temporary file
                continue
    return total / 2**20


def table(size: Scale) -> str:
    lines = [
        f"{size.rows:,} rows, {size.shards} shards",
        f"{'step':24}{'jobs':>6}{'wall s':>10}{'cpu s':>10}{'µs a row':>10}{'peak MiB':>10}",
    ]
    for step in size.steps:
        micros = step.cpu_s / size.rows * 1e6
        lines.append(
            f"{step.name:24}{step.jobs:6}{step.wall_s:10.1f}{step.cpu_s:10.1f}{micros:10.1f}{step.peak_mib:10.0f}"
        )
    lines.append(f"whole run {size.whole_s:.1f} s, no-op {size.no_op_s:.1f} s")
    lines.append(
        f"results {size.results_mib:,.0f} MiB, {size.results_peak_mib:,.0f} MiB at most while running, "
        f"report {size.report_mib:.1f} MiB"
    )
    return "\n".join(lines) + "\n"


def about(args: argparse.Namespace) -> dict[str, Any]:
    command = ["python", "benchmarks/scale.py", "--rows", *map(str, args.rows), "--shards", str(args.shards)]
    return {
        "command": " ".join([*command, "--cores", str(args.cores)]),
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": installed_versions(),
        "row_bytes": sum(len(dumps(row)) for row in dataset(1000)) // 1000,
    }


if __name__ == "__main__":
    main()
