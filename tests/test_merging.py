"""Facts about merging: what was split comes back whole and in order, and nothing else passes."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import UserError
from gristmill.files import write_json, write_jsonl
from gristmill.merging import UnusableParts, merged, part_line, proven, within_limit
from gristmill.types import JsonDict

NAMES = st.tuples(st.text(max_size=3), st.integers(0, 2), st.sampled_from(["", "first_second", "second_first"]))


def request(name: str, sample: int = 0, variant: str = "") -> JsonDict:
    messages = [{"role": "user", "content": f"{name}?"}]
    named = {"id": name, "sample": sample, "variant": variant}
    return named | {"messages": messages, "sampling": {}, "reference": None, "row": {"n": 1}}


def answer(name: str, sample: int = 0, variant: str = "") -> JsonDict:
    named = {"key": "0" * 32, "id": name, "sample": sample, "variant": variant, "text": f"{name}!"}
    numbers = {"prompt_tokens": 1, "completion_tokens": 2, "seconds": 0.5, "prompt_cut_tokens": 0}
    return named | {"finish_reason": "stop"} | numbers


def generation(name: str, sample: int = 0, variant: str = "") -> JsonDict:
    """What docs/outputs.md promises: the request's columns but for its sampling, and the answer's."""
    columns = request(name, sample, variant) | answer(name, sample, variant)
    return {column: value for column, value in columns.items() if column != "sampling"}


def part(*names: Any) -> list[JsonDict]:
    """Lines of a part: answers to rows of these names (or of name, sample, variant)."""
    answers = [answer(*(name if isinstance(name, tuple) else (name,))) for name in names]
    return [part_line(one["key"], one) for one in answers]


def parts_of(folder: Path, *contents: list[str]) -> list[Path]:
    """Part files a.jsonl, b.jsonl, … with the answers to rows of these names."""
    paths = [folder / f"{letter}.jsonl" for letter, _ in zip("abcdefgh", contents, strict=False)]
    for path, names in zip(paths, contents, strict=True):
        write_jsonl(path, part(*names))
    return paths


def merge(rows: list[str], parts: list[Path]) -> list[JsonDict]:
    return list(merged([request(row) for row in rows], parts))


def refusal(rows: list[str], parts: list[Path]) -> str:
    with pytest.raises(UnusableParts) as caught:
        merge(rows, parts)
    message = str(caught.value)
    assert "\n" not in message
    assert "run again" in message
    return message


@settings(deadline=None)
@given(st.lists(NAMES, unique=True, max_size=40), st.integers(1, 6), st.data())
def test_any_split_of_any_requests_merges_back_equal_and_in_order(names: list[Any], shards: int, data: Any) -> None:
    places = data.draw(st.lists(st.integers(0, shards - 1), min_size=len(names), max_size=len(names)))
    with TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{shard}.jsonl" for shard in range(shards)]
        for shard, path in enumerate(parts):
            write_jsonl(path, part(*(name for name, place in zip(names, places, strict=True) if place == shard)))
        found = list(merged([request(*name) for name in names], parts))
    assert found == [generation(*name) for name in names]


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=6), st.lists(st.sampled_from("abcd"), max_size=6))
def test_parts_pass_only_if_they_answer_every_request_once(left: list[str], right: list[str]) -> None:
    rows = ["a", "b", "c", "d"]
    with TemporaryDirectory() as folder:
        parts = parts_of(Path(folder), left, right)
        try:
            merge(rows, parts)
        except UnusableParts:
            assert left != sorted(left) or right != sorted(right) or sorted(left + right) != rows
        else:
            assert sorted(left + right) == rows


def test_merge_refuses_a_missing_row_and_names_it(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, ["r1"], ["r2", "r4"])
    message = refusal(["r1", "r2", "r3", "r4"], parts)
    assert "no answer for r3#0" in message
    assert f"r4#0 in {parts[1]}" in message


def test_merge_refuses_a_missing_last_row_and_names_it(tmp_path: Path) -> None:
    message = refusal(["r1", "r2"], parts_of(tmp_path, ["r1"], []))
    assert message.startswith("no answer for r2#0: all 2 parts have ended")


def test_merge_refuses_a_row_doubled_within_a_part(tmp_path: Path) -> None:
    assert "r1#0 in " in refusal(["r1", "r2"], parts_of(tmp_path, ["r1", "r1", "r2"]))


def test_merge_refuses_a_row_doubled_at_the_end_of_a_part(tmp_path: Path) -> None:
    assert "twice: r2#0 in " in refusal(["r1", "r2"], parts_of(tmp_path, ["r1", "r2", "r2"]))


def test_no_flipped_bit_of_a_part_becomes_a_result(tmp_path: Path) -> None:
    (path,) = parts_of(tmp_path, ["a", "b"])
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                found = merge(["a", "b"], [path])
            except UnusableParts:
                continue
            assert found == [generation("a"), generation("b")]  # such as 1E2 for 1e2


@pytest.mark.parametrize(
    "contents",
    [
        (["r1"], ["r1", "r2", "r3"]),  # both parts begin with it: one must not hide the other
        (["r1", "r2", "r3"], ["r1"]),
        (["r1", "r2"], ["r2", "r3"]),
        (["r1", "r3"], ["r2", "r3"]),
    ],
)
def test_merge_refuses_a_row_doubled_across_parts_and_names_both(tmp_path: Path, contents: Any) -> None:
    parts = parts_of(tmp_path, *contents)
    (doubled,) = set(contents[0]) & set(contents[1])
    message = refusal(["r1", "r2", "r3"], parts)
    assert f"{doubled}#0 is answered twice" in message
    assert all(str(part) in message for part in parts)


def test_a_hole_and_a_duplicate_do_not_cancel_out(tmp_path: Path) -> None:
    assert "r2#0 is answered twice" in refusal(["r1", "r2", "r3"], parts_of(tmp_path, ["r1", "r2"], ["r2"]))


def test_merge_refuses_a_foreign_row_and_names_it(tmp_path: Path) -> None:
    assert "alien#0 in " in refusal(["r1", "r2"], parts_of(tmp_path, ["r1", "alien", "r2"]))
    assert "answers to no request, or twice: alien#0" in refusal(["r1"], parts_of(tmp_path, ["r1"], ["alien"]))


def test_another_sample_or_variant_of_a_row_is_another_answer(tmp_path: Path) -> None:
    for other in ((1, ""), (0, "second_first")):
        write_jsonl(tmp_path / "a.jsonl", part(("r1", *other)))
        assert "no answer for r1#0:" in refusal(["r1"], [tmp_path / "a.jsonl"])


def test_merge_refuses_a_part_in_another_order(tmp_path: Path) -> None:
    message = refusal(["r1", "r2"], parts_of(tmp_path, ["r2", "r1"]))
    assert "no answer for r1#0" in message
    assert "out of order" in message


def test_merge_refuses_a_request_that_is_there_twice(tmp_path: Path) -> None:
    assert "no answer for r1#0" in refusal(["r1", "r1"], parts_of(tmp_path, ["r1"]))


def test_merge_refuses_a_part_cut_inside_a_line(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, ["r1", "r2"])
    parts[0].write_bytes(parts[0].read_bytes()[:-9])
    assert f"{parts[0]} cannot be read" in refusal(["r1", "r2"], parts)


@pytest.mark.parametrize("line", ["{}", '{"id":"r2","sample":0,"variant":""}', "[1]", "null", "", "NaN"])
def test_merge_refuses_a_line_that_is_no_answer(tmp_path: Path, line: str) -> None:
    parts = parts_of(tmp_path, ["r1"])
    with open(parts[0], "a") as handle:
        handle.write(f"{line}\n")
    assert f"{parts[0]} cannot be read" in refusal(["r1"], parts)


def test_merge_refuses_a_part_that_is_gone(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(["r1"], [tmp_path / "gone.jsonl"])


def test_no_requests_and_empty_parts_make_an_empty_file(tmp_path: Path) -> None:
    assert merge([], parts_of(tmp_path, [], [])) == []


def test_a_merge_streams(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, ["r1", "r2", "r3"])
    taken: list[str] = []

    def requests() -> Iterator[JsonDict]:
        for row in ("r1", "r2", "r3"):
            taken.append(row)
            yield request(row)

    generations = merged(requests(), parts)
    assert next(generations)["id"] == "r1"
    assert taken == ["r1"]


# ---- rows that failed


def failed_of(count: int, failed: int) -> list[dict[str, Any]]:
    reasons = ["out_of_memory"] * failed + ["stop"] * (count - failed)
    return [{"id": f"r{n}", "sample": 0, "variant": "", "finish_reason": reason} for n, reason in enumerate(reasons)]


@pytest.mark.parametrize(("failed", "ratio"), [(0, 0.0), (1, 0.01), (2, 0.02), (29, 0.29), (100, 1.0)])
def test_as_many_rows_may_fail_as_the_config_says(failed: int, ratio: float) -> None:
    assert list(within_limit(failed_of(100, failed), ratio)) == failed_of(100, failed)


@pytest.mark.parametrize(("failed", "ratio"), [(1, 0.0), (2, 0.01), (100, 0.99)])
def test_more_failed_rows_than_that_are_no_result_and_are_named(failed: int, ratio: float) -> None:
    with pytest.raises(
        UnusableParts, match=rf"{failed} of 100 rows failed, over max_failed_ratio {ratio:g}: r0#0 \(out"
    ):
        list(within_limit(failed_of(100, failed), ratio))


# ---- what is read of a merged file later


def test_a_merged_file_that_was_cut_or_added_to_is_not_read_as_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "generations.jsonl"
    write_jsonl(path, [{"id": n} for n in range(3)])
    assert len(list(proven(path))) == 3  # no manifest, no proof
    write_json(tmp_path / "manifest.json", {"requests": 3})
    assert len(list(proven(path))) == 3
    for count in (2, 4):
        write_jsonl(path, [{"id": n} for n in range(count)])
        with pytest.raises(UserError, match=rf"has {count} lines, and manifest.json says 3: the file was cut"):
            list(proven(path))
