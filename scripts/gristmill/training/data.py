"""Rows and batches: which texts stand in which row of which step, as a pure function of seed and step.

- A step takes batch_rows rows whatever the number of processes: rows are numbered through all epochs, each epoch is a
  permutation of its own drawn from (seed, epoch), and step s takes numbers s · batch_rows and on. So a checkpoint's
  position is its step, and process r of W takes its share of the same rows.
- Packing puts texts into rows of sequence_tokens, best fit first, once: rows are the same in every epoch. In a row
  position ids start again with each text, from which transformers makes attention that is blind to the others (where a
  model's layers do so: models.py tries it). What is left of a row is a text of its own without targets.
- Without packing a row is one text, filled up at its right, where causal attention does not look: no mask is needed.
- A target stands where it is predicted: position t holds token t + 1, or −100.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gristmill.errors import UserError
from gristmill.files import canonical, read_json
from gristmill.logits.storage import LogitsReader, LogitsRow, file_rows
from gristmill.training.texts import ABOUT, ROWS, TOKENS, text_hash

if TYPE_CHECKING:
    import torch

IGNORED = -100
#: Rows that packing keeps open; more would fit a little better and take longer.
OPEN_ROWS = 1024
#: Stored logits up to this many bytes are held in memory; more are read when they are needed, which is slower.
HELD_BYTES = 4 * 2**30

Ints = npt.NDArray[np.int64]


class Texts(Protocol):
    """Texts as token ids, with what a teacher said of them where it did."""

    #: Tokens of each text.
    lengths: Ints
    #: Index of the first token of each text that is a target.
    firsts: Ints
    #: What stands for the id of each text (texts.text_hash).
    hashes: Ints
    #: SHA-256 of all of it.
    sha256: str

    def tokens(self, text: int) -> npt.NDArray[np.int32]:
        """The ids of one text."""
        ...

    def logits(self, text: int) -> LogitsRow | None:
        """What the teacher said of it."""
        ...


class TokenTexts:
    """A folder that texts.write_texts made; nothing is read before it is needed."""

    def __init__(self, folder: Path) -> None:
        """Map it into memory."""
        rows = np.load(folder / ROWS)
        self._starts, self.lengths, self.firsts, self.hashes = (np.ascontiguousarray(column) for column in rows.T)
        self._tokens = np.memmap(folder / TOKENS, "<i4", "r")
        self.about: dict[str, Any] = read_json(folder / ABOUT)
        self.sha256: str = self.about["sha256"]
        if len(self._tokens) != self.about["tokens"]:
            raise UserError(
                f"{folder / TOKENS} has {len(self._tokens):,} of {self.about['tokens']:,} tokens; remove it"
            )

    def tokens(self, text: int) -> npt.NDArray[np.int32]:
        """The ids of one text."""
        start = self._starts[text]
        return self._tokens[start : start + self.lengths[text]]

    def logits(self, text: int) -> None:
        """Nothing: there is no teacher."""


class LogitTexts:
    """A teacher's stored logits; rows without a position are left out."""

    def __init__(self, folder: Path) -> None:
        """Read how long the rows are; hold all of them if they are small enough."""
        self.reader = LogitsReader(folder)
        total = hashlib.sha256(canonical(self.reader.metadata))
        found: list[tuple[int, int, int, int]] = []
        columns = ["id", "first", "token_ids"]
        paths = sorted(folder.glob("part-*.parquet"))
        for place, row in enumerate(row for path in paths for row in file_rows(path, columns)):
            ids = np.asarray(row["token_ids"], "<i4")
            total.update(canonical([row["first"], len(ids)]) + ids.tobytes())
            if row["first"] < len(ids):
                found.append((place, len(ids), row["first"], text_hash(row["id"])))
        if not found:
            raise UserError(f"{folder} holds no position to learn from; look at results/logits/<name>/metrics.json")
        self._places, self.lengths, self.firsts, self.hashes = np.asarray(found, np.int64).T
        self.sha256 = total.hexdigest()
        positions = int((self.lengths - self.firsts).sum())
        fits = positions * self.reader.metadata["k"] * 8 <= HELD_BYTES
        self._held: list[LogitsRow] | None = list(self.reader) if fits else None

    def tokens(self, text: int) -> npt.NDArray[np.int32]:
        """The ids of one text."""
        return self.logits(text).token_ids

    def logits(self, text: int) -> LogitsRow:
        """What the teacher said of it."""
        place = int(self._places[text])
        return self._held[place] if self._held is not None else self.reader[place]


