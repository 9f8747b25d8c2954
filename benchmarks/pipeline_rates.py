"""The real workflow over a workload of countdowns, and what its manifest and its samples say of its speed.

- Every answer in generations.jsonl is checked; only tokens of right ones count.
- The generating phase of a worker is generate_seconds of the manifest: from its first request to its last answer.
  With several workers the rate is all useful tokens over the slowest worker's seconds. `overlap_tokens_per_second` is
  the same by the clock, from the first GPU that generates to the last (a worker that starts late then counts against
  it).
- End to end is snakemake's whole time: rendering, splitting, loading, generating, merging, the report.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from children import Result
from tables import columns, number, share
from workload import Work, asked

from gristmill.files import read_json, read_jsonl, write_json
from gristmill.gpu import usage
from gristmill.types import JsonDict

ROOT = Path(__file__).resolve().parents[1]


def run(workers: int, work: Work, model: JsonDict, limit_s: float, logs: Path) -> JsonDict:
    """Run the workflow with so many GPU tokens in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="gristmill-pipeline-") as name:
        project = Path(name)
        write_project(project, work, model)
        start = time.monotonic()
        code, said = snakemake(project, workers, limit_s)
        wall_s = time.monotonic() - start
        _keep_logs(logs / f"pipeline-{workers}.log", project, said)
        if code != 0:
            lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
            reason = (
                f"no end after {limit_s:g} s" if code is None else f"snakemake ended with {code}: {lines[-1][-300:]}"
            )
            return {"gpu_tokens": workers, "wall_s": round(wall_s, 1), "reason": reason}
        found = examined(project / "results/runs/plain", work)
        return {"gpu_tokens": workers, "wall_s": round(wall_s, 1), "reason": None, **found}


def write_project(project: Path, work: Work, model: JsonDict) -> None:
    """A dataset, a prompt and a config, as a user has them."""
    lines = [
        json.dumps({"id": each.request.id, "prompt": each.request.messages[0]["content"]}) for each in asked(work, 0)
    ]
    (project / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (project / "ask.jinja").write_text("{{ prompt }}")
    run = {
        "dataset": "rows",
        "model": "countdown",
        "prompt": "ask",
        "sampling": {"max_new_tokens": work.max_new_tokens},
    }
    config: JsonDict = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {"countdown": model},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"plain": run},
    }
    write_json(project / "config.json", config)


def snakemake(project: Path, tokens: int, limit_s: float) -> tuple[int | None, str]:
    """The real command: (exit status, what it said), None when it had to be killed."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "all"]
    command += ["--workflow-profile", str(ROOT / "profiles" / "default"), "--configfile", "config.json"]
    command += ["--resources", f"gpu={tokens}"]
    environment = {**os.environ, "GRISTMILL_LEASES": str(project / "leases")}
    process = subprocess.Popen(
        command,
        cwd=project,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    finally:
        if process.poll() is None:  # this program is being ended
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def examined(folder: Path, work: Work) -> JsonDict:
    """The numbers of a run, and whether its answers are right."""
    manifest = read_json(folder / "manifest.json")
    right = tokens = 0
    answers = {line["id"]: line for line in read_jsonl(folder / "generations.jsonl")}
    for each in asked(work, 0):
        line = answers.get(each.request.id)
        if line is not None and each.is_right(line["text"], line["completion_tokens"]):
            right, tokens = right + 1, tokens + line["completion_tokens"]
    workers = [one for one in manifest["workers"] if "generate_seconds" in one]
    slowest_s = max(one["generate_seconds"] for one in workers)
    overlap_s, busy = _from_samples(folder / "gpu")
    return {
        "requests": work.requests,
        "right": right,
        "tokens": tokens,
        "workers": len(workers),
        "engine": sorted({one["engine"] for one in workers}),
        "load_s": [one["load_seconds"] for one in workers],
        "generate_s": [one["generate_seconds"] for one in workers],
        "worker_tokens": [one["completion_tokens"] for one in workers],
        "tokens_per_second": tokens / slowest_s,
        "overlap_tokens_per_second": tokens / overlap_s if overlap_s else None,
        "busy_while_generating": busy,
        "gpu": read_json(folder / "metrics.json")["gpu"],
    }


def _from_samples(folder: Path) -> tuple[float | None, dict[str, float]]:
    """Seconds from the first sample of a generating job to the last, and each GPU's mean use between them."""
    times: list[float] = []
    use: dict[str, list[float]] = {}
    for line in usage.read_folder(folder):
        if line.get("phase") == "generate":
            times.append(line["monotonic_s"])
            if line["utilization_ratio"] is not None:
                use.setdefault(line["uuid"], []).append(line["utilization_ratio"])
    means = {uuid: round(statistics.mean(seen), 3) for uuid, seen in use.items()}
    return (max(times) - min(times) if len(times) > 1 else None), means


def of_bare(mine: Result, other: Result) -> float | None:
    """An engine beside its library: the median over the passes that both made, each with its own round."""
    mine_by_turn, other_by_turn = (
        {one["turn"]: one["tokens_per_second"] for one in each.passes} for each in (mine, other)
    )
    both = [turn for turn in mine_by_turn if mine_by_turn[turn] and other_by_turn.get(turn)]
    return statistics.median(mine_by_turn[turn] / other_by_turn[turn] for turn in both) if both else None


def compare(runs: Sequence[JsonDict], results: Sequence[Result]) -> JsonDict:
    """All GPUs beside one, and one worker beside the engine without a pipeline, on the same requests."""
    done = [one for one in runs if one["reason"] is None]
    found: JsonDict = {}
    if len(done) == 2:
        one, all_ = done
        found["generating_ratio"] = all_["tokens_per_second"] / one["tokens_per_second"]
        found["end_to_end_ratio"] = one["wall_s"] / all_["wall_s"]
    for result in results:
        rate = result.passes[0]["tokens_per_second"] if result.passes else None
        if done and done[0]["workers"] == 1 and rate:
            found[f"one_worker_of_{result.way}"] = done[0]["tokens_per_second"] / rate
    return found


def described(one: JsonDict) -> str:
    """A run for the line on standard error."""
    if one["reason"] is not None:
        return str(one["reason"])
    return f"workers {one['workers']}: {one['tokens_per_second']:,.0f} tokens/s, {one['wall_s']:.0f} s end to end"


def table(runs: Sequence[JsonDict], compared: JsonDict) -> str:
    """The runs for people."""
    heads = (
        "workers",
        "engine",
        "end to end s",
        "load s",
        "generate s",
        "tokens/s",
        "by the clock",
        "busy",
        "right",
        "note",
    )
    rows: list[tuple[str, ...]] = [heads]
    for one in runs:
        if one["reason"] is not None:
            rows.append((*["-"] * 2, number(one["wall_s"]), *["-"] * 6, one["reason"]))
            continue
        slowest = [number(max(one[name])) for name in ("load_s", "generate_s")]
        rates = [number(one[name]) for name in ("tokens_per_second", "overlap_tokens_per_second")]
        busy = ", ".join(share(value) for value in one["busy_while_generating"].values()) or "-"
        cells = [number(one["wall_s"]), *slowest, *rates, busy, f"{one['right']}/{one['requests']}"]
        rows.append((str(one["workers"]), ", ".join(one["engine"]), *cells, ""))
    return columns(rows) + "".join(f"\n{name}: {value:.3f}" for name, value in compared.items())


def _keep_logs(path: Path, project: Path, said: str) -> None:
    logs = [f"== {each.name}\n{each.read_text('utf-8', 'replace')}" for each in sorted(project.rglob("*.log"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([said, *logs]))
