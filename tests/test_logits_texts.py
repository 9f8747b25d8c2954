"""Facts about a teacher's texts: which tokens are read, which of them have a position, and what is cut or skipped."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_teacher import WORDS, config_of, described, make_teacher, spec_of

from gristmill.config.schema import DatasetConfig, PromptConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.errors import UserError
from gristmill.files import write_sealed
from gristmill.logits.texts import keys_of, skipped, window_lines, windows

ASK, COLON, SAY, EOS = WORDS.index("ask"), WORDS.index(":"), WORDS.index("say"), WORDS.index("<eos>")


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "tiny")


def lines_of(folder: Path, tmp_path: Path, rows: list[dict[str, Any]], **texts: Any) -> list[dict[str, Any]]:
    """The lines of a dataset's plain texts."""
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(folder, dataset, **texts)
    return list(window_lines(spec, None, described(folder), ChatEncoder(folder, config_of(folder))))


def answers_of(folder: Path, tmp_path: Path, answers: list[dict[str, Any]], **texts: Any) -> list[dict[str, Any]]:
    """The lines of a run's answers to the question w1."""
    generations = tmp_path / "generations.jsonl"
    base = {"sample": 0, "variant": "", "messages": [{"role": "user", "content": "w1"}], "finish_reason": "stop"}
    generations.write_text("".join(json.dumps({"id": f"r{n}", **base, **row}) + "\n" for n, row in enumerate(answers)))
    spec = spec_of(folder, tmp_path, run="r", dataset=None, text_field=None, **texts)
    spec = spec.model_copy(update={"ends_with_token": texts.get("run_stop") is None})
    return list(window_lines(spec, generations, described(folder), ChatEncoder(folder, config_of(folder))))


def test_a_plain_text_has_positions_from_its_second_token(folder: Path, tmp_path: Path) -> None:
    (line,) = lines_of(folder, tmp_path, [{"id": "a", "text": "w1 w2 w3"}])
    assert line == {
        "id": "a", "sample": 0, "variant": "", "window": 0, "first": 1, "tokens": ids("w1 w2 w3"), "cut_tokens": 0
    }  # fmt: skip


def test_texts_of_no_and_of_one_token_are_windows_without_a_position(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": "none", "text": ""}, {"id": "one", "text": "w7"}, {"id": "null", "text": None}]
    write_sealed(tmp_path / "requests.jsonl", lines_of(folder, tmp_path, rows))
    none, one = windows(tmp_path / "requests.jsonl")
    assert (none.tokens, none.positions) == ([], 0)
    assert (one.tokens, one.positions) == (ids("w7"), 0)
    assert skipped(tmp_path / "requests.jsonl") == {"no_text": 1}


def test_a_text_longer_than_the_context_is_cut_and_says_by_how_much(folder: Path, tmp_path: Path) -> None:
    (line,) = lines_of(folder, tmp_path, [{"id": "a", "text": "w1 " * 200}])
    assert (len(line["tokens"]), line["cut_tokens"]) == (128, 72)


@pytest.mark.parametrize("length", [2, 9, 10, 11, 19, 20, 28, 100])
def test_windows_of_a_split_text_give_each_token_but_the_first_one_position(
    folder: Path, tmp_path: Path, length: int
) -> None:
    words = [f"w{number % 40}" for number in range(length)]
    row = {"id": "a", "text": " ".join(words)}
    lines = lines_of(folder, tmp_path, [row], max_tokens=10, on_overflow="split")
    assert [token for line in lines for token in line["tokens"][line["first"] :]] == ids(row["text"])[1:]
    assert [line["window"] for line in lines] == list(range(len(lines)))
    assert max(len(line["tokens"]) for line in lines) <= 10
    assert all(one["tokens"][-1] == other["tokens"][0] for one, other in itertools.pairwise(lines))


def test_only_the_first_texts_are_taken_where_max_samples_says_so(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "text": "w1 w2"} for n in range(5)]
    assert [line["id"] for line in lines_of(folder, tmp_path, rows, max_samples=2)] == ["r0", "r1"]


def test_an_answer_has_positions_and_its_prompt_has_none(folder: Path, tmp_path: Path) -> None:
    (line,) = answers_of(folder, tmp_path, [{"text": "w5 w6"}])
    assert line["tokens"] == [ASK, COLON, *ids("w1"), SAY, *ids("w5 w6"), EOS]
    assert line["first"] == 4


