"""Facts about progress lines: they count what came, and promise nothing before the first row."""

import re

import pytest

from gristmill.progress import Progress
from gristmill.types import Completion, Failure


def answer(number: int) -> Completion:
    return Completion(f"r{number}", 0, "", "text", "stop", 10, 5, 0.1)


def test_no_guess_is_made_before_the_first_row() -> None:
    assert Progress(total=3).line().endswith("0/3 rows, 0.0 tokens/s, the first rows are on their way")


def test_a_line_says_rows_speed_and_time_left() -> None:
    progress = Progress(total=3)
    progress.add(answer(1))
    assert re.fullmatch(r"1/3 rows, \d+\.\d tokens/s, \d+:\d\d:\d\d left", progress.line())
    assert (progress.done, progress.prompt_tokens, progress.completion_tokens) == (1, 10, 5)


def test_a_failed_row_is_named_at_once_and_adds_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=1)
    progress.add(Failure("r7", 2, "", "out_of_memory", "a batch of one row"))
    assert "row r7#2 failed: out_of_memory: a batch of one row" in capsys.readouterr().err
    assert (progress.done, progress.failed, progress.completion_tokens) == (1, 1, 0)


def test_the_last_line_comes_with_the_end_also_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def crash() -> None:
        with Progress(total=2) as progress:
            progress.add(answer(1))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        crash()
    assert "1/2 rows" in capsys.readouterr().err.splitlines()[-1]
