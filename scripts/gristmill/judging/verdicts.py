"""The judge's answers joined to what was judged: one verdict per answer or pair, in the runs' order.

- The judge's answers must be exactly those to the questions that items.py asks, in order; a missing or foreign one
  stops everything, so a verdict is None only for a reason that is written beside it.
- What could not be read is never a tie: a pair has a winner only when every order was read.
- A pair whose two orders chose differently is a tie with the reason `orders_disagree`.
- Only the judge's own completion is parsed. Its prompt holds the judged answer, whatever that says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gristmill.config.schema import JudgeConfig
from gristmill.config.specs import VerdictSpec
from gristmill.errors import UserError, some
from gristmill.judging.items import Item, is_swapped, items, line_rid
from gristmill.judging.readout import PARSER_VERSION, read_label
from gristmill.types import JsonDict, RequestId

TIE = "tie"


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
    for item in stream:
        found: list[JsonDict] = []
        for rid in item.asked(spec.judge.both_orders):
            reply = next(queue, None)
            if reply is None or line_rid(reply) != rid:
                wanted = itertools.chain((rid,), _later(rid, item, stream, spec.judge.both_orders))
                raise _mismatch(wanted, itertools.chain([] if reply is None else [reply], queue))
            found.append(reply)
        yield Judged(item, _verdict(spec, item, found))
    left = next(queue, None)
    if left is not None:
        raise _mismatch([], itertools.chain([left], queue))


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


def _verdict(spec: VerdictSpec, item: Item, replies: Sequence[JsonDict]) -> JsonDict:
    make = _pointwise if spec.judge.kind == "pointwise" else _pairwise
    return make(spec, item, replies)


def _pointwise(spec: VerdictSpec, item: Item, replies: Sequence[JsonDict]) -> JsonDict:
    read = _read(spec.judge, replies[0]) if replies else _unasked(item)
    meaning = spec.judge.meanings()[read["label"]] if read["label"] is not None else None
    return {
        **item.name,
        "run": spec.target[0],
        "label": read["label"],
        "verdict": meaning,
        "reason": read["reason"],
        "raw": read["raw"],
        "truncated": read["truncated"],
        "parser": PARSER_VERSION,
    }


def _pairwise(spec: VerdictSpec, item: Item, replies: Sequence[JsonDict]) -> JsonDict:
    orders = [_order(spec, reply) for reply in replies]
    winner, reason = _winner(item, [order["choice"] for order in orders])
    return {
        **item.name,
        "runs": list(spec.target),
        "orders": orders,
        "winner": winner,
        "reason": reason,
        "parser": PARSER_VERSION,
    }


def _order(spec: VerdictSpec, reply: JsonDict) -> JsonDict:
    """One question about a pair: who stood where, and who was chosen."""
    first, second = reversed(spec.target) if is_swapped(reply["variant"]) else spec.target
    read = _read(spec.judge, reply)
    named = {"first": first, "second": second, TIE: TIE}
    choice = named[spec.judge.meanings()[read["label"]]] if read["label"] is not None else None
    return {
        "first": first,
        "second": second,
        "label": read["label"],
        "choice": choice,
        "reason": read["reason"],
        "raw": read["raw"],
        "truncated": read["truncated"],
    }


def _winner(item: Item, choices: Sequence[str | None]) -> tuple[str | None, str | None]:
    """(winner, reason) of a pair."""
    if item.not_asked is not None:
        return (TIE if item.not_asked == "identical" else None), item.not_asked
    if None in choices:
        return None, "unreadable"
    return (choices[0], None) if len(set(choices)) == 1 else (TIE, "orders_disagree")


def _read(judge: JudgeConfig, reply: JsonDict) -> JsonDict:
    """label, reason, raw and truncated of one judge answer."""
    truncated = reply["finish_reason"] == "length"
    if reply["text"] is None:  # the judge's own prompt was too long (on_overflow: skip), or its row failed
        return {"label": None, "reason": reply["finish_reason"], "raw": None, "truncated": truncated}
    reading = read_label(reply["text"], list(judge.meanings()))
    return {"label": reading.label, "reason": reading.reason, "raw": reading.raw, "truncated": truncated}


def _unasked(item: Item) -> JsonDict:
    return {"label": None, "reason": item.not_asked, "raw": None, "truncated": False}