def test_an_answer_that_was_cut_or_ended_by_a_stop_text_gets_no_end_token(folder: Path, tmp_path: Path) -> None:
    cut, ended = answers_of(folder, tmp_path, [{"text": "w5", "finish_reason": "length"}, {"text": "w5"}])
    assert (cut["tokens"][-1], ended["tokens"][-1]) == (ids("w5")[0], EOS)
    generations = tmp_path / "generations.jsonl"
    spec = spec_of(folder, tmp_path, run="r", dataset=None, text_field=None).model_copy(
        update={"ends_with_token": False}
    )
    chat = ChatEncoder(folder, config_of(folder))
    assert [line["tokens"][-1] for line in window_lines(spec, generations, described(folder), chat)] == ids("w5 w5")


def test_an_empty_answer_is_its_end_token_and_one_that_failed_is_skipped(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": ""}, {"text": "", "finish_reason": "length"}, {"text": None, "finish_reason": "timeout"}]
    write_sealed(tmp_path / "requests.jsonl", answers_of(folder, tmp_path, rows))
    assert [window.positions for window in windows(tmp_path / "requests.jsonl")] == [1, 0]
    assert skipped(tmp_path / "requests.jsonl") == {"timeout": 1}


def test_a_prompt_that_fills_the_window_leaves_no_position(folder: Path, tmp_path: Path) -> None:
    (line,) = answers_of(folder, tmp_path, [{"text": "w5 w6"}], max_tokens=3)
    assert (line["first"], len(line["tokens"]), line["cut_tokens"]) == (3, 3, 4)


def test_the_thinking_that_a_template_opens_is_the_prompts_and_not_written_twice(tmp_path: Path) -> None:
    folder = make_teacher(tmp_path / "thinking")
    tokenizer = ChatEncoder(folder, config_of(folder)).tokenizer
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = tokenizer.chat_template.replace("say ", "<think>")
    tokenizer.save_pretrained(folder)
    (line,) = answers_of(folder, tmp_path, [{"text": "<think>w5 </think> w6"}])
    opened, closed = len(WORDS), len(WORDS) + 1
    assert line["tokens"] == [ASK, COLON, *ids("w1"), opened, *ids("w5"), closed, *ids("w6"), EOS]
    assert line["first"] == 4


def test_a_reference_is_the_answer_to_a_prompt_and_a_row_without_one_is_skipped(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.jinja").write_text("{{ question }}")
    dataset = tmp_path / "rows.jsonl"
    rows = [{"id": "a", "question": "w1", "reference": ["w2", "w3"]}, {"id": "b", "question": "w1", "reference": None}]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = spec_of(folder, dataset, text_field=None, prompt="ask").model_copy(
        update={"prompt": PromptConfig(file=str(tmp_path / "ask.jinja")), "dataset": DatasetConfig(path=str(dataset))}
    )
    first, second = window_lines(spec, None, described(folder), ChatEncoder(folder, config_of(folder)))
    assert first["tokens"][4:] == [*ids("w2"), EOS]
    assert second["skipped"] == "no_reference"


@pytest.mark.parametrize(("value", "said"), [(7, "text is 7, not a text"), ("a \ud800", "half of a surrogate pair")])
def test_what_is_no_text_is_refused_with_its_row(folder: Path, tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"row b.*{said}"):
        lines_of(folder, tmp_path, [{"id": "a", "text": "w1"}, {"id": "b", "text": value}])


def test_a_key_knows_tokens_and_teacher_and_no_name(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "w1 w2"}, {"id": "b", "text": "w1 w2"}, {"id": "c", "text": "w1 w3"}]
    write_sealed(tmp_path / "requests.jsonl", lines_of(folder, tmp_path, rows))
    found = list(windows(tmp_path / "requests.jsonl"))
    identity = {"weights": "x", "dtype": "float32", "quantization": None, "engine": None, "chat_template": "any"}
    key = keys_of(identity, 64)
    assert key(found[0]) == key(found[1]) != key(found[2])
    others = [keys_of({**identity, "weights": "y"}, 64), keys_of({**identity, "dtype": "bfloat16"}, 64)]
    others += [keys_of(identity, 65), keys_of(identity, None)]
    assert len({each(found[0]) for each in [key, *others]}) == 5
    assert keys_of({**identity, "chat_template": "another"}, 64)(found[0]) == key(found[0])
