"""Split requests.jsonl into one file a worker, balanced in number and in length.

    python scripts/split.py --spec "$SPEC" --weights results/models/smollm2.json \
        --requests results/runs/direct/requests.jsonl --shards 4 --out results/runs/direct/shards/4

SPEC is the JSON of gristmill.config.specs.ModelSpec. Prompts that do not fit the model's context stop it here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import ModelSpec, decode
from gristmill.errors import run_main
from gristmill.planning.workers import decode_workers
from gristmill.progress import log
from gristmill.splitting import split
from gristmill.weights import read_description


def main() -> None:
    """Requests in, shards out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--placements", default="{}", help="JSON of where and how each model runs")
    parser.add_argument("--workers", default="{}", help="JSON of the plan's workers; shards follow their speeds")
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--requests", required=True, type=Path)
    parser.add_argument("--shards", required=True, type=int)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(ModelSpec, args.spec).placed(args.placements)
    workers = decode_workers(args.workers).get(spec.name, [])
    weights = read_description(args.weights, spec.name, spec.model)
    counts = split(args.requests, args.out, args.shards, spec, weights, workers)
    log(f"{sum(counts)} requests in {len(counts)} shards of {min(counts)} to {max(counts)}")


if __name__ == "__main__":
    run_main(main)
