"""The service, `watch` and the report beside a real run on GPUs: does what they show agree with nvidia-smi?

    python benchmarks/service_gpus.py                   all GPUs of this machine; prints a table, writes JSON
    python benchmarks/service_gpus.py --report r.html   keep the report of the run
    python benchmarks/service_gpus.py --dry             no GPU: models of two layers, and nothing to compare

It starts the service in a folder of its own and has it run one config with two runs of a 1B shape, a judge of a 3B
shape by the likelihood of its labels, the judge's logits over the answers, and a short training: all of random weights.
The first start is stopped (DELETE) in the middle of its answers, the second goes on to the end. Every second the
readings of the service are taken together with nvidia-smi's; `watch` is piped meanwhile. The exit status is 1 when a
check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import provenance  # noqa: E402
from small_llama import SIZES, WORDS, make_model  # noqa: E402

from gristmill.files import read_jsonl, write_json  # noqa: E402
from gristmill.gpu import gpus  # noqa: E402
from gristmill.types import Gpu, JsonDict  # noqa: E402

#: About one billion parameters, and about three.
ANSWERER = {
    **SIZES,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
REFEREE = {**SIZES, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_hidden_layers": 28}
TINY = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LIMIT_S = 300.0
ENDED = {"finished", "failed", "stopped", "lost"}
GPU_METRICS: tuple[str, ...] = ("gpu_utilization_ratio", "gpu_memory_used_bytes", "gpu_power_watts")


@dataclass
class Machine:
    """The folder of the service, and how to speak to it."""

    folder: Path
    port: int = 8766
    process: subprocess.Popen[bytes] | None = None
    failed: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            print(f"FAILED: {what}", file=sys.stderr, flush=True)
            self.failed.append(what)

    def start(self) -> None:
        """Start the service and wait until it answers."""
        command = [sys.executable, str(ROOT / "scripts/serve.py"), "--directory", str(self.folder)]
        more = {"GRISTMILL_LEASES": str(self.folder / "leases")}
        self.process = subprocess.Popen([*command, "--port", str(self.port)], env={**os.environ, **more})
        wait_until(self._answers, 60)

    def _answers(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise SystemExit(f"error: the service ended with {self.process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health").close()
            return True
        except OSError:
            return False

    def ask(self, path: str, method: str = "GET", body: JsonDict | None = None) -> Any:
        """The answer's JSON, or its text."""
        token = (self.folder / ".gristmill-service/token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return json.loads(text) if "json" in answer.headers["content-type"] else text


@dataclass
class Seen:
    """What was read while the run went on."""

    #: (of nvidia-smi, of the service): of one GPU at about the same time.
    memory: list[tuple[float, float]] = field(default_factory=list)
    power: list[tuple[float, float]] = field(default_factory=list)
    #: Unit → the indices of the GPUs that its workers said they hold.
    devices: dict[str, set[int]] = field(default_factory=dict)
    #: Unit → most tokens a second (rows of windows and steps have none).
    fastest: dict[str, float] = field(default_factory=dict)
    held_by: set[str] = field(default_factory=set)
    #: Kind of recommendation → one of its texts.
    recommendations: dict[str, JsonDict] = field(default_factory=dict)
    answer_ms: list[float] = field(default_factory=list)


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="gristmill-service-") as name:
        machine = Machine(Path(name))
        there = [] if args.dry else gpus.usable(gpus.inventory(), os.environ)
        if not there and not args.dry:
            sys.exit("no GPU may be used here; use --dry to try the benchmark without one")
        write_project(machine.folder, args)
        try:
            found = measure(machine, there, args)
        finally:
            if machine.process is not None:
                machine.process.send_signal(signal.SIGINT)
                machine.process.wait(60)
            if args.logs:
                keep_logs(machine.folder / "results", args.logs)
    write_json(args.out, {**provenance.about(there), "dry": args.dry, "failed": machine.failed, **found})
    print(json.dumps(found, indent=1))
    print(*machine.failed or ["all checks hold"], sep="\n")
    sys.exit(1 if machine.failed else 0)