def held_out(texts: Texts, ratio: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which texts are held out: a share of the ids, the same ones when others come or go."""
    ids, places = np.unique(texts.hashes, return_inverse=True)
    drawn = [hashlib.sha256(f"{seed}:{id}".encode()).digest()[:8] for id in ids]
    chosen = np.asarray([int.from_bytes(item, "big") / 2**64 < ratio for item in drawn], np.bool_)
    return chosen[places]


def rows_of(texts: Texts, chosen: Ints, sequence_tokens: int, packing: bool, seed: int) -> list[list[int]]:
    """The texts of each row.

    Args:
        texts: all texts.
        chosen: those to use.
        sequence_tokens: longest row.
        packing: whether a row may have several.
        seed: of the order in which they are packed.

    Raises:
        UserError: a text is longer than a row.
    """
    if len(chosen) and (longest := int(texts.lengths[chosen].max())) > sequence_tokens:
        raise UserError(
            f"a text has {longest} tokens, over sequence_tokens={sequence_tokens}; raise it, or make the logits with "
            f"max_tokens: {sequence_tokens}"
        )
    if not packing:
        return [[int(text)] for text in chosen]
    order = np.random.default_rng([seed, 1]).permutation(chosen)
    return _packed([(int(text), int(texts.lengths[text])) for text in order], sequence_tokens)


def _packed(texts: Sequence[tuple[int, int]], size: int) -> list[list[int]]:
    """Each text into the open row that it fills best; the fullest row is closed when too many are open."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for text, length in texts:
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = size, len(rows)
            rows.append([])
        rows[row].append(text)
        if left > length:
            insort(room, (left - length, row))
            if len(room) > OPEN_ROWS:
                room.pop(0)
    return rows


class Order:
    """Which rows a step takes."""

    def __init__(self, rows: int, batch_rows: int, seed: int) -> None:
        """Of so many rows."""
        self.rows, self.batch_rows, self._seed = rows, batch_rows, seed
        self._epoch, self._permutation = -1, np.arange(0)

    def step(self, step: int) -> list[int]:
        """The rows of a step, counted from 0; those behind an epoch's last come from the next."""
        return [self._row(number) for number in range(step * self.batch_rows, (step + 1) * self.batch_rows)]

    def steps(self, epochs: float) -> int:
        """How many steps it takes to see the rows so often."""
        return max(1, -(-round(epochs * self.rows) // self.batch_rows))

    def epochs(self, steps: int) -> float:
        """How often the rows are seen in so many steps."""
        return steps * self.batch_rows / self.rows

    def _row(self, number: int) -> int:
        epoch, place = divmod(number, self.rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, 2, epoch]).permutation(self.rows)
        return int(self._permutation[place])


def share(rows: Sequence[int], rank: int, processes: int, micro: int) -> list[list[int]]:
    """The micro-batches of one process, of a step's rows: they go round, so many rows each."""
    parts = [list(rows[start : start + micro]) for start in range(0, len(rows), micro)]
    return parts[rank::processes]


@dataclass(slots=True)
class Batch:
    """One micro-batch: B rows of L tokens, N targets among them."""

    input_ids: torch.Tensor  # (B, L)
    position_ids: torch.Tensor  # (B, L)
    targets: torch.Tensor  # (B, L), IGNORED where there is none
    #: Of the targets in the order of the rows: (N, k), (N, k), (N,); None without a teacher.
    teacher: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    count: int

    def to(self, device: Any) -> Batch:
        """The same on another device."""
        teacher = None if self.teacher is None else tuple(tensor.to(device) for tensor in self.teacher)
        moved = (self.input_ids.to(device), self.position_ids.to(device), self.targets.to(device))
        return Batch(*moved, teacher, self.count)  # type: ignore[arg-type]


def batch_of(texts: Texts, rows: Sequence[Sequence[int]], width: int | None) -> Batch:
    """Rows as tensors.

    Args:
        texts: all texts.
        rows: the texts of each row.
        width: L; None: that of the longest row, each of which is one text.
    """
    import torch

    length = width or max(int(texts.lengths[list(row)].sum()) for row in rows)
    ids = np.zeros((len(rows), length), np.int64)
    positions = np.tile(np.arange(length), (len(rows), 1))
    targets = np.full((len(rows), length), IGNORED, np.int64)
    teacher: list[LogitsRow] = []
    for number, row in enumerate(rows):
        start = 0
        for text in row:
            tokens, first = texts.tokens(text), int(texts.firsts[text])
            end = start + len(tokens)
            ids[number, start:end] = tokens
            positions[number, start:end] = np.arange(len(tokens))
            targets[number, start + first - 1 : end - 1] = tokens[first:]
            start = end
            if (said := texts.logits(text)) is not None:
                teacher.append(said)
        if width is not None:
            positions[number, start:] = np.arange(length - start)
    plain = (torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(targets))
    return Batch(*plain, _teacher(teacher), int((targets != IGNORED).sum()))


def _teacher(said: Sequence[LogitsRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    import torch

    if not said:
        return None
    ids = np.concatenate([row.top_ids for row in said]).astype(np.int64)
    logprobs = np.concatenate([row.top_logprobs for row in said])
    tail = np.concatenate([row.tail_logprob for row in said])
    return torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(tail)
