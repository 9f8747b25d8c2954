"""How Snakemake was called: results/invocation.json, written when a run begins, for the report and for people."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from gristmill import __version__, checkout
from gristmill.files import write_json
from gristmill.types import JsonDict

PATH = Path("results/invocation.json")


def write(words: Sequence[str], config: JsonDict, path: Path = PATH) -> None:
    """Write it.

    Args:
        words: Snakemake's arguments, the program first.
        config: as it was read, `--config` merged into it.
        path: where to.
    """
    value = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["snakemake", *words[1:]]),
        "gristmill": __version__,
        "commit": checkout.commit(),
        "config": config,
    }
    write_json(path, value)
