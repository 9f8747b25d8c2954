"""Facts about the Dark Room example: its rooms, agents and texts, and the whole of it at a small size."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import ROOT, Project
from tiny_training import STILL
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

EXAMPLE = ROOT / "config/examples/dark_room"
sys.path.insert(0, str(EXAMPLE))

from evaluate import over_goals  # noqa: E402
from room import ACTIONS, END, Histories, Learner, Room, parted, words  # noqa: E402

ROOM = Room()


def learned(count: int = 40, seed: int = 0) -> Histories:
    return Learner().learn(ROOM, np.repeat(ROOM.goals(), count, 0), np.random.default_rng(seed))


def read(text: str) -> tuple[list[tuple[int, int, bool]], list[str]]:
    """Places, with whether they are the goal, and actions of a history's text."""
    found = text.split()
    places = [
        (int(x.strip("x+")), int(y.strip("y+")), x.endswith("+") and y.endswith("+"))
        for x, y in zip(found[::3], found[1::3], strict=True)
    ]
    return places, found[2::3]


def test_walls_hold_an_agent_and_every_action_does_what_it_says() -> None:
    corner = np.array([[0, 0]] * 5)
    there = ROOM.move(corner, np.arange(5))
    assert dict(zip(ACTIONS, map(tuple, there.tolist()), strict=True)) == {
        "stay": (0, 0), "east": (1, 0), "west": (0, 0), "south": (0, 1), "north": (0, 0)
    }  # fmt: skip


def test_the_goal_is_any_cell_but_the_start_and_the_best_is_all_steps_after_the_way() -> None:
    goals = ROOM.goals()
    assert len(goals) == 24
    assert (2, 2) not in set(map(tuple, goals.tolist()))
    assert ROOM.best(np.array([[2, 1], [0, 0]])).tolist() == [7, 4]


def test_a_history_follows_the_rules_of_the_room() -> None:
    histories = learned(count=2)
    for number, goal in enumerate(histories.goals.tolist()):
        places, actions = read(histories.text(number))
        assert len(places) == 8 * 8
        for step, ((x, y, on_goal), action) in enumerate(zip(places, actions, strict=True)):
            assert on_goal == ([x, y] == goal)
            if step % 8 == 0:
                assert (x, y) == (2, 2)
            else:
                before, did = places[step - 1], actions[step - 1]
                moved = ROOM.move(np.array([before[:2]]), np.array([list(ACTIONS).index(did)]))[0]
                assert [x, y] == moved.tolist()
            assert action in ACTIONS


def test_agents_begin_by_chance_and_end_near_the_best() -> None:
    returns, best = learned().returns().mean(0), ROOM.best(ROOM.goals()).mean()
    assert returns[0] < 0.2 * best
    assert returns[-1] > 0.85 * best
    assert (np.diff(returns)[:5] > 0).all()


def test_the_same_seed_gives_the_same_histories_and_another_one_others() -> None:
    one, same, other = learned(2), learned(2), learned(2, seed=1)
    assert (one.actions == same.actions).all()
    assert (one.actions != other.actions).any()


def test_goals_are_parted_without_an_overlap_and_nothing_is_lost() -> None:
    seen, unseen = (set(map(tuple, part.tolist())) for part in parted(ROOM.goals(), 6, 0))
    assert len(unseen) == 6
    assert seen | unseen == set(map(tuple, ROOM.goals().tolist()))
    assert not seen & unseen


def test_every_word_is_in_the_vocabulary_once() -> None:
    vocabulary = ROOM.vocabulary()
    assert len(vocabulary) == len(set(vocabulary)) == 1 + 2 * 5 * 2 + 5
    histories = learned(1)
    assert {word for n in range(24) for word in histories.text(n).split()} <= set(vocabulary) - {END}
    assert list(words(np.array([1, 2]), np.array([1, 2]), 4)) == ["x1+", "y2+", "north"]


