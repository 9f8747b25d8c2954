"""The judge's answers joined to what was judged: one verdict per answer or pair, in the runs' order.

- The judge's answers must be exactly those to the questions that items.py asks, in order; a missing or foreign one
  stops everything, so a verdict is None only for a reason that is written beside it.
- What could not be read is never a tie: a pair has a winner only when every order was read.
- How the two orders of a pair make a winner is in pairs.py.
- Only the judge's own completion is parsed. Its prompt holds the judged answer, whatever that says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gristmill.clusters import cluster_name
from gristmill.config.specs import VerdictSpec
from gristmill.errors import UserError, some
from gristmill.judging.items import Item, is_swapped, items, line_rid
from gristmill.judging.pairs import SIDES, TIE, combined, first_is_better, has_strength, preferred
from gristmill.judging.reading import Reader
from gristmill.judging.readout import PARSER_VERSION
from gristmill.types import JsonDict, Reading, RequestId

__all__ = ["TIE", "Judged", "judged"]


@dataclass(frozen=True, slots=True)
class Judged:
    """What was judged and the line of verdicts.jsonl about it."""

    item: Item
    line: JsonDict


def judged(
    spec: VerdictSpec, generations: Sequence[Iterable[JsonDict]], replies: Iterable[JsonDict]
) -> Iterator[Judged]:
    """The verdicts of one judge target, in constant memory.

    Args:
        spec: the judge and its target.
        generations: the parsed lines of each judged run's generations.jsonl.
        replies: the parsed lines of the judge's generations.jsonl.

    Raises:
        UserError: the judge's answers are not those that were asked for; the message names the ids.
    """
    if len(spec.target) == 2 and TIE in spec.target:
        raise UserError(f"a run named {TIE!r} could not be told from a tie; rename the run")
    stream, queue = items(spec.target, generations), iter(replies)
    reader = Reader.of(spec.judge)
    for item in stream:
        found: list[JsonDict] = []
        for rid in item.asked(spec.judge.both_orders):
            reply = next(queue, None)
            if reply is None or line_rid(reply) != rid:
                wanted = itertools.chain((rid,), _later(rid, item, stream, spec.judge.both_orders))
                raise _mismatch(wanted, itertools.chain([] if reply is None else [reply], queue))
            found.append(reply)
        yield Judged(item, _verdict(spec, reader, item, found) | _cluster(spec, item))
    left = next(queue, None)
    if left is not None:
        raise _mismatch([], itertools.chain([left], queue))


def _cluster(spec: VerdictSpec, item: Item) -> JsonDict:
    """What the row is counted under, where the judged runs have a cluster column."""
    if spec.cluster is None:
        return {}
    return {"cluster": cluster_name(item.id, {**item.row, "reference": item.reference}, spec.cluster)}


def _later(rid: RequestId, item: Item, stream: Iterator[Item], both_orders: bool) -> Iterator[RequestId]:
    """The questions after `rid`."""
    asked = item.asked(both_orders)
    yield from asked[asked.index(rid) + 1 :]
    for later in stream:
        yield from later.asked(both_orders)


def _mismatch(wanted: Iterable[RequestId], replies: Iterable[JsonDict]) -> UserError:
    expected = dict.fromkeys(wanted)
    got = dict.fromkeys(line_rid(reply) for reply in replies)
    missing = [str(rid) for rid in expected if rid not in got]
    foreign = [str(rid) for rid in got if rid not in expected]
    problems = [f"no judge answer for {some(missing)}"] if missing else []
    problems += [f"judge answers to nothing that is asked, or twice: {some(foreign)}"] if foreign else []
    problems = problems or [f"the judge's answers are in another order from {next(iter(expected))} on"]
    return UserError(f"{'; '.join(problems)}; run the judge again (its journal keeps the answers)")


def _verdict(spec: VerdictSpec, reader: Reader, item: Item, replies: Sequence[JsonDict]) -> JsonDict:
    make = _pairwise if spec.judge.kind == "pairwise" else _single
    return make(spec, reader, item, replies)


def _single(spec: VerdictSpec, reader: Reader, item: Item, replies: Sequence[JsonDict]) -> JsonDict:
    """The verdict on one answer: a meaning or a class, or a score."""
    reading, columns = _read(reader, replies[0]) if replies else _unasked(item)
    score = spec.judge.kind == "score"
    meaning = spec.judge.meanings()[reading.label] if reading.label is not None and not score else None
    return {
        **item.name,
        "run": spec.target[0],
        "label": reading.label,
        **({"score": reading.value} if score else {"verdict": meaning}),
        **columns,
        "parser": PARSER_VERSION,
    }


def _pairwise(spec: VerdictSpec, reader: Reader, item: Item, replies: Sequence[JsonDict]) -> JsonDict:
    orders = [_order(spec, reader, reply) for reply in replies]
    line = {**item.name, "runs": list(spec.target), "orders": orders}
    if spec.judge.readout == "likelihood":
        line["preference"] = _preference(spec, item, orders)
    winner, reason = _winner(spec, item, line)
    return {**line, "winner": winner, "reason": reason, "parser": PARSER_VERSION}


def _order(spec: VerdictSpec, reader: Reader, reply: JsonDict) -> JsonDict:
    """One question about a pair: who stood where, and who was chosen."""
    first, second = reversed(spec.target) if is_swapped(reply["variant"]) else spec.target
    reading, columns = _read(reader, reply)
    meanings = spec.judge.meanings()
    side, strength = SIDES[meanings[reading.label]] if reading.label is not None else (None, None)
    choice = {"first": first, "second": second, TIE: TIE, None: None}[side]
    more: JsonDict = {}
    if spec.judge.readout == "likelihood":
        more["preference"] = first_is_better(meanings, reading)
        choice = preferred(first, second, more["preference"])
    elif has_strength(meanings.values()):
        more["strength"] = strength
    return {"first": first, "second": second, "label": reading.label, "choice": choice, **more, **columns}


def _preference(spec: VerdictSpec, item: Item, orders: Sequence[JsonDict]) -> float | None:
    """How far the first run is preferred, the mean over the orders; identical answers are even."""
    if item.not_asked is not None:
        return 0.5 if item.not_asked == "identical" else None
    if any(order["preference"] is None for order in orders):
        return None
    own = [abs((order["first"] != spec.target[0]) - order["preference"]) for order in orders]
    return math.fsum(own) / len(own)


def _winner(spec: VerdictSpec, item: Item, line: JsonDict) -> tuple[str | None, str | None]:
    """(winner, reason) of a pair."""
    if item.not_asked is not None:
        return (TIE if item.not_asked == "identical" else None), item.not_asked
    if "preference" in line:
        winner = preferred(spec.target[0], spec.target[1], line["preference"])
        return winner, "unreadable" if winner is None else None
    choices = [order["choice"] for order in line["orders"]]
    return combined(spec.target, choices, has_strength(spec.judge.meanings().values()))


def _read(reader: Reader, reply: JsonDict) -> tuple[Reading, JsonDict]:
    """What one judge answer says, and the columns that every answer has."""
    columns: JsonDict = {"reason": reply["finish_reason"], "raw": None, "truncated": reply["finish_reason"] == "length"}
    columns |= {name: reply[name] for name in ("attempt", "unreadable_attempts") if name in reply}
    if reply["text"] is None:  # the judge's own prompt was too long (on_overflow: skip), or its row failed
        return Reading(None, None, ""), columns
    reading = reader.read(reply["text"], reply.get("label_logprobs"))
    columns |= {"reason": reading.reason, "raw": reading.raw}
    if reader.readout == "likelihood":
        shares = reading.probabilities
        columns["probabilities"] = None if shares is None else dict(zip(reader.labels, shares, strict=True))
        columns["label_mass"] = reading.label_mass
    return reading, columns


def _unasked(item: Item) -> tuple[Reading, JsonDict]:
    return Reading(None, None, ""), {"reason": item.not_asked, "raw": None, "truncated": False}
