"""Facts about ending early: the batch in flight is finished or given up in time, and a hung process ends too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import wait_until

from gristmill import stopping
from gristmill.stopping import Interrupted, interruptible

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_interrupted_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def wait() -> None:
        with interruptible():
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            except Exception as error:  # as libraries do
                raise AssertionError("a library took the signal for a failure of its own") from error

    with pytest.raises(Interrupted) as caught:
        wait()
    assert caught.value.signum == number
    assert str(caught.value) == number.name
    assert signal.getsignal(number) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_the_batch_in_flight_is_finished_and_nothing_new_begins() -> None:
    begun: list[str] = []
    with interruptible() as stop:
        with stop.finishing(lambda: begun.append("asked to stop")):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            batch = "finished"
        with pytest.raises(Interrupted):
            stop.check()
    assert (begun, batch) == (["asked to stop"], "finished")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def wait_for_a_batch_that_does_not_end(signals: int) -> None:
    with interruptible() as stop, stop.finishing(lambda: None):
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def test_a_batch_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "FINISH_S", 0.05)
    with pytest.raises(Interrupted):
        wait_for_a_batch_that_does_not_end(signals=1)


def test_a_second_signal_gives_the_batch_up_at_once() -> None:
    with pytest.raises(Interrupted):
        wait_for_a_batch_that_does_not_end(signals=2)


HUNG = """
import ctypes
from gristmill import stopping
stopping.LIMIT_S = 0.3
mutex = ctypes.create_string_buffer(64)
with stopping.interruptible():
    print("here", flush=True)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # for ever, and no signal ends it
"""


def test_a_process_that_hangs_in_c_ends_too() -> None:
    command = [sys.executable, "-c", HUNG]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env={"PYTHONPATH": str(SCRIPTS)}, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().split()[2] == "S")
        time.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (143, "stopped by SIGTERM, hung\n")
