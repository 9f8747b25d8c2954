"""Render a dataset and a prompt into requests.jsonl.

    python scripts/render_requests.py --spec "$SPEC" --out results/runs/direct/requests.jsonl

SPEC is the JSON of gristmill.config.specs.RequestsSpec; the workflow passes it (see `snakemake -p`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import RequestsSpec, decode
from gristmill.errors import run_main
from gristmill.files import write_sealed
from gristmill.progress import log
from gristmill.rendering import requests


def main() -> None:
    """Rows in, requests out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(RequestsSpec, args.spec)
    count = write_sealed(args.out, requests(spec))
    log(f"{count} requests from {spec.dataset.path}")


if __name__ == "__main__":
    run_main(main)
