"""Turn texts into the token ids that a teacher reads: windows, one a line. Needs the tokenizer, not the model.

    python scripts/logits_requests.py --spec "$SPEC" --weights results/models/teacher.json \
        --generations results/runs/direct/generations.jsonl --out results/logits/answers/requests.jsonl

SPEC is the JSON of gristmill.config.specs.LogitsSpec; --generations only where the texts are a run's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.config.specs import LogitsSpec, decode
from gristmill.engines.chat import ChatEncoder
from gristmill.errors import run_main
from gristmill.files import write_sealed
from gristmill.logits.texts import longest, window_lines
from gristmill.progress import log
from gristmill.weights import read_description, require_prepared


def main() -> None:
    """Texts in, windows out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--generations", type=Path, help="of the run whose answers are the texts")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    spec = decode(LogitsSpec, args.spec)
    weights = read_description(args.weights, spec.teacher.name, spec.teacher.model)
    chat = ChatEncoder(require_prepared(weights), spec.teacher.model)
    count = write_sealed(args.out, window_lines(spec, args.generations, weights, chat))
    log(f"{count} windows of at most {longest(spec.texts, spec.teacher.model, weights)} tokens")


if __name__ == "__main__":
    run_main(main)
