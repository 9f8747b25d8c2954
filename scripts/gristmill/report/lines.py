"""One answer or verdict as the sample browser has it, from the lines of the files.

- A key that only some answers or judges have (a turn, what was read, likelihoods) is there only for those.
- Values that are not text become their JSON text: a browser would round large integers.
"""

from __future__ import annotations

import math

from gristmill.followups import turn_number
from gristmill.report.words import as_text
from gristmill.types import JsonDict


def turn_of(line: JsonDict) -> JsonDict:
    """The number of the turn that a line is about, if it is about one."""
    number = turn_number(line.get("variant") or "")
    return {} if number is None else {"turn": number}


def answer(number: int, row: JsonDict, line: JsonDict, graded: JsonDict, metric: str | None) -> JsonDict:
    """A run's answer with its grades; its prompt joins the row's prompts if it is a new one."""
    prompt = [[message["role"], message["content"] or ""] for message in line["messages"]]
    if prompt not in row["prompts"]:
        row["prompts"].append(prompt)
    grades = graded.get("grades", {})
    more = turn_of(line)
    if graded.get("extracted"):
        more["extracted"] = {
            name: None if found is None else as_text(found) for name, found in graded["extracted"].items()
        }
    if line.get("label_logprobs"):
        found = map(math.exp, line["label_logprobs"])
        more["probabilities"] = dict(zip(line["labels"], found, strict=True))
    return {
        **more,
        "run": number,
        "prompt": row["prompts"].index(prompt),
        "text": line["text"],
        "truncated": line["finish_reason"] == "length",
        "invalid": graded.get("invalid"),
        "wrong": metric is not None and grades.get(metric) is False,
        "grades": grades,
        "cut": line.get("prompt_cut_tokens", 0),
        "tokens": [line.get("prompt_tokens"), line.get("completion_tokens")],
    }


def pointwise(number: int, line: JsonDict) -> JsonDict:
    """A judge's verdict, class or score of one answer."""
    said = line.get("verdict") or (line.get("label") if line.get("score") is not None else None)
    state = said or ("no_answer" if line.get("reason") == "no_answer" else "unreadable")
    asked = {name: line.get(name) for name in ("label", "reason", "raw", "truncated")} | _likelihoods(line)
    score = {"score": line["score"]} if line.get("score") is not None else {}
    return {
        "judge": number,
        "run": line["run"],
        "state": state,
        "disagree": False,
        **turn_of(line),
        **score,
        "orders": [asked],
    }


def _likelihoods(line: JsonDict) -> JsonDict:
    """What only some judges tell: the labels' shares and their mass, and by how much an answer is better."""
    return {name: line[name] for name in ("probabilities", "label_mass", "strength") if line.get(name) is not None}


def pairwise(number: int, line: JsonDict) -> JsonDict:
    """A judge's choice between two answers, with each order in which it was asked."""
    reason, winner = line.get("reason"), line["winner"]
    won = {"tie": "tie", None: "no_answer" if reason == "no_answer" else "unreadable"}.get(winner, f"win:{winner}")
    names = ("first", "second", "label", "choice", "reason", "raw", "truncated")
    return {
        **turn_of(line),
        "judge": number,
        "run": None,
        "state": won,
        "disagree": reason == "orders_disagree",
        "identical": reason == "identical",
        "orders": [{name: order.get(name) for name in names} | _likelihoods(order) for order in line["orders"]],
    }
