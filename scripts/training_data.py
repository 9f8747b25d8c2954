"""A training's texts as token ids, once, for all its processes; needs no GPU and no model, only its tokenizer.

    python scripts/training_data.py --spec "$SPEC" --weights results/models/smollm2.json \
        --out results/trainings/student/data

SPEC is the JSON of gristmill.config.specs.TrainingDataSpec; the workflow passes it (see `snakemake -p`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import TrainingDataSpec, decode
from gristmill.errors import run_main
from gristmill.progress import log
from gristmill.training.texts import write_texts
from gristmill.weights import read_description


def main() -> None:
    """Rows in, token ids out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(TrainingDataSpec, args.spec)
    described = read_description(args.weights, spec.texts.teacher.name)
    write_texts(spec, described | spec.context(), args.out, log)


if __name__ == "__main__":
    run_main(main)
