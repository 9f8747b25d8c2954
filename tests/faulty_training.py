"""scripts/train.py with a fault: its processes are this file, and FAULT in the environment says what goes wrong.

slow                every step takes 0.3 seconds longer
hang:RANK:STEP      the process stops for ever in that step
kill:RANK:STEP      the process is killed in that step
deaf:RANK:STEP      the same, and the others hear nothing, as inside a kernel that waits for it
nan:STEP            the loss of that step is not a number
wreck:STEP          the update of that step leaves weights that are no numbers
full:STEP           the disk is full when that step's checkpoint is written
late:STEP           the process is told to stop while that step's sums are awaited
early:RANK          the process is told to stop (SIGTERM) in step 3, the launcher is not
"""

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))


def main() -> None:
    if sys.argv[1].endswith("task.json"):
        break_something(*os.environ["FAULT"].split(":"))
        from gristmill.training.rank import run_rank

        raise SystemExit(run_rank(Path(sys.argv[1])))
    import functools

    import train
    from gristmill.errors import run_main

    train.run_training = functools.partial(train.run_training, script=Path(__file__))
    run_main(train.main)


def break_something(kind: str, *numbers: str) -> None:
    from gristmill.training import loop

    before = loop.Training._step
    rank = int(os.environ.get("RANK", "0"))

    def step(self: Any) -> Any:
        if kind == "slow":
            time.sleep(0.3)
        if kind == "deaf" and self.progress.step + 1 == int(numbers[1]) and rank != int(numbers[0]):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(600)
        if kind in ("hang", "kill", "deaf") and [rank, self.progress.step + 1] == [int(number) for number in numbers]:
            if kind != "hang":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1)
        if kind == "early" and [rank, self.progress.step + 1] == [int(numbers[0]), 3]:
            os.kill(os.getpid(), signal.SIGTERM)
        if kind == "late":
            sums = self.parallel.sums

            def told(values: Any) -> Any:
                if len(values) == 4 and self.progress.step + 1 == int(numbers[0]):
                    os.kill(os.getpid(), signal.SIGTERM)
                return sums(values)

            self.parallel.sums = told
        line = before(self)
        self.parallel.__dict__.pop("sums", None)
        return line

    checkpointed = loop.Training._checkpoint

    def wrecked(self: Any) -> None:
        if kind == "wreck" and self.progress.step == int(numbers[0]):
            next(iter(self.model.parameters())).data.fill_(float("nan"))
        checkpointed(self)

    losses = loop.Training._losses

    def broken(self: Any, batch: Any) -> Any:
        found = losses(self, batch)
        nan = kind == "nan" and self.model.training and self.progress.step + 1 == int(numbers[0])
        return tuple(value * float("nan") for value in found) if nan else found

    fsync, save = os.fsync, loop.checkpoint.save

    def full(_fd: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def saved(folder: Path, at: int, *more: Any) -> None:
        os.fsync = full if kind == "full" and at == int(numbers[0]) else fsync
        save(folder, at, *more)

    loop.Training._step = step
    loop.Training._losses = broken
    loop.Training._checkpoint = wrecked  # type: ignore[method-assign]
    loop.checkpoint.save = saved


if __name__ == "__main__":
    main()
