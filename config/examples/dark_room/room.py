"""Dark Room: a grid with a hidden goal, agents that learn in it, and their learning written as text.

The task is that of Laskin et al., "In-context Reinforcement Learning with Algorithm Distillation" (arXiv 2210.14215):
an agent sees where it stands, and nothing of the goal until it stands on it. Every episode begins in the middle, has as
many steps, and brings 1 for each step at whose beginning the agent stands on the goal.

A history is what one agent did in one room, episode after episode while it learned. As text a step is three words: the
two coordinates, each with a + on the goal, and the action taken there: `x2 y1 east x3+ y1+ stay`. So a goal that no
model was trained on is still written in words that it knows.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from gristmill.errors import UserError

Ints = npt.NDArray[np.int64]

#: Action → step along x and y.
ACTIONS = {"stay": (0, 0), "east": (1, 0), "west": (-1, 0), "south": (0, 1), "north": (0, -1)}
END = "<end>"
WORDS_A_STEP = 3
_MOVES = np.array(list(ACTIONS.values()))


@dataclass(frozen=True, slots=True)
class Room:
    """A square of `side` × `side` cells, and the `steps` of an episode."""

    side: int = 5
    steps: int = 8

    @property
    def start(self) -> Ints:
        """The middle, where every episode begins."""
        return np.array([self.side // 2, self.side // 2])

    def goals(self) -> Ints:
        """Every cell but the start, row by row: G × 2 coordinates x, y."""
        cells = np.array([(x, y) for y in range(self.side) for x in range(self.side)])
        others: Ints = cells[(cells != self.start).any(-1)]
        return others

    def move(self, places: Ints, actions: Ints) -> Ints:
        """Where N agents stand after a step; walls hold them.

        Args:
            places: N × 2 coordinates.
            actions: N indices of ACTIONS.
        """
        there: Ints = np.clip(places + _MOVES[actions], 0, self.side - 1)
        return there

    def best(self, goals: Ints) -> Ints:
        """The most that an episode can bring, for each goal."""
        most: Ints = np.maximum(self.steps - np.abs(goals - self.start).sum(-1), 0)
        return most

    def vocabulary(self) -> list[str]:
        """All words, the end of a text first."""
        coordinates = [f"{axis}{n}{mark}" for axis in "xy" for n in range(self.side) for mark in ("", "+")]
        return [END, *coordinates, *ACTIONS]


@dataclass(frozen=True, slots=True)
class Histories:
    """What N agents did in E episodes of T steps."""

    #: N × 2.
    goals: Ints
    #: N × E × T × 2: where each step begins.
    places: Ints
    #: N × E × T: indices of ACTIONS.
    actions: Ints

    def rewards(self) -> Ints:
        """N × E × T: 1 where the agent stands on its goal."""
        on_goal: Ints = (self.places == self.goals[:, None, None]).all(-1).astype(np.int64)
        return on_goal

    def returns(self) -> Ints:
        """N × E."""
        total: Ints = self.rewards().sum(-1)
        return total

    def text(self, number: int) -> str:
        """One history, three words a step."""
        goal = self.goals[number]
        places, actions = self.places[number].reshape(-1, 2), self.actions[number].reshape(-1)
        return " ".join(
            word for place, action in zip(places, actions, strict=True) for word in words(place, goal, action)
        )


def words(place: Ints, goal: Ints, action: int | None = None) -> Iterator[str]:
    """The coordinates of a place, and the action taken there."""
    mark = "+" if (place == goal).all() else ""
    yield f"x{place[0]}{mark}"
    yield f"y{place[1]}{mark}"
    if action is not None:
        yield list(ACTIONS)[action]


@dataclass(frozen=True, slots=True)
class Learner:
    """Tabular Q-learning (Watkins 1989); its exploration falls linearly to the least, over a share of its episodes."""

    episodes: int = 48
    #: Every so-manyth episode is kept, so that a short context spans all of the learning.
    kept_every: int = 6
    rate: float = 0.5
    discount: float = 0.9
    exploring_share: float = 0.7
    least_exploration: float = 0.02

    def learn(self, room: Room, goals: Ints, random: np.random.Generator) -> Histories:
        """One agent for each goal, side by side.

        Args:
            room: where.
            goals: N × 2 coordinates.
            random: where chance comes from.
        """
        agents, names = np.arange(len(goals)), len(ACTIONS)
        values = np.zeros((len(goals), room.side, room.side, names))
        kept: list[tuple[Ints, Ints]] = []
        for episode in range(self.episodes):
            exploring = max(1 - episode / (self.episodes * self.exploring_share), self.least_exploration)
            place = np.tile(room.start, (len(goals), 1))
            steps: list[tuple[Ints, Ints]] = []
            for _ in range(room.steps):
                told = values[agents, place[:, 0], place[:, 1]]
                best = np.argmax(told + random.random(told.shape) * 1e-6, -1)  # chance decides between equals
                action = np.where(random.random(len(goals)) < exploring, random.integers(names, size=len(goals)), best)
                there = room.move(place, action)
                reward = (there == goals).all(-1)
                wanted = reward + self.discount * values[agents, there[:, 0], there[:, 1]].max(-1)
                values[agents, place[:, 0], place[:, 1], action] += self.rate * (wanted - told[agents, action])
                steps.append((place, action))
                place = there
            if (episode + 1) % self.kept_every == 0:
                kept.append((np.stack([step[0] for step in steps], 1), np.stack([step[1] for step in steps], 1)))
        return Histories(goals, np.stack([part[0] for part in kept], 1), np.stack([part[1] for part in kept], 1))


def parted(goals: Ints, held_out: int, seed: int) -> tuple[Ints, Ints]:
    """Goals to train on, and so many that are kept from it."""
    order = np.random.default_rng(seed).permutation(len(goals))
    return goals[np.sort(order[held_out:])], goals[np.sort(order[:held_out])]


def require_least(args: Namespace, **least: int) -> None:
    """Refuse a number of the command line that is too small; one that is not given is left alone.

    Raises:
        UserError: it names the first one.
    """
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise UserError(f"--{name.replace('_', '-')} {value} is too few; give {smallest} or more")
