"""8-bit and 4-bit loads on a real GPU: do they load over the whole group, answer, and need what the plan says?

    python benchmarks/quantized_loads.py                  a Llama 8B shape of random weights; prints a table
    python benchmarks/quantized_loads.py --shape 1B --out result.json

Each load runs in a process of its own, through the project's own loading and static engine. Compared is the estimate of
gristmill.memory.estimate (weights only) with what torch holds after loading. Needs bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from memory_planner import SHAPES, make_folder  # noqa: E402

from gristmill.config.schema import ModelConfig  # noqa: E402
from gristmill.files import write_json  # noqa: E402
from gristmill.memory.estimate import MIB, weight_bytes  # noqa: E402
from gristmill.memory.shapes import read_shape  # noqa: E402
from gristmill.progress import log  # noqa: E402
from gristmill.types import Request, Sampling  # noqa: E402

LOADS = ("16bit", "8bit", "4bit")


def main() -> None:
    """Loads in, table and JSON out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8B")
    parser.add_argument("--one", nargs=2, metavar=("LOAD", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], Path(args.one[1]))))
        return
    with tempfile.TemporaryDirectory(prefix="gristmill-quantized-") as name:
        folder = Path(name)
        make_folder(folder, args.shape)
        results = [in_a_process(load, folder) for load in LOADS]
    for one in results:
        print(
            "{load:6} weights {held_mib:6} MiB, estimated {estimated_mib:6}, {error:+.1%}; {device_map}".format(**one)
        )
    if args.out:
        write_json(args.out, {"shape": args.shape, "loads": results})


def in_a_process(load: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", load, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(load: str, folder: Path) -> dict[str, Any]:
    """Load, note the memory, answer two requests."""
    from gristmill.engines.static.engine import StaticEngine

    quantization = None if load == "16bit" else load
    model = ModelConfig.model_validate({"source": str(folder), "dtype": "bfloat16", "quantization": quantization})
    engine = StaticEngine(folder, model, 8192, on_gpu=True, log=log)
    import torch

    held = sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count())) / MIB
    requests = [
        Request(f"r{n}", 0, "", ({"role": "user", "content": "hello"},), Sampling(max_new_tokens=16)) for n in (0, 1)
    ]
    answered = sum(getattr(outcome, "text", None) is not None for outcome in engine.generate(requests))
    estimated = sum(weight_bytes(read_shape(folder), model)) / MIB
    return {
        "load": load,
        "held_mib": round(held),
        "estimated_mib": round(estimated),
        "error": round(estimated / held - 1, 4),
        "answered": answered,
        "device_map": engine.device_map,
        "card": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
