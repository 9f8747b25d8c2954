r"""Compare runs of one dataset on the rows they share.

    python scripts/compare.py --spec "$SPEC" --grades direct=results/runs/direct/grades.jsonl \
        --grades worked=results/runs/worked/grades.jsonl --out results/comparisons.json

$SPEC is the JSON of a gristmill.config.specs.CompareSpec. The columns are in docs/outputs.md, what they mean in
docs/statistics.md. Needs no GPU; the same grades give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.arguments import named_paths
from gristmill.comparing import comparisons
from gristmill.config.specs import CompareSpec, decode
from gristmill.errors import run_main
from gristmill.files import read_jsonl, write_json


def main() -> None:
    """Grades in, comparisons out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, metavar="JSON", help="a CompareSpec")
    parser.add_argument("--grades", action="append", default=[], metavar="RUN=FILE", help="a run's grades.jsonl")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="comparisons.json to write")
    args = parser.parse_args()
    grades = {run: read_jsonl(path) for run, path in named_paths("--grades", args.grades, "FILE").items()}
    found = comparisons(decode(CompareSpec, args.spec), grades)
    write_json(args.out, found)
    print(f"{args.out}: {len(found['comparisons'])} comparisons of {len(grades)} runs")


if __name__ == "__main__":
    run_main(main)
