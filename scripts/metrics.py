r"""Grade a run's answers against the references, and sum them up.

    python scripts/metrics.py --spec "$SPEC" --generations results/runs/direct/generations.jsonl \
        --gpu-samples results/runs/direct/gpu --grades results/runs/direct/grades.jsonl \
        --metrics results/runs/direct/metrics.json

$SPEC is the JSON of a gristmill.config.specs.MetricsSpec. The formats are in docs/outputs.md; what counts as a match is
in scripts/gristmill/grading.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import MetricsSpec, decode
from gristmill.errors import run_main
from gristmill.files import write_json, write_jsonl
from gristmill.gpu.usage import usage_of
from gristmill.merging import proven
from gristmill.metrics import RunTally


def main() -> None:
    """Read the answers, write grades and metrics."""
    args = _arguments()
    tally = RunTally(decode(MetricsSpec, args.spec))
    write_jsonl(args.grades, tally.graded(proven(args.generations)))
    metrics = {**tally.metrics(), "gpu": usage_of(args.gpu_samples) if args.gpu_samples else None}
    write_json(args.metrics, metrics)
    print(f"{metrics['run']}: {metrics['metric'] or 'no metric'} {metrics['accuracy']} over {metrics['n']} answers")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, metavar="JSON", help="a MetricsSpec")
    parser.add_argument("--generations", required=True, type=Path, metavar="FILE", help="the run's generations.jsonl")
    parser.add_argument("--gpu-samples", type=Path, metavar="FOLDER", help="what the GPUs did (may not exist)")
    parser.add_argument("--grades", required=True, type=Path, metavar="FILE", help="grades.jsonl to write")
    parser.add_argument("--metrics", required=True, type=Path, metavar="FILE", help="metrics.json to write")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
