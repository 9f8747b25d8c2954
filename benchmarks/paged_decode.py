"""The paged attention of one new token a sequence: right against float64, and how fast it reads the cache.

    python benchmarks/paged_decode.py --out benchmarks/results/paged_decode.json

Needs a GPU and Triton. For each shape: the relative error of flash.kernels.paged_decode, the median time of a call, and
keys and values read a second as a share of what a large copy moves (read and written) on that card.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import floor
from provenance import about
from tables import columns, number, share

from gristmill.files import write_json
from gristmill.gpu import gpus

#: Sequences, query heads, key-value heads, head size.
SHAPES = [(1, 32, 8, 128), (16, 32, 8, 128), (256, 32, 8, 128), (768, 32, 8, 128), (256, 32, 8, 64), (256, 9, 3, 64)]
PAGE, PAGES = 256, 5


def measure(sequences: int, heads: int, kv_heads: int, size: int) -> dict[str, Any]:
    import torch
    from triton.testing import do_bench

    from gristmill.engines.continuous.flash import kernels

    torch.manual_seed(0)
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    pages = sequences * PAGES + 2
    keys, values = (torch.randn(pages, PAGE, kv_heads, size, **made) for _ in range(2))
    places = torch.randperm(sequences * PAGES, device="cuda").view(sequences, PAGES).int()
    before = torch.randint(1, PAGES * PAGE, (sequences,), dtype=torch.int32, device="cuda")
    query = torch.randn(sequences, 1, heads, size, **made)
    key, value = (torch.randn(sequences, 1, kv_heads, size, **made) for _ in range(2))
    out = kernels.flash_attn_with_kvcache(query, keys, values, key, value, before, places)[:, 0]
    few = min(sequences, 16)
    right = kernels.reference_paged_decode(query[:few, 0], keys, values, places[:few], before[:few] + 1, size**-0.5)
    error = ((out[:few].double() - right).norm() / right.norm()).item()
    after = before + 1
    seconds = 1e-3 * do_bench(
        lambda: kernels.paged_decode(query[:, 0], keys, values, places, after, None, -1), return_mode="median"
    )
    read = int(after.sum()) * kv_heads * size * 2 * 2
    return {
        "sequences": sequences, "heads": heads, "kv_heads": kv_heads, "size": size,
        "error": error, "microseconds": seconds * 1e6, "bytes_per_second": read / seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    rate = floor.measure()[1].bytes_per_second
    rows = [measure(*shape) for shape in SHAPES]
    if args.out is not None:
        write_json(str(args.out), about(gpus.inventory()) | {"bytes_per_second": rate, "rows": rows})
    cells = [["sequences", "heads", "kv heads", "size", "error", "µs", "of the copy's bytes/s"]]
    for row in rows:
        shape = [str(row[name]) for name in ("sequences", "heads", "kv_heads", "size")]
        speed = share(row["bytes_per_second"] / rate)
        cells.append([*shape, f"{row['error']:.1e}", number(row["microseconds"]), speed])
    print(columns(cells))


if __name__ == "__main__":
    main()
