"""What must hold after a disturbed run: the results of an undisturbed one, and a cause for every row asked again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_kinds import Fault

from gristmill.journal.reading import segments
from gristmill.journal.upkeep import contents

UNITS = ("runs/plain", "judges/grader/plain")
_SECONDS = re.compile(rb'"seconds":[^,}]+')


@dataclass(frozen=True)
class Asked:
    """A request as the engine got it."""

    pid: int
    time: float
    #: unit, id, sample, variant
    row: tuple[str, ...]
    prompt: int


def read_asked(path: Path) -> list[Asked]:
    """Everything the engines of a folder were asked, in its order."""
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text().splitlines())
    return [Asked(one["pid"], one["time"], (one["unit"], *map(str, one["rid"])), one["prompt"]) for one in lines]


def explain(asked: Sequence[Asked], faults: Sequence[Fault]) -> list[str]:
    """Charge every row that was asked again to the fault that cost it; returns what no fault explains.

    A row is charged to a fault that damaged its record between the two times, else to one that stopped the worker which
    was asked the first time.
    """
    charged = {id(fault): 0 for fault in faults}
    unexplained: list[str] = []
    for first, again in _pairs(asked):
        cause = next((f for f in faults if first.row in f.rows and first.time <= f.at <= again.time), None)
        cause = cause or next((f for f in faults if first.pid in f.pids), None)
        if cause is None:
            unexplained.append(f"{' '.join(first.row)} was asked by {first.pid} and again by {again.pid}")
        else:
            charged[id(cause)] += 1
    for fault in faults:
        fault.asked_again = charged[id(fault)]
        if fault.asked_again > fault.allowed:
            unexplained.append(
                f"{fault.kind} {fault.target}: {fault.asked_again} rows asked again, {fault.allowed} were in flight"
            )
    return unexplained


def _pairs(asked: Sequence[Asked]) -> Iterator[tuple[Asked, Asked]]:
    last: dict[tuple[tuple[str, ...], int], Asked] = {}
    for one in asked:
        name = (one.row, one.prompt)
        if name in last:
            yield last[name], one
        last[name] = one


def results(folder: Path) -> dict[str, Any]:
    """What two runs of the same config and data must have in common; times are left out."""
    found: dict[str, Any] = {}
    for unit in UNITS:
        place = folder / "results" / unit
        found[f"{unit}/generations.jsonl"] = _SECONDS.sub(b'"seconds":0', (place / "generations.jsonl").read_bytes())
        manifest = json.loads((place / "manifest.json").read_text())
        names = ("requests", "finish_reasons", "prompt_tokens", "completion_tokens", "sampling", "generation_version")
        found[f"{unit}/manifest.json"] = {name: manifest[name] for name in names}
        found[f"{unit}/manifest.json rows of all workers"] = sum(worker["rows"] for worker in manifest["workers"])
        metrics = json.loads((place / "metrics.json").read_text())
        found[f"{unit}/metrics.json"] = {name: value for name, value in metrics.items() if name != "gpu"}
    found["verdicts.jsonl"] = (folder / "results/judges/grader/plain/verdicts.jsonl").read_bytes()
    found["grades.jsonl"] = (folder / "results/runs/plain/grades.jsonl").read_bytes()
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Which results are not those of the undisturbed run."""
    return [f"{name} is not that of the undisturbed run" for name in expected if found[name] != expected[name]]


def wrong_rows(folder: Path, ids: Sequence[str]) -> list[str]:
    """Rows of generations.jsonl that are missing, doubled, foreign or out of order, for the run and its judge."""
    wrong = []
    for unit in UNITS:
        lines = (folder / "results" / unit / "generations.jsonl").read_text().splitlines()
        there = [json.loads(line)["id"] for line in lines]
        if there != list(ids):
            wrong.append(f"{unit}: rows {there} are not {list(ids)}")
        manifest = json.loads((folder / "results" / unit / "manifest.json").read_text())
        if manifest["requests"] != len(ids) or sum(worker["rows"] for worker in manifest["workers"]) != len(ids):
            wrong.append(f"{unit}: the manifest does not count {len(ids)} rows")
    return wrong


def doubles(folder: Path) -> int:
    """Answers that the journals hold twice, or held before they were compacted."""
    total = 0
    for unit in UNITS:
        found = [contents(path) for path in segments(folder / "results" / unit / "journal") if path.is_file()]
        total += sum(one.doubles for one in found)
    return total
