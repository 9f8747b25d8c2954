"""Find, fetch or convert a model's weights once, and describe them in results/models/<model>.json.

    python scripts/prepare_model.py --spec "$SPEC" --out results/models/smollm2.json

SPEC is the JSON of gristmill.config.specs.ModelSpec; the workflow passes it (see `snakemake -p`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import ModelSpec, decode
from gristmill.errors import run_main
from gristmill.files import write_json
from gristmill.progress import log
from gristmill.weights import prepare


def main() -> None:
    """Weights in, description out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--placements", default="{}", help="JSON of where and how each model runs")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(ModelSpec, args.spec).placed(args.placements)
    described = prepare(spec.name, spec.model, log)
    write_json(args.out, described)
    if spec.model.endpoint is not None:
        log(f"{spec.name}: served elsewhere as {spec.model.endpoint.model}, no weights here")
        return
    log(f"{spec.name}: {described['parameters']:,} parameters in {described['folder']}")


if __name__ == "__main__":
    run_main(main)
