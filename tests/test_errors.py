"""Facts about what a user sees of a mistake."""

from pathlib import Path

import pytest

from gristmill.errors import UserError, run_main, some


def test_a_users_mistake_is_one_line_and_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise UserError("gpus_per_model=3 does not divide 8 GPUs; use 1, 2, 4 or 8")

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: gpus_per_model=3 does not divide 8 GPUs; use 1, 2, 4 or 8\n"


def test_a_file_that_is_gone_or_closed_to_us_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: (tmp_path / "gone.json").read_text())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/gone.json: No such file or directory; put it right")


def test_ctrl_c_is_one_line_and_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 130
    assert capsys.readouterr().err == "stopped by SIGINT; run again to go on\n"


def test_any_other_failure_keeps_its_traceback() -> None:
    def main() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_main(main)


@pytest.mark.parametrize(("count", "text"), [(0, ""), (1, "a"), (5, "a, b, c, d, e"), (7, "a, b, c, d, e and 2 more")])
def test_a_few_names_stand_for_many(count: int, text: str) -> None:
    assert some(list("abcdefg")[:count]) == text
