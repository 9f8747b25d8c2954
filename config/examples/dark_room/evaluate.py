"""Let a trained Dark Room model act, and draw whether it improves within its context.

    python config/examples/dark_room/evaluate.py /tmp/dark

FOLDER is that of histories.py, in which snakemake has run. The model acts in rooms with goals that it was not trained
on (and, beside them, with those it was), episode after episode. All that it sees is its own history so far, and its
weights stay as they are. Written are dark_room.json (the return of every episode) and dark_room.svg: mean returns,
those of the learning agents and of chance, and the most that can be had.

- Intervals are over goals: they say what to expect of another goal. Rollouts for one goal are no independent ones.
- What the model was trained on is looked at: a goal that is in it is not unseen, whatever room.json says.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from room import ACTIONS, WORDS_A_STEP, Ints, Room, require_least, words

from gristmill.errors import UserError, run_main, some
from gristmill.files import read_json, write_bytes, write_json
from gristmill.stats.intervals import clustered_mean
from gristmill.training.data import TokenTexts
from gristmill.training.texts import ABOUT

#: Okabe and Ito's blue and orange, a grey, and black; with their dashes.
COLOURS = {"unseen goals": "#0072b2", "seen goals": "#e69f00", "agents that learn": "#777777", "chance": "#000000"}
DASHES = ([1, 0], [6, 3], [1, 0], [2, 3])


def main() -> None:
    """Arguments in, numbers and a picture out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="FOLDER/results/trainings/dark_room/model")
    parser.add_argument("--rollouts", type=int, default=50, help="for each goal")
    parser.add_argument("--episodes", type=int, help="as many as a history has")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    require_least(args, rollouts=1, episodes=1, seed=0)
    model = args.model or args.folder / "results/trainings/dark_room/model"
    told = what_was_made(args.folder)
    if not (model / "config.json").exists():
        raise UserError(f"{model} holds no model; train one first: snakemake … --directory {args.folder}")
    checked = require_unseen(model, told)
    room = Room(told["side"], told["steps"])
    episodes = args.episodes or len(told["source_returns"])
    found: dict[str, Any] = {"room": told, "episodes": episodes, "rollouts": args.rollouts, "unseen_checked": checked}
    for kind in ("unseen", "seen"):
        goals = np.repeat(np.array(told[kind]), args.rollouts, 0)
        found[kind] = summary(room, goals, roll_out(model, room, goals, episodes, args.seed))
    chance = by_chance(room, np.repeat(np.array(told["unseen"]), 1000, 0), np.random.default_rng(args.seed))
    found["chance"] = float(chance.mean())
    write_json(args.folder / "dark_room.json", found)
    write_bytes(args.folder / "dark_room.svg", draw(found).encode())
    print(*lines(found), args.folder / "dark_room.svg", sep="\n")


def what_was_made(folder: Path) -> dict[str, Any]:
    """room.json of histories.py.

    Raises:
        UserError: it is not there, or not as it was written.
    """
    made = folder / "room.json"
    if not made.exists():
        raise UserError(f"{made} is not there; make it with histories.py {folder}")
    try:
        told: dict[str, Any] = read_json(made)
        lacking = {"side", "steps", "seen", "unseen", "source_returns"} - told.keys()
    except (ValueError, AttributeError) as error:
        raise UserError(f"{made} is not as it was written; make it again with histories.py {folder}") from error
    if lacking:
        raise UserError(f"{made} lacks {', '.join(sorted(lacking))}; make it again with histories.py {folder}")
    return told


def require_unseen(model: Path, told: dict[str, Any]) -> bool:
    """Whether what the model was trained on, beside it, was found and has none of the goals that are called unseen.

    Raises:
        UserError: it has one, or the model was trained on something else.
    """
    from transformers import AutoTokenizer

    texts, manifest = model.parent / "data/training", model / "training/manifest.json"
    if not ((texts / ABOUT).exists() and manifest.exists()):
        return False
    again = "run snakemake again, and then this"
    data = TokenTexts(texts)
    if read_json(manifest)["metrics"]["data"]["texts"]["sha256"] != data.sha256:
        raise UserError(f"{model} was not trained on {texts}; {again}")
    ids = AutoTokenizer.from_pretrained(str(model), local_files_only=True).get_vocab()
    tokens = np.concatenate([data.tokens(text) for text in range(len(data.lengths))])
    for x, y in told["unseen"]:
        names = [ids.get(f"x{x}+"), ids.get(f"y{y}+")]
        if None not in names and bool(((tokens[:-1] == names[0]) & (tokens[1:] == names[1])).any()):
            raise UserError(f"{model} was trained on the goal {x},{y}, which room.json keeps from it; {again}")
    return True


def summary(room: Room, goals: Ints, returns: Ints) -> dict[str, Any]:
    """What is told of N rollouts of E episodes: N goals, N × E returns, their means, and how much they rise."""
    first, last = returns[:, 0], returns[:, -1]
    return {
        "best": float(room.best(goals).mean()),
        "goals": goals.tolist(),
        "returns": returns.tolist(),
        "means": [over_goals(goals, episode) for episode in returns.T],
        "rise": over_goals(goals, last - first),
    }


