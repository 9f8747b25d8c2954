"""Join what the jobs have scored into data files in the texts' order, and prove that nothing is missing.

- Parts keep the texts' order, so the windows are walked once, and each must stand at the front of exactly one part: a
  hole, a double or a foreign line shows where it is. Each row is then taken from the journal by its key.
- A window without a position becomes a row without a model; one that failed has no row, and is counted.
- Rows are named as the texts are now: a key knows tokens only, so a renamed row is not scored again.
- Files end at about FILE_BYTES, and the folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.errors import UserError, some
from gristmill.files import atomic_folder, checked, read_jsonl
from gristmill.logits import journal
from gristmill.logits.storage import (
    DISTILLKIT_BYTES,
    GROUP_VALUES,
    DamagedLogits,
    LogitsRow,
    LogitsWriter,
)
from gristmill.logits.texts import Window, WindowId, windows
from gristmill.merging import UnusableParts, allowed
from gristmill.types import JsonDict

FILE_BYTES = 256 * 1024 * 1024
_REMEDY = "the parts are removed; run again (the journal keeps what is scored)"
_NAMED = 5
Log = Callable[[str], None]


@dataclass(slots=True)
class Sums:
    """What the rows add up to, counted while they pass."""

    rows: int = 0
    positions: int = 0
    tokens: int = 0
    without_positions: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    padded_mass_max: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    _nll: float = 0.0
    _entropy: float = 0.0
    _top1: int = 0
    #: How often each float16 occurred as a tail, by its bits: all quantiles, exactly, in constant memory.
    _tails: Any = field(default_factory=lambda: np.zeros(1 << 16, np.int64))

    def add(self, row: LogitsRow) -> None:
        """Count a row."""
        self.rows += 1
        self.positions += row.positions
        self.tokens += len(row.token_ids)
        self.without_positions += not row.positions
        self.cut_rows += bool(row.cut_tokens)
        self.cut_tokens += row.cut_tokens
        self.padded_mass_max = max(self.padded_mass_max, row.padded_mass)
        self.keys.add(row.key)
        if not row.positions:
            return
        tail = row.tail_logprob.astype(np.float64)
        tops = row.top_logprobs.astype(np.float64)
        self._nll -= float(row.target_logprob.astype(np.float64).sum())
        self._entropy += float((_surprise(tops).sum(axis=1) + _surprise(tail)).sum())
        best = row.top_ids[np.arange(row.positions), tops.argmax(axis=1)]
        self._top1 += int((best == row.token_ids[row.first :]).sum())
        self._tails += np.bincount(row.tail_logprob.astype(np.float16).view(np.uint16), minlength=1 << 16)

    def metrics(self) -> JsonDict:
        """The numbers of what was scored; null where there is no position."""
        count = self.positions
        numbers: JsonDict = {
            "rows": self.rows,
            "positions": count,
            "tokens": self.tokens,
            "rows_without_positions": self.without_positions,
            "cut_rows": self.cut_rows,
            "cut_tokens": self.cut_tokens,
            "failed": len(self.failed),
            "padded_mass_max": self.padded_mass_max,
        }
        nll = self._nll / count if count else None
        return numbers | {
            "target_nll": nll,
            "perplexity": float(np.exp(min(nll, 700.0))) if nll is not None else None,
            "target_is_top1": self._top1 / count if count else None,
            "entropy_at_least": self._entropy / count if count else None,
            "tail_mass_mean": self._tail_mean() if count else None,
            "tail_mass_p99": self._tail_quantile(0.99) if count else None,
        }

    def _tail_mean(self) -> float:
        there, masses = self._tail_masses()
        return float((self._tails[there] * masses).sum() / self.positions)

    def _tail_quantile(self, share: float) -> float:
        there, masses = self._tail_masses()
        order = np.argsort(masses)
        at = np.searchsorted(np.cumsum(self._tails[there][order]), share * self.positions)
        return float(masses[order][min(int(at), len(order) - 1)])

    def _tail_masses(self) -> tuple[Any, Any]:
        there = np.flatnonzero(self._tails)
        return there, np.exp(there.astype(np.uint16).view(np.float16).astype(np.float64))


def merge(
    requests: Path,
    parts: Sequence[Path],
    folder: Path,
    data: Path,
    keys: Callable[[Window], set[str]],
    teacher: str,
    max_failed_ratio: float,
    log: Log,
) -> tuple[Sums, JsonDict, list[JsonDict]]:
    """Write the data files; gives the sums, the files' metadata, and name, rows, positions, bytes and hash of each.

    Args:
        requests: requests.jsonl.
        parts: all parts.
        folder: the journal.
        data: where the files go.
        keys: the keys that a window may have.
        teacher: its name in the config.
        max_failed_ratio: share of the windows that may have failed.
        log: takes messages.

    Raises:
        UnusableParts: a hole, a double or a foreign line; a row that is no longer in the journal, or none at all; too
            many failures.
    """
    found, sums = journal.find(folder, log), Sums()
    lookup = journal.Lookup()
    try:
        metadata = _metadata(lookup, found, requests, keys, teacher)
        rows = _rows(_proven(requests, parts, keys), found, lookup, sums, metadata, log)
        with atomic_folder(data) as temporary:
            files = _write(temporary, rows, metadata, sums)
            _within_limit(sums, max_failed_ratio)
    finally:
        lookup.close()
    return sums, metadata, files


def sizes(files: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> JsonDict:
    """Bytes a position, beside what others would take."""
    total, positions = sum(file["bytes"] for file in files), sum(file["positions"] for file in files)
    return {
        "bytes": total,
        "bytes_per_position": total / positions if positions else None,
        "plain_bytes_per_position": 6 * metadata["k"],  # int32 ids and float16 log-probabilities
        "distillkit_bytes_per_position": {str(k): size for k, size in DISTILLKIT_BYTES.items()},
    }


def _proven(
    requests: Path, parts: Sequence[Path], keys: Callable[[Window], set[str]]
) -> Iterator[tuple[Window, JsonDict]]:
    """Every window with its line of a part."""
    heads: dict[WindowId, tuple[JsonDict, Iterator[JsonDict], Path]] = {}
    for path in parts:
        _advance(_lines(path), path, heads)
    for window in windows(requests):
        head = heads.pop(window.wid, None)
        if head is None:
            fronts = some([f"{wid} in {path}" for wid, (_, _, path) in heads.items()]) or "nothing, all have ended"
            raise UnusableParts(
                f"no part goes on with {window.wid}, but with {fronts}: it is missing, or a line is foreign, doubled "
                f"or out of order; {_REMEDY}"
            )
        line, rest, path = head
        if line["key"] not in keys(window):
            raise UnusableParts(f"{window.wid} in {path} is of other tokens or another teacher; {_REMEDY}")
        yield window, line
        _advance(rest, path, heads)
    if heads:
        names = some([f"{wid} in {path}" for wid, (_, _, path) in heads.items()])
        raise UnusableParts(f"windows of no text, or twice: {names}; {_REMEDY}")


def _advance(lines: Iterator[JsonDict], path: Path, heads: dict[WindowId, Any]) -> None:
    line = next(lines, None)
    if line is None:
        return
    wid = WindowId(line["id"], line["sample"], line["variant"], line["window"])
    if wid in heads:
        raise UnusableParts(f"{wid} is scored twice, in {heads[wid][2]} and {path}; {_REMEDY}")
    heads[wid] = (line, lines, path)


def _lines(path: Path) -> Iterator[JsonDict]:
    try:
        yield from map(checked, read_jsonl(path))
    except (UserError, OSError, ValueError, TypeError, KeyError) as error:
        raise UnusableParts(f"{path} cannot be read ({error}); {_REMEDY}") from error


def _rows(
    proven: Iterator[tuple[Window, JsonDict]],
    found: Mapping[str, journal.Where],
    lookup: journal.Lookup,
    sums: Sums,
    metadata: JsonDict,
    log: Log,
) -> Iterator[LogitsRow]:
    for window, line in proven:
        if line["failed"] is not None:
            sums.failed[str(window.wid)] = line["failed"]
            continue
        if not window.positions:
            yield _empty(window, line["key"], metadata["k"])
            continue
        where = found.get(line["key"])
        if where is None:
            raise UnusableParts(f"{window.wid} is not in the journal, though its part says so; {_REMEDY}")
        try:
            row = lookup.row(where)
        except DamagedLogits as error:
            journal.set_aside(where.path, str(error), log)
            raise UnusableParts(f"{where.path.name} is damaged, and is set aside; {_REMEDY}") from error
        name, sample, variant, number = window.wid
        yield replace(row, id=name, sample=sample, variant=variant, window=number, cut_tokens=window.cut_tokens)


def _metadata(
    lookup: journal.Lookup,
    found: Mapping[str, journal.Where],
    requests: Path,
    keys: Callable[[Window], set[str]],
    teacher: str,
) -> JsonDict:
    """What the segment of the first row says of the teacher; its name is the config's of today."""
    for window in windows(requests):
        for key in keys(window):
            if key in found:
                said = lookup.metadata(found[key])
                return said | {"teacher": said["teacher"] | {"name": teacher}}
    there = list(windows(requests))
    if any(window.positions for window in there):
        raise UnusableParts(f"{requests} has no window that the journal has a position of; {_REMEDY}")
    cut = sum(bool(window.cut_tokens) for window in there)
    raise UserError(
        f"{requests}: none of its {len(there)} windows has a token to predict, and max_tokens cut {cut} of them; raise "
        "it above the length of the prompts, or look at the texts"
    )


