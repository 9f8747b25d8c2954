"""Facts about logits on disk: what is written is read, a damaged file is named, and another vocabulary is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gristmill.errors import UserError
from gristmill.logits import storage
from gristmill.logits.storage import FORMAT_VERSION, DamagedLogits, LogitsReader, LogitsRow, LogitsWriter
from gristmill.logits.vocabulary import tokenizer_sha256, vocabulary_size

K = 4


def words(*more: str, name: str = "words") -> PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    vocab = {word: number for number, word in enumerate(["<unk>", "a", "b", "c", *more])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", name_or_path=name)


def metadata(**changes: Any) -> dict[str, Any]:
    base = {"format_version": FORMAT_VERSION, "vocab_size": 1000, "k": K, "full": False, "teacher": {"name": "t"}}
    return {**base, "tokenizer_sha256": tokenizer_sha256(words()), **changes}


def row(number: int, tokens: int = 9, first: int = 1, k: int = K, vocab: int = 1000) -> LogitsRow:
    draw = np.random.default_rng(number)
    positions = max(0, tokens - first)
    logprobs = -np.sort(draw.random((positions, k)) * 9).astype(np.float16).astype(np.float32)
    return LogitsRow(
        key=f"{number:032x}",
        id=f"r{number}",
        sample=0,
        window=number % 2,
        first=first,
        token_ids=draw.integers(0, vocab, tokens).astype(np.int32),
        top_ids=draw.integers(0, vocab, (positions, k)).astype(np.int32),
        top_logprobs=logprobs,
        tail_logprob=np.float32(np.float16(-draw.random(positions))),
        target_logprob=np.float32(-draw.random(positions)),
        cut_tokens=number,
    )


def write(folder: Path, rows: list[LogitsRow], name: str = "part-00000.parquet", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    with open(folder / name, "wb") as handle, LogitsWriter(handle, metadata(**changes)) as writer:
        writer.write(rows)
    return folder / name


def assert_same(found: LogitsRow, wanted: LogitsRow) -> None:
    for name in LogitsRow.__dataclass_fields__:
        one, other = getattr(found, name), getattr(wanted, name)
        if isinstance(other, np.ndarray):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            assert np.array_equal(one, other), name
        else:
            assert one == other


@pytest.mark.parametrize("vocab", [1000, 65_536, 65_537, 152_000])
def test_what_is_written_is_read_in_order_with_ids_of_16_bits_where_they_do(tmp_path: Path, vocab: int) -> None:
    rows = [row(number, 3 + number, vocab=vocab) for number in range(7)]
    path = write(tmp_path / "data", rows, vocab_size=vocab)
    reader = LogitsReader(tmp_path / "data")
    assert len(reader) == 7
    for found, wanted in zip(reader, rows, strict=True):
        assert_same(found, wanted)
    assert_same(reader[4], rows[4])
    kind = storage._open(path).schema_arrow.field("top_ids").type.value_type
    assert str(kind) == ("uint16" if vocab <= 65_536 else "int32")


def test_a_row_without_positions_and_a_tail_of_nothing_keep_their_shape(tmp_path: Path) -> None:
    empty = row(1, tokens=1)
    certain = replace(row(2), tail_logprob=np.full(8, -np.inf, np.float32))
    write(tmp_path / "data", [empty, certain])
    first, second = LogitsReader(tmp_path / "data")
    assert first.top_ids.shape == (0, K)
    assert np.isneginf(second.tail_logprob).all()


def test_a_full_distribution_has_no_ids_on_disk_and_all_of_them_when_read(tmp_path: Path) -> None:
    whole = replace(row(3, k=1000), top_ids=np.broadcast_to(np.arange(1000, dtype=np.int32), (8, 1000)))
    path = write(tmp_path / "data", [whole], full=True, k=1000)
    assert "top_ids" not in storage._open(path).schema_arrow.names
    assert_same(LogitsReader(tmp_path / "data")[0], whole)


def test_rows_are_cut_into_row_groups_that_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "GROUP_VALUES", 50)
    rows = [row(number) for number in range(30)]
    write(tmp_path / "data", rows[:20])
    write(tmp_path / "data", rows[20:], "part-00001.parquet")
    reader = LogitsReader(tmp_path / "data")
    assert [file.group_rows for file in reader._files] == [[2] * 10, [2] * 5]
    for index in (29, 0, 13, 20, 19):
        assert_same(reader[index], rows[index])


def test_ids_and_log_probabilities_take_less_than_plain_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [row(number, 200, k=64) for number in range(20)], k=64)
    assert path.stat().st_size / (20 * 199) < storage.PLAIN_BYTES_64 / 1.5


def test_files_of_two_teachers_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", [row(1)])
    write(tmp_path / "data", [row(2)], "part-00001.parquet", teacher={"name": "other"})
    with pytest.raises(UserError, match=r"part-00001.parquet has other metadata"):
        LogitsReader(tmp_path / "data")


def test_a_folder_without_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no part-\*.parquet"):
        LogitsReader(tmp_path)


def test_a_file_that_was_cut_and_one_with_a_flipped_bit_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [row(number, 50) for number in range(9)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedLogits, match=r"part-00000.parquet is damaged"):
        LogitsReader(tmp_path / "data")
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(DamagedLogits, match=r"part-00000.parquet is damaged"):
        list(LogitsReader(tmp_path / "data"))


def test_a_student_with_another_tokenizer_is_refused_and_both_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data", [row(1)])
    reader = LogitsReader(tmp_path / "data")
    reader.check_student(words(name="elsewhere"), head_width=1024)
    with pytest.raises(UserError, match=r"tokenizer \(mine, sha256 [0-9a-f]{16}….* teacher's \(t, sha256"):
        reader.check_student(words("d", name="mine"))


def test_a_student_with_fewer_logits_than_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", [row(1)])
    with pytest.raises(UserError, match=r"999 logits, and the teacher's vocabulary has 1,000 tokens"):
        LogitsReader(tmp_path / "data").check_student(words(), head_width=999)


def test_the_tokenizers_hash_knows_ids_and_cuts_and_no_settings_of_use() -> None:
    plain = tokenizer_sha256(words())
    used = words()
    used(["a b", "c"], padding=False, truncation=True, max_length=1)
    used.chat_template = "{{ messages }}"
    assert tokenizer_sha256(used) == plain
    added = words()
    added.add_tokens(["<|end|>"])
    assert tokenizer_sha256(added) != plain
    assert vocabulary_size(added) == vocabulary_size(words()) + 1
    cut = words()
    cut.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert tokenizer_sha256(cut) != plain
