r"""Build what a judge is asked about a run's answers, or about those of a pair of runs.

    python scripts/judge_requests.py --spec "$SPEC" --generations results/runs/direct/generations.jsonl \
        --out results/judges/grader/direct/requests.jsonl

For a pair, give the two files in the order of the spec's target:

    python scripts/judge_requests.py --spec "$SPEC" \
        --generations results/runs/direct/generations.jsonl results/runs/cot/generations.jsonl \
        --out results/judges/referee/direct_vs_cot/requests.jsonl

$SPEC is the JSON of a gristmill.config.specs.JudgeSpec. The formats are in docs/outputs.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import JudgeSpec, decode
from gristmill.errors import run_main
from gristmill.files import write_sealed
from gristmill.judging.requests import judge_requests
from gristmill.merging import proven


def main() -> None:
    """Read the answers, write the requests."""
    args = _arguments()
    spec = decode(JudgeSpec, args.spec)
    count = write_sealed(args.out, judge_requests(spec, [proven(path) for path in args.generations]))
    print(f"{count} judge requests in {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, metavar="JSON", help="a JudgeSpec")
    parser.add_argument("--generations", required=True, type=Path, nargs="+", metavar="FILE", help="of the judged runs")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="requests.jsonl to write")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
