"""Facts about splitting a requests file into shard files, with the echo engine's word counts for tokens."""

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_memory import write_model

from gristmill.codec import request_from_json
from gristmill.config.schema import ModelConfig
from gristmill.config.specs import ModelSpec
from gristmill.errors import UserError
from gristmill.files import read_jsonl, write_jsonl
from gristmill.planning.workers import Worker
from gristmill.splitting import CHUNK, measure, split
from gristmill.types import JsonDict

ECHO = ModelConfig(engine="echo")
SPEC = ModelSpec(name="echo", model=ECHO)
WEIGHTS: JsonDict = {"context_tokens": None, "folder": None, "weights_hash": "echo"}


def line(number: int, words: int = 1) -> JsonDict:
    sampling = {"max_new_tokens": 2, "temperature": 0.0, "stop": ["x"], "seed": 3}
    named = {"id": f"r{number}", "sample": 0, "variant": "", "messages": [{"role": "user", "content": "w " * words}]}
    return named | {"sampling": sampling, "reference": "ref", "row": {"big": "column"}}


def requests_file(folder: Path, *words: int) -> Path:
    path = folder / "requests.jsonl"
    write_jsonl(path, [line(number, count) for number, count in enumerate(words)])
    return path


def shards_in(folder: Path) -> dict[str, list[Any]]:
    return {path.name: list(read_jsonl(path)) for path in sorted(folder.iterdir())}


def test_every_request_is_in_one_shard_in_the_files_order_with_its_length(tmp_path: Path) -> None:
    words = [5, 1, 9, 2, 7, 3, 8, 4]
    assert split(requests_file(tmp_path, *words), tmp_path / "shards" / "3", 3, SPEC, WEIGHTS) == [3, 3, 2]
    found = shards_in(tmp_path / "shards" / "3")
    assert list(found) == ["1-of-3.jsonl", "2-of-3.jsonl", "3-of-3.jsonl"]
    assert sorted(one["id"] for shard in found.values() for one in shard) == [f"r{n}" for n in range(8)]
    for shard in found.values():
        numbers = [int(one["id"][1:]) for one in shard]
        assert numbers == sorted(numbers)
        assert [one["prompt_tokens"] for one in shard] == [words[number] for number in numbers]


def test_shards_follow_the_speeds_of_the_plans_workers(tmp_path: Path) -> None:
    workers = [Worker(1, 1.0, 0), Worker(1, 1.0, 0), Worker(2, 0.5, 1)]
    counts = split(requests_file(tmp_path, *range(1, 51)), tmp_path / "out", 3, SPEC, WEIGHTS, workers)
    assert counts == [20, 20, 10]


def test_all_shards_of_a_worker_have_its_speed(tmp_path: Path) -> None:
    workers = [Worker(1, 1.0, 0), Worker(2, 0.5, 1)]
    counts = split(requests_file(tmp_path, *range(1, 61)), tmp_path / "out", 4, SPEC, WEIGHTS, workers)
    assert counts == [20, 10, 20, 10]


def test_a_refusal_proposes_no_more_gpus_than_there_are_however_many_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.splitting.token_counter", lambda *_: lambda batch: [1 for _ in batch])
    spec = ModelSpec(name="m", model=ModelConfig(source="x"))
    weights = WEIGHTS | {"folder": str(write_model(tmp_path / "m", "70B")), "name": "m"}
    workers = [Worker(1, memory_mib=46_068)] * 2
    with pytest.raises(UserError, match=r"does not fit on 2; fits in 8-bit on 2"):
        split(requests_file(tmp_path, *[1] * 40), tmp_path / "out", 16, spec, weights, workers)


def test_a_shard_has_what_the_model_needs_and_no_more(tmp_path: Path) -> None:
    path = requests_file(tmp_path, 4)
    split(path, tmp_path / "out", 1, SPEC, WEIGHTS)
    (found,) = shards_in(tmp_path / "out")["1-of-1.jsonl"]
    assert set(found) == {"id", "sample", "variant", "messages", "sampling", "prompt_tokens", "crc32"}
    assert request_from_json(found) == request_from_json(next(iter(read_jsonl(path))))


