"""Write generations.jsonl as .csv or .parquet; objects and lists become JSON text.

    python scripts/export.py --generations results/runs/direct/generations.jsonl \
        --out results/runs/direct/generations.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.errors import run_main
from gristmill.export import export


def main() -> None:
    """JSON lines in, a table out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    export(args.generations, args.out)


if __name__ == "__main__":
    run_main(main)
