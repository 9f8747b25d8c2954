"""One process of a training; started once for each device, by torchrun where they are several (see scripts/train.py).

torchrun --standalone --nproc-per-node=2 scripts/train_rank.py results/trainings/student/task.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.training.rank import run_rank


def main() -> None:
    """A task in; the first process writes what it leaves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    raise SystemExit(run_rank(parser.parse_args().task))


if __name__ == "__main__":
    main()
