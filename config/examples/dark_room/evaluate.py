"""Let a trained Dark Room model act, and draw whether it improves within its context.

    python config/examples/dark_room/evaluate.py /tmp/dark

FOLDER is that of histories.py, in which snakemake has run. The model acts in rooms with goals that it was not trained
on (and, beside them, with those it was), episode after episode. All that it sees is its own history so far, and its
weights stay as they are. Written are dark_room.json (the return of every episode) and dark_room.svg: mean returns with
95 % intervals over rollouts, those of the learning agents, of chance, and the most that can be had.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from room import ACTIONS, Ints, Room, words

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from gristmill.errors import UserError, run_main
from gristmill.files import read_json, write_bytes, write_json
from gristmill.stats.intervals import t_half_width

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
    made, model = args.folder / "room.json", args.model or args.folder / "results/trainings/dark_room/model"
    if not made.exists():
        raise UserError(f"{made} is not there; make it with histories.py {args.folder}")
    if not (model / "config.json").exists():
        raise UserError(f"{model} holds no model; train one first: snakemake … --directory {args.folder}")
    told = read_json(made)
    room = Room(told["side"], told["steps"])
    episodes = args.episodes or len(told["source_returns"])
    found: dict[str, Any] = {"room": told, "episodes": episodes, "rollouts": args.rollouts}
    for kind in ("unseen", "seen"):
        goals = np.array(told[kind])
        returns = roll_out(model, room, np.repeat(goals, args.rollouts, 0), episodes, args.seed)
        found[kind] = {"best": float(room.best(goals).mean()), "returns": returns.tolist(), "means": means(returns)}
    chance = by_chance(room, np.repeat(np.array(told["unseen"]), 1000, 0), np.random.default_rng(args.seed))
    found["chance"] = float(chance.mean())
    write_json(args.folder / "dark_room.json", found)
    write_bytes(args.folder / "dark_room.svg", draw(found).encode())
    for kind in ("unseen", "seen"):
        first, *_, last = found[kind]["means"]
        print(f"{kind} goals: episode 1 {first['mean']:.2f}, episode {episodes} {last['mean']:.2f} "
              f"[{last['low']:.2f}, {last['high']:.2f}] of at most {found[kind]['best']:.2f}")  # fmt: skip
    print(f"chance {found['chance']:.2f}; agents that learn end at {told['source_returns'][-1]:.2f}")
    print(f"{args.folder / 'dark_room.svg'}")


def roll_out(folder: Path, room: Room, goals: Ints, episodes: int, seed: int) -> Ints:
    """The returns, N × episodes, of a model that draws its actions, in N rooms side by side.

    Raises:
        UserError: its context is shorter than so many episodes.
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
    needed, limit = episodes * room.steps * 3, int(model.config.max_position_embeddings)
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


def means(returns: npt.NDArray[Any]) -> list[dict[str, float]]:
    """Of each episode the mean over rollouts with its 95 % interval."""
    count = len(returns)
    middle, error = returns.mean(0), returns.std(0, ddof=1) / np.sqrt(count)
    half = [t_half_width(float(each), count) for each in error]
    return [
        {"mean": float(mean), "low": float(mean - width), "high": float(mean + width)}
        for mean, width in zip(middle, half, strict=True)
    ]


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
    band = base.mark_area(opacity=0.2).encode(x=x, y="low:Q", y2="high:Q", color=who)
    line = base.mark_line(point=True).encode(x=x, y=y, color=who, strokeDash=dash)
    most = alt.Chart(alt.InlineData(values=[{"best": found["unseen"]["best"]}])).mark_rule(strokeDash=[2, 2])
    chart = alt.layer(band, line, most.encode(y="best:Q")).properties(
        width=420, height=260, background="white", title="Return of each episode; dashed above: the most there is"
    )
    return str(vl_convert.vegalite_to_svg(chart.to_dict()))


if __name__ == "__main__":
    run_main(main)
