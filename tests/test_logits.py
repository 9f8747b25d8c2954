"""Facts about a teacher's jobs: nothing is scored twice, nothing is lost to a kill, and no hole passes the merge."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from tiny_teacher import WORDS, config_of, described, make_teacher, spec_of

from gristmill.config.schema import GpusConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.errors import UserError
from gristmill.files import read_jsonl, with_checksum, write_json, write_jsonl, write_sealed
from gristmill.logits import journal, merging, worker
from gristmill.logits.journal import Segments, link_merged
from gristmill.logits.merging import merge, sizes
from gristmill.logits.scoring import TransformersTeacher
from gristmill.logits.storage import LogitsReader, LogitsRow, file_rows
from gristmill.logits.texts import either_key, window_lines
from gristmill.logits.worker import Share, part_line, score_share
from gristmill.merging import UnusableParts
from gristmill.planning.workers import Worker
from gristmill.types import Failure, JsonDict

SCRIPTS = Path(__file__).parents[1] / "scripts"
K = 8


class Place:
    """A folder as a teacher has it in results/, with its texts."""

    def __init__(self, root: Path, teacher: Path) -> None:
        self.root, self.teacher = root, teacher
        self.model = config_of(teacher, max_batch_rows=1)  # batches of one: the same bits in any batch
        self.weights: JsonDict = described(teacher)

    def write(self, texts: dict[str, str]) -> None:
        dataset = self.root / "rows.jsonl"
        dataset.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
        chat = ChatEncoder(self.teacher, self.model)
        lines = window_lines(spec_of(self.teacher, dataset), None, self.weights, chat)
        write_sealed(self.root / "requests.jsonl", lines)

    def share(self, name: str = "1-of-1", k: int | None = K, **changes: Any) -> Share:
        shards = name.rpartition("-")[2]
        part = self.root / "parts" / shards / f"{name}.jsonl"
        paths = {"requests": self.root / "requests.jsonl", "journal": self.root / "journal", "part": part}
        made = Share("logits/t", name, **paths, gpu_samples=self.root / "gpu.jsonl", workers=[Worker(1)], teacher="t",
                     top_k=k)  # fmt: skip
        return replace(made, **changes)

    def score(self, shards: int = 1, **changes: Any) -> list[Path]:
        """All parts."""
        shares = [self.share(f"{number}-of-{shards}", **changes) for number in range(1, shards + 1)]
        for share in shares:
            score_share(share, self.model, self.weights, GpusConfig(wait_minutes=0), 1)
        return [share.part for share in shares]

    def merge(self, parts: Sequence[Path], k: int | None = K, ratio: float = 0.0) -> list[LogitsRow]:
        keys = either_key(self.model, self.weights, k)
        sums, _, files = merge(
            self.root / "requests.jsonl", parts, self.root / "journal", self.root / "data", keys, "t", ratio, print
        )
        link_merged(self.root / "journal", [self.root / "data" / file["name"] for file in files], sums.keys, print)
        return list(LogitsReader(self.root / "data"))

    def journaled(self) -> Counter[str]:
        """How often each key is in the journal."""
        paths = sorted((self.root / "journal").glob("*.parquet"))
        return Counter(line["key"] for path in paths for line in file_rows(path, ["key"]))


def texts(count: int, seed: int = 0) -> dict[str, str]:
    draw = np.random.default_rng(seed)
    words = WORDS[6:]
    return {f"r{n}": " ".join(draw.choice(words, draw.integers(2, 40))) for n in range(count)}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "tiny")


@pytest.fixture
def place(tmp_path: Path, teacher: Path) -> Place:
    made = Place(tmp_path, teacher)
    made.write(texts(12))
    return made


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a model that is opened is an error."""
    monkeypatch.setattr(worker, "open_teacher", None)  # calling it would fail


def as_bytes(rows: Sequence[LogitsRow]) -> list[tuple[Any, ...]]:
    arrays = ("token_ids", "top_ids", "top_logprobs", "tail_logprob", "target_logprob")
    return [(row.id, row.window, row.first, *(getattr(row, name).tobytes() for name in arrays)) for row in rows]


# ---- nothing twice


