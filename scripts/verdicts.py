r"""Read what a judge answered: one verdict per judged answer or pair, and the judge's numbers and reliability.

    python scripts/verdicts.py --spec "$SPEC" --generations results/runs/direct/generations.jsonl \
        --judge-generations results/judges/grader/direct/generations.jsonl \
        --grades results/runs/direct/grades.jsonl --metric exact_match \
        --gpu-samples results/judges/grader/direct/gpu \
        --verdicts results/judges/grader/direct/verdicts.jsonl --metrics results/judges/grader/direct/metrics.json

For a pair, give two --generations files in the order of the spec's target, and neither --grades nor --metric. No model
is started: a better parser or another bar costs seconds. $SPEC is the JSON of a gristmill.config.specs.VerdictSpec; the
formats are in docs/outputs.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from gristmill.config.specs import VerdictSpec, decode
from gristmill.errors import UserError, run_main
from gristmill.files import read_jsonl, write_json, write_jsonl
from gristmill.gpu.usage import usage_of
from gristmill.judging.scales import ClassTally, ScoreTally
from gristmill.judging.tallies import PairwiseTally, PointwiseTally
from gristmill.judging.verdicts import judged
from gristmill.merging import proven
from gristmill.types import JsonDict


def main() -> None:
    """Read the answers and the judge's, write verdicts and metrics."""
    args = _arguments()
    spec = decode(VerdictSpec, args.spec)
    metrics = _pointwise(spec, args) if spec.judge.kind == "pointwise" else _other(spec, args)
    write_json(args.metrics, {**metrics, "gpu": usage_of(args.gpu_samples) if args.gpu_samples else None})
    print(f"{metrics['n']} judged, {metrics['asked']} asked, {metrics['unreadable']} unreadable; {_trust(metrics)}")


def _pointwise(spec: VerdictSpec, args: argparse.Namespace) -> JsonDict:
    if (args.grades is None) != (args.metric is None):
        raise UserError("--grades and --metric go together; give both, or neither")
    tally = PointwiseTally(spec, args.metric)
    grades = read_jsonl(args.grades) if args.grades else ()
    write_jsonl(args.verdicts, tally.counted(judged(spec, *_inputs(args)), grades))
    return tally.metrics()


def _other(spec: VerdictSpec, args: argparse.Namespace) -> JsonDict:
    if args.grades is not None or args.metric is not None:
        raise UserError("--grades and --metric are for a pointwise judge; leave them out for a pair, score or class")
    tallies: dict[str, type[PairwiseTally | ScoreTally | ClassTally]] = {
        "pairwise": PairwiseTally,
        "score": ScoreTally,
        "classification": ClassTally,
    }
    tally = tallies[spec.judge.kind](spec)
    write_jsonl(args.verdicts, tally.counted(judged(spec, *_inputs(args))))
    return tally.metrics()


def _inputs(args: argparse.Namespace) -> tuple[list[Iterator[JsonDict]], Iterator[JsonDict]]:
    return [proven(path) for path in args.generations], proven(args.judge_generations)


def _trust(metrics: JsonDict) -> str:
    return "reliable" if metrics["reliable"] else "unreliable: " + "; ".join(metrics["unreliable_because"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, metavar="JSON", help="a VerdictSpec")
    parser.add_argument("--generations", required=True, type=Path, nargs="+", metavar="FILE", help="of the judged runs")
    parser.add_argument("--judge-generations", required=True, type=Path, metavar="FILE", help="the judge's answers")
    parser.add_argument("--grades", type=Path, metavar="FILE", help="the run's grades.jsonl, to compare with")
    parser.add_argument("--metric", metavar="NAME", help="the metric in --grades to compare with")
    parser.add_argument("--gpu-samples", type=Path, metavar="FOLDER", help="what the judge's GPUs did (may not exist)")
    parser.add_argument("--verdicts", required=True, type=Path, metavar="FILE", help="verdicts.jsonl to write")
    parser.add_argument("--metrics", required=True, type=Path, metavar="FILE", help="metrics.json to write")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
