"""Facts about answers that a renamed run takes over."""

import os
from pathlib import Path

import pytest

from gristmill.adoption import adopt
from gristmill.journal import Segment, read_known, workers
from gristmill.types import Completion

KEYS = [letter * 32 for letter in "abc"]


def written(folder: Path, *keys: str) -> Path:
    with Segment(folder, {"unit": f"runs/{folder.parent.name}"}) as segment:
        for key in keys:
            segment.append(key, Completion(key[0], 0, "", f"answer {key[0]}", "stop", 1, 1, 0.0))
    return next(iter(sorted(folder.glob("*.jsonl"), key=os.path.getmtime, reverse=True)))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return tmp_path / "old" / "journal"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    folder = tmp_path / "new" / "journal"
    folder.mkdir(parents=True)
    return folder


def test_a_segment_with_a_wanted_answer_is_linked_and_names_who_made_it(old: Path, new: Path) -> None:
    path = written(old, *KEYS[:2])
    said: list[str] = []
    assert adopt(new, [old], KEYS[1:], said.append) == 1
    assert (new / path.name).samefile(path)
    assert said == [f"answers are taken over from {path}"]
    assert set(read_known(new, KEYS, print)) == set(KEYS[:2])
    assert [worker["unit"] for worker in workers(new, KEYS)] == ["runs/old"]


def test_nothing_is_brought_twice_or_without_need(old: Path, new: Path) -> None:
    written(old, KEYS[0])
    assert adopt(new, [old], [], print) == 0
    assert adopt(new, [old], KEYS[1:], print) == 0
    assert list(new.iterdir()) == []
    assert adopt(new, [old], KEYS, print) == 1
    assert adopt(new, [old], KEYS, print) == 0


def test_a_broken_segment_and_a_journal_that_is_gone_are_left_alone(old: Path, new: Path) -> None:
    path = written(old, KEYS[0])
    path.write_bytes(b"not a journal\n")
    assert adopt(new, [old, old.with_name("gone")], KEYS, print) == 0
    assert path.read_bytes() == b"not a journal\n"


def test_without_hard_links_a_segment_is_copied(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(old, KEYS[0])

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert adopt(new, [old], KEYS, print) == 1
    assert [found.name for found in new.iterdir()] == [path.name]
    assert (new / path.name).read_bytes() == path.read_bytes()
