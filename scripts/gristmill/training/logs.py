"""What a training says while it runs: steps.jsonl always, TensorBoard where it is installed, one progress bar.

- steps.jsonl has a line for every step and every evaluation, flushed as it comes. A training that goes on from step N
  begins with the lines that the checkpoint of N has, and a new one with none: a step stands there once.
- Only the first process writes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from gristmill.files import dumps, loads, write_jsonl
from gristmill.progress import log
from gristmill.types import JsonDict

#: Seconds between two looks of the bar in a log file, where each is a line.
LOG_EVERY_S = 10.0


class StepLog:
    """The writers of one training."""

    def __init__(self, path: Path, tensorboard: Path, done: int, steps: int, earlier: Path | None) -> None:
        """Go on behind step `done`, with the lines of its checkpoint; from the start without one."""
        kept = [] if earlier is None else list(read_steps(earlier))
        write_jsonl(path, kept)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        self._board = _tensorboard(tensorboard, done)
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        self._bar: Any = tqdm(total=steps, initial=done, unit="step", mininterval=0.5 if terminal else LOG_EVERY_S)

    def add(self, line: JsonDict) -> None:
        """One step or evaluation; numbers go to TensorBoard under their names."""
        self._file.write(dumps(line) + b"\n")
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                if isinstance(value, int | float) and name not in ("step", "epoch"):
                    self._board.add_scalar(name, value, line["step"])
        if "loss" in line:
            self._bar.update(line["step"] - self._bar.n)
            self._bar.set_postfix_str(
                f"loss {line['loss']:.4f}, {line['tokens_per_second']:.0f} tokens/s", refresh=False
            )

    def __enter__(self) -> StepLog:
        """Nothing more to open."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        """Write what is left."""
        self._bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_steps(path: Path) -> Iterator[JsonDict]:
    """The lines of a steps.jsonl; a torn last one is dropped."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as handle:
        for data in handle:
            if data.endswith(b"\n"):
                with contextlib.suppress(ValueError):
                    yield loads(data)


def _tensorboard(folder: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log("tensorboard is not installed, so steps.jsonl alone has the curves; pip install tensorboard for both")
        return None
    return SummaryWriter(str(folder), purge_step=done + 1)
