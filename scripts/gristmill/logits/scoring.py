"""Teacher forcing with transformers: windows through the model once, and of each position what is kept.

- Windows of like length share a batch, longest first, by a budget of tokens; out of memory halves it, and a window that
  does not fit alone fails. They are padded at the right: under causal attention no token sees what stands after it, so
  there is no mask, and attention takes its fastest way.
- The body of the model gives hidden states (B, T, H). Only those of positions go on through the head, a chunk at a
  time, in float32 from the head's output on: logits of a whole batch never exist.
- Heads with more than a matrix (a cap, a scale) are found by a probe when the model loads: where chunks through the
  head alone do not give what the model gives, whole batches of logits are taken from it, in smaller batches.
- A model that is cut over several GPUs (parallel: tensor) has a process on each. All go through the same batches and
  chunks; the first alone keeps what comes out.
- The softmax is over the tokenizer's vocabulary. What a padded head gives beyond it means nothing to a student: it is
  dropped before, and the most that it ever was is kept.

B windows, T tokens, N positions of a chunk, W outputs of the head, V tokens of the vocabulary, k kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gristmill.config.logits import MAX_FULL_VOCABULARY
from gristmill.config.schema import ModelConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.loading import idle_gpus, load_model, placement
from gristmill.engines.ranks import RankGone, Ranks
from gristmill.engines.static.token_budget import free_bytes, release_memory
from gristmill.errors import UserError
from gristmill.logits.storage import Floats, Ints, LogitsRow
from gristmill.logits.texts import Window
from gristmill.logits.vocabulary import vocabulary_size
from gristmill.types import Failure, FailureReason

if TYPE_CHECKING:
    import torch

#: What the other ranks of a model that is cut run.
FOLLOWER = "gristmill.logits.follower"
#: Most tokens of a batch. More gain nothing: a GPU is busy with a quarter of it, and a CPU's caches are small.
GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 16_384, 2_048
#: Logits of a chunk, in float32: 256 MiB, and about three times that at work.
CHUNK_LOGITS = 1 << 26
#: Logits of a batch where the head cannot be used alone.
WHOLE_LOGITS = 1 << 29
#: Share of the free GPU memory that a batch's activations may take.
ACTIVATION_SHARE = 0.5
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of N positions."""

    top_ids: Ints  # (N, k)
    top_logprobs: Floats  # (N, k)
    tail_logprob: Floats  # (N,)
    target_logprob: Floats  # (N,)
    #: The most that ids beyond the vocabulary had, (N,).
    padded_mass: Floats

    def row(self, window: Window, key: str) -> LogitsRow:
        """The row of a window whose positions these are."""
        return LogitsRow(
            key=key,
            id=window.wid.id,
            sample=window.wid.sample,
            variant=window.wid.variant,
            window=window.wid.window,
            first=window.first,
            token_ids=np.asarray(window.tokens, np.int32),
            top_ids=self.top_ids,
            top_logprobs=self.top_logprobs,
            tail_logprob=self.tail_logprob,
            target_logprob=self.target_logprob,
            cut_tokens=window.cut_tokens,
            padded_mass=float(self.padded_mass.max(initial=0.0)),
        )


