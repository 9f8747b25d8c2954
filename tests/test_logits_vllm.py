"""Facts about a teacher in vLLM: its numbers are those of transformers, and what it cannot give it refuses."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_teacher import config_of, make_teacher
from vllm_environment import NoVllm, vllm_python

from gristmill.errors import UserError
from gristmill.logits.scoring import TransformersTeacher
from gristmill.logits.storage import LogitsRow
from gristmill.logits.texts import Window, WindowId
from gristmill.logits.vllm import VllmTeacher, kept_of

ROOT = Path(__file__).parents[1]


def flat(positions: list[list[tuple[int, float]]]) -> SimpleNamespace:
    """vLLM's FlatLogprobs: nothing for the first token, then the token itself and the most likely ones."""
    starts = [0, *np.cumsum([0, *map(len, positions)])[:-1].tolist()]
    pairs = [pair for position in positions for pair in position]
    return SimpleNamespace(
        start_indices=starts, token_ids=[pair[0] for pair in pairs], logprobs=[pair[1] for pair in pairs]
    )


def test_of_each_position_the_token_itself_and_the_most_likely_ones_are_told_apart() -> None:
    half, quarter = np.log(0.5), np.log(0.25)
    window = Window(WindowId("a", 0, "", 0), 1, [7, 5, 9])
    found = flat([[(5, half), (5, half), (6, quarter)], [(9, -8.0), (6, half), (5, half)]])
    kept = kept_of(found, window, 2)
    assert kept.top_ids.tolist() == [[5, 6], [6, 5]]
    assert np.allclose(kept.target_logprob, [half, -8.0])
    assert np.allclose(kept.tail_logprob[0], quarter)
    assert kept.tail_logprob[1] < -15  # nothing, but for rounding


def test_only_the_positions_from_first_on_are_kept() -> None:
    window = Window(WindowId("a", 0, "", 0), 2, [7, 5, 9])
    kept = kept_of(flat([[(5, -1.0), (5, -1.0)], [(9, -2.0), (6, -0.5)]]), window, 1)
    assert kept.top_ids.tolist() == [[6]]
    assert kept.target_logprob.tolist() == [-2.0]


def test_numbers_of_other_tokens_than_the_texts_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="do not begin with the texts' tokens"):
        kept_of(flat([[(6, -1.0), (5, -1.0)]]), Window(WindowId("a", 0, "", 0), 1, [7, 5]), 1)


@pytest.mark.parametrize(
    ("top_k", "said"), [(8, r"14 outputs of a padded head \(64 against 50 tokens\)"), (None, "full needs every logit")]
)
def test_what_vllm_cannot_give_is_refused_before_it_is_loaded(tmp_path: Path, top_k: int | None, said: str) -> None:
    folder = make_teacher(tmp_path / "tiny")
    with pytest.raises(UserError, match=said):
        VllmTeacher(folder, config_of(folder, engine="vllm"), top_k, False, print)


@pytest.mark.slow
@pytest.mark.model
def test_vllms_numbers_are_those_of_transformers(smollm2_folder: Path) -> None:
    try:
        python = vllm_python()
    except NoVllm as reason:
        pytest.skip(str(reason))
    texts = [[504, 3575, 282, 4649, 314, 7042, 28, 284], [34, 1232, 216, 34, 446]]
    command = [str(python), str(ROOT / "tests/logits_vllm_program.py"), str(smollm2_folder), json.dumps(texts), "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    teacher = TransformersTeacher(smollm2_folder, config_of(smollm2_folder), 5, False, print)
    windows = [(str(n), Window(WindowId(str(n), 0, "", 0), 1 + n, tokens)) for n, tokens in enumerate(texts)]
    wanted = dict(teacher.score(windows))
    for number, found in enumerate(json.loads(done.stdout.splitlines()[-1])):
        row = wanted[str(number)]
        assert isinstance(row, LogitsRow)
        for name in ("top_logprobs", "tail_logprob", "target_logprob"):
            assert np.allclose(found[name], getattr(row, name), atol=1e-3), name
        assert found["top_ids"] == row.top_ids.tolist()
