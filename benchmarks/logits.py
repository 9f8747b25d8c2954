"""How fast a teacher's log-probabilities come, beside the plain way: whole logits in float32, four texts at a time.

    python benchmarks/logits.py --shape 8B --texts 256 --tokens 1024          one GPU
    python benchmarks/logits.py --shape 8B --gpus 2 --no-naive                layers over two GPUs (device_map)
    python benchmarks/logits.py --shape tiny --texts 64 --tokens 128          without a GPU: all but the numbers

- The model is a Llama of random weights (countdown.py); the texts are random tokens, their lengths even between a half
  of --tokens and all of it. Speed does not depend on what the weights are; bytes do, so those that are printed are an
  upper bound (random ids, no two alike): docs/distillation.md has a real model's.
- Ours is the teacher as the jobs use it, and then once more with its rows written to a segment as they come. Naive is
  model(batch).logits.float(), log_softmax over all of it, topk and gather, padded to the longest of four in the
  texts' order. Both keep the same numbers of every position, which are compared.
- The first pass is the cold one and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import numpy as np  # noqa: E402
from countdown import SHAPES  # noqa: E402
from provenance import about, slug  # noqa: E402

from gristmill.config.schema import ModelConfig  # noqa: E402
from gristmill.files import write_json  # noqa: E402
from gristmill.gpu import gpus, lease  # noqa: E402
from gristmill.logits.journal import Segments  # noqa: E402
from gristmill.logits.scoring import TransformersTeacher  # noqa: E402
from gristmill.logits.storage import FORMAT_VERSION, LogitsRow  # noqa: E402
from gristmill.logits.texts import Window, WindowId  # noqa: E402
from gristmill.progress import log  # noqa: E402
from gristmill.types import JsonDict  # noqa: E402

LEASE_WAIT_S = 600.0
NAIVE_ROWS = 4


def main() -> None:
    args = _arguments()
    there = gpus.usable(gpus.inventory(), {}, "auto")
    with contextlib.ExitStack() as stack:
        devices = []
        if there:
            want = (there, args.gpus, "benchmarks/logits.py", LEASE_WAIT_S)
            devices = stack.enter_context(lease.leased(*want, log, gpus.links(there)))
        folder = stack.enter_context(model_folder(args))
        report: JsonDict = {**about(devices), "settings": {n: str(v) for n, v in vars(args).items() if n != "out"}}
        report |= measured(args, folder, bool(devices))
        out = args.out or ROOT / "benchmarks/results" / f"logits-{args.shape}-{slug(devices)}.json"
    write_json(out, report)
    for name in ("ours", "ours_written", "naive"):
        if found := report.get(name):
            memory = f", {found['peak_gib']:.1f} GiB at most" if found["peak_gib"] else ""
            print(f"{name:13} {found['positions_per_s']:12,.0f} positions/s{memory}")
    print(f"bytes a position {report['bytes_per_position']:.1f}, written to {out}")


def measured(args: argparse.Namespace, folder: Path, on_gpu: bool) -> JsonDict:
    """All ways, on one loaded model."""
    settings = {"source": str(folder), "dtype": args.dtype or ("bfloat16" if on_gpu else "float32"), "engine": "static"}
    teacher = TransformersTeacher(folder, ModelConfig.model_validate(settings), args.top_k, on_gpu, log)
    windows = texts(args, teacher.vocab_size)
    found: JsonDict = {"positions": sum(window.positions for _, window in windows)}
    rows: dict[str, Any] = {}

    def score() -> None:
        rows.update(teacher.score(windows))

    found["ours"] = timed(score, found["positions"], args.passes)
    with tempfile.TemporaryDirectory() as name:
        found["ours_written"] = timed(lambda: written(teacher, windows, Path(name)), found["positions"], 1, warm=True)
        size = sum(path.stat().st_size for path in Path(name).glob("*.parquet"))
        found["bytes_per_position"] = size / found["positions"]
    if not args.no_naive:
        some = windows[: args.naive_texts]
        count = sum(window.positions for _, window in some)
        kept: dict[str, Any] = {}
        found["naive"] = timed(lambda: kept.update(naive(teacher, some)), count, args.passes)
        ours = [rows[key] for key, _ in some]
        assert all(isinstance(row, LogitsRow) for row in ours), "a text failed"
        differences = [np.abs(row.target_logprob - kept[row.key][2]) for row in ours]
        found["largest_difference"] = float(np.concatenate(differences).max())
        found["ratio"] = found["ours"]["positions_per_s"] / found["naive"]["positions_per_s"]
    return found


def written(teacher: TransformersTeacher, windows: Sequence[tuple[str, Window]], folder: Path) -> None:
    """Score, and write the rows as a job does."""
    metadata = {"format_version": FORMAT_VERSION, "vocab_size": teacher.vocab_size, "k": teacher.k, "full": False}
    segments = Segments(folder, "1-of-1", metadata, {})
    for _, row in teacher.score(windows):
        assert isinstance(row, LogitsRow), row
        segments.add(row)
    segments.flush()


def naive(teacher: TransformersTeacher, windows: Sequence[tuple[str, Window]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Ids, log-probabilities and targets of each text, by whole logits in float32."""
    import torch

    model = teacher._model
    for begin in range(0, len(windows), NAIVE_ROWS):
        batch = windows[begin : begin + NAIVE_ROWS]
        width = max(len(window.tokens) for _, window in batch)
        ids = torch.tensor(
            [[*window.tokens, *[0] * (width - len(window.tokens))] for _, window in batch], device=model.device
        )
        mask = torch.tensor([[column < len(window.tokens) for column in range(width)] for _, window in batch])
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask.long().to(model.device), use_cache=False).logits.float()
            logprobs = torch.log_softmax(logits[:, :-1, : teacher.vocab_size], dim=-1)  # (B, T - 1, V)
            values, tops = torch.topk(logprobs, teacher.k, dim=-1)
            targets = logprobs.gather(-1, ids[:, 1:].to(logprobs.device).unsqueeze(-1)).squeeze(-1)
            parts = [part.cpu().numpy() for part in (tops, values, targets)]
        for row, (key, window) in enumerate(batch):
            yield key, tuple(part[row, : window.positions] for part in parts)


