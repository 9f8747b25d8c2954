"""Write the report: one HTML file with scores, judges and how far to trust them, every answer, and provenance.

    python scripts/report.py --spec "$SPEC" \\
        --run direct=results/runs/direct --run worked=results/runs/worked \\
        --judge referee/direct=results/judges/referee/direct \\
        --judge arena/direct_vs_worked=results/judges/arena/direct_vs_worked \\
        --jury panel/direct=results/juries/panel/direct \\
        --training tuned=results/trainings/tuned --logits taught=results/logits/taught \\
        --comparisons results/comparisons.json --rankings results/rankings.json \\
        --invocation results/invocation.json --out results/report.html

SPEC is the JSON of gristmill.config.specs.ReportSpec, at the least '{"title": "my report", "max_rows": 2000}'. Only the
folders given are read: generations.jsonl, grades.jsonl, metrics.json and manifest.json of a run, verdicts.jsonl,
metrics.json and manifest.json of a judge target, metrics.json of a jury's, metrics.json and manifest.json of a training
and of a teacher's logits, a training's steps.jsonl, and gpu/ and live/ where they are there (docs/outputs.md).
Comparisons and rankings have to be of the runs and judges that are given. Needs no GPU; the same files give the same
bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.arguments import named_paths
from gristmill.config.specs import ReportSpec, decode
from gristmill.errors import UserError, run_main
from gristmill.report.data import Beside
from gristmill.report.render import write_report


def main() -> None:
    """Folders in, one page out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--run", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--judge", action="append", default=[], metavar="JUDGE/TARGET=FOLDER")
    parser.add_argument("--jury", action="append", default=[], metavar="JURY/TARGET=FOLDER")
    parser.add_argument("--training", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--logits", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--comparisons", type=Path, metavar="FILE")
    parser.add_argument("--rankings", type=Path, metavar="FILE")
    parser.add_argument("--invocation", type=Path, metavar="FILE", help="shown if it is there")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    runs, judges = named_paths("--run", args.run), named_paths("--judge", args.judge)
    trained = {
        "trainings": named_paths("--training", args.training),
        "logits": named_paths("--logits", args.logits),
    }
    beside = Beside(
        named_paths("--jury", args.jury), args.comparisons, args.rankings, invocation=args.invocation, **trained
    )
    if not (runs or trained["trainings"] or trained["logits"]):
        raise UserError("nothing to report on: give at least one --run, --training or --logits")
    size = write_report(decode(ReportSpec, args.spec), runs, judges, args.out, beside)
    numbers = f"{len(runs)} runs, {len(judges)} judge targets"
    beyond = "".join(f", {len(folders)} {name}" for name, folders in trained.items() if folders)
    print(f"{args.out}: {numbers}{beyond}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    run_main(main)