def test_rows_come_in_the_texts_order_with_their_numbers(place: Place) -> None:
    rows = place.merge(place.score())
    assert [row.id for row in rows] == list(texts(12))
    for row, text in zip(rows, texts(12).values(), strict=True):
        assert row.token_ids.tolist() == [WORDS.index(word) for word in text.split()]
        assert row.top_ids.shape == (len(row.token_ids) - 1, K)
        assert (np.diff(row.top_logprobs, axis=1) <= 0).all()


def test_three_shards_give_the_bytes_of_one(place: Place, tmp_path: Path, teacher: Path) -> None:
    other = Place(tmp_path / "other", teacher)
    other.root.mkdir()
    other.write(texts(12))
    assert as_bytes(place.merge(place.score(1))) == as_bytes(other.merge(other.score(3)))


def test_another_number_of_shards_scores_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = as_bytes(place.merge(place.score(3)))
    forbid(monkeypatch)
    assert as_bytes(place.merge(place.score(2))) == before


def test_only_texts_that_are_new_are_scored_and_a_renamed_one_is_not(place: Place) -> None:
    place.merge(place.score(2))
    old = texts(12)
    changed = {"renamed": old.pop("r3"), **old, "new": "w1 w2 w3"}
    place.write(changed)
    rows = place.merge(place.score(2))
    assert [row.id for row in rows] == list(changed)
    counts = place.journaled()
    assert len(counts) == 13
    assert set(counts.values()) == {1}


def test_equal_texts_are_scored_once(place: Place) -> None:
    place.write({"a": "w1 w2 w3", "b": "w1 w2 w3"})
    first, second = place.merge(place.score())
    assert (first.id, second.id) == ("a", "b")
    assert as_bytes([replace(second, id="a")]) == as_bytes([first])


