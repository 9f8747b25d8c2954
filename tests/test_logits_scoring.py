"""Facts about a teacher's numbers: they are those of a softmax over the whole vocabulary, however they are computed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_teacher import PADDING, WORDS, config_of, make_teacher
from transformers import AutoTokenizer

from gristmill.engines.loading import load_model
from gristmill.errors import UserError
from gristmill.logits import scoring
from gristmill.logits.scoring import TransformersTeacher, distributions, kept_count
from gristmill.logits.storage import LogitsRow
from gristmill.logits.texts import Window, WindowId
from gristmill.types import Failure

V = len(WORDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "tiny")


def window(name: str, tokens: Sequence[int], first: int = 1) -> Window:
    return Window(WindowId(name, 0, "", 0), first, list(tokens))


def some_windows() -> list[Window]:
    draw = np.random.default_rng(0)
    lengths = [2, 31, 7, 64, 7, 19, 128, 3]
    drawn = [window(f"r{n}", draw.integers(3, V, length).tolist()) for n, length in enumerate(lengths)]
    return [*drawn, window("answer", draw.integers(3, V, 20).tolist(), first=15)]


def open_teacher(folder: Path, top_k: int | None = 8, **settings: Any) -> TransformersTeacher:
    return TransformersTeacher(folder, config_of(folder, **settings), top_k, False, print)


def rows_of(teacher: TransformersTeacher, windows: Sequence[Window]) -> dict[str, LogitsRow]:
    found = dict(teacher.score([(item.wid.id, item) for item in windows]))
    assert all(isinstance(row, LogitsRow) for row in found.values()), found
    assert found.keys() == {item.wid.id for item in windows}
    return {key: row for key, row in found.items() if isinstance(row, LogitsRow)}


def wanted(folder: Path, item: Window, vocab: int = V) -> torch.Tensor:
    """log softmax over the vocabulary (P, V), by the model alone, one text at a time; the softmax in float64."""
    model = load_model(folder, config_of(folder), False)
    with torch.inference_mode():
        logits = model(torch.tensor([list(item.tokens)])).logits[0, :, :vocab].double()  # float32 sums differ by more
    return torch.log_softmax(logits, dim=-1)[item.first - 1 : -1]


def assert_right(
    folder: Path, rows: dict[str, LogitsRow], windows: Sequence[Window], vocab: int = V, near: float = 1e-5
) -> None:
    for item in windows:
        row, exact = rows[item.wid.id], wanted(folder, item, vocab)
        ids = torch.tensor(row.top_ids).long()
        assert row.positions == item.positions
        assert np.abs(row.top_logprobs - exact.gather(1, ids).numpy()).max() < near
        assert np.abs(row.top_logprobs - exact.topk(ids.shape[1]).values.numpy()).max() < near
        loss = torch.nn.functional.cross_entropy(exact, torch.tensor(list(item.tokens[item.first :])), reduction="none")
        assert np.abs(row.target_logprob + loss.numpy()).max() < near
        total = np.exp(row.top_logprobs.astype(np.float64)).sum(axis=1) + np.exp(row.tail_logprob.astype(np.float64))
        assert np.abs(total - 1).max() < near


@pytest.mark.parametrize("chunk", [1, 100, 1 << 26])
def test_chunks_through_the_head_give_the_softmax_over_the_whole_vocabulary(
    folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", chunk)
    teacher = open_teacher(folder)
    assert teacher._head.alone
    assert_right(folder, rows_of(teacher, some_windows()), some_windows())


@pytest.mark.parametrize(("rows", "tokens"), [(1, 2048), (None, 64), (None, 300), (None, 2048)])
def test_the_batch_changes_no_number(
    folder: Path, rows: int | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CPU_BATCH_TOKENS", tokens)
    assert_right(folder, rows_of(open_teacher(folder, max_batch_rows=rows), some_windows()), some_windows())


def test_what_a_padded_head_gives_beyond_the_vocabulary_is_left_out_and_told(folder: Path) -> None:
    teacher = open_teacher(folder, top_k=V)
    assert (teacher.head_width, teacher.vocab_size) == (V + PADDING, V)
    item = some_windows()[1]
    row = rows_of(teacher, [item])["r1"]
    assert row.top_ids.max() == V - 1
    with torch.inference_mode():
        logits = load_model(folder, config_of(folder), False)(torch.tensor([list(item.tokens)])).logits[0, :-1].float()
    padded = torch.softmax(logits, dim=-1)[:, V:].sum(dim=-1).max().item()
    assert padded > 0.01
    assert row.padded_mass == pytest.approx(padded, abs=1e-5)


def test_the_full_distribution_is_that_of_top_k_of_the_whole_vocabulary(folder: Path) -> None:
    tops, full = (rows_of(open_teacher(folder, k), some_windows()) for k in (V, None))
    for name, top in tops.items():
        whole = full[name]
        assert np.array_equal(whole.top_ids[0], np.arange(V))
        assert np.array_equal(np.take_along_axis(whole.top_logprobs, top.top_ids, axis=1), top.top_logprobs)
        assert np.isneginf(top.tail_logprob).all()
        assert np.isneginf(whole.tail_logprob).all()


def test_a_head_with_a_cap_is_used_alone_and_one_with_a_scale_through_its_model(tmp_path: Path) -> None:
    capped = make_teacher(tmp_path / "gemma", "Gemma2", head_dim=8, final_logit_softcapping=5.0)
    teacher = open_teacher(capped)
    assert teacher._head.alone
    assert_right(capped, rows_of(teacher, some_windows()), some_windows())
    scaled = make_teacher(tmp_path / "cohere", "Cohere", logit_scale=0.25)
    teacher = open_teacher(scaled)
    assert not teacher._head.alone
    assert_right(scaled, rows_of(teacher, some_windows()), some_windows())


def test_out_of_memory_halves_the_batch_and_fails_only_a_window_that_does_not_fit_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    score = TransformersTeacher._scored

    def small(teacher: TransformersTeacher, batch: Sequence[Window]) -> Any:
        tried.append(len(batch))
        if len(batch) > 2 or len(batch[0].tokens) > 100:
            raise torch.OutOfMemoryError("made up")
        return score(teacher, batch)

    monkeypatch.setattr(TransformersTeacher, "_scored", small)
    windows = [window(f"r{n}", range(3, 13)) for n in range(9)] + [window("long", [5] * 120)]
    found = dict(open_teacher(folder).score([(item.wid.id, item) for item in windows]))
    failed = found.pop("long")
    assert isinstance(failed, Failure)
    assert failed.reason == "out_of_memory"
    assert len(found) == 9
    assert all(isinstance(row, LogitsRow) for row in found.values())
    assert tried[:2] == [10, 5]


def test_logits_that_are_not_finite_fail_their_window_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = open_teacher(folder)
    through = teacher._head.states

    def broken(ids: torch.Tensor) -> torch.Tensor:
        states = through(ids).clone()
        states[(ids == 9).any(dim=1)] = torch.nan
        return states

    monkeypatch.setattr(teacher._head, "states", broken)
    found = dict(teacher.score([("bad", window("bad", [9, 10, 11])), ("good", window("good", [10, 11, 12]))]))
    assert isinstance(found["good"], LogitsRow)
    assert isinstance(found["bad"], Failure)
    assert found["bad"].reason == "non_finite_logits"


def test_a_token_that_cannot_come_has_a_log_probability_of_minus_infinity() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.0, 0.0]])
    kept = distributions(logits, torch.tensor([1]), 4, 2)
    assert np.isneginf(kept.target_logprob[0])
    assert kept.top_ids[0, 0] == 0
    assert np.exp(kept.tail_logprob[0]) + np.exp(kept.top_logprobs[0]).sum() == pytest.approx(1)


def test_a_tail_of_almost_nothing_is_exact() -> None:
    logits = torch.full((1, 1000), -60.0)
    logits[0, 7] = 0.0
    kept = distributions(logits, torch.tensor([3]), 1000, 1)
    assert kept.tail_logprob[0] == pytest.approx(-60 + np.log(999), abs=1e-4)  # 1 − p would be 0


def test_stop_ends_with_the_batch_in_flight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CPU_BATCH_TOKENS", 20)
    teacher = open_teacher(folder)
    seen = []
    for key, _ in teacher.score([(f"r{n}", window(f"r{n}", range(3, 13))) for n in range(8)]):
        seen.append(key)
        teacher.stop()
    assert len(seen) == 2


def test_all_of_a_large_vocabulary_is_refused_with_the_numbers() -> None:
    assert kept_count(None, 65_536) == 65_536
    assert kept_count(64, 50) == 50
    with pytest.raises(UserError, match=r"would keep 65,537 log-probabilities a token \(131,074 bytes\).*set top_k"):
        kept_count(None, 65_537)


@pytest.mark.model
@pytest.mark.parametrize(("rows", "near"), [(1, 1e-5), (None, 1e-4)])  # 30 layers of rounding by another batch shape
def test_smollm2s_numbers_are_those_of_the_softmax_over_its_vocabulary(
    smollm2_folder: Path, rows: int | None, near: float
) -> None:
    teacher = open_teacher(smollm2_folder, top_k=64, max_batch_rows=rows)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    texts = ["The capital of France is Paris, and that of Japan is Tokyo.", "2 + 2 = 4", "Bees make honey. " * 40]
    windows = [window(str(n), tokenizer(text)["input_ids"]) for n, text in enumerate(texts)]
    assert_right(smollm2_folder, rows_of(teacher, windows), windows, 49_152, near)