def measure(machine: Machine, there: Sequence[Gpu], args: argparse.Namespace) -> JsonDict:
    """Start, stop, start again, and look all the while."""
    machine.start()
    before = memory_used(there, args.dry)
    tests = machine.ask("/v1/gpus/test", "POST")
    machine.check(all(test["verdict"] == "passed" for test in tests), f"the self-test says {tests}")
    seen = Seen()
    order = {"config": "all.yaml", "cores": 2 if args.dry else 8, **({"gpus": len(there)} if there else {})}

    first = machine.ask("/v1/runs", "POST", order)["id"]
    look(machine, seen, first, args.dry, lambda run: run["done"] >= args.rows // 4)
    began = time.monotonic()
    machine.ask(f"/v1/runs/{first}", "DELETE")
    wait_until(lambda: machine.ask(f"/v1/runs/{first}")["state"] in ENDED, 60)
    stopped_s = time.monotonic() - began
    state = machine.ask(f"/v1/runs/{first}")
    machine.check(state["state"] == "stopped", f"after DELETE the run is {state['state']}")
    wait_until(lambda: memory_used(there, args.dry) <= before + 64, 20)
    free_s = time.monotonic() - began

    second = machine.ask("/v1/runs", "POST", order)["id"]
    look(machine, seen, second, args.dry, is_working)  # with nothing at work, watch would end at once
    watched = machine.folder / "watch.txt"
    with open(watched, "wb") as out:
        command = [sys.executable, str(ROOT / "scripts/watch.py"), "--every", "1"]
        watch = subprocess.Popen(command, cwd=machine.folder, stdout=out, stdin=subprocess.DEVNULL)
        ended = look(machine, seen, second, args.dry, lambda run: run["state"] in ENDED)
        watch.wait(60)
    machine.check(ended["state"] == "finished", f"the run is {ended['state']}: {ended['log_tail'][-2000:]}")
    machine.check(ended["done"] == ended["rows"], f"{ended['done']} of {ended['rows']} rows are done")
    again = asked_again(machine.folder / "results")
    machine.check(not again, f"asked twice: {again}")
    last = watched.read_text().splitlines()[-1]
    machine.check("finished" in last, f"the last line of watch is {last!r}")
    indices = {gpu.index for gpu in there}
    for unit, used in seen.devices.items():
        machine.check(used <= indices and bool(used), f"{unit} holds GPUs {sorted(used)}, of {sorted(indices)}")
    metrics = machine.ask("/metrics")
    for uuid in (gpu.uuid for gpu in there):
        named = [one for one in GPU_METRICS if f"gristmill_{one}{{" in metrics and uuid in metrics]
        machine.check(len(named) == len(GPU_METRICS), f"/metrics of {uuid} has only {named}")
    if args.report:
        args.report.write_text(machine.ask(f"/v1/runs/{second}/report"))
    if not args.dry:
        machine.check(bool(seen.memory), "no reading stands beside one of nvidia-smi")
    return {
        "units": {unit["unit"]: unit["state"] for unit in ended["units"]},
        "tokens_per_second_fastest": seen.fastest,
        "devices": {unit: sorted(used) for unit, used in seen.devices.items()},
        "held_by": sorted(seen.held_by),
        "stop_seconds": round(stopped_s, 1),
        "memory_free_seconds": round(free_s, 1),
        "readings": len(seen.memory),
        "memory_difference_mib": spread(seen.memory),
        "power_difference_watts": spread(seen.power),
        "answer_ms_median": round(statistics.median(seen.answer_ms), 1),
        "answer_ms_slowest": round(max(seen.answer_ms), 1),
        "recommendations": seen.recommendations,
        "watch_lines": watched.read_text().count("\n"),
        "watch_last": watched.read_text().splitlines()[-12:],
        "bytes_of_the_report": len(machine.ask(f"/v1/runs/{second}/report").encode()),
    }


def look(machine: Machine, seen: Seen, run_id: str, dry: bool, enough: Callable[[JsonDict], bool]) -> JsonDict:
    """Read the service and nvidia-smi every second until it is enough; the run as it is then."""
    deadline = time.monotonic() + LIMIT_S
    run: JsonDict = {}
    while time.monotonic() < deadline:
        began = time.perf_counter()
        listed = machine.ask("/v1/gpus")
        seen.answer_ms.append((time.perf_counter() - began) * 1000)
        if not dry:
            compare(seen, listed)
        seen.held_by |= {each["held_by"].split("/")[0] for each in listed["gpus"] if each["held_by"]}
        for each in machine.ask("/v1/recommendations"):
            seen.recommendations.setdefault(each["kind"], each)
        run = machine.ask(f"/v1/runs/{run_id}")
        for unit in run["units"]:
            held = {each["index"] for worker in unit["workers"] for each in worker["devices"]}
            if held:
                seen.devices.setdefault(unit["unit"], set()).update(held)
            speed = unit["tokens_per_second_now"] or 0
            seen.fastest[unit["unit"]] = max(speed, seen.fastest.get(unit["unit"], 0))
        if enough(run):
            return run
        machine.check(run["state"] not in ENDED, f"the run is {run['state']} too early: {run['log_tail'][-3000:]}")
        if run["state"] in ENDED:
            return run
        time.sleep(1)
    raise SystemExit(f"error: run {run_id} took longer than {LIMIT_S:g} s: {run['log_tail'][-3000:]}")


def is_working(run: JsonDict) -> bool:
    """Whether a job of it is at work."""
    return any(worker["state"] in ("loading", "running") for unit in run["units"] for worker in unit["workers"])


def compare(seen: Seen, listed: JsonDict) -> None:
    """One reading of each GPU beside nvidia-smi's, where the service's is as new as that."""
    told = smi("uuid,memory.used,power.draw")
    for each in listed["gpus"]:
        if each["uuid"] in told and each["memory_used_bytes"] is not None and each["power_watts"] is not None:
            memory, power = told[each["uuid"]]
            seen.memory.append((memory, each["memory_used_bytes"] / 2**20))
            seen.power.append((power, each["power_watts"]))


def smi(fields: str) -> dict[str, list[float]]:
    """What nvidia-smi says of each GPU that tells all of it, by its UUID."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    cells = [[cell.strip() for cell in line.split(",")] for line in lines]
    return {row[0]: [float(cell) for cell in row[1:]] for row in cells if "[N/A]" not in row}


def memory_used(there: Sequence[Gpu], dry: bool) -> float:
    """MiB, of all GPUs together."""
    return 0.0 if dry else sum(used for (used,) in smi("uuid,memory.used").values())


def spread(pairs: Sequence[tuple[float, float]]) -> JsonDict | None:
    """How far two readings of a thing are apart."""
    apart = sorted(abs(one - other) for one, other in pairs)
    if not apart:
        return None
    return {"median": round(statistics.median(apart), 1), "p90": round(apart[int(0.9 * len(apart))], 1)}


def keep_logs(results: Path, out: Path) -> None:
    """What the jobs said, in one file."""
    logs = [f"== {path.relative_to(results)}\n{path.read_text()}" for path in sorted(results.rglob("*.log"))]
    out.write_text("\n".join(logs))


def asked_again(results: Path) -> list[str]:
    """Rows of a run that its journal has more than once."""
    found = []
    for run in sorted((results / "runs").iterdir()):
        keys = [line["key"] for path in run.glob("journal/*.jsonl") for line in read_jsonl(path) if "key" in line]
        found += [f"{run.name}: {len(keys) - len(set(keys))} rows"] if len(keys) != len(set(keys)) else []
    return found


def write_project(folder: Path, args: argparse.Namespace) -> None:
    """Models, rows, prompts and the config."""
    device = "cpu" if args.dry else "cuda"
    # In a process of its own, which gives the GPU back: jobs wait for a GPU whose memory others hold.
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(make_model, folder / "models/answerer", TINY if args.dry else ANSWERER, device).result()
        other.submit(make_model, folder / "models/referee", TINY if args.dry else REFEREE, device).result()
    topics = [f"{WORDS[n % len(WORDS)]} {WORDS[n // len(WORDS) % len(WORDS)]}" for n in range(args.rows)]
    rows = [{"id": f"r{n}", "topic": topic, "reference": "river"} for n, topic in enumerate(topics)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ask.jinja").write_text("tell me a word about the {{ topic }}")
    (folder / "other.jinja").write_text("tell me a new word about the small {{ topic }}")
    (folder / "judge.jinja").write_text("tell me about {{ topic }} {{ answer }}")
    run = {"dataset": "rows", "model": "answerer", "metrics": ["contains"]}
    run["sampling"] = {"max_new_tokens": 64 if args.dry else 128}  # type: ignore[assignment]
    training = {
        **{"objective": "distill", "base": "answerer", "logits": "taught", "steps": 4 if args.dry else 60},
        **{"sequence_tokens": 640, "batch_rows": 8, "micro_batch_rows": 8, "learning_rate": 1e-4},
        **({} if args.dry else {"mixed_precision": "bf16"}),
    }
    judge = {"kind": "pointwise", "model": "referee", "prompt": "judge", "runs": ["plain", "other"]}
    config = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {
            name: {"source": str(folder / "models" / name), "max_batch_rows": 256} for name in ("answerer", "referee")
        },
        "prompts": {name: {"file": f"{name}.jinja"} for name in ("ask", "other", "judge")},
        "runs": {"plain": {**run, "prompt": "ask"}, "other": {**run, "prompt": "other"}},
        "judges": {"words": {**judge, "readout": "likelihood", "labels": {"red": "correct", "blue": "incorrect"}}},
        "logits": {"taught": {"model": "referee", "run": "plain", "top_k": 16, "max_samples": args.rows // 4}},
        "trainings": {"student": training},
    }
    (folder / "config").mkdir()
    write_json(folder / "config/all.yaml", config)


def wait_until(holds: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"error: it did not happen within {limit_s:g} s")
        time.sleep(0.1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="without GPUs")
    parser.add_argument("--rows", type=int, help="rows of each run (default: 2400, 400 with --dry)")
    parser.add_argument("--report", type=Path, help="where the report goes")
    parser.add_argument("--logs", type=Path, help="where the logs of the jobs go")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    args.rows = (400 if args.dry else 2400) if args.rows is None else args.rows
    if args.rows < 8:
        parser.error(f"--rows is {args.rows}; at least 8")
    return args


if __name__ == "__main__":
    main()
