"""The steps of a training, as every process runs them together.

    loss of a step = sum over all its targets, of all processes and micro-batches, / their number

- So accumulation and processes change rounding only: a micro-batch with few targets weighs little.
- A loss or a gradient that is not finite ends the training before it touches the weights, with the step named.
- At SIGTERM, or when the launcher leaves a file named stop, the step in flight ends, a checkpoint is written, and all
  processes leave: they agree on the step, since the wish travels with the losses' sum.
- What the next step depends on is in the checkpoint or follows from the step's number, so a training that goes on
  makes the same steps: bit for bit in float32, as long as the number of processes is the same.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gristmill.errors import UserError
from gristmill.live.writing import Live
from gristmill.training import checkpoint
from gristmill.training.data import Batch, LogitTexts, Order, Texts, TokenTexts, batch_of, held_out, rows_of, share
from gristmill.training.logs import StepLog
from gristmill.training.models import build, require_blind, tokenizer_of
from gristmill.training.objectives import cross_entropy, distillation, forward_kl
from gristmill.training.optimizing import learning_rate, parameter_groups
from gristmill.training.parallel import Parallel
from gristmill.training.results import write_results
from gristmill.training.task import Effective, Task, recipe_digest
from gristmill.training.throughput import flops_per_token
from gristmill.types import JsonDict


@dataclass(slots=True)
class Progress:
    """How far a training is; with parameters, optimizer and random states this is a checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0