def over_goals(goals: Ints, values: Ints) -> dict[str, float | None]:
    """The mean of N rollouts' values with its 95 % interval over goals; None where there is none."""
    estimate = clustered_mean(values.astype(np.float64), [f"{x},{y}" for x, y in goals])
    low, high = estimate.ci95 or (None, None)
    return {"mean": estimate.value, "low": low, "high": high}


def lines(found: dict[str, Any]) -> list[str]:
    """The numbers in words."""
    told = [
        f"{kind} goals: episode 1 {_words(each['means'][0])}, episode {found['episodes']} {_words(each['means'][-1])} "
        f"of at most {each['best']:.2f}; rise {_words(each['rise'])}"
        for kind, each in ((kind, found[kind]) for kind in ("unseen", "seen"))
    ]
    if not found["unseen_checked"]:
        told.append("not checked: that it never saw the unseen goals, for nothing beside it tells what it saw")
    return [*told, f"chance {found['chance']:.2f}; agents that learn end at {found['room']['source_returns'][-1]:.2f}"]


def _words(value: dict[str, float | None]) -> str:
    bounds = "" if value["low"] is None else f" [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value['mean']:.2f}{bounds}"


def roll_out(folder: Path, room: Room, goals: Ints, episodes: int, seed: int) -> Ints:
    """The returns, N × episodes, of a model that draws its actions, in N rooms side by side.

    Raises:
        UserError: its context is shorter than so many episodes, or it does not know the room's words.
    """
    import warnings

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # past_key_values is about to have another name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
    model.to(device)
    ids = tokenizer.get_vocab()
    if unknown := sorted(set(room.vocabulary()) - ids.keys()):
        raise UserError(f"{folder} does not know {some(unknown)}; its room was another one: train a model of this one")
    needed, limit = episodes * room.steps * WORDS_A_STEP, int(model.config.max_position_embeddings)
    if needed > limit:
        raise UserError(f"--episodes {episodes} takes {needed} tokens, and the model reads {limit}; use fewer")
    chance = torch.Generator(device).manual_seed(seed)
    names = torch.tensor([ids[name] for name in ACTIONS], device=device)
    cache, action, returns = DynamicCache(config=model.config), None, np.zeros((len(goals), episodes), np.int64)
    with torch.inference_mode():
        for episode in range(episodes):
            place = np.tile(room.start, (len(goals), 1))
            for _ in range(room.steps):
                returns[:, episode] += (place == goals).all(-1)
                seen = torch.tensor([[ids[word] for word in words(*pair)] for pair in zip(place, goals, strict=True)])
                new = seen.to(device) if action is None else torch.cat([names[action][:, None], seen.to(device)], 1)
                logits = model(new, past_key_values=cache, use_cache=True).logits[:, -1, names].float()
                action = torch.multinomial(logits.softmax(-1), 1, generator=chance)[:, 0]
                place = room.move(place, action.cpu().numpy())
    return returns


def by_chance(room: Room, goals: Ints, random: np.random.Generator) -> Ints:
    """The returns of an agent that draws every action evenly."""
    place, returns = np.tile(room.start, (len(goals), 1)), np.zeros(len(goals), np.int64)
    for _ in range(room.steps):
        returns += (place == goals).all(-1)
        place = room.move(place, random.integers(len(ACTIONS), size=len(goals)))
    return returns


def draw(found: dict[str, Any]) -> str:
    """The chart as SVG text."""
    import altair as alt
    import vl_convert

    lines = [
        {"who": f"{kind} goals", "episode": number, **each}
        for kind in ("unseen", "seen")
        for number, each in enumerate(found[kind]["means"], start=1)
    ]
    lines += [
        {"who": "agents that learn", "episode": n, "mean": value}
        for n, value in enumerate(found["room"]["source_returns"][: found["episodes"]], start=1)
    ]
    lines += [{"who": "chance", "episode": n, "mean": found["chance"]} for n in (1, found["episodes"])]
    base = alt.Chart(alt.InlineData(values=lines))
    named, colours = list(COLOURS), list(COLOURS.values())
    legend = alt.Legend(symbolOpacity=1, symbolType="stroke")
    who = alt.Color("who:N", title=None, scale=alt.Scale(domain=named, range=colours), legend=legend)
    dash = alt.StrokeDash("who:N", title=None, scale=alt.Scale(domain=named, range=DASHES), legend=legend)
    x = alt.X("episode:Q", title="episode in the context", axis=alt.Axis(tickMinStep=1, grid=False))
    y = alt.Y("mean:Q", title="return", scale=alt.Scale(domain=[0, found["unseen"]["best"]], nice=True))
    bounded = base.transform_filter("isValid(datum.low)")
    band = bounded.mark_area(opacity=0.2).encode(x=x, y="low:Q", y2="high:Q", color=who)
    line = base.mark_line(point=True).encode(x=x, y=y, color=who, strokeDash=dash)
    most = alt.Chart(alt.InlineData(values=[{"best": found["unseen"]["best"]}])).mark_rule(strokeDash=[2, 2])
    chart = alt.layer(band, line, most.encode(y="best:Q")).properties(
        width=420, height=260, background="white", title="Return of each episode; dashed above: the most there is"
    )
    return str(vl_convert.vegalite_to_svg(chart.to_dict()))


if __name__ == "__main__":
    run_main(main)
