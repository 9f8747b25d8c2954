"""Facts about rows and batches: what is a target, what stands in a row, and which rows a step takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import GPT2, LLAMA, STILL, make

from gristmill.errors import UserError
from gristmill.training.data import IGNORED, Order, TokenTexts, batch_of, held_out, rows_of, share
from gristmill.training.models import build, require_blind, tokenizer_of
from gristmill.training.objectives import cross_entropy


def opened(folder: Path, rows: list[dict[str, Any]] | None = None, **recipe: Any) -> TokenTexts:
    return TokenTexts(make(folder, rows, **recipe).write_data() / "training")


def words(folder: Path, ids: Any) -> str:
    from transformers import AutoTokenizer

    return " ".join(AutoTokenizer.from_pretrained(folder / "words").convert_ids_to_tokens([int(id) for id in ids]))


SFT = {"objective": "sft", "text_field": None, "prompt": "ask"}


def test_of_a_chat_only_the_answer_and_its_end_are_targets(tmp_path: Path) -> None:
    found = opened(tmp_path, [{"id": "a", "question": "w1 w2", "reference": "w3 w4", "text": ""}], **SFT)
    batch = batch_of(found, [[0]], None)
    assert words(tmp_path, batch.input_ids[0]) == "ask : w1 w2 say w3 w4 <eos>"
    learnt = batch.targets[0][batch.targets[0] != IGNORED]
    assert words(tmp_path, learnt) == "w3 w4 <eos>"
    assert batch.targets[0].tolist()[4:7] == batch.input_ids[0].tolist()[5:8]


def test_of_a_plain_text_every_token_but_the_first_is_a_target(tmp_path: Path) -> None:
    found = opened(tmp_path, [{"id": "a", "text": "w1 w2 w3"}])
    batch = batch_of(found, [[0]], None)
    assert words(tmp_path, batch.input_ids[0]) == "w1 w2 w3 <eos>"
    assert batch.targets[0].tolist() == [*batch.input_ids[0].tolist()[1:], IGNORED]


def test_a_long_text_is_split_so_that_each_token_is_a_target_once(tmp_path: Path) -> None:
    text = " ".join(f"w{number}" for number in range(44))
    found = opened(tmp_path, [{"id": "a", "text": text}, {"id": "b", "text": "w0 w1"}], sequence_tokens=8)
    windows = [words(tmp_path, found.tokens(number)).split() for number in range(len(found.lengths))]
    targets = [word for window in windows for word in window[1:]]
    assert targets == [*(f"w{number}" for number in range(1, 44)), "<eos>", "w1", "<eos>"]
    assert max(map(len, windows)) == 8
    assert len(set(found.hashes.tolist())) == 2, "windows of a text carry its name"


def test_a_full_last_window_leaves_the_end_to_a_window_of_its_own(tmp_path: Path) -> None:
    found = opened(tmp_path, [{"id": "a", "text": "w0 w1 w2 w3 w4 w5 w6 w7"}], sequence_tokens=8)
    assert [words(tmp_path, found.tokens(number)) for number in range(2)] == ["w0 w1 w2 w3 w4 w5 w6 w7", "w7 <eos>"]


def test_rows_without_a_target_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "w1 w2"}, {"id": "b", "text": None}]
    found = opened(tmp_path, rows)
    assert (len(found.lengths), found.about["rows_without_targets"]) == (1, 1)


def test_a_training_without_a_target_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row of 1 has a token to learn; look at"):
        opened(tmp_path, [{"id": "a", "question": "w1", "reference": None, "text": ""}], **SFT)


@pytest.mark.parametrize("architecture", [LLAMA, {**GPT2, **STILL}], ids=["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_row_has_the_losses_of_its_texts_alone(tmp_path: Path, architecture: Any, attention: str) -> None:
    made = make(tmp_path, architecture=architecture, attention=attention)
    texts = TokenTexts(made.write_data() / "training")
    training, model = made.config.trainings["t"], made.config.models["words"]
    built = build(training, model, made.weights(), tokenizer_of(made.weights(), model)).eval()
    require_blind(built, torch.no_grad())
    rows = rows_of(texts, np.arange(len(texts.lengths)), 32, True, 0)
    assert max(map(len, rows)) > 2
    packed = losses(built, batch_of(texts, rows[:6], 32))
    alone = torch.cat([losses(built, batch_of(texts, [[text]], None)) for row in rows[:6] for text in row])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def losses(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    there = batch.targets != IGNORED
    return cross_entropy(logits[there], batch.targets[there])


def test_a_model_with_a_state_is_refused_for_packing(tmp_path: Path) -> None:
    state = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    made = make(tmp_path, architecture=state)
    training, model = made.config.trainings["t"], made.config.models["words"]
    built = build(training, model, made.weights(), tokenizer_of(made.weights(), model))
    with pytest.raises(UserError, match="see each other; set packing: false"):
        require_blind(built, torch.no_grad())


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 16), min_size=1, max_size=60), seed=st.integers(0, 5))
def test_packing_puts_each_text_into_one_row_and_no_row_over_its_size(lengths: list[int], seed: int) -> None:
    class Lengths:
        def __init__(self) -> None:
            self.lengths = np.asarray(lengths)

    rows = rows_of(Lengths(), np.arange(len(lengths)), 16, True, seed)  # type: ignore[arg-type]
    assert sorted(text for row in rows for text in row) == list(range(len(lengths)))
    assert all(sum(lengths[text] for text in row) <= 16 for row in rows)
    assert rows == rows_of(Lengths(), np.arange(len(lengths)), 16, True, seed)  # type: ignore[arg-type]


def test_a_text_longer_than_a_row_is_refused_with_both_numbers(tmp_path: Path) -> None:
    found = opened(tmp_path)
    with pytest.raises(UserError, match=r"a text has \d+ tokens, over sequence_tokens=4"):
        rows_of(found, np.arange(len(found.lengths)), 4, True, 0)


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (1, 1), (2, 2), (4, 1), (8, 1)])
def test_a_step_takes_the_same_rows_whatever_the_number_of_processes(processes: int, micro: int) -> None:
    for step in (0, 3, 7):
        numbers = Order(29, 8, seed=4).step(step)
        parts = [share(numbers, rank, processes, micro) for rank in range(processes)]
        assert sorted(row for rank in parts for part in rank for row in part) == sorted(numbers)
        assert {len(rank) for rank in parts} == {8 // (processes * micro)}


def test_an_epoch_sees_every_row_once_and_the_next_in_another_order() -> None:
    order = Order(30, 10, seed=1)
    epochs = [[row for step in range(first, first + 3) for row in order.step(step)] for first in (0, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 2
    assert epochs[0] != epochs[1]
    assert Order(30, 10, seed=1).step(4) == order.step(4), "a step's rows depend on nothing before it"


def test_epochs_are_rounded_up_to_whole_steps() -> None:
    order = Order(29, 8, seed=0)
    assert [order.steps(epochs) for epochs in (0.01, 1, 2)] == [1, 4, 8]


def test_held_out_texts_keep_their_place_when_others_come_and_windows_stay_together(tmp_path: Path) -> None:
    rows = [{"id": f"t{number}", "text": " ".join(["w1"] * (3 + number % 20))} for number in range(200)]
    before = opened(tmp_path / "a", rows[:150], sequence_tokens=8)
    after = opened(tmp_path / "b", rows, sequence_tokens=8)
    out = dict(zip(before.hashes.tolist(), held_out(before, 0.3, 5).tolist(), strict=True))
    also = dict(zip(after.hashes.tolist(), held_out(after, 0.3, 5).tolist(), strict=True))
    assert 0.15 < np.mean(list(out.values())) < 0.45
    assert {id: also[id] for id in out} == out
    for texts in (before, after):
        by_id: dict[int, set[bool]] = {}
        for id, held in zip(texts.hashes.tolist(), held_out(texts, 0.3, 5).tolist(), strict=True):
            by_id.setdefault(id, set()).add(held)
        assert all(len(values) == 1 for values in by_id.values())
