"""What profiles/slurm costs beside a local run: seconds a run and a shard, with the echo engine, which takes no time.

    python tests/slurm/cluster.py start               a cluster on this machine, where there is none
    python benchmarks/slurm_overhead.py --shards 1,4,16

- Each number of shards is run three times: here (--cores all), with the profile as it is, and with the profile and
  `--slurm-array-jobs generate`. The local run has the same Snakefile, jobs and files.
- A job's own time is SLURM's (squeue %M); what is beyond it is waiting: for the queue, and for Snakemake to look.
- On a test cluster all nodes are this machine, so many jobs at once take longer than on nodes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from provenance import about  # noqa: E402

from gristmill.files import write_json  # noqa: E402

CONFIG = """datasets: {rows: {path: rows.jsonl}}
models: {echo: {engine: echo, resources: {runtime: 5}}}
prompts: {ask: {file: ask.jinja}}
runs: {plain: {dataset: rows, model: echo, prompt: ask, metrics: [contains]}}
gpus: {total: SHARDS}
"""
WAYS = {
    "local": ["--workflow-profile", "profiles/default", "--cores", "all"],
    "slurm": ["--workflow-profile", "profiles/slurm"],
    "slurm-array": ["--workflow-profile", "profiles/slurm", "--slurm-array-jobs", "generate"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", default="1,4,16")
    parser.add_argument("--ways", default=",".join(["local", "slurm"]))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        sys.exit("no SLURM answers here; python tests/slurm/cluster.py start")
    report = {**about([]), "runs": []}
    for shards in map(int, args.shards.split(",")):
        for way in args.ways.split(","):
            found = {"shards": shards, "way": way, **measured(shards, WAYS[way])}
            report["runs"].append(found)
            print(
                f"{way:<14}{shards:>4} shards  {found['seconds']:6.1f} s  {found['a_shard']:5.1f} s a shard", flush=True
            )
    if args.out:
        write_json(args.out, report)


def measured(shards: int, options: list[str]) -> dict[str, float]:
    """Seconds of one run from nothing."""
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=ROOT) as name:
        folder = Path(name)
        rows = [{"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(10 * shards)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "ask.jinja").write_text("{{ question }}")
        (folder / "config.yaml").write_text(CONFIG.replace("SHARDS", str(shards)))
        (folder / "inventory.json").write_text('[{"name": "GPU", "memory_total_mib": 80000, "count": 8}]')
        options = [str(ROOT / word) if word.startswith("profiles/") else word for word in options]
        command = [str(Path(sys.executable).parent / "snakemake"), "--snakefile", str(ROOT / "Snakefile")]
        command += ["--directory", name, "--configfile", str(folder / "config.yaml"), *options]
        environment = {**os.environ, "GRISTMILL_LEASES": str(folder / "leases")}
        if "profiles/slurm" in " ".join(options):
            environment["GRISTMILL_INVENTORY"] = str(folder / "inventory.json")
        start = time.monotonic()
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - start
        if ran.returncode:
            sys.exit((ran.stdout + ran.stderr)[-3000:])
    return {"seconds": round(seconds, 1), "a_shard": round(seconds / shards, 1)}


if __name__ == "__main__":
    main()
