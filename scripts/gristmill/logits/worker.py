"""One job of a teacher: its share of the windows scored, unless the journal has them, and a part that says so.

The rows themselves go to the journal, in segments. The part has a line for each window of the share: its name, its key,
and why it failed if it did. Which windows are whose follows from their lengths and the number of shards alone
(shards.py), so every job reads the same file and there is nothing to cut up before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.engines.ranks import why_not
from gristmill.errors import UserError, some
from gristmill.files import with_checksum, write_jsonl
from gristmill.gpu.watch import Place, Watch
from gristmill.job import alone, device_names, held, usable
from gristmill.keys import model_identity
from gristmill.live.writing import Live, outcome_numbers
from gristmill.local_copy import local
from gristmill.logits import journal
from gristmill.logits.scoring import Teacher
from gristmill.logits.storage import FORMAT_VERSION, SHIFT, LogitsRow
from gristmill.logits.texts import Window, keys_of, windows
from gristmill.logits.vocabulary import tokenizer_sha256
from gristmill.manifest import installed_versions
from gristmill.merging import allowed
from gristmill.planning.workers import Worker, worker_of
from gristmill.progress import Progress, log
from gristmill.shards import assign
from gristmill.stopping import Stop
from gristmill.types import Completion, Failure, Gpu, JsonDict
from gristmill.weights import require_prepared


@dataclass(frozen=True, slots=True)
class Share:
    """What one job is to do, and where."""

    unit: str
    #: k-of-n.
    name: str
    requests: Path
    journal: Path
    part: Path
    gpu_samples: Path
    #: All workers of the plan; shard k is worker k's.
    workers: Sequence[Worker]
    #: The teacher's name in the config.
    teacher: str
    #: Log-probabilities kept a position; None: all.
    top_k: int | None
    max_failed_ratio: float = 0.0
    #: A cluster's scheduler started this job, with GPUs for it.
    scheduled: bool = False

    @property
    def numbers(self) -> tuple[int, int]:
        """Which shard (from 1), of how many."""
        shard, _, shards = self.name.partition("-of-")
        return int(shard), int(shards)


def score_share(share: Share, model: ModelConfig, weights: JsonDict, config: GpusConfig, threads: int) -> None:
    """Make a share's part.

    Raises:
        UserError: windows failed, or no group of GPUs was to be had.
        stopping.Interrupted: a signal came; what was done is in the journal.
    """
    worker = worker_of(share.workers, share.numbers[0])
    there = usable(worker, model, config, share.scheduled)
    key = keys_of(model_identity(model, weights, bool(there)), share.top_k)
    own = [(key(window), window) for window in own_windows(share)]
    with (
        alone(share.unit, share.name, share.journal, config.wait_minutes * 60) as stop,
        Live(share.journal.parent / "live" / f"{share.name}.jsonl", share.unit, share.name) as live,
    ):
        left = _left(share, own)
        count = sum(1 for _, window in own if window.positions)
        log(f"{share.unit} {share.name}: {len(own)} windows, {count} with positions, {len(left)} to score")
        live.tell("queued" if left else "starting", total=len(own), known=len(own) - len(left))
        failures: dict[str, Failure] = {}
        if left:
            purpose = f"logits {share.unit} {share.name}"
            group = held(there, worker, purpose, config, share.scheduled)
            with local(weights, model.local_copy, log) as here, group as devices:
                failures = _score(share, model, here, config, threads, devices, own, stop, live)
        if len(failures) > allowed(share.max_failed_ratio, len(own) * share.numbers[1]) or (
            failures and len(failures) == count
        ):
            names = some([f"{failure.rid} ({failure.reason}: {failure.detail})" for failure in failures.values()])
            raise UserError(
                f"{share.unit} {share.name}: {len(failures)} windows failed: {names}; run again to retry them"
            )
        write_jsonl(share.part, (part_line(found, window, failures.get(found)) for found, window in own))


def own_windows(share: Share) -> Iterator[Window]:
    """The windows of a share, in the texts' order."""
    shard, shards = share.numbers
    lengths = [len(window.tokens) for window in windows(share.requests)]
    speeds = [worker_of(share.workers, number).speed for number in range(1, shards + 1)]
    shard_of = assign(lengths, shards, speeds)
    return (window for number, window in enumerate(windows(share.requests)) if shard_of[number] == shard - 1)


def part_line(key: str, window: Window, failure: Failure | None) -> JsonDict:
    """A line of a part."""
    failed = None if failure is None else failure.reason
    return with_checksum({"key": key, **window.wid._asdict(), "failed": failed})