def timed(work: Callable[[], object], positions: int, passes: int, warm: bool = False) -> JsonDict:
    """Seconds of the fastest pass after the first, and the most memory that torch held."""
    import torch

    seconds = []
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    for _ in range(passes + (not warm)):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    counted = seconds if warm else seconds[1:]
    held = [torch.cuda.max_memory_allocated(device) / 2**30 for device in range(torch.cuda.device_count())]
    return {
        "seconds": [round(each, 3) for each in seconds],
        "positions_per_s": positions / min(counted),
        "peak_gib": max(held, default=None),
    }


def texts(args: argparse.Namespace, vocabulary: int) -> list[tuple[str, Window]]:
    """Random tokens of lengths between a half of --tokens and all of it."""
    draw = np.random.default_rng(args.seed)
    lengths = draw.integers(args.tokens // 2, args.tokens, args.texts, endpoint=True)
    drawn = [draw.integers(3, vocabulary, length).tolist() for length in lengths]
    return [(f"t{n}", Window(WindowId(f"t{n}", 0, "", 0), 1, tokens)) for n, tokens in enumerate(drawn)]


@contextlib.contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The model of random weights: the one that is named, made there if it is missing, or one that goes at the end."""
    shape, memory = SHAPES[args.shape], Path("/dev/shm")
    needed = 2 * (shape.layer_parameters + 2 * shape.head_parameters)
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed
    with tempfile.TemporaryDirectory(prefix="logits-", dir=args.scratch or (memory if fits else None)) as name:
        folder = args.model_folder or Path(name)
        if not (folder / "config.json").exists():
            program = Path(__file__).with_name("countdown.py")
            subprocess.run([sys.executable, str(program), args.shape, str(folder)], check=True, stdout=2)
        yield folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = {name.lower(): name for name in SHAPES}
    parser.add_argument("--shape", default="8b", type=lambda name: shapes.get(name.lower(), name), choices=SHAPES)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of the longest text")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--dtype", help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--passes", type=int, default=2, help="beside the cold one")
    parser.add_argument("--naive-texts", type=int, default=64, help="how many of the texts the plain way reads")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, help="folder for the model; /dev/shm where it has room, else a disk")
    parser.add_argument("--model-folder", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
