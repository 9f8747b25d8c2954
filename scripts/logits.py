"""Score one share of a teacher's windows, on an exact group of GPUs: rows to the journal, and a part that names them.

    python scripts/logits.py --spec "$SPEC" --weights results/models/teacher.json --top-k 64 --name 1-of-4 \
        --requests results/logits/answers/requests.jsonl --journal results/logits/answers/journal \
        --unit logits/answers --gpu-samples results/logits/answers/gpu --out results/logits/answers/parts/4/1-of-4.jsonl

SPEC is the JSON of gristmill.config.specs.ModelSpec. Windows that the journal has are not scored again; if none is
left, the model is not loaded. TERM and INT keep what is done; run again to go on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gristmill.config.schema import GpusConfig
from gristmill.config.specs import ModelSpec, decode
from gristmill.errors import run_main
from gristmill.logits.worker import Share, score_share
from gristmill.planning.workers import Worker, decode_workers
from gristmill.stopping import Interrupted
from gristmill.weights import read_description


def main() -> None:
    """Windows in, a part out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--placements", default="{}", help="JSON of where and how each model runs")
    parser.add_argument("--gpus", default="{}", help="JSON of the config's gpus section")
    parser.add_argument("--workers", default="{}", help="JSON of the plan's workers; shard k runs on worker k's GPUs")
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--top-k", required=True, type=int, help="log-probabilities kept a position; 0: all")
    parser.add_argument("--name", required=True, help="which share: 1-of-4")
    parser.add_argument("--requests", required=True, type=Path)
    parser.add_argument("--journal", required=True, type=Path)
    parser.add_argument("--unit", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu-samples", required=True, type=Path, help="folder for what the GPUs did")
    parser.add_argument("--max-failed-ratio", type=float, default=0.0, help="share of the windows that may fail")
    parser.add_argument("--scheduled", action="store_true", help="a cluster's scheduler gave this job its GPUs")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(ModelSpec, args.spec).placed(args.placements)
    weights = read_description(args.weights, spec.name, spec.model)
    share = Share(
        unit=args.unit,
        name=args.name,
        requests=args.requests,
        journal=args.journal,
        part=args.out,
        gpu_samples=args.gpu_samples / f"{args.name}.jsonl",
        workers=decode_workers(args.workers).get(spec.name) or [Worker(spec.model.gpus_per_model)],
        teacher=spec.name,
        top_k=args.top_k or None,
        max_failed_ratio=args.max_failed_ratio,
        scheduled=args.scheduled,
    )
    try:
        score_share(share, spec.model, weights, decode(GpusConfig, args.gpus), args.threads)
    except Interrupted as stop:
        print(f"stopped by {stop}; finished rows are in {args.journal}; run again to go on", file=sys.stderr)
        raise SystemExit(128 + stop.signum) from None


if __name__ == "__main__":
    run_main(main)
