"""Join a teacher's rows into data/part-*.parquet, proving that every window is there once; then metrics and manifest.

    python scripts/logits_merge.py --spec "$SPEC" --weights results/models/teacher.json --top-k 64 \
        --unit logits/answers --requests results/logits/answers/requests.jsonl \
        --first-part results/logits/answers/parts/4/1-of-4.jsonl --journal results/logits/answers/journal \
        --data results/logits/answers/data --metrics results/logits/answers/metrics.json \
        --manifest results/logits/answers/manifest.json
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

from gristmill import __version__, checkout
from gristmill.config.specs import ModelSpec, decode
from gristmill.errors import run_main
from gristmill.files import read_json, write_json
from gristmill.logits import LOGITS_VERSION
from gristmill.logits.journal import link_merged
from gristmill.logits.merging import merge, sizes
from gristmill.logits.texts import either_key, skipped
from gristmill.manifest import installed_versions
from gristmill.merging import UnusableParts, parts_beside
from gristmill.progress import log
from gristmill.types import JsonDict
from gristmill.weights import read_description


def main() -> None:
    """Parts in, a dataset of logits out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--top-k", required=True, type=int, help="log-probabilities kept a position; 0: all")
    parser.add_argument("--unit", required=True)
    parser.add_argument("--requests", required=True, type=Path)
    parser.add_argument("--first-part", required=True, type=Path, help="1-of-N.jsonl; all N are merged")
    parser.add_argument("--journal", required=True, type=Path)
    parser.add_argument("--max-failed-ratio", type=float, default=0.0, help="share of the windows that may have failed")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--metrics", required=True, type=Path)
    parser.add_argument("--manifest", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(ModelSpec, args.spec)
    weights = read_description(args.weights, spec.name, spec.model)
    keys = either_key(spec.model, weights, args.top_k or None)
    parts = parts_beside(args.first_part)
    try:
        sums, metadata, files = merge(
            args.requests, parts, args.journal, args.data, keys, spec.name, args.max_failed_ratio, log
        )
    except UnusableParts:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    workers: list[JsonDict] = [read_json(path) for path in sorted(args.journal.glob("*.json"))]
    seconds = sum(worker["score_seconds"] for worker in workers)
    size = sizes(files, metadata)
    write_json(
        args.metrics,
        {"unit": args.unit, "teacher": spec.name, "k": metadata["k"], **sums.metrics(), **size}
        | {"skipped": skipped(args.requests), "score_seconds": round(seconds, 3)},
    )
    write_json(
        args.manifest,
        {
            "unit": args.unit,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "gristmill": __version__,
            "commit": checkout.commit(),
            "logits_version": LOGITS_VERSION,
            "python": platform.python_version(),
            "packages": installed_versions(),
            "spec": spec.model_dump(),
            "weights": weights,
            "metadata": metadata,
            "files": files,
            "failed": sums.failed,
            "workers": workers,
        },
    )
    each = f"{size['bytes_per_position']:.1f} bytes each" if sums.positions else "no bytes"
    log(f"{sums.rows} rows, {sums.positions} positions, {each} (plain: {size['plain_bytes_per_position']})")
    link_merged(args.journal, [args.data / file["name"] for file in files], sums.keys, log)


if __name__ == "__main__":
    run_main(main)