@dataclass(slots=True)
class Rows:
    """The rows of the training or of the evaluation."""

    texts: Texts
    rows: list[list[int]]
    #: Tokens of a row; None: as many as the longest of a batch has.
    width: int | None

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Rows by their numbers."""
        return batch_of(self.texts, [self.rows[number] for number in numbers], self.width)

    def tokens(self, numbers: Sequence[int]) -> int:
        """Tokens of so many rows, without what fills them up."""
        return int(sum(self.texts.lengths[self.rows[number]].sum() for number in numbers))

    def targets(self, numbers: Sequence[int]) -> int:
        """Targets of so many rows."""
        return self.tokens(numbers) - int(sum(self.texts.firsts[self.rows[number]].sum() for number in numbers))


class Training:
    """One training on this process."""

    def __init__(self, task: Task, log: Callable[[str], None]) -> None:
        """Meet the other processes, read the data, build the model.

        Raises:
            UserError: the data, the model or the batch do not fit.
        """
        import torch

        self.task, self.recipe, self._log = task, task.training, log
        self.parallel = Parallel(self.recipe, task.on_gpu, task.threads)
        self.effective = Effective.of(self.recipe, self.parallel.processes)
        model = task.spec.model.model
        self.tokenizer = tokenizer_of(task.weights, model)
        self.rows, self.measured = self._data()
        self.order = Order(len(self.rows.rows), self.recipe.batch_rows, self.recipe.seed)
        self.steps = self.recipe.steps or self.order.steps(self.recipe.epochs or 1)
        built = build(self.recipe, model, task.weights, self.tokenizer, self.parallel.is_sent_weights)
        self._check_vocabulary(built)
        self.flops = flops_per_token(built, self.recipe.sequence_tokens)
        self.model = self.parallel.wrap(built)
        torch.manual_seed(self.recipe.seed + 1 + self.parallel.rank)  # dropout differs from process to process
        groups = parameter_groups(self.model, self.recipe.weight_decay)
        rates: JsonDict = {"lr": self.recipe.learning_rate, "betas": self.recipe.betas}
        self._adam = torch.optim.AdamW(groups, fused=task.on_gpu or None, **rates)
        self.optimizer = self.parallel.optimizer(self._adam)
        if self.recipe.packing:  # a forward of a sharded model leaves parameters behind that no optimizer may take
            require_blind(self.parallel.unwrapped(self.model), self.parallel.autocast())
        self.folder = task.work / "checkpoints" / recipe_digest(task, self.rows.texts.sha256)
        self.progress = Progress()
        self.resumed_from: int | None = None
        #: Of the steps of this process's life.
        self.tokens = 0
        #: Whether all processes have agreed to stop, and whether this one was told to.
        self.stopping = self._told = False

    def run(self) -> bool:
        """All steps that are left, and the result; False when it was stopped before.

        Raises:
            UserError: the loss is not finite, or the disk does not take a checkpoint.
        """
        self._resume()
        if self.parallel.main:
            self._log(f"{self.effective}; steps {self.progress.step} to {self.steps}")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        with contextlib.ExitStack() as opened:
            steps_log: StepLog | None = None
            live: Live | None = None
            if self.parallel.main:
                live = opened.enter_context(self._live())
                board = self.task.work / "tensorboard"
                done = self.progress.step
                earlier = checkpoint.curve_of(checkpoint.place(self.folder, done)) if done else None
                steps_log = opened.enter_context(StepLog(self.task.steps, board, done, self.steps, earlier))
            self._run(steps_log)
            if live is not None and self.stopping and self.progress.step < self.steps:
                live.tell("stopped")
        if self.progress.step < self.steps and self.stopping:
            return False
        self._take_best()
        write_results(self)
        return True

    def _live(self) -> Live:
        """What says how far the training is; a row is a step there."""
        path, begun = self.task.work / "live" / "training.jsonl", (self.progress.step, self.progress.seconds)

        def numbers() -> JsonDict:
            seconds = round(self.progress.seconds - begun[1], 3)
            return {"done": self.progress.step, "tokens": self.tokens, "seconds": seconds}

        live = Live(path, f"trainings/{self.task.spec.name}", "training")
        live.count(numbers)
        devices, rows = list(self.task.devices), self.recipe.batch_rows
        live.tell("running", total=self.steps, known=begun[0], engine="training", devices=devices, batch_rows=rows)
        return live

    def _run(self, steps_log: StepLog | None) -> None:
        if self.progress.step == 0 and self.measured is not None:
            self._measure(steps_log)
        while self.progress.step < self.steps and not self._is_patience_over():
            line = self._step()
            if steps_log is not None:
                steps_log.add(line)
            done = self.progress.step
            every = self.recipe.evaluation.every_steps if self.recipe.evaluation else None
            better = False
            if self.measured is not None and (done == self.steps or (every is not None and done % every == 0)):
                better = self._measure(steps_log)
            if done % self.recipe.checkpoint_every_steps == 0 or done == self.steps or self.stopping or better:
                self._checkpoint()
            if self.stopping:
                return

    def _step(self) -> JsonDict:
        """One update; gives its line in steps.jsonl."""
        begun = time.monotonic()
        step = self.progress.step
        numbers = self.order.step(step)
        count = self.rows.targets(numbers)
        parts = share(numbers, self.parallel.rank, self.parallel.processes, self.recipe.micro_batch_rows)
        sums = self._no_sums()
        for place, part in enumerate(parts):
            batch = self.rows.batch(part).to(self.parallel.device)
            part_loss = functools.partial(self._part, batch, count, sums)
            self.parallel.backward(self.model, part_loss, place == len(parts) - 1)
        wished = self._told or (self.parallel.main and self.task.stop.exists())
        *totals, stop = self.parallel.sums([*sums.tolist(), float(wished)])
        self.stopping = stop > 0
        loss, ce, kl = (total / count for total in totals)
        self._require_finite(loss, "loss", step)
        norm = self.parallel.clip(self.model, self.optimizer)
        if self.parallel.scaler is None:  # with one, a step whose gradients overflow is left out and the scale halved
            self._require_finite(norm, "gradient norm", step)
        rate = learning_rate(self.recipe, step, self.steps)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.monotonic() - begun
        self.progress.step += 1
        self.progress.seconds += seconds
        tokens = self.rows.tokens(numbers)
        self.tokens += tokens
        named = {"step": self.progress.step, "epoch": round(self.order.epochs(self.progress.step), 4), "loss": loss}
        parted = {"cross_entropy": ce, "kl": kl} if self.recipe.objective == "distill" else {}
        spent = {
            "seconds": round(seconds, 4),
            "tokens_per_second": round(tokens / seconds, 1),
            "memory_gib": _memory_gib(),
        }
        norms = {"learning_rate": rate, "gradient_norm": norm if math.isfinite(norm) else None}
        return {**named, **parted, **norms, "tokens": tokens, "targets": count, **spent}

    def _part(self, batch: Batch, count: int, sums: Any) -> Any:
        """The loss of one micro-batch, as its share of the step's."""
        import torch

        losses = self._losses(batch)
        sums += torch.stack(losses).detach().double()
        return losses[0] * (self.parallel.processes / count)

    def _no_sums(self) -> Any:
        """Of loss, cross-entropy and KL; they stay on the device until the step's end."""
        import torch

        return torch.zeros(3, dtype=torch.float64, device=self.parallel.device)

    def _losses(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Sums over the targets: of the objective, the cross-entropy, the KL."""
        outputs = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        there = batch.targets != -100
        logits = outputs.logits[there]  # (N, V)
        if batch.teacher is None:
            ce = cross_entropy(logits, batch.targets[there])
            return ce.sum(), ce.sum(), ce.sum() * 0
        logits = logits[:, : self.rows.texts.reader.metadata["vocab_size"]]  # type: ignore[attr-defined]
        ce = cross_entropy(logits, batch.targets[there])
        kl = forward_kl(logits, *batch.teacher, self.recipe.temperature)
        total = distillation(ce, kl, self.recipe.alpha, self.recipe.temperature)
        return total.sum(), ce.sum(), kl.sum()

    def _measure(self, steps_log: StepLog | None) -> bool:
        """Evaluate; gives whether early stopping has a new best step."""
        import torch

        assert self.measured is not None
        begun = time.monotonic()
        numbers = list(range(len(self.measured.rows)))
        mine = share(numbers, self.parallel.rank, self.parallel.processes, self.recipe.micro_batch_rows)
        # FSDP gathers parameters in every forward pass, so every process makes as many as the first.
        most = len(share(numbers, 0, self.parallel.processes, self.recipe.micro_batch_rows))
        sums = self._no_sums()
        self.model.eval()
        with torch.no_grad(), self.parallel.autocast():
            for part in mine:
                batch = self.measured.batch(part).to(self.parallel.device)
                sums += torch.stack(self._losses(batch)).double()
            if len(mine) < most:
                self._losses(self.measured.batch([0]).to(self.parallel.device))
        self.model.train()
        count = self.measured.targets(numbers)
        loss, ce, kl = (total / count for total in self.parallel.sums(sums.tolist()))
        line: JsonDict = {"step": self.progress.step, "evaluation_loss": loss, "evaluation_cross_entropy": ce}
        line |= {"evaluation_kl": kl} if self.recipe.objective == "distill" else {}
        line |= {"evaluation_targets": count, "evaluation_seconds": round(time.monotonic() - begun, 3)}
        if steps_log is not None:
            steps_log.add({name: _finite(value) for name, value in line.items()})
        return self._note(loss)

    def _note(self, loss: float) -> bool:
        """Whether a step's model is the best yet; that before the first step is nobody's result."""
        stopping, progress = self.recipe.early_stopping, self.progress
        if stopping is None or progress.step == 0:
            return False
        better = progress.best_loss is None or loss < progress.best_loss - stopping.min_improvement
        if math.isfinite(loss) and better:
            progress.best_loss, progress.best_step, progress.evaluations_since_best = loss, progress.step, 0
            return True
        progress.evaluations_since_best += 1
        return False

    def _is_patience_over(self) -> bool:
        stopping = self.recipe.early_stopping
        return stopping is not None and self.progress.evaluations_since_best >= stopping.patience

    def _checkpoint(self) -> None:
        self._require_finite_weights()
        state = {**asdict(self.progress), "effective": str(self.effective), "processes": self.parallel.processes}
        state["scaler"] = self.parallel.scaler.state_dict() if self.parallel.scaler is not None else None
        curve = self.task.steps
        checkpoint.save(self.folder, self.progress.step, state, curve, self.model, self._adam, self.parallel)
        if self.parallel.main:
            checkpoint.rotate(self.folder, self.recipe.keep_checkpoints, self.progress.best_step)

    def _resume(self) -> None:
        """Go on from the last whole checkpoint of this recipe, which the first process names to all."""
        if self.parallel.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.utime(self.folder)  # of the recipes that have been trained here, this one is at work (job.py)
            checkpoint.sweep(self.folder)
        there = checkpoint.steps_there(self.folder, self._log) if self.parallel.main else []
        last = int(self.parallel.sums([float(there[-1]) if there else 0.0])[0])
        if not last:
            return
        state = checkpoint.load(self.folder, last, self.model, self._adam, self.parallel)
        self.progress = Progress(**{name: state[name] for name in Progress.__dataclass_fields__})
        self.resumed_from = last
        if self.parallel.main:
            self._log(f"going on from step {last} ({checkpoint.place(self.folder, last)})")
            if state["processes"] != self.parallel.processes:
                self._log(f"the checkpoint is of {state['effective']}; now {self.effective}")

    def _take_best(self) -> None:
        best = self.progress.best_step
        if best is None or best == self.progress.step:
            return
        kept = self.progress
        checkpoint.load(self.folder, best, self.model, self._adam, self.parallel)
        self.progress = kept
        if self.parallel.main:
            self._log(f"the best evaluation was at step {best}; its model is the result")

    def _data(self) -> tuple[Rows, Rows | None]:
        """The rows to train on and those to measure on."""
        recipe = self.recipe
        apart: TokenTexts | None = None
        texts: Texts
        if recipe.objective == "distill":
            texts = LogitTexts(self.task.data)
        else:
            texts = TokenTexts(self.task.data / "training")
            if recipe.evaluation is not None and recipe.evaluation.dataset is not None:
                apart = TokenTexts(self.task.data / "evaluation")
        ratio = recipe.evaluation.held_out_ratio if recipe.evaluation else 0.0
        out = held_out(texts, ratio, recipe.seed)
        if out.all() or (ratio and not out.any()):
            few = "trained on" if out.all() else "held out"
            raise UserError(f"of {len(out)} texts none is {few} at held_out_ratio={ratio:g}; change it")
        measured = self._rows(apart, np.ones(len(apart.lengths), bool)) if apart is not None else None
        return self._rows(texts, ~out), measured or (self._rows(texts, out) if out.any() else None)

    def _rows(self, texts: Texts, chosen: Any) -> Rows:
        recipe = self.recipe
        rows = rows_of(texts, np.flatnonzero(chosen), recipe.sequence_tokens, recipe.packing, recipe.seed)
        return Rows(texts, rows, recipe.sequence_tokens if recipe.packing else None)

    def _check_vocabulary(self, model: Any) -> None:
        if isinstance(self.rows.texts, LogitTexts):
            self.rows.texts.reader.check_student(self.tokenizer, model.get_output_embeddings().weight.shape[0])

    def _require_finite(self, value: float, what: str, step: int) -> None:
        if not math.isfinite(value):
            raise UserError(
                f"step {step + 1}: the {what} is {value}, and the weights are as before it; {self._kept()}; lower "
                "learning_rate, lengthen warmup_steps, or look at the rows of this step"
            )

    def _require_finite_weights(self) -> None:
        """A step's own update is seen by the next step's loss; before a checkpoint there is none yet."""
        import torch

        mine = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        parts = (part.to_local() if hasattr(part, "to_local") else part for part in mine)
        broken = not all(bool(torch.isfinite(part).all()) for part in parts)
        if self.parallel.sums([float(broken)])[0]:
            raise UserError(
                f"step {self.progress.step}: its update left weights that are not finite; {self._kept()}; lower "
                f"learning_rate ({self.recipe.learning_rate:g}) or lengthen warmup_steps"
            )

    def _kept(self) -> str:
        there = checkpoint.steps_there(self.folder, self._log)
        return f"the last good checkpoint is step {there[-1]} in {self.folder}" if there else "no checkpoint is there"

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._told = True


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _memory_gib() -> float:
    """The most that this process has had: of the GPU's memory, or of the machine's where there is no GPU."""
    import resource

    import torch

    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