class Teacher(Protocol):
    """What gives logits of windows: transformers (here) or vllm (vllm.py)."""

    name: str
    dtype: str
    #: Tokens of the vocabulary that the distributions are over, and outputs that the head has.
    vocab_size: int
    head_width: int
    #: Log-probabilities kept a position.
    k: int

    def score(self, windows: Sequence[tuple[str, Window]]) -> Iterator[tuple[str, LogitsRow | Failure]]:
        """The row, or the failure, of each keyed window, in any order, as soon as it is there."""
        ...

    def stop(self) -> None:
        """Begin nothing new. Called from a signal's handler."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...


class TransformersTeacher:
    """A model of transformers on any device_map, or cut over several GPUs."""

    name = "transformers"

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        top_k: int | None,
        on_gpu: bool,
        log: Callable[[str], None],
        ranks: int = 1,
    ) -> None:
        """Load tokenizer and weights; imports torch and transformers.

        Args:
            folder: the weights.
            model: the teacher's config.
            top_k: log-probabilities kept a position; None: all.
            on_gpu: whether the job holds GPUs.
            log: takes messages.
            ranks: processes over which every layer is cut (engines/ranks.py); this one is the first.

        Raises:
            UserError: all are asked for, of a vocabulary that is too large for it.
        """
        tokenizer = ChatEncoder(folder, model).tokenizer
        self._on_gpu, self._log, self._stopped = on_gpu, log, False
        self._ranks = Ranks(FOLLOWER, folder, model, ranks, on_gpu) if ranks > 1 else None
        self._model = load_model(folder, model, on_gpu, ranks)
        if on_gpu and ranks == 1 and (idle := idle_gpus(self._model)):
            log(f"the model holds nothing on {len(idle)} GPUs of the worker ({idle}); fewer gpus_per_model would do")
        cut = {str(rank): "a part of every layer" for rank in range(ranks)}
        self.device_map = cut if ranks > 1 else placement(self._model)
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self._head = Head(self._model)
        self.head_width = self._head.width
        self.vocab_size = min(vocabulary_size(tokenizer), self.head_width)
        self.k = kept_count(top_k, self.vocab_size)
        self._full = top_k is None
        if not self._head.alone:
            log("the head does more than one matrix: logits are taken from the whole model, in smaller batches")
        self._most_rows = model.max_batch_rows
        self._most_tokens = self._batch_tokens()

    def score(self, windows: Sequence[tuple[str, Window]]) -> Iterator[tuple[str, LogitsRow | Failure]]:
        """See Teacher; windows without a position are not for a model."""
        left = sorted(windows, key=lambda item: -len(item[1].tokens))
        while left and not self._stopped:
            batch = left[: self._rows(len(left[0][1].tokens))]
            kept = self._unless_out_of_memory([window for _, window in batch])
            if kept is None:  # out here, where no traceback holds on to the batch's memory
                release_memory(self._on_gpu)
                if len(batch) > 1:
                    self._halve(len(batch), len(batch[0][1].tokens))
                    continue
                detail = f"a batch of one window with {len(batch[0][1].tokens)} tokens; lower max_tokens"
                yield batch[0][0], _failure(batch[0][1], "out_of_memory", detail)
            else:
                for (key, window), found in zip(batch, kept, strict=True):
                    yield key, self._outcome(key, window, found)
            left = left[len(batch) :]

    def stop(self) -> None:
        """The batch in flight is the last."""
        self._stopped = True

    def close(self) -> None:
        """Free the model's memory, also for the driver."""
        del self._model, self._head
        release_memory(self._on_gpu)
        if self._ranks is not None:
            self._ranks.close()

    def _outcome(self, key: str, window: Window, kept: Kept) -> LogitsRow | Failure:
        broken = np.flatnonzero(~np.isfinite(kept.target_logprob) & ~np.isneginf(kept.target_logprob))
        if broken.size:
            detail = f"the logits of token {window.first + int(broken[0])} are not finite in {self.dtype}; try another"
            return _failure(window, "non_finite_logits", detail)
        return kept.row(window, key)

    def _unless_out_of_memory(self, batch: Sequence[Window]) -> list[Kept] | None:
        import torch

        try:
            with torch.inference_mode():
                return self._scored(batch)
        except torch.OutOfMemoryError as error:
            if self._ranks is None:
                return None
            raise UserError(
                f"out of memory with {len(batch)} windows of {len(batch[0].tokens)} tokens; processes that share a "
                "model do not begin anew with fewer, so set max_batch_rows, or parallel: layers"
            ) from error
        except RuntimeError as error:
            if self._ranks is None:
                raise
            said = self._ranks.gone() or " ".join(str(error).split())[:200]
            raise RankGone(f"the teacher cannot go on: {said}; see the log above, and run again to go on") from error

    def _scored(self, batch: Sequence[Window]) -> list[Kept]:
        import torch

        rows = [(window.first, window.tokens) for window in batch]
        if self._ranks is not None:
            self._ranks.tell({"rows": rows})
        targets = torch.tensor([token for first, tokens in rows for token in tokens[first:]])
        chunks: list[Kept] = []
        done = 0
        for logits in self._head.chunks(rows):
            wanted = targets[done : done + len(logits)]
            chunks.append(distributions(logits, wanted, self.vocab_size, None if self._full else self.k))
            done += len(logits)
        return _parted(chunks, [window.positions for window in batch])

    def _rows(self, tokens: int) -> int:
        """How many windows of so many tokens a batch may have."""
        rows = max(1, self._most_tokens // tokens)
        return min(rows, self._most_rows or rows)

    def _halve(self, rows: int, tokens: int) -> None:
        self._most_tokens = max(1, rows // 2) * tokens
        self._log(
            f"out of memory with {rows} windows of {tokens} tokens; going on with {self._most_tokens} tokens in a batch"
        )

    def _batch_tokens(self) -> int:
        """Tokens of a batch: as many as are worth it, or as many as there is memory for."""
        most = GPU_BATCH_TOKENS if self._on_gpu else CPU_BATCH_TOKENS
        if not self._head.alone:
            most = min(most, max(1, WHOLE_LOGITS // self.head_width))
        if not self._on_gpu:
            return most
        import torch

        config = self._model.config.get_text_config()
        # Of one layer at a time: the residual stream, its norms, queries, keys and values, and the MLP's inner states.
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        each = (8 * config.hidden_size + 3 * inner) * self._model.dtype.itemsize
        free = min(free_bytes(device) for device in range(torch.cuda.device_count()))
        return max(1, min(most, int(ACTIVATION_SHARE * free / each)))


def kept_count(top_k: int | None, vocab_size: int) -> int:
    """How many log-probabilities of a position are kept.

    Raises:
        UserError: all of a vocabulary that is too large.
    """
    if top_k is not None:
        return min(top_k, vocab_size)
    if vocab_size > MAX_FULL_VOCABULARY:
        raise UserError(
            f"logits.*.full would keep {vocab_size:,} log-probabilities a token ({2 * vocab_size:,} bytes), over the "
            f"{MAX_FULL_VOCABULARY:,} that it is for; set top_k instead"
        )
    return vocab_size


def distributions(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, k: int | None) -> Kept:
    """What is kept of positions, from their logits.

    Args:
        logits: (N, W), in any dtype; they are made float32 here.
        targets: (N,), the token at each position.
        vocab_size: V; outputs beyond it are left out of the softmax.
        k: how many are kept; None: all, in the vocabulary's order.
    """
    import torch

    whole = logits.float()
    real = whole[:, :vocab_size]
    total = torch.logsumexp(real, dim=-1, keepdim=True)  # (N, 1)
    if whole.shape[1] > vocab_size:
        beyond = torch.logsumexp(whole[:, vocab_size:], dim=-1, keepdim=True)
        padded = torch.sigmoid(beyond - total).squeeze(-1)  # e^b / (e^b + e^t)
    else:
        padded = torch.zeros_like(total).squeeze(-1)
    target = (real.gather(1, targets.to(real.device).unsqueeze(-1)) - total).squeeze(-1)
    if k is None:
        ids = torch.arange(vocab_size, device=real.device).expand(real.shape)
        tops, tail = real - total, torch.full_like(target, -torch.inf)
    else:
        values, ids = torch.topk(real, min(k, vocab_size), dim=-1)
        tops = values - total
        tail = (torch.logsumexp(real.scatter(1, ids, -torch.inf), dim=-1, keepdim=True) - total).squeeze(-1)
    return Kept(_numpy(ids).astype(np.int32), *(_numpy(values) for values in (tops, tail, target, padded)))


class Head:
    """A model in two: its body, which gives states, and its head, which makes logits of them."""

    def __init__(self, model: Any) -> None:
        """Find the parts, and see by a probe whether the head can be used alone."""
        self._model = model
        self._body = model.base_model
        self._matrix = model.get_output_embeddings()
        self._cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self.width, self.alone = self._probe()

    def chunks(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Iterator[torch.Tensor]:
        """The logits (N, W) of all positions, so many at a time that little memory is needed.

        Args:
            rows: of each window the first token that has a position, and its tokens.
        """
        import torch

        width = max(len(tokens) for _, tokens in rows)
        padded = [[*tokens, *[0] * (width - len(tokens))] for _, tokens in rows]
        states = self.states(torch.tensor(padded, device=self._model.device))  # (B, T, H or W)
        wanted = torch.cat([states[row, first - 1 : len(tokens) - 1] for row, (first, tokens) in enumerate(rows)])
        del states
        size = max(1, CHUNK_LOGITS // self.width)
        for begin in range(0, len(wanted), size):
            yield self.logits(wanted[begin : begin + size])

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, T, H); logits (B, T, W) where the head cannot be used alone."""
        found: torch.Tensor
        if self.alone:
            found = self._body(input_ids=ids, use_cache=False, return_dict=True)[0]
        else:
            found = self._model(input_ids=ids, use_cache=False, return_dict=True).logits
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The logits (N, W) of states."""
        return self._through_head(states) if self.alone else states

    def _through_head(self, states: torch.Tensor) -> torch.Tensor:
        import torch

        device = self._matrix.weight.device
        # Of an offloaded head the weights are elsewhere (meta), and accelerate moves what goes in.
        found: torch.Tensor = self._matrix(states if device.type == "meta" else states.to(device))
        return found if self._cap is None else torch.tanh(found / self._cap) * self._cap

    def _probe(self) -> tuple[int, bool]:
        """How many outputs there are, and whether a few tokens through body and head give what the model gives."""
        import torch

        model = self._model
        ids = (
            torch.arange(_PROBE_TOKENS, device=model.device).unsqueeze(0) % model.get_input_embeddings().weight.shape[0]
        )
        with torch.inference_mode():
            whole = model(input_ids=ids, use_cache=False, return_dict=True).logits[0].float().cpu()
            if self._body is model or not hasattr(self._matrix, "weight"):
                return whole.shape[-1], False
            states = self._body(input_ids=ids, use_cache=False, return_dict=True)[0][0]
            try:
                alone = self._through_head(states).float().cpu()
            except (RuntimeError, TypeError):  # the states are not what its head takes
                return whole.shape[-1], False
        near = 1e-4 if model.dtype == torch.float32 else 0.03
        same = alone.shape == whole.shape and bool((alone - whole).abs().max() <= near * whole.abs().max().clamp(min=1))
        return whole.shape[-1], same


def _numpy(values: torch.Tensor) -> Any:
    return values.cpu().numpy()


def _parted(chunks: Sequence[Kept], positions: Sequence[int]) -> list[Kept]:
    """Chunks of positions, joined and cut again into those of each window."""
    names = list(Kept.__dataclass_fields__)
    ends = np.cumsum(positions)[:-1]
    columns = [np.split(np.concatenate([getattr(chunk, name) for chunk in chunks]), ends) for name in names]
    return [Kept(*values) for values in zip(*columns, strict=True)]


def _failure(window: Window, reason: FailureReason, detail: str) -> Failure:
    return Failure(window.wid.id, window.wid.sample, window.wid.variant, reason, detail)