def describe(share_top_k: int | None, teacher: Teacher, name: str, model: ModelConfig, weights: JsonDict) -> JsonDict:
    """The metadata of a file of logits (docs/outputs.md)."""
    from gristmill.engines.chat import ChatEncoder

    tokenizer = ChatEncoder(Path(weights["folder"]), model).tokenizer
    return {
        "format_version": FORMAT_VERSION,
        "k": teacher.k,
        "full": share_top_k is None,
        "vocab_size": teacher.vocab_size,
        "head_width": teacher.head_width,
        "normalized_over": "the first vocab_size outputs of the head; those beyond are padding and left out",
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "temperature": 1.0,
        "log": "natural",
        "shift": SHIFT,
        "dtype": teacher.dtype,
        "teacher": {
            "name": name,
            "source": model.source,
            "revision": weights.get("commit") or model.revision,
            "weights_hash": weights["weights_hash"],
            "quantization": model.quantization,
        },
    }


def open_teacher(model: ModelConfig, weights: JsonDict, top_k: int | None, on_gpu: bool, gpus: int = 1) -> Teacher:
    """The teacher with its weights: by vllm where the config names it, else by transformers.

    Raises:
        UserError: it is to be cut over its GPUs, and cannot be.
    """
    folder = require_prepared(weights)
    if model.engine == "vllm":
        from gristmill.logits.vllm import VllmTeacher

        return VllmTeacher(folder, model, top_k, on_gpu, log)
    from gristmill.logits.scoring import TransformersTeacher

    cut = gpus if model.parallel == "tensor" else 1
    if cut > 1 and (reason := why_not(folder, model, cut)) is not None:
        raise UserError(f"parallel: tensor cannot be used: {reason}; set parallel: auto or layers")
    return TransformersTeacher(folder, model, top_k, on_gpu, log, cut)


def _left(share: Share, own: Sequence[tuple[str, Window]]) -> dict[str, Window]:
    """What is to be scored: each key once, in order."""
    known = journal.find(share.journal, log)
    return {key: window for key, window in own if window.positions and key not in known}


def _score(
    share: Share,
    model: ModelConfig,
    weights: JsonDict,
    config: GpusConfig,
    threads: int,
    devices: Sequence[Gpu],
    own: Sequence[tuple[str, Window]],
    stop: Stop,
    live: Live,
) -> dict[str, Failure]:
    """Score what is missing; rows go to the journal. Gives the failures by key."""
    with Watch(devices, Place(share.unit, share.name, share.gpu_samples), config, log) as watch:
        left = _left(share, own)  # the lease may have been waited for, and others may have scored meanwhile
        if not left:
            return {}
        live.tell("loading", devices=[asdict(gpu) for gpu in devices], known=len(own) - len(left))
        import torch

        torch.set_num_threads(threads)
        start = time.monotonic()
        teacher = open_teacher(model, weights, share.top_k, bool(devices), len(devices))
        load_s = time.monotonic() - start
        watch.loaded()
        log(f"{teacher.name} in {teacher.dtype}, loaded in {load_s:.1f} s on {device_names(devices)}")
        try:
            metadata = describe(share.top_k, teacher, share.teacher, model, weights)
            segments = journal.Segments(share.journal, share.name, metadata, _info(share, teacher, devices, load_s))
            failures: dict[str, Failure] = {}
            done: set[str] = set()
            begun = time.monotonic()
            try:
                progress = Progress(total=len(left))
                live.count(outcome_numbers(progress, teacher, len(own)))
                live.tell("running", engine=teacher.name)
                with progress, stop.finishing(teacher.stop):
                    for key, outcome in teacher.score(list(left.items())):
                        done.add(key)
                        if isinstance(outcome, Failure):
                            failures[key] = outcome
                        else:
                            segments.add(outcome)
                        told = _told(outcome, time.monotonic() - begun)
                        progress.add(told)
                        watch.add(told)
            finally:
                segments.flush()
        finally:
            teacher.close()
    stop.check()
    if missing := [str(window.wid) for key, window in left.items() if key not in done]:
        raise RuntimeError(f"{teacher.name} scored {len(done)} of {len(left)} windows, not {some(missing)}")
    return failures


def _told(outcome: LogitsRow | Failure, seconds: float) -> Completion | Failure:
    """An outcome for the clock and the log, where positions count as tokens."""
    if isinstance(outcome, Failure):
        return outcome
    counts = (outcome.first, outcome.positions)
    return Completion(outcome.id, outcome.sample, outcome.variant, None, "stop", *counts, seconds)


def _info(share: Share, teacher: Teacher, devices: Sequence[Gpu], load_s: float) -> dict[str, Any]:
    """Who a job is, for the manifest."""
    return {
        "unit": share.unit,
        "shard": share.name,
        "engine": teacher.name,
        "devices": [asdict(gpu) for gpu in devices],
        "device_map": getattr(teacher, "device_map", None),
        "dtype": teacher.dtype,
        "packages": installed_versions(),
        "load_seconds": round(load_s, 3),
    }
