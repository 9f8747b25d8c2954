"""Answer one shard's requests with a model, on an exact group of GPUs (device_map="auto" unless the config says more).

    python scripts/generate.py --spec "$SPEC" --weights results/models/smollm2.json \
        --shard results/runs/direct/shards/4/1-of-4.jsonl --journal results/runs/direct/journal \
        --unit runs/direct --threads 2 --gpu-samples results/runs/direct/gpu \
        --out results/runs/direct/parts/4/1-of-4.jsonl

SPEC is the JSON of gristmill.config.specs.ModelSpec. Requests that the journal has answers to are not asked again; if
none is left, the model is not loaded. TERM and INT keep what is done; run again to go on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from gristmill import fence
from gristmill.config.schema import GpusConfig, JudgeConfig
from gristmill.config.specs import ModelSpec, decode
from gristmill.errors import run_main
from gristmill.judging.asking import Asking
from gristmill.planning.workers import Worker, decode_workers, worker_of
from gristmill.stopping import Interrupted
from gristmill.weights import read_description
from gristmill.worker import Shard, UnusableShard, run_shard


def main() -> None:
    """A shard in, its part out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--placements", default="{}", help="JSON of where and how each model runs")
    parser.add_argument("--gpus", default="{}", help="JSON of the config's gpus section")
    parser.add_argument("--workers", default="{}", help="JSON of the plan's workers; shard k runs on worker k's GPUs")
    parser.add_argument(
        "--left-behind", nargs="*", default=[], type=Path, help="journals of what the config no longer names"
    )
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--shard", required=True, type=Path)
    parser.add_argument("--journal", required=True, type=Path)
    parser.add_argument("--unit", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--gpu-samples", required=True, type=Path, help="folder for what the GPUs did (docs/outputs.md)"
    )
    parser.add_argument("--max-failed-ratio", type=float, default=0.0, help="share of the unit's rows that may fail")
    parser.add_argument("--judges", default="{}", help="JSON of the config's judges: when each is asked again")
    parser.add_argument("--scheduled", action="store_true", help="a cluster's scheduler gave this job its GPUs")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(ModelSpec, args.spec).placed(args.placements)
    name = args.shard.stem
    workers = decode_workers(args.workers).get(spec.name) or [Worker(spec.model.gpus_per_model)]
    worker = worker_of(workers, int(name.partition("-")[0]))
    samples = args.gpu_samples / f"{name}.jsonl"
    left_behind = tuple(args.left_behind)
    places = (args.unit, name, args.shard, args.journal, args.out, samples)
    asking = _asking(args.unit, args.judges)
    shard = Shard(*places, worker, left_behind, args.max_failed_ratio, asking, args.scheduled)
    weights = read_description(args.weights, spec.name, spec.model)
    try:
        run_shard(shard, spec.model, weights, decode(GpusConfig, args.gpus), args.threads)
    except UnusableShard:
        with fence.passed(args.shard):
            shutil.rmtree(args.shard.parent, ignore_errors=True)
        raise
    except Interrupted as stop:
        print(f"stopped by {stop}; finished rows are in {args.journal}; run again to go on", file=sys.stderr)
        raise SystemExit(128 + stop.signum) from None


def _asking(unit: str, judges: str) -> Asking | None:
    """How the judge of a unit judges/<judge>/<target> is asked; None for a run."""
    kind, name = unit.split("/")[:2]
    found = json.loads(judges).get(name) if kind == "judges" else None
    return None if found is None else Asking.of(name, JudgeConfig.model_validate(found))


if __name__ == "__main__":
    run_main(main)
