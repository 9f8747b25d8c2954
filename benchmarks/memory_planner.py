"""Estimated against measured GPU memory: three Llama shapes of random weights, generated with by the static engine.

    python benchmarks/memory_planner.py                           all GPUs of this machine as one group; 1B, 3B and 8B
    python benchmarks/memory_planner.py --gpus 1 --shapes 8B      one GPU
    python benchmarks/memory_planner.py --rows 64 --prompt 1024 --new 256 --out result.json
    python benchmarks/memory_planner.py --dry                     no GPU: a tiny shape on the CPU, nothing is measured

Each shape runs in a process of its own, on a lease, from a folder of safetensors that is made and removed again
(8B: 16 GB of --scratch), loaded in bfloat16 with device_map="auto". Compared for each GPU: the estimate of
gristmill.memory.estimate without the CUDA context against torch.cuda.max_memory_allocated, and with it against the
growth that NVML shows. The estimate's terms and their reasons stand in that module. `reserved` and NVML hold what
torch's allocator keeps without using, which is not planned for: it gives it back before it fails. Exit status 1 when an
estimate of allocated memory is more than 10 % off on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from small_llama import WORDS, _save_tokenizer  # noqa: E402

from gristmill.config.schema import ModelConfig  # noqa: E402
from gristmill.files import write_json  # noqa: E402
from gristmill.gpu import gpus, lease  # noqa: E402
from gristmill.memory.estimate import CONTEXT_MIB, MIB, Load, estimate  # noqa: E402
from gristmill.memory.shapes import Shape, read_shape  # noqa: E402
from gristmill.progress import log  # noqa: E402
from gristmill.types import Gpu, JsonDict, Request, Sampling  # noqa: E402

TOLERANCE = 0.1
#: hidden, intermediate, layers, heads, kv heads, vocabulary: Llama 3.2 1B and 3B (but not tied), Llama 3.1 8B.
SHAPES = {
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "3B": (3072, 8192, 28, 24, 8, 128256),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "tiny": (64, 128, 4, 4, 2, 1000),
}


def main() -> None:
    """Shapes in, table and JSON out."""
    args = _arguments()
    if args.one:
        print(json.dumps(_measure(args.one, args)))
        return
    results = [_in_a_process(name, args) for name in (["tiny"] if args.dry else args.shapes)]
    worst = max((abs(row["error_ratio"]) for one in results for row in one["gpus"]), default=None)
    for one in results:
        _print(one)
    if worst is not None:
        print(f"largest error of allocated memory: {100 * worst:.1f} % (at most {100 * TOLERANCE:g} %)")
    write_json(args.out, {"date": time.strftime("%Y-%m-%d"), "worst_error_ratio": worst, "shapes": results})
    sys.exit(1 if worst is not None and worst > TOLERANCE else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="GPUs of the group; default: all there are")
    parser.add_argument("--shapes", nargs="+", default=["1B", "3B", "8B"], choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument(
        "--prompt", type=int, default=512, help="prompt tokens of every other row; the others have half"
    )
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(name: str, args: argparse.Namespace) -> JsonDict:
    """Measure one shape in a fresh process: its CUDA context and peaks are its own."""
    own = ["--one", name, "--rows", str(args.rows), "--prompt", str(args.prompt), "--new", str(args.new)]
    own += ["--scratch", str(args.scratch), *(["--gpus", str(args.gpus)] if args.gpus else []), *(["--dry"] * args.dry)]
    result = subprocess.run([sys.executable, __file__, *own], stdout=subprocess.PIPE, text=True, check=True)
    found: JsonDict = json.loads(result.stdout.splitlines()[-1])
    return found


def _measure(name: str, args: argparse.Namespace) -> JsonDict:
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        subprocess.run([sys.executable, "-c", _MAKE, str(ROOT), name, scratch], check=True)
        there = [] if args.dry else gpus.usable(gpus.inventory(), os.environ)
        if not there:
            return _run(name, Path(scratch), [], args)
        with lease.leased(
            there, args.gpus or len(there), f"memory_planner {name}", 600, log, gpus.links(there)
        ) as held:
            return _run(name, Path(scratch), held, args)


def _run(name: str, folder: Path, held: list[Gpu], args: argparse.Namespace) -> JsonDict:
    """Load, answer one batch, and set what was estimated beside what was used."""
    load = Load(args.rows, args.prompt, args.new)
    model = ModelConfig(
        source=str(folder), dtype="bfloat16", max_batch_rows=args.rows, gpus_per_model=max(1, len(held))
    )
    shape = read_shape(folder)
    before = {uuid: use.used_mib for uuid, use in gpus.use(held).items()}
    from gristmill.engines.static.engine import StaticEngine

    start = time.monotonic()
    engine = StaticEngine(folder, model, shape.context_tokens, bool(held), log)
    loaded_s = time.monotonic() - start
    answers = list(engine.generate(_requests(load)))
    assert len(answers) == args.rows
    described = {"shape": name, "rows": load.rows, "prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens}
    described |= {"parameters": shape.parameters, "load_seconds": round(loaded_s, 1), "device_map": engine.device_map}
    return described | {"gpus": _compare(shape, model, load, held, before) if held else []}


def _compare(
    shape: Shape, model: ModelConfig, load: Load, held: list[Gpu], before: dict[str, int]
) -> list[dict[str, Any]]:
    import torch

    after = {uuid: use.used_mib for uuid, use in gpus.use(held).items()}
    free = [(gpu.memory_total_mib - before.get(gpu.uuid, 0) - CONTEXT_MIB) * MIB for gpu in held]
    estimates = estimate(shape, model, load, free)
    assert estimates is not None, "the estimate says that it does not fit"
    rows = []
    for device, (gpu, one) in enumerate(zip(held, estimates, strict=True)):
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        rows.append(
            {
                "gpu": f"{gpu.index} {gpu.name}",
                "layers": one.layers,
                "weights_mib": one.weights // MIB,
                "cache_mib": one.cache // MIB,
                "working_mib": one.working // MIB,
                "estimated_mib": one.torch // MIB,
                "allocated_mib": allocated // MIB,
                "error_ratio": round(one.torch / allocated - 1, 4),
                "reserved_mib": reserved // MIB,
                "estimated_card_mib": one.total // MIB,
                "nvml_mib": after[gpu.uuid] - before[gpu.uuid],
                "context_mib": after[gpu.uuid] - before[gpu.uuid] - torch.cuda.memory_reserved(device) // MIB,
            }
        )
    return rows


def _requests(load: Load) -> list[Request]:
    """Prompts of two lengths, so that the batch is padded and attention runs under a mask, as with real rows."""
    sampling = Sampling(max_new_tokens=load.new_tokens)
    lengths = [load.prompt_tokens if number % 2 == 0 else load.prompt_tokens // 2 for number in range(load.rows)]
    texts = [" ".join(WORDS[place % len(WORDS)] for place in range(length - 1)) for length in lengths]  # + "word"
    return [
        Request(str(number), 0, "", ({"role": "user", "content": text},), sampling) for number, text in enumerate(texts)
    ]


def make_folder(folder: Path, name: str) -> None:
    """A Llama folder of random weights, a file a layer; all layers share their values: seconds, not minutes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[name]
    words = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    _save_tokenizer(folder, words)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    kv = kv_heads * hidden // heads
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (intermediate, hidden)}
    shapes |= {"mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate)}
    torch.manual_seed(0)
    layer = {part: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for part, shape in shapes.items()}
    layer |= {
        part: torch.ones(hidden, dtype=torch.bfloat16) for part in ("input_layernorm", "post_attention_layernorm")
    }
    files = {
        f"layer-{number}.safetensors": {
            f"model.layers.{number}.{part}.weight": tensor for part, tensor in layer.items()
        }
        for number in range(layers)
    }
    table = torch.randn((vocabulary, hidden), dtype=torch.bfloat16) * 0.02
    ends = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    files["ends.safetensors"] = ends | {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {tensor: file for file, tensors in files.items() for tensor in tensors}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


#: In a process of its own: the lease must be taken before torch is imported, and the weights made before the lease.
_MAKE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1] + "/benchmarks")
import memory_planner
memory_planner.make_folder(Path(sys.argv[3]), sys.argv[2])
"""


def _print(one: JsonDict) -> None:
    size = f"{one['parameters'] / 1e9:.2f} billion parameters"
    print(f"{one['shape']}: {size}, {one['rows']} rows of {one['prompt_tokens']} + {one['new_tokens']} tokens")
    print(f"  placed: {one['device_map']}")
    for row in one["gpus"]:
        parts = f"{row['weights_mib']} weights + {row['cache_mib']} cache + {row['working_mib']} working"
        print(
            f"  GPU {row['gpu']}: estimated {row['estimated_mib']} MiB ({parts}), allocated {row['allocated_mib']} "
            f"({100 * row['error_ratio']:+.1f} %), reserved {row['reserved_mib']}; "
            f"card {row['estimated_card_mib']} estimated, {row['nvml_mib']} by NVML (context {row['context_mib']})"
        )


if __name__ == "__main__":
    main()
