"""The continuous engine: transformers' continuous batching, where a row that ends makes room for the next one at once.

- The keys and values of all rows lie in pages; as many pages are made as the memory left after loading has room for.
- Prompts that begin alike share their first pages. CUDA graphs and the fastest attention that is installed are used.
- Every row has its own random stream and its own check for finite logits (rows.py), so that its answer does not depend
  on its neighbours. What continuous batching cannot do (a repetition penalty, a JSON Schema, the likelihood of labels)
  goes to the static engine.
- The manager runs in a thread of its own; this one meanwhile tokenizes the next rows and reads the finished ones.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.config.schema import ModelConfig
from gristmill.engines.answers import (
    STOP_TEXT_TOKENS,
    holds_stop_text,
    not_finite,
    out_of_memory,
    read_answer,
    timed_out,
)
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.continuous import flash
from gristmill.engines.continuous.manager import (
    DidNotStart,
    EngineDied,
    Session,
    make_manager,
    restore_attention,
    room_tokens,
    unblock,
)
from gristmill.engines.loading import load_model
from gristmill.engines.prepared import Prepared, prepare
from gristmill.engines.ranks import RankGone, Ranks
from gristmill.engines.static.engine import StaticEngine
from gristmill.engines.static.token_budget import release_memory
from gristmill.errors import UserError
from gristmill.keys import row_seed
from gristmill.types import Completion, Outcome, Request, Sampling

if TYPE_CHECKING:
    from gristmill.engines.continuous.rows import RowTable

#: Most rows that are answered at a time, on a GPU and on a CPU.
GPU_ROWS, CPU_ROWS = 1024, 32
#: Share of the free GPU memory for keys, values and activations; the next one is tried when it runs out.
MEMORY_SHARES = (0.88, 0.7, 0.5)
#: Share of the places that must be taken for new rows to wait. A pass with a prompt in it reads the keys and values of
#: all rows without graphs, so prompts come in many at a time and the passes between them are of new tokens alone.
REFILL_AT = 0.75
#: What the other ranks run.
FOLLOWER = "gristmill.engines.continuous.follower"
#: Prompts made ready at a time.
CHUNK = 256
#: Context of a model that names none.
UNKNOWN_CONTEXT = 32_768
#: Seconds that the manager's thread gets to end.
END_S = 5.0


@dataclass(slots=True)
class _Running:
    """A row in the manager."""

    item: Prepared
    #: When it joined, on time.monotonic.
    begun: float
    looked_at: int = 0


class ContinuousEngine:
    """Rows through transformers' continuous batching."""

    name = "continuous"

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        context_tokens: int | None,
        on_gpu: bool,
        log: Callable[[str], None],
        ranks: int = 1,
    ) -> None:
        """Load tokenizer and weights, cut over `ranks` GPUs; imports torch and transformers."""
        self.attention = flash.offer() if on_gpu else "sdpa"
        self._config = model
        self._context_tokens = context_tokens
        self._on_gpu = on_gpu
        self._log = log
        self._stopped = False
        #: The rows in the manager, and how often memory ran out: for whoever watches.
        self._rows_now: dict[str, _Running] = {}
        self._begun_again = 0
        #: Rows on a CPU whose logits, or those of a neighbour, were not finite.
        self._doubtful: list[Request] = []
        #: What the manager that runs was made for, the manager, and its rows.
        self._running: tuple[Session, Any, RowTable] | None = None
        self._chat = ChatEncoder(folder, model)
        self._ranks = Ranks(FOLLOWER, folder, model, ranks, on_gpu) if ranks > 1 else None
        self._model = load_model(folder, model, on_gpu, ranks)
        #: The attention that the model was loaded with, and whether a manager's thread does not end.
        self._own_attention = str(self._model.config._attn_implementation)
        self._hung = False
        self._static = StaticEngine(folder, model, context_tokens, on_gpu, log, (self._chat, self._model))
        self._rows = min(model.max_batch_rows or GPU_ROWS, GPU_ROWS if on_gpu else CPU_ROWS)
        cut = {str(rank): "a part of every layer" for rank in range(ranks)}
        self.device_map = cut if ranks > 1 else self._static.device_map
        self.dtype = self._static.dtype

    @property
    def batch_rows(self) -> int:
        """Rows in work at the same time, here or with the static engine, for whoever watches."""
        return len(self._rows_now) or self._static.batch_rows

    @property
    def retries(self) -> int:
        """How often memory ran out and rows began again."""
        return self._begun_again + self._static.retries

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        """Tokens of each prompt, chat template included."""
        return self._static.prompt_tokens(requests)

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Answer the requests, each as it ends."""
        for same in _alike(requests):
            if self._stopped:
                return
            lacking = _lacking(same[0])
            if lacking is not None and self._ranks is not None:
                raise UserError(f"{lacking} needs the static engine; set parallel: layers")
            if lacking is not None:
                self._log(f"{len(same)} rows go to the static engine: continuous batching has no {lacking}")
                self._end()
                yield from self._static.generate(same)
            else:
                yield from self._with_less_memory_each_time(same, same[0].sampling)

    def stop(self) -> None:
        """Take no more rows in; what runs goes on."""
        self._stopped = True
        self._static.stop()

    def close(self) -> None:
        """Free the model's memory, also for the driver: whoever leases the devices next looks there."""
        self._end()
        if self._hung:
            self._log("the thread of continuous batching hangs, and the job is ended; finished rows are in the journal")
            os._exit(1)
        del self._model
        self._static.close()
        if self._ranks is not None:
            self._ranks.close()

    def _with_less_memory_each_time(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Outcome]:
        """A session with the manager, and when memory runs out another one with less of it for what is left."""
        left = {request.rid: request for request in requests}
        any_ended = False
        for share in MEMORY_SHARES:
            try:
                for outcome in self._session(list(left.values()), sampling, share):
                    any_ended = True
                    del left[outcome.rid]
                    yield outcome
                return
            except (EngineDied, RankGone) as error:
                if self._ranks is not None or not self._on_gpu:
                    raise
                if "out of memory" not in str(error).lower():
                    if any_ended or self._config.engine != "auto":
                        raise
                    self._log(f"{error}; the rows go to the static engine")
                    break
            release_memory(self._on_gpu)
            self._begun_again += 1
            self._log(f"out of memory with {share:.0%} of the free memory for pages; {len(left)} rows begin again")
            if self._stopped:
                return
        else:
            self._log(f"continuous batching finds no room; {len(left)} rows go to the static engine")
        self._end()
        release_memory(self._on_gpu)
        yield from self._static.generate(list(left.values()))

    def _session(self, requests: Sequence[Request], sampling: Sampling, share: float) -> Iterator[Outcome]:
        """All requests, of one sampling setting, through one manager."""
        self._doubtful = []
        rows = min(self._rows, len(requests))
        longest = max(1, (self._context_tokens or UNKNOWN_CONTEXT) - sampling.max_new_tokens)
        session = Session(sampling, tuple(self._chat.stop_ids()), rows, len(requests), longest, share)
        manager, table = self._open(session)
        try:
            yield from self._turn(manager, table, self._ready(requests), sampling)
        except BaseException:
            self._end()
            raise
        if self._doubtful:  # without flash attention all rows share one mask, and 0 × NaN is NaN in each of them
            self._log(f"the logits of {len(self._doubtful)} rows were not finite; the static engine asks each alone")
            self._end()
            yield from self._static.generate(self._doubtful)

    def _open(self, session: Session) -> tuple[Any, RowTable]:
        """A manager that runs: the last one, when it was made for the same."""
        from gristmill.engines.continuous.rows import RowTable

        if self._running is not None and self._running[0] == session:
            return self._running[1:]
        self._end()
        table = RowTable(session.rows, self._model.device)
        if self._ranks is not None:
            self._ranks.tell(session.to_json())
        manager = make_manager(self._model, session, table, self._on_gpu)
        self._running = (session, manager, table)
        try:
            self._start(manager)
        except BaseException:
            self._end()
            raise
        return manager, table

    def _end(self) -> None:
        """End the manager that runs, if one does, and free its pages."""
        if self._running is not None:
            _, manager, _ = self._running
            self._running = None
            gc.unfreeze()
            manager.stop(block=True, timeout=END_S, hard_stop=True)
            if manager.is_running():  # it would hold this process's end for as long as it hangs
                self._hung = True
            else:
                manager.destroy()
            restore_attention(self._model, self._own_attention)

    def _ready(self, requests: Sequence[Request]) -> Iterator[Prepared | Completion]:
        """The requests made ready, some at a time, while others run."""
        for begin in range(0, len(requests), CHUNK):
            yield from prepare(requests[begin : begin + CHUNK], self._chat, self._config, self._context_tokens)

    def _turn(
        self, manager: Any, table: RowTable, source: Iterator[Prepared | Completion], sampling: Sampling
    ) -> Iterator[Outcome]:
        """Keep the manager fed, and give out what ends."""
        running: dict[str, _Running] = {}
        self._rows_now = running
        watched = bool(sampling.stop) or self._config.timeout_seconds is not None
        more, room = True, room_tokens(manager)
        while more or running:
            feed = len(running) <= table.most * REFILL_AT
            while feed and more and len(running) < table.most:
                item = None if self._stopped else next(source, None)
                if item is None:
                    more = False
                elif isinstance(item, Completion):
                    yield item
                elif item.tokens > room:
                    yield out_of_memory(item)
                else:
                    name = table.add(len(item.ids), row_seed(item.request))
                    running[name] = _Running(item, time.monotonic())
                    manager.add_request(item.ids, name, max_new_tokens=sampling.max_new_tokens, streaming=watched)
            if running:
                yield from self._ended(manager, table, running, watched)

    def _ended(self, manager: Any, table: RowTable, running: dict[str, _Running], watched: bool) -> Iterator[Outcome]:
        """What ended since the last call; waits a moment if nothing did."""
        ended: dict[str, tuple[Any, bool]] = {}  # result, and whether its time was over
        for result in self._results(manager):
            row = running.get(result.request_id)
            if row is None or result.request_id in ended:
                continue  # it was ended here, and went on for a step
            if result.error is not None:
                raise EngineDied(
                    f"continuous batching ended: {result.error}; run again to go on, or set engine: static"
                )
            if result.is_finished():
                ended[result.request_id] = (result, False)
            elif watched and (late := self._over(row, result.generated_tokens)) is not None:
                manager.cancel_request(result.request_id)
                ended[result.request_id] = (result, late)
        for name, sound in zip(ended, table.remove(list(ended)), strict=True):
            item, (result, late) = running.pop(name).item, ended[name]
            tokens = result.generated_tokens
            if not sound and not self._on_gpu:
                self._doubtful.append(item.request)
            elif not sound:
                yield not_finite(item, len(tokens) - 1, self.dtype)
            elif late:
                yield timed_out(item, len(tokens), self._config.timeout_seconds)
            else:
                yield read_answer(item, tokens, self._chat, _seconds(result))

    def _results(self, manager: Any) -> Iterator[Any]:
        """What the manager has for us now; waits up to a moment for the first."""
        result = manager.get_result(timeout=0.2)
        if result is None:
            unblock(manager)
        if result is None and self._ranks is not None and (gone := self._ranks.gone()):
            raise RankGone(f"the model cannot go on: {gone}; see the log above, and run again to go on")
        if result is None and not manager.is_running():
            raise EngineDied("continuous batching ended without a word; see the log above, and run again to go on")
        while result is not None:
            yield result
            result = manager.get_result(timeout=0)

    def _over(self, row: _Running, tokens: Sequence[int]) -> bool | None:
        """Whether a row must end now: False at a stop text, True when its time is over; None: it goes on."""
        new = len(tokens) - row.looked_at
        if new >= STOP_TEXT_TOKENS:
            row.looked_at = len(tokens)
            if holds_stop_text(tokens, new, row.item.request.sampling.stop, self._chat):
                return False
        limit = self._config.timeout_seconds
        return True if limit is not None and time.monotonic() - row.begun > limit else None

    def _start(self, manager: Any) -> None:
        """Make the pages, and begin.

        transformers' warm-up is left out: it reads the whole cache through one prompt, and records the graph of every
        size. A graph is recorded when its size first comes.
        """
        start = time.perf_counter()
        gc.freeze()  # recording a graph collects garbage first, among hundreds of thousands of objects
        manager.start()
        while manager.batch_processor is None and manager.is_running():
            time.sleep(0.01)
        if manager.batch_processor is None:
            raise DidNotStart(f"continuous batching does not start: {manager.background_thread_status.fatal_error}")
        settings = manager.continuous_batching_config
        self._log(
            f"continuous batching ready in {time.perf_counter() - start:.1f} s: {settings.num_blocks} pages, at most "
            f"{settings.max_requests_per_batch} rows and {settings.max_batch_tokens} tokens at a time, attention "
            f"{self._model.config._attn_implementation} from {self.attention}, CUDA graphs "
            f"{'on' if any(settings.cuda_graph_booleans) else 'off'}"
        )


def _seconds(result: Any) -> float:
    """From the row's first forward pass to its end; one that was taken out ends now."""
    begun, ended = result.lifespan
    return float((ended if ended >= 0 else time.perf_counter()) - begun)


def _alike(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests grouped by their sampling settings, those with labels apart, in order of appearance."""
    groups: dict[tuple[Sampling, bool], list[Request]] = {}
    for request in requests:
        groups.setdefault((request.sampling, bool(request.labels)), []).append(request)
    return list(groups.values())


def _lacking(request: Request) -> str | None:
    """What a request needs and continuous batching does not have."""
    if request.labels:
        return "likelihood of labels"
    if request.sampling.json_schema:
        return "json_schema"
    penalty = request.sampling.repetition_penalty
    return None if penalty == 1.0 else f"repetition_penalty ({penalty:g})"
