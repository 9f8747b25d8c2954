"""Training speed: tokens a second, the share of the GPUs' peak (MFU), and what more GPUs give.

    python benchmarks/training.py --gpus 1 2                          a Llama of 1.2 billion parameters in bf16
    python benchmarks/training.py --gpus 2 4 8 --sharding fsdp --shape 8B
    python benchmarks/training.py --gpus 1 2 --shape tiny --steps 8   on a CPU: processes that speak by gloo

- The real thing: scripts/train.py, its lease and torchrun, over rows of random tokens, which cost what others do.
- Each GPU has the same rows a step, so the effective batch grows with the GPUs. `scaling` is tokens a second a GPU over
  that of the first number of GPUs, of this run on this machine.
- Tokens a second is the median step; the first steps, in which memory is found, are left out.
- Numbers of GPUs come in turn, --repeats times, so that other work on the machine meets all alike.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

from provenance import about, slug  # noqa: E402
from small_llama import make_tokenizer  # noqa: E402

from gristmill.config.schema import ModelConfig, TrainingConfig  # noqa: E402
from gristmill.config.specs import ModelSpec, TrainingSpec, encode, encode_training_placements  # noqa: E402
from gristmill.files import read_json, write_json  # noqa: E402
from gristmill.gpu import gpus  # noqa: E402
from gristmill.training.texts import ABOUT, write_rows  # noqa: E402

#: Name → architecture, tokens of a row, rows of a micro-batch.
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "tiny": (
        {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "vocab_size": 2048},
        256,
        2,
    ),
    "1B": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True},
        2048,
        4,
    ),
    "8B": (
        {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128_256},
        2048,
        1,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a GPU in a step")
    parser.add_argument("--micro-batch-rows", type=int)
    parser.add_argument("--sharding", choices=["none", "fsdp"], default="none")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--attention", help="attn_implementation of transformers")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="folder with room for the checkpoints, 14 bytes a parameter")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    there = gpus.usable(gpus.inventory(), os.environ, "auto")
    out = args.out or ROOT / "benchmarks" / "results" / f"training-{args.shape}-{slug(there)}.json"
    passes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        weights = tokenizer(Path(folder))
        for _ in range(args.repeats):
            for count in args.gpus:
                passes.append(one(Path(folder) / "work", weights, count, args, bool(there)))
                print(passes[-1])
    settings = {"shape": args.shape, "sequence_tokens": SHAPES[args.shape][1], "sharding": args.sharding}
    settings |= {"gradient_checkpointing": args.gradient_checkpointing, "mixed_precision": "bf16"}
    lines = summary(passes, args.gpus)
    write_json(out, {"about": about(there), "settings": settings, "results": lines, "passes": passes})
    for line in lines:
        print(line)


def tokenizer(folder: Path) -> dict[str, Any]:
    """A model folder of which a training from scratch reads the tokenizer alone, described."""
    from gristmill.weights import prepare

    make_tokenizer(folder / "tokenizer")
    return dict(prepare("tokenizer", ModelConfig.model_validate({"source": str(folder / "tokenizer")}), print))


def one(work: Path, weights: dict[str, Any], count: int, args: argparse.Namespace, on_gpu: bool) -> dict[str, Any]:
    """Train on so many GPUs, and read the numbers."""
    architecture, tokens, micro = SHAPES[args.shape]
    micro = args.micro_batch_rows or micro
    rows = count * micro * args.accumulation
    shutil.rmtree(work, ignore_errors=True)
    write_data(work / "data", rows * args.steps, tokens, architecture["vocab_size"])
    training = TrainingConfig.model_validate(
        {
            "objective": "pretrain",
            "architecture": {"model_type": "llama", "max_position_embeddings": tokens, **architecture},
            **{"tokenizer": "tokenizer", "dataset": "random", "text_field": "text", "sequence_tokens": tokens},
            **{"steps": args.steps, "batch_rows": rows, "micro_batch_rows": micro, "learning_rate": 1e-4},
            **{"mixed_precision": "bf16", "sharding": args.sharding, "attention": args.attention, "packing": False},
            **{"gradient_checkpointing": args.gradient_checkpointing, "checkpoint_every_steps": 10**6},
            **{"gpus": count, "processes": 1 if on_gpu else count},
        }
    )
    model = ModelSpec(name="tokenizer", model=ModelConfig.model_validate({"source": weights["source"]}))
    write_json(work / "weights.json", weights)
    command = [sys.executable, str(ROOT / "scripts" / "train.py")]
    command += ["--spec", encode(TrainingSpec(name="speed", training=training, model=model))]
    command += [
        "--placements",
        encode_training_placements({"speed": training}),
        "--weights",
        str(work / "weights.json"),
    ]
    command += ["--data", str(work / "data"), "--work", str(work), "--threads", str(len(os.sched_getaffinity(0)))]
    command += ["--model", str(work / "model"), "--metrics", str(work / "metrics.json")]
    subprocess.run(command, check=True)
    metrics = read_json(work / "metrics.json")
    shutil.rmtree(work)
    names = ("tokens_per_second", "model_flops_utilization", "memory_gib", "parameters")
    return {"gpus": count, **{name: metrics[name] for name in names}, "batch": metrics["batch"]["factors"]}


def write_data(folder: Path, rows: int, tokens: int, vocabulary: int) -> None:
    """Rows of random tokens, in the form of a training's texts."""
    random = np.random.default_rng(0)
    lines = (
        {"id": str(row), "window": 0, "first": 1, "tokens": random.integers(vocabulary, size=tokens), "cut_tokens": 0}
        for row in range(rows)
    )
    (folder / "training").mkdir(parents=True)
    write_json(folder / "training" / ABOUT, write_rows(lines, folder / "training"))


def summary(passes: list[dict[str, Any]], counts: list[int]) -> list[dict[str, Any]]:
    """The medians of each number of GPUs, and what a GPU does compared with the first number."""
    rates = {
        count: statistics.median(one["tokens_per_second"] for one in passes if one["gpus"] == count) for count in counts
    }
    first = rates[counts[0]] / counts[0]
    found = []
    for count in counts:
        own = [one for one in passes if one["gpus"] == count]
        used = [one["model_flops_utilization"] for one in own if one["model_flops_utilization"] is not None]
        found.append(
            {
                "gpus": count,
                "tokens_per_second": rates[count],
                "scaling": round(rates[count] / count / first, 4),
                "model_flops_utilization": statistics.median(used) if used else None,
                "memory_gib": max(one["memory_gib"] for one in own),
                "batch": own[0]["batch"],
            }
        )
    return found


if __name__ == "__main__":
    main()
