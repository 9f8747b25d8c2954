r"""Rank the runs that pairwise judges compared.

    python scripts/rank.py --spec "$SPEC" --judge arena/direct_vs_worked=results/judges/arena/direct_vs_worked \
        --run direct=results/runs/direct --run worked=results/runs/worked --out results/rankings.json

$SPEC is the JSON of a gristmill.config.specs.RankSpec. Of a judge target verdicts.jsonl and metrics.json are read, of a
run generations.jsonl (for the lengths of its answers). The columns are in docs/outputs.md, what they mean in
docs/statistics.md. Needs no GPU; the same files give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.arguments import named_paths
from gristmill.config.specs import RankSpec, decode
from gristmill.errors import run_main
from gristmill.files import write_json
from gristmill.ranking import rankings


def main() -> None:
    """Verdicts in, rankings out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, metavar="JSON", help="a RankSpec")
    parser.add_argument("--judge", action="append", default=[], metavar="JUDGE/TARGET=FOLDER")
    parser.add_argument("--run", action="append", default=[], metavar="RUN=FOLDER")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="rankings.json to write")
    args = parser.parse_args()
    judges, runs = named_paths("--judge", args.judge), named_paths("--run", args.run)
    found = rankings(decode(RankSpec, args.spec), judges, runs)
    write_json(args.out, found)
    print(f"{args.out}: {len(found['rankings'])} rankings from {len(judges)} judged pairs")


if __name__ == "__main__":
    run_main(main)
