"""Python imports this module at its start where PYTHONPATH has this folder: it writes down what the engine is asked.

A row in flight at a kill -9 is in no journal, so only the engine knows of it. In a job of generate.py each request is
appended to the file GRISTMILL_ASKED (pid, time, unit, id, sample, variant and a hash of the prompt) before the model
gets it. Nothing else is changed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def _note(unit: str, requests: Sequence[Any]) -> None:
    lines = []
    for request in requests:
        prompt = zlib.crc32(json.dumps(request.messages).encode())
        asked = {"pid": os.getpid(), "time": time.time(), "unit": unit, "rid": list(request.rid), "prompt": prompt}
        lines.append(json.dumps(asked) + "\n")
    fd = os.open(os.environ["GRISTMILL_ASKED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(fd, "".join(lines).encode())
    finally:
        os.close(fd)


def _note_echo(unit: str) -> None:
    from gristmill.engines.echo import EchoEngine

    generate = EchoEngine.generate

    @functools.wraps(generate)
    def noted(self: EchoEngine, requests: Sequence[Any]) -> Iterator[Any]:
        for request in requests:
            if not self._stopped:
                _note(unit, [request])
                yield from generate(self, [request])

    EchoEngine.generate = noted  # type: ignore[method-assign]


def _note_static(unit: str) -> None:
    from gristmill.engines.static.decoding import DecodeLoop

    begun = DecodeLoop._begun

    @functools.wraps(begun)
    def noted(self: DecodeLoop, items: Sequence[Any]) -> Any:
        _note(unit, [item.request for item in items])
        return begun(self, items)

    DecodeLoop._begun = noted  # type: ignore[method-assign]


def _start() -> None:
    words = sys.orig_argv
    script = next((word for word in words if word.endswith("scripts/generate.py")), None)
    if script is None or "GRISTMILL_ASKED" not in os.environ:
        return
    sys.path.insert(0, str(Path(script).parent))
    spec = json.loads(words[words.index("--spec") + 1])
    note = _note_echo if spec["model"]["engine"] == "echo" else _note_static
    note(words[words.index("--unit") + 1])


_start()
