"""Runs ranked by what pairwise judges said of them: results/rankings.json.

- One ranking a judge and dataset, over all pairs of that judge: judges are not mixed, and no run answers two datasets.
- A pair that could not be read has no winner, is counted by its reason, and takes no part in any number.
- Lengths are in characters, surrounding whitespace left out, as in the judge's own metrics.json.
- A judge that fails its bars is ranked all the same, for a reader who wants to see; the entry says `reliable: false`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.config.specs import RankedPair, RankSpec
from gristmill.errors import UserError
from gristmill.files import read_json, read_jsonl
from gristmill.intervals import RowScores
from gristmill.judging.items import answer_of
from gristmill.judging.verdicts import TIE
from gristmill.merging import proven
from gristmill.stats.bradley_terry import Game, Rating, bradley_terry, win_matrix
from gristmill.stats.intervals import LEVEL
from gristmill.stats.length_control import length_controlled_win_rate
from gristmill.types import JsonDict

ABOUT = (
    "One ranking for each pairwise judge and dataset. rating: Bradley-Terry by maximum likelihood on Elo's scale (400 "
    "points are odds of 10 to 1), a tie is half a win for each; ci95 is the percentile interval over rows drawn again. "
    "place above or below: the run won or lost everything against the rated ones, and its rating has no bound. "
    "win_rate is of the first run of the pair; length_controlled is the same at equal length. Where reliable is false "
    "the judge failed its bars, and its numbers should not be believed."
)
_ORDER = {"above": 0, "rated": 1, "below": 2, "unconnected": 3}


@dataclass(slots=True)
class JudgedPair:
    """The readable verdicts of a pair of runs, and how many were not."""

    runs: tuple[str, str]
    games: list[Game] = field(default_factory=list)
    length_differences: list[int] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: JsonDict, answers: tuple[JsonDict, JsonDict]) -> None:
        """Count a line of verdicts.jsonl beside the two answers that it is about."""
        winner = verdict["winner"]
        if winner is None:
            self.unread[str(verdict["reason"])] += 1
            return
        if winner not in (*self.runs, TIE):
            raise UserError(f"the verdict on {verdict['id']} names {winner!r}, which is not of the pair; judge again")
        score = 0.5 if winner == TIE else float(winner == self.runs[0])
        self.games.append(Game(*self.runs, score, verdict["id"]))
        one, other = (len((answer["text"] or "").strip()) for answer in answers)
        self.length_differences.append(one - other)

    def numbers(self) -> JsonDict:
        """The pair's counts and win rates."""
        scores = RowScores()
        for game in self.games:
            scores.add(game.row, game.score)
        interval, won = scores.interval(), Counter(game.score for game in self.games)
        return {
            "runs": list(self.runs),
            "n": len(self.games),
            "wins": {self.runs[0]: won[1.0], self.runs[1]: won[0.0]},
            "ties": won[0.5],
            "unread": dict(self.unread),
            "win_rate": scores.value,
            "win_rate_ci95": [interval.low, interval.high] if interval else None,
            "length_controlled": self._controlled(),
        }

    def _controlled(self) -> JsonDict:
        preferences, rows = [game.score for game in self.games], [game.row for game in self.games]
        found = length_controlled_win_rate(preferences, self.length_differences, rows)
        return {
            "win_rate": found.value,
            "ci95": found.ci95 and list(found.ci95),
            "length_effect": found.length_effect,
            "overlap": found.overlap,
            "note": found.reason,
        }


def rankings(spec: RankSpec, judges: Mapping[str, Path], runs: Mapping[str, Path]) -> JsonDict:
    """The content of rankings.json.

    Args:
        spec: the judged pairs.
        judges: judge/target → the folder with verdicts.jsonl and metrics.json.
        runs: run → the folder with generations.jsonl.

    Raises:
        UserError: a folder is not given, or verdicts and answers are not of the same rows.
    """
    groups: dict[tuple[str, str], list[RankedPair]] = {}
    for pair in spec.pairs:
        groups.setdefault((pair.judge, pair.dataset), []).append(pair)
    return {
        "about": ABOUT,
        "level": LEVEL,
        "seed": spec.seed,
        "resamples": spec.resamples,
        "rankings": [_ranking(spec, pairs, judges, runs) for pairs in groups.values()],
    }


