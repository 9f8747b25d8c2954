"""The terminal's view: a line a unit, a line a worker, the last errors; as much as the window has room for.

Every cell is a Text, never a string: rich would take [brackets] in a string for markup. Colours only repeat what the
words say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gristmill.live import words
from gristmill.live.snapshot import ALIVE, Progress, UnitProgress, WorkerProgress

_STYLES = {
    **{"running": "green", "done": "dim", "waiting": "", "failed": "bold red", "stopped": "yellow"},
    **{"starting": "cyan", "queued": "cyan", "loading": "cyan", "lost": "bold red", "silent": "yellow"},
}
#: Columns of the window from which on more is shown.
MEDIUM, WIDE = 60, 100
ERRORS = 4


@dataclass(frozen=True, slots=True)
class View:
    """What is drawn; it looks at the window's size each time."""

    progress: Progress
    keys: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Fit what there is into the window."""
        width, height = options.max_width, options.height or console.size.height
        errors = [(unit.unit, text) for unit in self.progress.units for text in unit.errors][-ERRORS:]
        errors = errors[-max(0, height // 4) :] if height // 4 else []
        room = max(1, height - 2 - len(errors))
        workers = [(unit, worker) for unit in self.progress.units if unit.state != "done" for worker in unit.workers]
        for_units = min(len(self.progress.units), max(room - len(workers) - 2, room // 2, 1))
        for_workers = room - for_units - 1
        parts: list[RenderableType] = [_line(words.summary(self.progress), width, "bold")]
        parts.append(_units(self.progress.units, for_units, width))
        if workers and for_workers > 0:
            parts += [Text(""), _workers(workers, for_workers, width)]
        parts += [_line(f"error {words.clean(unit)}: {words.clean(text)}", width, "red") for unit, text in errors]
        if self.keys:
            parts.append(_line("q leaves; the run goes on", width, "dim"))
        yield Group(*parts)


def _units(units: Sequence[UnitProgress], room: int, width: int) -> Group:
    shown = sorted(units, key=lambda unit: words.UNIT_ORDER.index(unit.state))
    cut = shown[: room if len(shown) <= room else max(0, room - 1)]
    table = _table()
    for unit in cut:
        cells: list[RenderableType] = [_cell(unit.state, _STYLES[unit.state]), _cell(unit.unit)]
        if width >= WIDE:
            cells.append(ProgressBar(total=unit.total or 1, completed=unit.done, width=20))
        cells.append(_cell(f"{words.rows(unit.done, unit.total)} {words.noun(unit)}"))
        if width >= MEDIUM:
            cells.append(_cell(f"{unit.failed} failed" if unit.failed else "", "red"))
            cells.append(_cell(_speed(unit)))
            cells.append(_cell(f"{words.duration(unit.seconds_left)} left" if unit.state == "running" else ""))
        if width >= WIDE:
            overall = unit.tokens_per_second_overall
            cells.append(_cell("" if overall is None else f"{words.rate(overall)} overall", "dim"))
        table.add_row(*cells)
    return _with_more(table, len(shown) - len(cut), "units", width)


def _speed(unit: UnitProgress) -> str:
    return f"{words.rate(unit.tokens_per_second_now)} tok/s" if unit.state == "running" else ""


def _workers(workers: Sequence[tuple[UnitProgress, WorkerProgress]], room: int, width: int) -> Group:
    shown = sorted(workers, key=lambda pair: words.WORKER_ORDER.index(pair[1].state))
    cut = shown[: room if len(shown) <= room else max(0, room - 1)]
    table = _table()
    for unit, worker in cut:
        cells = [_cell(worker.state, _STYLES[worker.state]), _cell(f"{unit.unit} {worker.shard}")]
        cells.append(_cell(words.rows(worker.done, worker.total)))
        if width >= MEDIUM:
            speed = f"{words.rate(worker.tokens_per_second_now)} tok/s" if worker.state in ALIVE else ""
            batch = f"batch {worker.batch_rows}" if worker.batch_rows and worker.state in ALIVE else ""
            retries = f"{worker.retries} retries" if worker.retries else ""
            cells += [_cell(speed), _cell(" ".join(part for part in (batch, retries) if part))]
        if width >= WIDE:
            cells += [_cell(worker.host or ""), _cell(", ".join(map(words.gpu, worker.devices)))]
        table.add_row(*cells)
    return _with_more(table, len(shown) - len(cut), "workers", width)


def _table() -> Table:
    """Without borders or a header; each row is one line, cut at its column's width."""
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def _with_more(table: Table, more: int, noun: str, width: int) -> Group:
    return Group(table, *([_line(f"… and {more} more {noun}", width, "dim")] if more > 0 else []))


def _cell(text: str, style: str = "") -> Text:
    return Text(words.clean(text), style=style, no_wrap=True, overflow="ellipsis", end="")


def _line(text: str, width: int, style: str = "") -> Text:
    found = Text(words.clean(text), style=style, no_wrap=True, overflow="ellipsis")
    found.truncate(width, overflow="ellipsis")
    return found
