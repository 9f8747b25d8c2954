"""Train a model: takes a lease on the GPUs, starts one process for each (several by torchrun), and sees that they end.

    python scripts/train.py --spec "$SPEC" --weights results/models/smollm2.json --data results/trainings/student/data \
        --work results/trainings/student --model results/trainings/student/model \
        --metrics results/trainings/student/metrics.json --threads 2

SPEC is the JSON of gristmill.config.specs.TrainingSpec; the workflow passes it (see `snakemake -p`). TERM and INT end
the step in flight and write a checkpoint; run again to go on from it. Under SLURM with `nodes` over 1 it starts a
torchrun on each node of the job.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gristmill.config.schema import GpusConfig
from gristmill.config.specs import TrainingSpec, decode
from gristmill.errors import run_main
from gristmill.training.job import Places, Stopped, run_training
from gristmill.weights import read_description


def main() -> None:
    """Data in, a model folder out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--placements", default="{}", help="JSON of where and how each training runs")
    parser.add_argument("--gpus", default="{}", help="JSON of the config's gpus section")
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path, help="folder of scripts/training_data.py, or of logits")
    parser.add_argument("--work", required=True, type=Path, help="folder for checkpoints and logs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scheduled", action="store_true", help="a cluster's scheduler gave this job its GPUs")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--metrics", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(TrainingSpec, args.spec).placed(args.placements)
    weights = read_description(args.weights, spec.model.name)
    places = Places(args.data, args.work, args.model, args.metrics)
    try:
        run_training(spec, weights, places, decode(GpusConfig, args.gpus), args.threads, args.scheduled)
    except Stopped as stop:
        print(f"stopped by signal {stop.signum}; run again to go on from the last checkpoint", file=sys.stderr)
        raise SystemExit(128 + stop.signum) from None


if __name__ == "__main__":
    run_main(main)
