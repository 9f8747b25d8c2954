r"""Join the verdicts of several judges on one target to those of a jury.

    python scripts/jury.py --spec "$SPEC" \
        --judge-verdicts results/judges/one/direct/verdicts.jsonl results/judges/two/direct/verdicts.jsonl \
        --verdicts results/juries/both/direct/verdicts.jsonl --metrics results/juries/both/direct/metrics.json

The files stand in the order of the spec's judges. $SPEC is the JSON of a gristmill.config.specs.JurySpec; the formats
are in docs/outputs.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import JurySpec, decode
from gristmill.errors import run_main
from gristmill.files import read_jsonl, write_json, write_jsonl
from gristmill.judging.juries import JuryTally


def main() -> None:
    """Read the judges' verdicts, write the jury's."""
    args = _arguments()
    tally = JuryTally(decode(JurySpec, args.spec))
    write_jsonl(args.verdicts, tally.joined([read_jsonl(path) for path in args.judge_verdicts]))
    metrics = tally.metrics()
    write_json(args.metrics, metrics)
    print(f"{metrics['n']} judged by {len(metrics['judges'])}, {metrics['undecided']} undecided")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True, metavar="JSON", help="a JurySpec")
    parser.add_argument("--judge-verdicts", required=True, type=Path, nargs="+", metavar="FILE", help="one a judge")
    parser.add_argument("--verdicts", required=True, type=Path, metavar="FILE", help="verdicts.jsonl to write")
    parser.add_argument("--metrics", required=True, type=Path, metavar="FILE", help="metrics.json to write")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
