"""Exact groups of GPUs on a real machine: is every device held by one job at a time, and does a model fill its group?

    python benchmarks/gpu_groups.py                          all GPUs of this machine; prints a table, writes JSON
    python benchmarks/gpu_groups.py --out result.json        where the JSON goes (default: beside this file)
    python benchmarks/gpu_groups.py --only 8bit pipelines    the scenarios with one of these texts in their name
    python benchmarks/gpu_groups.py --rows 64                fewer rows a GPU
    python benchmarks/gpu_groups.py --logs folder            keep what Snakemake and the jobs said
    python benchmarks/gpu_groups.py --dry                    no GPU: two made-up ones, a fake NVML and the echo engine

Needs nothing but the project's environment: it makes a small Llama of random weights with a tokenizer and a chat
template, a dataset, and a temporary folder for each scenario, and runs the real `snakemake --cores all --resources
gpu=N` there. What is checked afterwards comes from the samples (gpu/*.jsonl), the manifests and the lease folder. The
last scenario is a plan that cannot fit (a 405B shape, of which only the headers exist): it must stop before its first
job. The exit status is 1 when a check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import provenance  # noqa: E402
from small_llama import WORDS, make_giant, make_model  # noqa: E402

from gristmill.files import read_json, read_jsonl, write_json  # noqa: E402
from gristmill.gpu import gpus, usage  # noqa: E402
from gristmill.types import Gpu, JsonDict  # noqa: E402

ROWS_PER_GPU, DRY_ROWS_PER_GPU, NEW_TOKENS = 256, 10, 128
HEADINGS: tuple[str, ...] = (
    *("scenario", "workers", "GPUs at once", "wall s", "load s", "generate s", "tokens", "samples", "mean busy"),
    *("tokens/J", "checks"),
)
#: A scenario that takes longer hangs.
LIMIT_S = 240


@dataclass(frozen=True)
class Scenario:
    """One way to use the machine. `pipelines` of them run at once, each with all the tokens."""

    name: str
    gpus_per_model: int
    devices: list[int | str] | str = "auto"
    pipelines: int = 1
    quantization: str | None = None
    #: The model is too large: Snakemake must refuse to start.
    refused: bool = False


@dataclass
class Outcome:
    """What came of a scenario; `failed` holds the checks that did not hold."""

    scenario: Scenario
    seconds: float = 0.0
    workers: int = 0
    gpus_at_once: int = 0
    samples: int = 0
    tokens: int = 0
    #: Of each worker: until its model was loaded, and from then to its last answer.
    load_seconds: list[float] = field(default_factory=list)
    generate_seconds: list[float] = field(default_factory=list)
    gpu: list[JsonDict | None] = field(default_factory=list)
    device_maps: list[dict[str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.failed.append(what)


@dataclass(frozen=True)
class Session:
    """One job's hold of one device, as its samples show it, by the machine's monotonic clock."""

    uuid: str
    job: str
    first: float
    last: float


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="gristmill-groups-") as name:
        folder = Path(name)
        environment = _dry_environment(folder) if args.dry else dict(os.environ)
        os.environ.update(environment)
        there = gpus.usable(gpus.inventory(), os.environ)
        if not there:
            sys.exit("no GPU may be used here; use --dry to try the benchmark without one")
        model = {"engine": "echo"} if args.dry else {"source": str(make_model(folder / "model")), "dtype": "bfloat16"}
        chosen = [one for one in scenarios(there) if not args.only or any(text in one.name for text in args.only)]
        outcomes: list[Outcome] = []
        for scenario in chosen:  # the file is written after each: what was measured stays, whatever comes later
            outcomes.append(run(scenario, folder, model, there, args))
            write_json(args.out, {**about(there, args), "scenarios": [asdict(outcome) for outcome in outcomes]})
            print(table(outcomes), file=sys.stderr, flush=True)
    print(table(outcomes))
    print(f"written to {args.out}")
    sys.exit(1 if any(outcome.failed for outcome in outcomes) else 0)


def scenarios(there: Sequence[Gpu]) -> list[Scenario]:
    """What this machine has the GPUs for."""
    pair = [Scenario("two GPUs a model", 2)] if len(there) >= 2 else []
    if pair and importlib.util.find_spec("bitsandbytes") is not None:
        pair += [Scenario(f"two GPUs a model, {bits}", 2, quantization=bits) for bits in ("8bit", "4bit")]
    last = Scenario("only the last GPU", 1, devices=[there[-1].uuid])
    together = Scenario("two pipelines at once", 1, pipelines=2)
    return [Scenario("one GPU a model", 1), *pair, last, together, Scenario("405B on one GPU", 1, refused=True)]


def run(scenario: Scenario, folder: Path, model: JsonDict, there: Sequence[Gpu], args: argparse.Namespace) -> Outcome:
    """Run a scenario's pipelines side by side and check what they left."""
    dry = args.dry
    place = folder / scenario.name.replace(" ", "-")
    projects = [place / f"pipeline-{number}" for number in range(1, scenario.pipelines + 1)]
    model = {"source": str(make_giant(place / "model"))} if scenario.refused else model
    for project in projects:
        write_project(project, scenario, model, args.rows * len(there), dry)
    print(f"{scenario.name} …", file=sys.stderr, flush=True)
    start = time.monotonic()
    started = [start_snakemake(project, place / "leases", len(there)) for project in projects]
    said = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    outcome = Outcome(scenario, round(time.monotonic() - start, 1))
    if args.logs:
        keep_logs(args.logs, projects, said)
    for process, text in zip(started, said, strict=True):
        if process.returncode != (2 if scenario.refused else 0):
            print(text[-4000:], file=sys.stderr)
            outcome.check(False, f"snakemake ended with {process.returncode}")
    if scenario.refused:
        outcome.check("do not fit" in said[0], f"what was said is not that it does not fit: {said[0][-200:]}")
        outcome.check(not (projects[0] / "results").exists(), "a job ran")
        print(said[0].strip(), file=sys.stderr)
    elif not outcome.failed:
        examine(outcome, projects, place / "leases", there, dry)
    return outcome