def test_a_prompt_that_does_not_fit_stops_before_anything_is_written(tmp_path: Path) -> None:
    path = requests_file(tmp_path, 3, 9, 4)
    with pytest.raises(UserError, match=r"1 prompt does not fit.*9 tokens.*rows: r1#0"):
        split(path, tmp_path / "shards" / "2", 2, SPEC, WEIGHTS | {"context_tokens": 8})
    assert sorted(found.name for found in tmp_path.iterdir()) == ["requests.jsonl"]


def test_a_prompt_that_does_not_fit_passes_with_its_full_length_under_another_policy(tmp_path: Path) -> None:
    skip = ModelConfig(engine="echo", on_overflow="skip", context_tokens=8)
    split(requests_file(tmp_path, 3, 9), tmp_path / "out", 1, ModelSpec(name="echo", model=skip), WEIGHTS)
    assert [one["prompt_tokens"] for one in shards_in(tmp_path / "out")["1-of-1.jsonl"]] == [3, 9]


def test_an_existing_folder_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "shards" / "2"
    for leftover in (out, out.with_name(".2.killed.tmp")):
        leftover.mkdir(parents=True)
        (leftover / "9-of-9.jsonl").write_text("old")
        os.utime(leftover, (0, 0))
    split(requests_file(tmp_path, 1, 1, 1), out, 2, SPEC, WEIGHTS)
    assert list(shards_in(out)) == ["1-of-2.jsonl", "2-of-2.jsonl"]
    assert [found.name for found in out.parent.iterdir()] == ["2"]


def test_an_existing_folder_stays_when_the_split_fails(tmp_path: Path) -> None:
    out = tmp_path / "2"
    split(requests_file(tmp_path, 1, 1), out, 2, SPEC, WEIGHTS)
    before = shards_in(out)
    with pytest.raises(UserError):
        split(requests_file(tmp_path, 9), out, 2, SPEC, WEIGHTS | {"context_tokens": 8})
    assert shards_in(out) == before


def test_no_requests_make_empty_shard_files(tmp_path: Path) -> None:
    assert split(requests_file(tmp_path), tmp_path / "out", 2, SPEC, WEIGHTS) == [0, 0]
    assert shards_in(tmp_path / "out") == {"1-of-2.jsonl": [], "2-of-2.jsonl": []}


def test_more_shards_than_requests_leave_some_empty(tmp_path: Path) -> None:
    assert split(requests_file(tmp_path, 1), tmp_path / "out", 3, SPEC, WEIGHTS) == [1, 0, 0]


def test_requests_beyond_one_chunk_are_measured_too(tmp_path: Path) -> None:
    words = [1 + number % 7 for number in range(CHUNK + 5)]
    assert measure(requests_file(tmp_path, *words), ECHO, WEIGHTS) == words


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_a_split_holds_a_chunk_of_requests_and_never_the_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    text = "word " + "w" * 2_000
    write_jsonl(path, (line(number) | {"messages": [{"role": "user", "content": text}]} for number in range(10_000)))
    assert path.stat().st_size > 20_000_000
    assert peak_bytes(lambda: split(path, tmp_path / "out", 64, SPEC, WEIGHTS)) < 12_000_000


def test_prompts_that_do_not_fit_are_counted_without_holding_their_text(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    text = "w" * 20_000
    write_jsonl(path, (line(number) | {"messages": [{"role": "user", "content": text}]} for number in range(3_000)))
    assert path.stat().st_size > 60_000_000
    skipping = ModelConfig(engine="echo", on_overflow="skip")
    assert peak_bytes(lambda: measure(path, skipping, WEIGHTS | {"context_tokens": 2})) < 45_000_000
