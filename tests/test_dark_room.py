"""Facts about the Dark Room example: its rooms, agents and texts, and the whole of it at a small size."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import ROOT, Project
from tiny_training import STILL

EXAMPLE = ROOT / "config/examples/dark_room"
sys.path.insert(0, str(EXAMPLE))

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


def test_what_is_missing_is_one_line_with_the_next_step(tmp_path: Path) -> None:
    found = run("evaluate.py", tmp_path)
    assert found.returncode == 2
    assert f"{tmp_path}/room.json is not there; make it with histories.py {tmp_path}" in found.stderr
    (tmp_path / "room.json").write_text("{}")
    found = run("evaluate.py", tmp_path)
    assert "results/trainings/dark_room/model holds no model; train one first" in found.stderr
    found = run("histories.py", tmp_path, "--held-out", 24)
    assert "--held-out 24: the room has 24 goals; keep some, train on some" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_the_example_runs_from_histories_to_the_picture(tmp_path: Path) -> None:
    project = Project(tmp_path / "dark")
    made = run("histories.py", project.folder, "--agents", 4, "--questions", 1)
    assert made.returncode == 0, made.stderr
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
    too_long = run("evaluate.py", project.folder, "--episodes", 9)
    assert "--episodes 9 takes 216 tokens, and the model reads 193; use fewer" in too_long.stderr


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _questions_have_one_answer(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        goal = np.array([int(n) for n in row["id"].split(" ")[0].split(",")])
        x, y = row["history"].split()[-2:]
        place = np.array([[int(x.strip("x+")), int(y.strip("y+"))]] * 5)
        away = np.abs(ROOM.move(place, np.arange(5)) - goal).sum(-1)
        assert [name for name, left in zip(ACTIONS, away, strict=True) if left == away.min()] == [row["reference"]]
