"""Python imports this at its start where PYTHONPATH has this folder: the echo engine takes time to load.

In a job of generate.py the echo engine sleeps GRISTMILL_BENCH_LOAD_S seconds when it is opened, and a row takes
GRISTMILL_BENCH_SLOW times as long on the GPU with the UUID GRISTMILL_BENCH_SLOW_GPU. The modules of the same name in
meter/ and asked/ are at work too.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def _slow_down() -> None:
    from gristmill.engines.echo import EchoEngine

    start = EchoEngine.__init__

    def slow_start(self: EchoEngine, *arguments: Any) -> None:
        time.sleep(float(os.environ["GRISTMILL_BENCH_LOAD_S"]))
        start(self, *arguments)
        if os.environ.get("GRISTMILL_BENCH_SLOW_GPU") in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
            self._delay_s *= float(os.environ["GRISTMILL_BENCH_SLOW"])

    EchoEngine.__init__ = slow_start  # type: ignore[method-assign]


def _start() -> None:
    for folder in ("meter", "asked"):
        runpy.run_path(str(Path(__file__).parents[1] / folder / "sitecustomize.py"))
    script = next((word for word in sys.orig_argv if word.endswith("scripts/generate.py")), None)
    if script is not None and "GRISTMILL_BENCH_LOAD_S" in os.environ:
        sys.path.insert(0, str(Path(script).parent))
        _slow_down()


_start()
