"""Several judges of one kind and target joined to one verdict: juries/<jury>/<target>/.

- majority: what more judges say than anything else. As many votes for two things is `votes_tied`: undecided, no tie.
- mean: of the scores that were read.
- Fewer read verdicts than more than half of the judges is `too_few_read`, whatever they say.
- Fleiss' kappa is over what all judges were read on; null for scores, and where all always say the same.
- Krippendorff's alpha takes whatever was read, and of scores how far they are apart.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from gristmill.config.specs import JurySpec
from gristmill.errors import UserError
from gristmill.judging.items import answer_of
from gristmill.judging.pairs import TIE
from gristmill.judging.reliability import Share
from gristmill.judging.tallies import bounds, new_scores, unit_of
from gristmill.stats.agreement import fleiss_kappa, krippendorff_alpha
from gristmill.types import JsonDict

#: The column of a verdict line that holds what was decided.
DECIDED = {"pointwise": "verdict", "classification": "verdict", "pairwise": "winner", "score": "score"}


class JuryTally:
    """A jury's verdicts on one target, counted as they pass."""

    def __init__(self, spec: JurySpec) -> None:
        self._spec = spec
        self._column = DECIDED[spec.kind]
        self._low, self._high = spec.range or (0.0, 1.0)
        # Dividing by a power of two is exact.
        self._width = 2.0 ** math.ceil(math.log2(self._high - self._low))
        self._n = 0
        self._decided: Counter[Any] = Counter()
        self._reasons: Counter[str] = Counter()
        self._rate = new_scores(spec.cluster)
        self._same: Counter[tuple[str, str]] = Counter()
        self._both: Counter[tuple[str, str]] = Counter()
        self._votes: Counter[tuple[Any, ...]] = Counter()

    def joined(self, verdicts: Sequence[Iterable[JsonDict]]) -> Iterator[JsonDict]:
        """The jury's lines, from the lines of each judge's verdicts.jsonl in the order of the spec's judges.

        Raises:
            UserError: the judges' files do not list the same answers.
        """
        for lines in itertools.zip_longest(*verdicts):
            names = {None if line is None else answer_of(line) for line in lines}
            if len(names) > 1:
                raise UserError(
                    f"the judges of {self._spec.name} list different answers from line {self._n + 1} on; "
                    "make their verdicts again"
                )
            yield self._line(lines)

    def metrics(self) -> JsonDict:
        """The content of metrics.json."""
        spec = self._spec
        return {
            "jury": spec.name,
            "kind": spec.kind,
            "judges": spec.judges,
            "combine": spec.combine,
            "target": "_vs_".join(spec.target),
            "runs": spec.target,
            "n": self._n,
            "undecided": self._reasons.total(),
            "undecided_reasons": dict(sorted(self._reasons.items())),
            **self._numbers(),
            "agreement": [
                {"judges": list(pair), "n": n, "percent": Share(self._same[pair], n).ratio}
                for pair, n in self._both.items()
            ],
            **self._beyond_chance(),
        }

    def _line(self, lines: Sequence[JsonDict]) -> JsonDict:
        votes = {name: line[self._column] for name, line in zip(self._spec.judges, lines, strict=True)}
        decided, reason = decide(list(votes.values()), self._spec.combine)
        if decided is None and all(line["reason"] == "no_answer" for line in lines):
            reason = "no_answer"
        self._count(unit_of(lines[0]), votes, decided, reason)
        place = "runs" if self._spec.kind == "pairwise" else "run"
        turn = {"variant": lines[0]["variant"]} if "variant" in lines[0] else {}
        named = {"id": lines[0]["id"], "sample": lines[0]["sample"], **turn, place: lines[0][place]}
        return {**named, "votes": votes, self._column: decided, "reason": reason}

    def _count(self, row: str, votes: dict[str, Any], decided: Any, reason: str | None) -> None:
        self._n += 1
        if reason is not None:
            self._reasons[reason] += 1
        elif self._spec.kind != "score":
            self._decided[decided] += 1
        self._count_rate(row, decided)
        for one, other in itertools.combinations(votes, 2):
            read = votes[one] is not None and votes[other] is not None
            self._both[one, other] += read
            self._same[one, other] += read and votes[one] == votes[other]
        self._votes[tuple(sorted(votes.values(), key=repr))] += 1

    def _count_rate(self, row: str, decided: Any) -> None:
        if self._spec.kind == "pointwise":
            self._rate.add(row, float(decided == "correct"))
        elif self._spec.kind == "pairwise" and decided is not None:
            self._rate.add(row, 0.5 if decided == TIE else float(decided == self._spec.target[0]))
        elif self._spec.kind == "score" and decided is not None:
            self._rate.add(row, (decided - self._low) / self._width)

    def _beyond_chance(self) -> JsonDict:
        """How far the judges agree beyond chance."""
        votes = list(self._votes.elements())
        scores = self._spec.kind == "score"
        return {
            "fleiss_kappa": None
            if scores
            else fleiss_kappa(_counts([each for each in votes if None not in each])).value,
            "krippendorff_alpha": krippendorff_alpha(votes, "interval" if scores else "nominal").value,
        }

    def _numbers(self) -> JsonDict:
        value, ends = self._rate.value, bounds(self._rate)
        if self._spec.kind == "score":
            back = [
                min(self._low + each * self._width, self._high) for each in (value, *(ends or ())) if each is not None
            ]
            return {"mean": back[0] if back else None, "ci95": back[1:] or None}
        decided = {"decided": dict(sorted(self._decided.items()))}
        rate = {"pointwise": "accuracy", "pairwise": "win_rate"}.get(self._spec.kind)
        return decided if rate is None else {**decided, rate: value, "ci95": ends}


def decide(votes: Sequence[Any], combine: str) -> tuple[Any, str | None]:
    """(what the jury decides, why it does not); None is a vote that could not be read."""
    read = [vote for vote in votes if vote is not None]
    if 2 * len(read) <= len(votes):
        return None, "too_few_read"
    if combine == "mean":
        return fmean(read), None
    most = Counter(read).most_common(2)
    if len(most) == 2 and most[0][1] == most[1][1]:
        return None, "votes_tied"
    return most[0][0], None


def _counts(votes: Sequence[tuple[Any, ...]]) -> list[list[int]]:
    """Items × what was said: how many judges said it."""
    said = list(dict.fromkeys(vote for each in votes for vote in each))
    return [[each.count(vote) for vote in said] for each in votes]