def run(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLE / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What histories.py writes, at a small size."""
    folder = tmp_path_factory.mktemp("made")
    done = run("histories.py", folder, "--agents", 4, "--questions", 1)
    assert done.returncode == 0, done.stderr
    assert "Writing model" not in done.stderr
    return folder


@pytest.fixture
def guessing(made: Path, tmp_path: Path) -> Path:
    """The same with random weights in the place of a trained model."""
    shutil.copytree(made, tmp_path / "dark")
    model = tmp_path / "dark/results/trainings/dark_room/model"
    tokenizer = AutoTokenizer.from_pretrained(str(made / "words"))
    tokenizer.save_pretrained(model)
    size = {"vocab_size": len(tokenizer), "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 193}
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).save_pretrained(model)
    return tmp_path / "dark"


def _one_line(done: "subprocess.CompletedProcess[str]", said: str) -> None:
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_one_line_with_the_next_step(tmp_path: Path) -> None:
    _one_line(
        run("evaluate.py", tmp_path),
        f"{tmp_path}/room.json is not there; make it with histories.py {tmp_path}",
    )
    for text, said in (
        ('{"side": 5', "room.json is not as it was written; make it again with histories.py"),
        ("[]", "room.json is not as it was written; make it again with histories.py"),
        ('{"side": 5, "steps": 8}', "room.json lacks seen, source_returns, unseen; make it again with histories.py"),
    ):
        (tmp_path / "room.json").write_text(text)
        _one_line(run("evaluate.py", tmp_path), said)


def test_a_folder_without_a_model_is_one_line_with_the_next_step(made: Path) -> None:
    _one_line(run("evaluate.py", made), "results/trainings/dark_room/model holds no model; train one first")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--agents", 0, "--agents 0 is too few; give 1 or more"),
        ("--questions", -1, "--questions -1 is too few; give 1 or more"),
        ("--seed", -1, "--seed -1 is too few; give 0 or more"),
        ("--held-out", 0, "--held-out 0: the room has 24 goals; keep some, train on some"),
        ("--held-out", 24, "--held-out 24: the room has 24 goals; keep some, train on some"),
        ("--held-out", 23, "--held-out 23: no goal to train on has x"),
    ],
)
def test_histories_that_cannot_be_made_are_one_line_and_no_file(
    tmp_path: Path, option: str, value: int, said: str
) -> None:
    _one_line(run("histories.py", tmp_path / "dark", option, value), said)
    assert not (tmp_path / "dark").exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--rollouts", 0, "--rollouts 0 is too few; give 1 or more"),
        ("--episodes", 0, "--episodes 0 is too few; give 1 or more"),
        ("--seed", -1, "--seed -1 is too few; give 0 or more"),
        ("--episodes", 9, "--episodes 9 takes 216 tokens, and the model reads 193; use fewer"),
    ],
)
def test_rollouts_that_cannot_be_are_one_line(guessing: Path, option: str, value: int, said: str) -> None:
    _one_line(run("evaluate.py", guessing, option, value), said)
    assert not (guessing / "dark_room.json").exists()


def test_a_model_of_another_room_is_refused_by_the_words_that_it_does_not_know(guessing: Path) -> None:
    told = json.loads((guessing / "room.json").read_text())
    (guessing / "room.json").write_text(json.dumps(told | {"side": 6}))
    _one_line(run("evaluate.py", guessing), "does not know x5, x5+, y5, y5+; its room was another one")


def test_one_episode_and_one_rollout_are_enough_and_what_is_not_checked_is_said(guessing: Path) -> None:
    done = run("evaluate.py", guessing, "--episodes", 1, "--rollouts", 1)
    assert done.returncode == 0, done.stderr
    assert "not checked: that it never saw the unseen goals" in done.stdout
    found = json.loads((guessing / "dark_room.json").read_text())
    assert found["unseen_checked"] is False
    assert found["unseen"]["rise"] == {"mean": 0.0, "low": None, "high": None}
    assert np.array(found["unseen"]["returns"]).shape == (6, 1)


def test_files_that_do_not_belong_together_have_no_room_json(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dark"
    shutil.copytree(made, folder)
    shutil.rmtree(folder / "words")
    (folder / "words").touch()  # a file where a folder must be: it stops in the midst of its files
    done = run("histories.py", folder, "--agents", 4, "--questions", 1, "--seed", 1)
    assert done.returncode == 2, done.stderr
    assert (folder / "histories.jsonl").read_bytes() != (made / "histories.jsonl").read_bytes()
    _one_line(run("evaluate.py", folder), "room.json is not there; make it with histories.py")


def test_the_first_rows_of_unseen_goals_have_every_one_of_them(made: Path) -> None:
    told = json.loads((made / "room.json").read_text())
    first = [row["goal"] for row in _rows(made / "unseen.jsonl")[:6]]
    assert sorted(first) == sorted(f"{x},{y}" for x, y in told["unseen"])


def test_a_goal_that_is_kept_from_the_training_is_in_no_text_of_it(made: Path) -> None:
    told = json.loads((made / "room.json").read_text())
    found = {
        place[:2] for row in _rows(made / "histories.jsonl") for place in read(row["history"])[0] if place[2]
    }  # fmt: skip
    assert found
    assert not found & set(map(tuple, told["unseen"]))


def test_the_interval_of_rollouts_is_that_of_goals() -> None:
    goals = np.repeat([[0, 0], [1, 0], [2, 0]], 100, 0)
    found = over_goals(goals, np.repeat([1, 2, 6], 100))
    assert found["mean"] == pytest.approx(3)
    assert found["high"] == pytest.approx(3 + 4.302653 * np.sqrt(7 / 3))  # t with 2 degrees of freedom, s² = 7
    assert over_goals(goals, np.zeros(300, np.int64)) == {"mean": 0.0, "low": None, "high": None}


@pytest.mark.slow
def test_the_example_runs_from_histories_to_the_picture(made: Path, tmp_path: Path) -> None:
    project = Project(tmp_path / "dark")
    shutil.copytree(made, project.folder)
    told = json.loads((project.folder / "room.json").read_text())
    unseen = {f"{x},{y}" for x, y in told["unseen"]}
    rows = {name: _rows(project.folder / f"{name}.jsonl") for name in ("histories", "unseen", "questions")}
    assert {row["goal"] for row in rows["unseen"]} == unseen
    assert not {row["goal"] for row in rows["histories"]} & unseen
    assert [len(rows[name]) for name in rows] == [18 * 4, 6 * 4, 6 * 6]
    _questions_have_one_answer(rows["questions"])
    value = yaml.safe_load((ROOT / "config/examples/dark_room.yaml").read_text())
    value["trainings"]["dark_room"]["architecture"] |= {"n_embd": 16, **STILL}
    value["trainings"]["dark_room"] |= {"steps": 20, "warmup_steps": 2}
    value["trainings"]["dark_room"]["evaluation"]["every_steps"] = 10
    project.write_config(value)
    project.done()
    assert len(project.lines("runs/next_step/generations.jsonl")) == 36
    assert set(project.value("runs/next_step/metrics.json")["slices"]["episodes"]) == {
        f"{n} episodes" for n in (0, 1, 2, 4, 6, 7)
    }
    losses = project.value("trainings/dark_room/metrics.json")["evaluation"]
    assert losses["last"]["evaluation_loss"] < losses["first"]["evaluation_loss"]
    done = run("evaluate.py", project.folder, "--rollouts", 3)
    assert done.returncode == 0, done.stderr
    found = json.loads((project.folder / "dark_room.json").read_text())
    assert np.array(found["unseen"]["returns"]).shape == (18, 8)
    assert np.array(found["seen"]["returns"]).shape == (54, 8)
    picture = (project.folder / "dark_room.svg").read_text()
    assert picture.startswith("<svg")
    assert "agents that learn" in picture
    again = run("evaluate.py", project.folder, "--rollouts", 3)
    assert again.stdout == done.stdout
    assert found["unseen_checked"] is True
    model = project.folder / "results/trainings/dark_room/model"
    assert (model / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~_umask()
    told["unseen"].append(told["seen"].pop())
    x, y = told["unseen"][-1]
    (project.folder / "room.json").write_text(json.dumps(told))
    _one_line(run("evaluate.py", project.folder), f"was trained on the goal {x},{y}, which room.json keeps from it")
    about = model.parent / "data/training/about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"sha256": "another"}))
    _one_line(run("evaluate.py", project.folder), f"was not trained on {about.parent}; run snakemake again")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _questions_have_one_answer(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        goal = np.array([int(n) for n in row["id"].split(" ")[0].split(",")])
        x, y = row["history"].split()[-2:]
        place = np.array([[int(x.strip("x+")), int(y.strip("y+"))]] * 5)
        away = np.abs(ROOM.move(place, np.arange(5)) - goal).sum(-1)
        assert [name for name, left in zip(ACTIONS, away, strict=True) if left == away.min()] == [row["reference"]]
