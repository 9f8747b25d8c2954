"""One worker: a shard's requests in, its part out, the model loaded only for what the journal does not know.

The order matters and is the same for every engine: read the shard, look into the journal, and only if something is left
take a lease, load the model, and write each outcome to the journal before anything else is done with it. What depends
on earlier answers is asked in waves (followups.py): all that can be asked now, then what became askable. The part is
written last, whole, in the shard's order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill import journal
from gristmill.adoption import adopt
from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.engines import context_limit, open_engine
from gristmill.engines.overflow import overflows, refuse_overflow
from gristmill.errors import UserError, some
from gristmill.files import checked, read_jsonl, write_jsonl
from gristmill.followups import Followups
from gristmill.gpu.watch import Place, Watch
from gristmill.job import alone, device_names, held, usable
from gristmill.journal.reading import segments
from gristmill.judging.asking import Asking, UnreadableStreak
from gristmill.keys import WEIGHTLESS, RequestKeys, model_identity
from gristmill.live.writing import Live, outcome_numbers
from gristmill.local_copy import local
from gristmill.manifest import installed_versions
from gristmill.merging import allowed, part_line
from gristmill.planning.workers import Worker
from gristmill.progress import Progress, log
from gristmill.splitting import token_counter
from gristmill.stopping import Stop
from gristmill.types import Completion, Engine, Failure, Gpu, JsonDict, Request
from gristmill.waves import Waves
from gristmill.weights import require_prepared


@dataclass(frozen=True, slots=True)
class Shard:
    """What one worker is to do, and where."""

    unit: str
    name: str
    requests: Path
    journal: Path
    part: Path
    gpu_samples: Path
    worker: Worker
    #: Journals of runs and judges that the config no longer names.
    left_behind: tuple[Path, ...] = ()
    #: Share of the unit's requests that may fail.
    max_failed_ratio: float = 0.0
    #: A judge's: how its answers are read, to ask again or to stop; None for a run.
    asking: Asking | None = None
    #: A cluster's scheduler started this job, with GPUs for it.
    scheduled: bool = False

    @property
    def live(self) -> Path:
        """Where the job says how far it is."""
        return self.journal.parent / "live" / f"{self.name}.jsonl"

    def may_fail(self, requests: int) -> int:
        """How many of this shard's requests may fail before the whole unit has too many: about all that it may have.

        What holds for the unit is decided by the merge, which counts all shards.
        """
        shards = int(self.name.rpartition("-")[2])
        return allowed(self.max_failed_ratio, requests * shards)


def run_shard(shard: Shard, model: ModelConfig, weights: JsonDict, config: GpusConfig, threads: int) -> None:
    """Make a shard's part.

    Raises:
        UserError: rows failed, or no group of GPUs was to be had.
        stopping.Interrupted: a signal came; what was done is in the journal.
    """
    job = _Job(shard, model, weights, config, threads, tuple(usable(shard.worker, model, config, shard.scheduled)))
    requests = _requests(job)
    with (
        alone(shard.unit, shard.name, shard.journal, config.wait_minutes * 60) as stop,
        Live(shard.live, shard.unit, shard.name) as live,
    ):
        known: dict[str, Completion] = {}
        _take_over(shard, requests, known)
        count, left = len(requests), requests.left
        log(f"{shard.unit} {shard.name}: {count} requests, {count - left} in the journal, {left} to answer")
        live.tell("queued" if left else "starting", total=count, known=count - left)
        failures = _answer(job, requests, known, stop, live) if left else {}
        nothing = len(failures) + requests.unasked() == count
        if failures and (len(failures) > shard.may_fail(count) or nothing):
            raise UserError(_failure_message(shard, list(failures.values())))
        write_jsonl(shard.part, (part_line(key, answer) for key, answer in requests.answers(known, failures)))


class UnusableShard(UserError):
    """A shard that cannot be read. Snakemake looks at its folder only: without that, the next run splits again."""


def _requests(job: _Job) -> Followups:
    path = job.shard.requests
    try:
        return followups(path, job.model, job.weights, bool(job.there), job.shard.asking)
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableShard(
            f"{path} cannot be read ({type(error).__name__}: {error}); the shards are removed, run again"
        ) from error


def followups(
    path: Path, model: ModelConfig, weights: JsonDict, on_gpu: bool = False, asking: Asking | None = None
) -> Followups:
    """A shard file's requests, in the file's order, and what of them can be asked."""
    keys = RequestKeys(model_identity(model, weights, on_gpu), model)
    limit = context_limit(model, weights)
    counter: list[Callable[[Sequence[Request]], list[int]]] = []

    def key(request: Request, prompt_tokens: int) -> str:
        return keys.key(request, limit if overflows(request, prompt_tokens, limit) else None)

    def count(request: Request) -> int:
        """Of a later turn, which could not be measured before the turns before it were answered."""
        if limit is None:
            return 0
        if not counter:
            counter.append(token_counter(model, weights))
        (tokens,) = counter[0]([request])
        refuse_overflow([(request, tokens)], limit, model)
        return tokens

    return Followups(map(checked, read_jsonl(path)), key, count, asking.again if asking else None)


def keyed_requests(path: Path, model: ModelConfig, weights: JsonDict, on_gpu: bool = False) -> dict[str, Request]:
    """What can be asked of a shard file when nothing is answered, by key, in the file's order."""
    return followups(path, model, weights, on_gpu).open({})


