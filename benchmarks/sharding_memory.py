"""What FSDP takes before a training's first step: memory of each GPU and each process, beside the size of the model.

    python benchmarks/sharding_memory.py --processes 2                    a Llama of 3.2 billion parameters in float32
    python benchmarks/sharding_memory.py --processes 2 --shape tiny       on a CPU: resident memory alone

- The real thing: the model is built and sharded as every training does it, by as many processes.
- GPU: torch's max_memory_allocated until the model is sharded, and what it holds from then on. Host: the most resident
  memory that a process ever had, the libraries included.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

from small_llama import make_tokenizer  # noqa: E402

from gristmill.config.schema import ModelConfig, TrainingConfig  # noqa: E402

GIB = 1 << 30
SHAPES: dict[str, dict[str, Any]] = {
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
    | {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 32_000, "tie_word_embeddings": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="3B")
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tokenizer is not None:
        one(args.shape, args.tokenizer)
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder) / "tokenizer")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.processes}", "--standalone"]
        command += [__file__, "--shape", args.shape, "--tokenizer", str(tokenizer)]
        subprocess.run(command, check=True)


def one(shape: str, folder: Path) -> None:
    """Build, shard, and say what it took; one process of several."""
    import torch
    from transformers import AutoTokenizer

    from gristmill.training import models
    from gristmill.training.parallel import Parallel

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    texts = {"tokenizer": "tokenizer", "dataset": "none", "text_field": "text", "steps": 1, "learning_rate": 0.1}
    architecture = {"model_type": "llama", **SHAPES[shape]}
    recipe = TrainingConfig.model_validate(
        {"objective": "pretrain", "architecture": architecture, "sharding": "fsdp", **texts}
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    parallel = Parallel(recipe, on_gpu, 4)
    model = models.build(recipe, ModelConfig(source=str(folder)), {}, tokenizer, parallel.is_sent_weights)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sharded = parallel.wrap(model)
    gpu = ""
    if on_gpu:
        most, now = torch.cuda.max_memory_allocated() / GIB, torch.cuda.memory_allocated() / GIB
        gpu = f"GPU {most:.2f} GiB at most, {now:.2f} GiB now; "
    models.require_blind(sharded, parallel.autocast())
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(f"process {parallel.rank}: model {size / GIB:.2f} GiB; {gpu}host {host:.2f} GiB at most", flush=True)
    parallel.close()


if __name__ == "__main__":
    main()
