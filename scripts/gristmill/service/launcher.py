"""Stands beside one Snakemake: says which process it is, and how it ended, in the run's folder.

    python -m gristmill.service.launcher RUN_FOLDER     # reads run.json, writes process.json, log and ended.json

- It leads the process group, so a signal to the group reaches Snakemake and its jobs, as Ctrl-C in a terminal does. It
  outlives them, and so a service that was restarted meanwhile learns the exit status too.
- Its handlers do nothing, but they are handlers: a service in the background of a shell ignores SIGINT, which a child
  would inherit, and a Snakemake that ignores it cannot be stopped. What has a handler is reset when a program starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from gristmill import fence
from gristmill.files import read_json, write_json
from gristmill.live import Reader
from gristmill.service.processes import identify
from gristmill.service.units import UnitView, units_as_json
from gristmill.types import JsonDict


def main() -> None:
    """Run one Snakemake to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    folder = Path(sys.argv[1]).resolve()
    run = read_json(folder / "run.json")
    me = identify(os.getpid())
    assert me is not None
    write_json(folder / "process.json", {"pid": me.pid, "started": me.started})
    with open(folder / "log", "ab") as log:
        code = subprocess.call(
            run["command"], cwd=run["directory"], env=_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    write_json(folder / "ended.json", {"exit_code": code, "ended": time.time(), "units": _units(Path(run["results"]))})


def _units(results: Path) -> list[JsonDict]:
    """How far the units are."""
    try:
        return units_as_json([UnitView.of(unit) for unit in Reader(results).read().units])
    except Exception:  # how the run ended must be known whatever stands in its results
        traceback.print_exc()  # into the run's log
        return []


def _environment() -> dict[str, str]:
    """As the service was started: without the path that this module came by, and of no run."""
    kept = {name: value for name, value in os.environ.items() if name != fence.RUN}
    _, _, there = kept.pop("PYTHONPATH", "").partition(os.pathsep)
    return {**kept, "PYTHONPATH": there} if there else kept


if __name__ == "__main__":
    main()