def test_another_top_k_is_scored_anew_and_the_first_stays_known(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.merge(place.score())
    rows = place.merge(place.score(k=3), k=3)
    assert rows[0].top_ids.shape[1] == 3
    assert len(place.journaled()) == 24
    forbid(monkeypatch)
    assert place.merge(place.score())[0].top_ids.shape[1] == K


def test_merged_rows_lie_on_the_disk_once_and_outlive_the_data_folder(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = as_bytes(place.merge(place.score(3)))
    (data,) = (place.root / "data").glob("*.parquet")
    (segment,) = (place.root / "journal").glob("*.parquet")
    assert data.stat().st_ino == segment.stat().st_ino
    data.unlink()
    forbid(monkeypatch)
    assert as_bytes(place.merge(place.score(1))) == before


@pytest.mark.slow
def test_a_killed_job_loses_no_written_segment_and_scores_none_again(place: Place) -> None:
    place.write(texts(4000, seed=1))
    write_json(place.root / "weights.json", place.weights)
    spec = json.dumps({"name": "teacher", "model": place.model.model_dump()})
    command = [sys.executable, str(SCRIPTS / "logits.py"), "--spec", spec, "--top-k", str(K), "--name", "1-of-1"]
    command += ["--weights", str(place.root / "weights.json"), "--requests", str(place.root / "requests.jsonl")]
    command += [
        "--journal",
        str(place.root / "journal"),
        "--unit",
        "logits/t",
        "--gpu-samples",
        str(place.root / "gpu"),
    ]
    command += ["--out", str(place.share().part)]
    running = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    wait_until(lambda: any((place.root / "journal").glob("*.parquet")) or running.poll() is not None)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = place.journaled()
    assert 0 < len(done) < 4000
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stderr=subprocess.DEVNULL)
    counts = place.journaled()
    assert counts.keys() == {line["key"] for line in read_jsonl(place.share().part)}
    assert set(counts.values()) == {1}
    assert done.keys() < counts.keys()
    assert len(place.merge([place.share().part])) == 4000


def test_a_terminated_job_keeps_what_it_has_scored(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    score = TransformersTeacher._scored

    def stopping(self: TransformersTeacher, batch: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return score(self, batch)

    monkeypatch.setattr(TransformersTeacher, "_scored", stopping)
    with pytest.raises(BaseException, match="SIGTERM"):
        place.score()
    assert len(place.journaled()) == 1


def test_a_cut_segment_is_named_set_aside_and_scored_again(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.score()
    (segment,) = (place.root / "journal").glob("*.parquet")
    segment.write_bytes(segment.read_bytes()[:-100])
    rows = place.merge(place.score())
    assert len(rows) == 12
    assert f"segment {segment.name} is not used" in capsys.readouterr().err
    assert segment.with_suffix(".parquet.broken").exists()


def test_a_flipped_bit_is_found_by_the_merge_and_the_next_run_scores_these_rows(place: Place) -> None:
    parts = place.score()
    (segment,) = (place.root / "journal").glob("*.parquet")
    whole = bytearray(segment.read_bytes())
    whole[len(whole) // 2] ^= 1
    segment.write_bytes(whole)
    with pytest.raises(UnusableParts, match=r"is damaged, and is set aside"):
        place.merge(parts)
    assert len(place.merge(place.score())) == 12


# ---- no hole


def test_the_merge_refuses_a_hole_and_names_it(place: Place) -> None:
    parts = place.score(2)
    lines = list(read_jsonl(parts[0]))
    write_jsonl(parts[0], lines[:1] + lines[2:])
    with pytest.raises(UnusableParts, match=rf"no part goes on with {lines[1]['id']}#0"):
        place.merge(parts)


def test_the_merge_refuses_a_double_and_names_it(place: Place) -> None:
    parts = place.score(2)
    lines = list(read_jsonl(parts[0]))
    write_jsonl(parts[0], [lines[0], *lines])
    with pytest.raises(UnusableParts, match=rf"{lines[0]['id']}#0"):
        place.merge(parts)


def test_the_merge_refuses_a_foreign_line_and_a_key_of_other_tokens(place: Place) -> None:
    parts = place.score()
    lines = list(read_jsonl(parts[0]))
    foreign = {name: value for name, value in lines[0].items() if name != "crc32"} | {"id": "nobody"}
    write_jsonl(parts[0], [*lines, with_checksum(foreign)])
    with pytest.raises(UnusableParts, match=r"windows of no text, or twice: nobody#0"):
        place.merge(parts)
    other = {name: value for name, value in lines[0].items() if name != "crc32"} | {"key": lines[1]["key"]}
    write_jsonl(parts[0], [with_checksum(other), *lines[1:]])
    with pytest.raises(UnusableParts, match=r"r0#0 .* is of other tokens"):
        place.merge(parts)


def test_the_merge_refuses_rows_that_the_journal_has_lost(place: Place) -> None:
    parts = place.score()
    for segment in (place.root / "journal").glob("*.parquet"):
        segment.unlink()
    with pytest.raises(UnusableParts, match="no window that the journal has a position of"):
        place.merge(parts)


def test_a_merge_that_fails_leaves_the_data_as_they_were(place: Place) -> None:
    parts = place.score()
    before = as_bytes(place.merge(parts))
    write_jsonl(parts[0], list(read_jsonl(parts[0]))[:-1])
    with pytest.raises(UnusableParts):
        place.merge(parts)
    assert as_bytes(list(LogitsReader(place.root / "data"))) == before


def test_a_text_without_a_position_is_a_row_and_loads_no_model(place: Place) -> None:
    place.write({"one": "w1", "none": "", "two": "w1 w2"})
    rows = place.merge(place.score())
    assert [(row.id, row.positions, len(row.token_ids)) for row in rows] == [
        ("one", 0, 1),
        ("none", 0, 0),
        ("two", 1, 2),
    ]


def test_failed_windows_stop_the_job_unless_they_are_few_enough(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    score = TransformersTeacher.score

    def failing(self: TransformersTeacher, windows: Any) -> Any:
        for key, outcome in score(self, windows):
            bad = isinstance(outcome, LogitsRow) and outcome.id == "r5"
            yield key, Failure("r5", 0, "", "out_of_memory", "made up") if bad else outcome

    monkeypatch.setattr(TransformersTeacher, "score", failing)
    with pytest.raises(UserError, match=r"1 windows failed: r5#0 \(out_of_memory: made up\)"):
        place.score()
    parts = place.score(max_failed_ratio=0.1)
    with pytest.raises(UnusableParts, match=r"1 of 12 windows failed, over max_failed_ratio 0: r5#0"):
        place.merge(parts)
    assert [row.id for row in place.merge(parts, ratio=0.1)] == [name for name in texts(12) if name != "r5"]
    monkeypatch.undo()
    assert len(place.merge(place.score())) == 12  # it is asked again


# ---- what is said


def test_the_numbers_of_a_dataset_are_those_of_its_rows(place: Place) -> None:
    parts = place.score()
    keys = either_key(place.model, place.weights, K)
    sums, metadata, files = merge(
        place.root / "requests.jsonl", parts, place.root / "journal", place.root / "data", keys, "t", 0.0, print
    )
    rows = list(LogitsReader(place.root / "data"))
    targets = np.concatenate([row.target_logprob for row in rows]).astype(np.float64)
    tails = np.exp(np.concatenate([row.tail_logprob for row in rows]).astype(np.float64))
    found = sums.metrics()
    assert found["positions"] == len(targets) == sum(len(text.split()) - 1 for text in texts(12).values())
    assert found["perplexity"] == pytest.approx(np.exp(-targets.mean()))
    assert found["tail_mass_mean"] == pytest.approx(tails.mean(), rel=1e-6)
    assert found["tail_mass_p99"] == pytest.approx(np.sort(tails)[int(np.ceil(0.99 * len(tails))) - 1], rel=1e-6)
    assert 0 < found["padded_mass_max"] < 1
    assert 0 < found["entropy_at_least"] < np.log(len(WORDS))
    each = sizes(files, metadata)
    assert each["bytes"] == sum(path.stat().st_size for path in (place.root / "data").iterdir())
    assert each["plain_bytes_per_position"] == 48
    assert (metadata["vocab_size"], metadata["head_width"], metadata["k"]) == (len(WORDS), len(WORDS) + 14, K)
    assert (metadata["dtype"], metadata["teacher"]["weights_hash"]) == ("float32", place.weights["weights_hash"])


def test_the_data_are_cut_into_files_that_are_read_as_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = as_bytes(place.merge(place.score()))
    monkeypatch.setattr(merging, "FILE_BYTES", 1)
    monkeypatch.setattr(merging, "GROUP_VALUES", 1)
    after = as_bytes(place.merge(place.score()))
    assert after == before
    assert len(list((place.root / "data").glob("part-*.parquet"))) > 3


def test_the_reader_knows_the_teachers_tokenizer(place: Place, tmp_path: Path) -> None:
    place.merge(place.score())
    reader = LogitsReader(place.root / "data")
    tokenizer = ChatEncoder(place.teacher, place.model).tokenizer
    reader.check_student(tokenizer, head_width=len(WORDS) + 2)  # padded otherwise than the teacher
    tokenizer.add_tokens(["more"])
    with pytest.raises(UserError, match=r"is not the teacher's \(t, sha256"):
        reader.check_student(tokenizer)


def test_the_first_segment_is_written_soon_and_later_ones_ever_more_rarely(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = place.merge(place.score())[0]
    (segment,) = (place.root / "journal").glob("*.parquet")
    folder = place.root / "elsewhere"
    folder.mkdir()
    now = [0.0]
    monkeypatch.setattr(journal.time, "monotonic", lambda: now[0])
    segments = Segments(folder, "1-of-1", journal.LogitsFile(segment).metadata, {})
    written = []
    for second in range(100):
        now[0] = float(second)
        segments.add(row)
        written.append(len(list(folder.glob("*.parquet"))))
    assert [second for second in range(1, 100) if written[second] > written[second - 1]] == [1, 3, 7, 15, 31, 61, 91]


def test_a_part_line_names_its_window_and_why_it_failed(place: Place) -> None:
    _, window = next(iter(worker._left(place.share(), keyed(place)).items()))
    line = part_line("key", window, Failure("r0", 0, "", "timeout", "late"))
    assert (line["id"], line["window"], line["failed"]) == ("r0", 0, "timeout")


def keyed(place: Place) -> list[tuple[str, Any]]:
    (place.root / "journal").mkdir(exist_ok=True)
    return [(window.wid.id, window) for window in worker.own_windows(place.share())]