def _write(folder: Path, rows: Iterator[LogitsRow], metadata: JsonDict, sums: Sums) -> list[JsonDict]:
    """Files of about FILE_BYTES."""
    files: list[JsonDict] = []
    row = next(rows, None)
    while row is not None:
        path = folder / f"part-{len(files):05d}.parquet"
        count = positions = 0
        with open(path, "w+b") as handle:
            with LogitsWriter(handle, metadata) as writer:
                group: list[LogitsRow] = []
                while row is not None and not (count and handle.tell() >= FILE_BYTES):
                    sums.add(row)
                    group.append(row)
                    count, positions = count + 1, positions + row.positions
                    if sum(each.top_logprobs.size for each in group) >= GROUP_VALUES:
                        writer.write(group)
                        group = []
                    row = next(rows, None)
                writer.write(group)
            handle.flush()
            os.fsync(handle.fileno())
        with open(path, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        size = path.stat().st_size
        files.append({"name": path.name, "rows": count, "positions": positions, "bytes": size, "sha256": digest})
    return files


def _within_limit(sums: Sums, max_failed_ratio: float) -> None:
    failed, count = len(sums.failed), len(sums.failed) + sums.rows
    if failed > allowed(max_failed_ratio, count):
        names = some([f"{name} ({reason})" for name, reason in sums.failed.items()], _NAMED)
        raise UnusableParts(
            f"{failed} of {count} windows failed, over max_failed_ratio {max_failed_ratio:g}: {names}; run again to "
            "score only these, or raise it"
        )


def _empty(window: Window, key: str, k: int) -> LogitsRow:
    """The row of a window in which no token has a position."""
    nothing = np.zeros(0, np.float32)
    return LogitsRow(
        key=key,
        id=window.wid.id,
        sample=window.wid.sample,
        variant=window.wid.variant,
        window=window.wid.window,
        first=window.first,
        token_ids=np.asarray(window.tokens, np.int32),
        top_ids=np.zeros((0, k), np.int32),
        top_logprobs=np.zeros((0, k), np.float32),
        tail_logprob=nothing,
        target_logprob=nothing,
        cut_tokens=window.cut_tokens,
    )


def _surprise(logprobs: Any) -> Any:
    """−p log p, 0 where p is."""
    return -np.exp(logprobs) * np.where(np.isneginf(logprobs), 0.0, logprobs)
