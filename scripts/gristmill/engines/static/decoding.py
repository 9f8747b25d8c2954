"""The decode loop: rows join a running batch, get a token a step, and leave it when their answer ends.

- Waiting rows, longest first, fill the batch up to the token budget. They join once a sixteenth of its rows is free:
  a prefill has a price whatever its size, and every step of a free row is lost. Rows that left without another to join
  are cut out once they are an eighth, since that copies the cache.
- A batch is as wide as its widest row, and how much of it is padding is not limited: in a simulation of log-normal
  lengths, rows that waited for a narrower batch lost more than the padding costs.
- A step's tokens are read after the next step is on its way, so a device does not wait for the host. A row that has
  ended therefore computes one token too many, which nobody reads.
- Out of memory in a prefill sends its rows back to wait; anywhere else all that run start again. Either way the budget
  is halved. A row's answer does not depend on it: its random numbers are its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gristmill.engines.answers import STOP_TEXT_TOKENS, holds_stop_text, out_of_memory
from gristmill.engines.prepared import Prepared
from gristmill.engines.static.loaded import Loaded
from gristmill.engines.static.next_token import BROKEN
from gristmill.engines.static.running_batch import OnTheWay, RunningBatch
from gristmill.engines.static.token_budget import AnswerLengths, release_memory
from gristmill.types import Outcome

#: Share of the batch's rows that must be free before others join, and that must have ended before they are cut out.
JOIN_SHARE, LEAVE_SHARE = 1 / 16, 1 / 8
#: Tokens of one prefill (rows × longest prompt): enough to keep a GPU busy, and a bound on its working memory.
PREFILL_TOKENS = 16_384


@dataclass(slots=True)
class Row:
    """A row that is being answered."""

    item: Prepared
    started_s: float
    #: On the clock of time.monotonic; None: no limit.
    deadline_s: float | None
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


class DecodeLoop:
    """Answers items of one sampling setting."""

    def __init__(self, loaded: Loaded, items: Sequence[Prepared], stopped: Callable[[], bool]) -> None:
        """Items come longest first; once `stopped` says so, no row joins any more."""
        self._loaded = loaded
        self._stopped = stopped
        self._waiting = deque(items)
        self._lengths = AnswerLengths(items[0].request.sampling.max_new_tokens)
        self._batch: RunningBatch | None = None
        #: The batch's rows, in its order, those that have ended among them.
        self._rows: list[Row] = []
        #: Columns that the batch is planned to have when its rows end.
        self._columns = 0
        #: Tokens that are computed or being computed, with their rows.
        self._unread: deque[tuple[list[Row], OnTheWay]] = deque()

    def outcomes(self) -> Iterator[Outcome]:
        """Each row's outcome as soon as it is there."""
        self._loaded.budget.look(self._loaded.model)
        while self._rows or (self._waiting and not self._stopped()):
            found = self._turn()
            if found is None:  # out here, where no traceback holds on to the step's tensors
                found = self._start_again()
            yield from found

    def _turn(self) -> list[Outcome] | None:
        """Rows join or leave, a step starts, the step before it is read; None when memory ran out."""
        import torch

        try:
            with torch.inference_mode():
                failed = self._let_join()
                if not self._rows:
                    return failed
                self._cut_out_ended()
                self._loaded.budget.running = len(self._rows)
                self._launch(self._rows, self._batch_now().step())
                return [*failed, *self._read()]
        except torch.OutOfMemoryError:
            return None

    def _let_join(self) -> list[Outcome]:
        """Prefill waiting rows as long as there is room; the outcome of one that does not fit even alone."""
        while items := self._next_to_join():
            rows = self._begun(items)
            joining = self._prefilled(items)
            if joining is not None:
                self._join(rows, joining)
                continue
            release_memory(self._loaded.on_gpu)
            if not self._rows and len(items) == 1:
                return [out_of_memory(items[0])]
            self._loaded.budget.halve(len(items), self._columns, running=len(self._live()))
            self._waiting.extendleft(reversed(items))
        return []

    def _next_to_join(self) -> list[Prepared]:
        """Rows that fit into the batch now, taken from those that wait; none while too few would."""
        live, most = self._live(), self._loaded.budget.max_rows
        if not self._waiting or self._stopped() or len(live) == most:
            return []
        first = self._waiting[0]
        columns = max(self._expected(item, tokens) for item, tokens in [(first, 0), *live])
        most = self._loaded.budget.rows(columns)
        room = most - len(live)
        if room < 1 or (live and room < min(len(self._waiting), most * JOIN_SHARE)):
            return []
        self._columns = columns
        count = min(room, max(1, PREFILL_TOKENS // max(1, len(first.ids))), len(self._waiting))
        return [self._waiting.popleft() for _ in range(count)]

    def _live(self) -> list[tuple[Prepared, int]]:
        """The rows that have not ended, with their number of tokens."""
        return [(row.item, len(row.tokens)) for row in self._rows if not row.ended]

    def _expected(self, item: Prepared, so_far: int) -> int:
        """Columns that a row is expected to use in the end."""
        return len(item.ids) + self._lengths.expected(so_far, len(self._rows))

    def _prefilled(self, items: Sequence[Prepared]) -> RunningBatch | None:
        """A batch of these rows; None when there is no memory for it."""
        import torch

        try:
            return RunningBatch(self._loaded, items, 0 if self._rows else self._columns)
        except torch.OutOfMemoryError:
            return None

    def _begun(self, items: Sequence[Prepared]) -> list[Row]:
        """Rows whose time counts from now."""
        limit_s = self._loaded.timeout_s
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        return [Row(item, time.perf_counter(), deadline_s) for item in items]

    def _join(self, rows: list[Row], joining: RunningBatch) -> None:
        self._launch(rows, joining.tokens())
        if self._batch is None:
            self._rows, self._batch = rows, joining
        else:
            self._rearrange(rows, joining)

    def _cut_out_ended(self) -> None:
        ended = sum(row.ended for row in self._rows)
        if ended and ended >= LEAVE_SHARE * len(self._rows):
            self._rearrange([], None)

    def _rearrange(self, rows: list[Row], joining: RunningBatch | None) -> None:
        """Take out the rows that have ended, and put others below."""
        keep = [place for place, row in enumerate(self._rows) if not row.ended]
        self._rows = [self._rows[place] for place in keep] + rows
        self._batch_now().rearrange(keep, joining, self._columns)

    def _batch_now(self) -> RunningBatch:
        assert self._batch is not None
        return self._batch

    def _launch(self, rows: Sequence[Row], tokens: OnTheWay) -> None:
        self._unread.append((list(rows), tokens))

    def _read(self) -> Iterator[Outcome]:
        """What has ended by the step before the newest one, or by the clock."""
        now = time.monotonic()
        while len(self._unread) > 1:
            rows, tokens = self._unread.popleft()
            for row, token in zip(rows, tokens.read(), strict=True):
                if not row.ended and (outcome := self._take(row, token)):
                    yield outcome
        for row in self._rows:
            if not row.ended and row.deadline_s is not None and now > row.deadline_s:
                yield self._end(row, late=True)
        if all(row.ended for row in self._rows):
            self._clear()

    def _take(self, row: Row, token: int) -> Outcome | None:
        """Give a row its token; the outcome, if it was the last."""
        if token == BROKEN:
            return self._end(row, broken=len(row.tokens))
        row.tokens.append(token)
        whole = len(row.tokens) == row.item.request.sampling.max_new_tokens
        return self._end(row) if whole or token in self._loaded.chat.ends or self._has_stop_text(row) else None

    def _has_stop_text(self, row: Row) -> bool:
        """Whether one of the row's stop texts stands in its answer; looked for in the newest tokens, now and then."""
        if len(row.tokens) % STOP_TEXT_TOKENS:
            return False
        return holds_stop_text(row.tokens, STOP_TEXT_TOKENS, row.item.request.sampling.stop, self._loaded.chat)

    def _end(self, row: Row, broken: int | None = None, late: bool = False) -> Outcome:
        row.ended = True
        self._lengths.add(len(row.tokens))
        return self._loaded.outcome(row.item, row.tokens, time.perf_counter() - row.started_s, broken, late)

    def _start_again(self) -> list[Outcome]:
        """After the memory ran out: the rows that had not ended wait again; one that was alone has failed."""
        rows, items = len(self._rows), [item for item, _ in self._live()]
        self._clear()
        release_memory(self._loaded.on_gpu)
        if rows == 1:
            return [out_of_memory(item) for item in items]
        self._loaded.budget.halve(rows, self._columns)
        self._waiting.extendleft(sorted(items, key=lambda item: item.tokens))
        return []

    def _clear(self) -> None:
        """Nothing runs."""
        self._batch = None
        self._rows = []
        self._unread.clear()
