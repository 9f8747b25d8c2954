"""Write what the Dark Room example is trained and asked on: agents' learning histories, questions, and a tokenizer.

    python config/examples/dark_room/histories.py /tmp/dark

FOLDER gets histories.jsonl (to train on), unseen.jsonl (histories of goals that are kept from the training),
questions.jsonl (where to go next, in rooms with such goals, after more or fewer episodes), words/ (the tokenizer, in a
model folder of random weights), and room.json (what all of it was made with), which is written last: where it is, the
files belong together. The same arguments give the same files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from room import ACTIONS, END, WORDS_A_STEP, Histories, Ints, Learner, Room, parted, require_least, words

from gristmill.errors import UserError, run_main
from gristmill.files import atomic_folder, write_json, write_jsonl

#: Episodes that stand in front of a question.
EARLIER = (0, 1, 2, 4, 6, 7)


def main() -> None:
    """Arguments in, files out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--agents", type=int, default=300, help="for each goal")
    parser.add_argument("--held-out", type=int, default=6, help="goals that are kept from the training")
    parser.add_argument("--questions", type=int, default=10, help="for each held-out goal and number of episodes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    require_least(args, agents=1, questions=1, seed=0)
    room, learner, random = Room(), Learner(), np.random.default_rng(args.seed)
    if not 0 < args.held_out < len(room.goals()):
        raise UserError(f"--held-out {args.held_out}: the room has {len(room.goals())} goals; keep some, train on some")
    seen, unseen = parted(room.goals(), args.held_out, args.seed)
    for axis in (0, 1):
        if strange := set(unseen[:, axis].tolist()) - set(seen[:, axis].tolist()):
            raise UserError(
                f"--held-out {args.held_out}: no goal to train on has {'xy'[axis]}{min(strange)}, so its word would "
                "mean nothing; keep fewer, or use another --seed"
            )
    known = learner.learn(room, np.tile(seen, (args.agents, 1)), random)  # goal by goal: the first rows have them all
    other = learner.learn(room, np.tile(unseen, (args.agents, 1)), random)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "room.json").unlink(missing_ok=True)
    write_jsonl(args.folder / "histories.jsonl", lines(known, "seen"))
    write_jsonl(args.folder / "unseen.jsonl", lines(other, "unseen"))
    write_jsonl(args.folder / "questions.jsonl", questions(room, other, args.questions, random))
    write_words(room, args.folder / "words")
    made = {
        **{"side": room.side, "steps": room.steps, "seed": args.seed, "agents": args.agents},
        **{"seen": seen.tolist(), "unseen": unseen.tolist(), "source_returns": other.returns().mean(0).tolist()},
    }
    write_json(args.folder / "room.json", made)
    tokens = other.places.shape[1] * room.steps * WORDS_A_STEP
    print(
        f"{args.folder}: {len(known.goals):,} histories of {tokens} tokens, {len(seen)} goals; {len(unseen)} held out"
    )


def lines(histories: Histories, kind: str) -> Iterator[dict[str, Any]]:
    """Rows of a dataset: `history` is the text."""
    for number, goal in enumerate(histories.goals):
        yield {"id": f"{kind}-{number}", "goal": f"{goal[0]},{goal[1]}", "history": histories.text(number)}


def questions(room: Room, histories: Histories, count: int, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """For each goal and each of EARLIER, `count` beginnings of histories at whose end one action alone is best.

    The last episode is walked by chance, so that where it ends says nothing of the goal.
    """
    for goal in np.unique(histories.goals, axis=0):
        agents = np.flatnonzero((histories.goals == goal).all(-1))
        for earlier in EARLIER:
            for number in range(count):
                agent = int(random.choice(agents))
                text = histories.text(agent).split()[: earlier * room.steps * WORDS_A_STEP]
                last, best = _walk(room, goal, random)
                yield {
                    "id": f"{goal[0]},{goal[1]} after {earlier} #{number}",
                    "history": " ".join([*text, *last]),
                    "reference": best,
                    "episodes": f"{earlier} episodes",
                }


def _walk(room: Room, goal: Ints, random: np.random.Generator) -> tuple[list[str], str]:
    """The words of a walk to a place beside which one action alone comes nearer to the goal, and that action."""
    while True:
        place, text = room.start, list[str]()
        for _ in range(random.integers(1, room.steps - 1)):
            action = int(random.integers(len(ACTIONS)))
            text += words(place, goal, action)
            place = room.move(place[None], np.array([action]))[0]
        away = [int(np.abs(room.move(place[None], np.array([n]))[0] - goal).sum()) for n in range(len(ACTIONS))]
        nearest = [name for name, left in zip(ACTIONS, away, strict=True) if left == min(away)]
        if len(nearest) == 1 and min(away) > 0:
            return [*text, *words(place, goal)], nearest[0]


def write_words(room: Room, folder: Path) -> None:
    """A word-level tokenizer in the smallest model folder that can hold one."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    vocabulary = {word: place for place, word in enumerate(room.vocabulary())}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    named = {"eos_token": END, "pad_token": END, "unk_token": END}
    torch.manual_seed(0)
    size = len(vocabulary)
    smallest = GPT2Config(vocab_size=size, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    with atomic_folder(folder) as made:
        PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named).save_pretrained(made)
        GPT2LMHeadModel(smallest).save_pretrained(made)


if __name__ == "__main__":
    run_main(main)
