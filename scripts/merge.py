"""Join the workers' parts into generations.jsonl, proving that every request is answered once; then the manifest.

    python scripts/merge.py --spec "$SPEC" --weights results/models/smollm2.json --unit runs/direct \
        --requests results/runs/direct/requests.jsonl --first-part results/runs/direct/parts/4/1-of-4.jsonl \
        --journal results/runs/direct/journal --generations results/runs/direct/generations.jsonl \
        --manifest results/runs/direct/manifest.json

The other parts lie beside the first, by their names: a thousand paths would not fit on a command line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import ModelSpec, decode
from gristmill.errors import run_main
from gristmill.files import check_seal, read_jsonl, write_json, write_sealed
from gristmill.journal.upkeep import compact
from gristmill.keys import every_key
from gristmill.manifest import Tally, manifest
from gristmill.merging import UnusableParts, merged, parts_beside, within_limit
from gristmill.progress import log
from gristmill.weights import read_description


def main() -> None:
    """Parts in, one file out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--placements", default="{}", help="JSON of where and how each model runs")
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--unit", required=True)
    parser.add_argument("--requests", required=True, type=Path)
    parser.add_argument("--first-part", required=True, type=Path, help="1-of-N.jsonl; all N are merged")
    parser.add_argument("--journal", required=True, type=Path)
    parser.add_argument("--max-failed-ratio", type=float, default=0.0, help="share of the rows that may have failed")
    parser.add_argument("--generations", required=True, type=Path)
    parser.add_argument("--manifest", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(ModelSpec, args.spec).placed(args.placements)
    weights = read_description(args.weights, spec.name, spec.model)
    check_seal(args.requests)
    parts = parts_beside(args.first_part)
    tally = Tally()
    try:
        lines = merged(read_jsonl(args.requests), parts, every_key(spec.model, weights))
        generations = within_limit(lines, args.max_failed_ratio)
        count = write_sealed(args.generations, tally.through(generations))
    except UnusableParts:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    first = next(read_jsonl(args.requests), None)
    described = manifest(args.unit, spec, weights, tally, args.journal)
    write_json(args.manifest, {**described, "sampling": first and first["sampling"]})
    log(f"{count} answers from {len(parts)} parts")
    compact(args.journal, log)


if __name__ == "__main__":
    run_main(main)