def _ranking(spec: RankSpec, pairs: list[RankedPair], judges: Mapping[str, Path], runs: Mapping[str, Path]) -> JsonDict:
    """One judge's ranking of the runs over one dataset."""
    names = list(dict.fromkeys(run for pair in pairs for run in pair.runs))
    folders = [_given(judges, f"{pair.judge}/{'_vs_'.join(pair.runs)}", "--judge") for pair in pairs]
    judged = [_read(pair, folder, runs) for pair, folder in zip(pairs, folders, strict=True)]
    trust = [_trust(folder) for folder in folders]
    games = [game for each in judged for game in each.games]
    ratings = bradley_terry(names, games, baseline=spec.baseline, seed=spec.seed, resamples=spec.resamples)
    anchored = any(each.run == spec.baseline and each.rating is not None for each in ratings)
    return {
        "judge": pairs[0].judge,
        "dataset": pairs[0].dataset,
        "reliable": all(each["reliable"] for each in trust),
        "n": len(games),
        "unread": sum(each.unread.total() for each in judged),
        "baseline": spec.baseline if anchored else None,
        "ratings": [_rating_line(each, games) for each in sorted(ratings, key=_best_first)],
        "win_matrix": _matrix(names, games),
        "pairs": [{**each.numbers(), **known} for each, known in zip(judged, trust, strict=True)],
    }


def _read(pair: RankedPair, folder: Path, runs: Mapping[str, Path]) -> JudgedPair:
    """A pair's verdicts beside the answers, which stand in the same order."""
    found = JudgedPair(pair.runs)
    answers = [proven(_given(runs, run, "--run") / "generations.jsonl") for run in pair.runs]
    for verdict in read_jsonl(folder / "verdicts.jsonl"):
        found.add(verdict, (_answer(verdict, answers[0], folder), _answer(verdict, answers[1], folder)))
    if any(next(stream, None) is not None for stream in answers):
        raise UserError(
            f"{folder} has fewer verdicts than the runs have answers; remove its verdicts.jsonl and run again"
        )
    return found


def _answer(verdict: JsonDict, answers: Iterator[JsonDict], folder: Path) -> JsonDict:
    line = next(answers, None)
    if line is None or answer_of(line) != answer_of(verdict):
        named = f"{verdict['id']}#{verdict['sample']}"
        raise UserError(f"{folder}: no answer to {named} at its place; remove its verdicts.jsonl and run again")
    return line


def _trust(folder: Path) -> JsonDict:
    metrics = read_json(folder / "metrics.json")
    return {"reliable": metrics["reliable"], "unreliable_because": metrics["unreliable_because"]}


def _rating_line(rating: Rating, games: list[Game]) -> JsonDict:
    """A run's rating with what it was made from."""
    scores = [game.score if game.first == rating.run else 1 - game.score for game in games if rating.run in game[:2]]
    counted = Counter(scores)
    return {
        "run": rating.run,
        "rating": rating.rating,
        "ci95": rating.ci95 and list(rating.ci95),
        "place": rating.place,
        "wins": counted[1.0],
        "losses": counted[0.0],
        "ties": counted[0.5],
        "note": rating.reason,
    }


def _best_first(rating: Rating) -> tuple[int, float]:
    return _ORDER[rating.place], -(rating.rating or 0.0)


def _matrix(names: list[str], games: list[Game]) -> JsonDict:
    """Run → run → how often the first beat the second, a tie counting ½ on both sides."""
    wins = win_matrix(names, games)
    return {one: {other: float(wins[i, j]) for j, other in enumerate(names) if i != j} for i, one in enumerate(names)}


def _given(folders: Mapping[str, Path], name: str, flag: str) -> Path:
    if name not in folders:
        raise UserError(f"the folder of {name} is not given; add {flag} {name}=FOLDER")
    return folders[name]