def keep_logs(folder: Path, projects: Sequence[Path], said: Sequence[str]) -> None:
    """What Snakemake said and what the jobs said, one file a pipeline."""
    folder.mkdir(parents=True, exist_ok=True)
    for project, text in zip(projects, said, strict=True):
        logs = [f"== {path.name}\n{path.read_text()}" for path in sorted(project.rglob("*.log"))]
        (folder / f"{project.parent.name}-{project.name}.log").write_text("\n".join([text, *logs]))


def start_snakemake(project: Path, leases: Path, count: int) -> subprocess.Popen[str]:
    """The real command, in the project's folder."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "all"]
    command += ["--workflow-profile", str(ROOT / "profiles" / "default"), "--configfile", "config.json"]
    command += ["--resources", f"gpu={count}"]
    environment = {**os.environ, "GRISTMILL_LEASES": str(leases)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=project, env=environment, text=True, **pipes)


def write_project(project: Path, scenario: Scenario, model: JsonDict, rows: int, dry: bool) -> None:
    """A config, a prompt and rows enough to keep every GPU busy for some seconds."""
    project.mkdir(parents=True)
    words = [f"{WORDS[n % len(WORDS)]} {WORDS[n // len(WORDS) % len(WORDS)]}" for n in range(rows)]
    lines = [json.dumps({"id": f"r{n}", "topic": topic}) for n, topic in enumerate(words)]
    (project / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (project / "ask.jinja").write_text("tell me a word about the {{ topic }}")
    config: JsonDict = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {"small": {**model, "gpus_per_model": scenario.gpus_per_model}},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"plain": {"dataset": "rows", "model": "small", "prompt": "ask"}},
        "gpus": {"devices": scenario.devices},
    }
    config["runs"]["plain"]["sampling"] = {"max_new_tokens": NEW_TOKENS}
    if scenario.quantization and not dry:
        config["models"]["small"]["quantization"] = scenario.quantization
    write_json(project / "config.json", config)


def examine(outcome: Outcome, projects: Sequence[Path], leases: Path, there: Sequence[Gpu], dry: bool) -> None:
    """Fill in the numbers and check them."""
    scenario, size = outcome.scenario, outcome.scenario.gpus_per_model
    allowed = {gpu.uuid for gpu in there} if scenario.devices == "auto" else set(scenario.devices)
    held = [session for project in projects for session in sessions(project)]
    for project in projects:
        _examine_project(outcome, project, dry)
    outcome.gpus_at_once = most_at_once(held)
    for one, other in overlaps(held):
        outcome.check(False, f"{one.uuid} was held by {one.job} and {other.job} at the same second")
    used = {session.uuid for session in held}
    outcome.check(used <= allowed, f"used {sorted(used - allowed)}, which gpus.devices does not name")
    full = len(allowed) // size * size
    outcome.check(outcome.gpus_at_once == full, f"{outcome.gpus_at_once} GPUs at once, {full} could have been used")
    locked = {path.stem for path in leases.glob("*.lock")}
    outcome.check(used <= locked, f"no lease was taken on {sorted(used - locked)}")
    outcome.check(not list(leases.glob("*.sick")), f"GPUs were set aside: {sorted(leases.glob('*.sick'))}")


def _examine_project(outcome: Outcome, project: Path, dry: bool) -> None:
    run_folder, size = project / "results" / "runs" / "plain", outcome.scenario.gpus_per_model
    manifest, metrics = read_json(run_folder / "manifest.json"), read_json(run_folder / "metrics.json")
    both = project / "rows.jsonl", run_folder / "generations.jsonl"
    rows, answers = (sum(1 for _ in read_jsonl(path)) for path in both)
    outcome.check(rows == answers, f"{answers} answers to {rows} rows")
    outcome.workers += len(manifest["workers"])
    outcome.tokens += manifest["completion_tokens"]
    outcome.gpu.append(metrics["gpu"])
    outcome.check(metrics["gpu"] is not None, "metrics.json has no gpu section")
    outcome.samples += metrics["gpu"]["samples"] if metrics["gpu"] else 0
    for worker in manifest["workers"]:
        shard, devices = worker["shard"], worker["devices"]
        outcome.load_seconds.append(worker["load_seconds"])
        outcome.generate_seconds.append(worker["generate_seconds"])
        outcome.check((run_folder / "gpu" / f"{shard}.jsonl").exists(), f"no samples of shard {shard}")
        outcome.check(len(devices) == size, f"shard {shard} held {len(devices)} GPUs, not {size}")
        if not dry:
            outcome.device_maps.append(worker["device_map"])
            on = {int(device.removeprefix("cuda:")) for device in worker["device_map"] if device[-1].isdigit()}
            outcome.check(on == set(range(size)), f"shard {shard} has modules on {sorted(on)} of its {size} GPUs")


def sessions(project: Path) -> Iterator[Session]:
    """Every device that a job of the project held, from its first sample to its last."""
    times: dict[tuple[str, str], list[float]] = {}
    for line in usage.read_folder(project / "results" / "runs" / "plain" / "gpu"):
        if "uuid" in line:
            times.setdefault((line["uuid"], f"{project.name} session {line['session']}"), []).append(
                line["monotonic_s"]
            )
    for (uuid, job), seconds in times.items():
        yield Session(uuid, job, min(seconds), max(seconds))


def overlaps(held: Sequence[Session]) -> Iterator[tuple[Session, Session]]:
    """Pairs of jobs that held one device at one time."""
    ordered = sorted(held, key=lambda session: (session.uuid, session.first))
    for one, other in itertools.pairwise(ordered):
        if one.uuid == other.uuid and other.first <= one.last:
            yield one, other


def most_at_once(held: Sequence[Session]) -> int:
    """The most devices that were held at the same time."""
    return max((len({each.uuid for each in held if each.first <= now.first <= each.last}) for now in held), default=0)


def about(there: Sequence[Gpu], args: argparse.Namespace) -> JsonDict:
    """Where and when the numbers were made."""
    return {**provenance.about(there), "dry": args.dry, "rows_per_gpu": args.rows, "new_tokens": NEW_TOKENS}


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes for people."""
    rows = [HEADINGS]
    for outcome in outcomes:
        gpu = [entry for entry in outcome.gpu if entry]
        busy = ", ".join(_number(entry["utilization_mean_ratio"]) for entry in gpu) or "-"
        joule = ", ".join(_number(entry["tokens_per_joule"]) for entry in gpu) or "-"
        numbers = [outcome.workers, outcome.gpus_at_once, outcome.seconds]
        numbers += [max(each, default=0) for each in (outcome.load_seconds, outcome.generate_seconds)]
        numbers += [outcome.tokens, outcome.samples]
        named = "; ".join(outcome.failed) or "ok"
        rows.append((outcome.scenario.name, *(f"{number:.6g}" for number in numbers), busy, joule, named))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]) for row in rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _dry_environment(folder: Path) -> dict[str, str]:
    """Two GPUs that are not there, and an NVML that knows them."""
    uuids = ["GPU-dry-0", "GPU-dry-1"]
    fields = {"name": "Dry GPU", "memory_total_mib": 81920, "memory_used_mib": 0}
    write_json(folder / "gpus.json", [{"index": n, "uuid": uuid, **fields} for n, uuid in enumerate(uuids)])
    fake = {"PYTHONPATH": str(ROOT / "tests" / "fake_nvml"), "FAKE_NVML": json.dumps({uuid: {} for uuid in uuids})}
    return {**fake, "GRISTMILL_INVENTORY": str(folder / "gpus.json"), "GRISTMILL_ECHO_SECONDS": "0.5"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="without GPUs")
    parser.add_argument("--only", nargs="+", help="texts in the names of the scenarios to run")
    parser.add_argument("--logs", type=Path, help="a folder for logs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--rows", type=int, help=f"rows a GPU (default: {ROWS_PER_GPU}, {DRY_ROWS_PER_GPU} with --dry)")
    args = parser.parse_args()
    args.rows = args.rows or (DRY_ROWS_PER_GPU if args.dry else ROWS_PER_GPU)
    return args


if __name__ == "__main__":
    main()