def _recall(shard: Shard, requests: Followups, known: dict[str, Completion]) -> set[str]:
    """Bring what the journal knows into `known`, turn by turn; returns the keys that it lacks."""
    lacking: set[str] = set()
    while wanted := set(requests.open(known)) - lacking:
        known.update(journal.read_known(shard.journal, wanted, log))
        lacking |= wanted - set(known)
    return lacking


def _take_over(shard: Shard, requests: Followups, known: dict[str, Completion]) -> None:
    """Bring what the journal and those left behind know into `known`; also what another shard brings meanwhile."""
    before: list[Path] | None = None
    while before != (now := segments(shard.journal)):
        adopt(shard.journal, shard.left_behind, _recall(shard, requests, known), log)
        before = now


@dataclass(frozen=True, slots=True)
class _Job:
    """What stands before anything is asked."""

    shard: Shard
    model: ModelConfig
    weights: JsonDict
    config: GpusConfig
    threads: int
    #: The GPUs of this host that the worker may take. Whether there are any enters the keys (dtype: auto), so they are
    #: looked for once.
    there: tuple[Gpu, ...]


def _answer(job: _Job, requests: Followups, known: dict[str, Completion], stop: Stop, live: Live) -> dict[str, Failure]:
    """Ask the model for what is missing; completions go to the journal and into `known`. Gives the failures by key."""
    shard = job.shard
    place = Place(shard.unit, shard.name, shard.gpu_samples)
    rule = "judge_generate" if shard.unit.startswith("judges/") else "generate"
    group = held(job.there, shard.worker, f"{rule} {shard.unit} {shard.name}", job.config, shard.scheduled)
    # Before the lease: GPUs need not be held while files are copied.
    weights_here = local(job.weights, job.model.local_copy, log)
    with weights_here as weights, group as devices, Watch(devices, place, job.config, log) as watch:
        # The lease may have been waited for, and others may have answered meanwhile.
        if devices:
            _recall(shard, requests, known)
        if not requests.open(known):
            return {}
        live.tell("loading", devices=[asdict(gpu) for gpu in devices], known=len(requests) - requests.left)
        start = time.monotonic()
        engine, why = _open(job, weights, bool(devices), requests.kinds())
        load_s = time.monotonic() - start
        watch.loaded()
        where = "a server" if job.model.endpoint is not None else device_names(devices)
        log(f"engine {engine.name} ({why}), loaded in {load_s:.1f} s on {where}")
        log(f"layers: {getattr(engine, 'device_map', None) or 'none'}")
        loaded = {"load_seconds": round(load_s, 3)}  # with the worker's line, which also a killed job leaves
        segment = journal.Segment(shard.journal, _worker_info(shard, engine, why, devices) | loaded)
        progress = Progress(total=requests.left)
        live.count(outcome_numbers(progress, engine, len(requests)))
        live.tell("running", engine=engine.name)
        asking = Waves(engine, segment, watch, progress, UnreadableStreak(shard.asking))
        try:
            with segment, progress, stop.finishing(engine.stop):
                failures, unanswered = asking.answer(requests, known)
                segment.summarize(_summary(progress) | _served(engine))
        finally:
            engine.close()
    stop.check()
    if unanswered:
        names = some([str(rid) for rid in unanswered])
        raise RuntimeError(f"engine {engine.name} answered {progress.done} of {progress.total} requests, not {names}")
    return failures


def _open(job: _Job, weights: JsonDict, on_gpu: bool, requests: Collection[Request]) -> tuple[Engine, str]:
    if job.model.engine not in WEIGHTLESS:
        require_prepared(weights)
        import torch

        torch.set_num_threads(job.threads)
    samplings, labelled = {request.sampling for request in requests}, any(request.labels for request in requests)
    return open_engine(job.model, weights, on_gpu, log, samplings, labelled)


def _worker_info(shard: Shard, engine: Engine, why: str, devices: list[Gpu]) -> JsonDict:
    info: JsonDict = {"unit": shard.unit, "shard": shard.name, "engine": engine.name, "why": why}
    info["devices"] = [asdict(gpu) for gpu in devices]
    for name in ("device_map", "dtype"):
        info[name] = getattr(engine, name, None)
    return _served(engine) | info | {"packages": installed_versions()}


def _served(engine: Engine) -> JsonDict:
    """What a server says it is; the engine fills it at the first answer, before that is written."""
    served = getattr(engine, "served", None)
    return {} if served is None else {"served": served}


def _summary(progress: Progress) -> dict[str, Any]:
    seconds = progress.elapsed_s
    return {
        "generate_seconds": round(seconds, 3),
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.completion_tokens,
        "tokens_per_second": round(progress.completion_tokens / seconds, 2) if seconds else None,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _failure_message(shard: Shard, failures: list[Failure]) -> str:
    names = some([f"{failure.rid} ({failure.reason})" for failure in failures])
    limit = f" (max_failed_ratio {shard.max_failed_ratio:g})" if shard.max_failed_ratio else ""
    return f"{shard.unit} {shard.name}: {len(failures)} rows failed{limit}: {names}; run again to retry only these"
