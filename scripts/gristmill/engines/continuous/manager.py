"""transformers' manager of continuous batching, made ready for one session; the same in every process of a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gristmill.errors import UserError
from gristmill.types import Sampling

if TYPE_CHECKING:
    from gristmill.engines.continuous.rows import RowTable

#: Tokens of a forward pass, and share of the memory, on a CPU.
CPU_PASS_TOKENS, CPU_SHARE = 512, 0.1


class EngineDied(UserError):
    """The manager's thread ended on an error; the rows that finished are in the journal."""


class DidNotStart(EngineDied):
    """The manager could not be made ready; no row was asked."""


@dataclass(frozen=True, slots=True)
class Session:
    """What the manager is made for: requests of one sampling setting."""

    sampling: Sampling
    stop_ids: tuple[int, ...]
    #: Most rows at a time, and all of them.
    rows: int
    requests: int
    #: The most tokens of a prompt.
    prompt_tokens: int
    #: Share of the free memory for keys, values and activations.
    share: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Session:
        """The session that `to_json` wrote."""
        sampling = plain["sampling"] | {"stop": tuple(plain["sampling"]["stop"])}
        return cls(**plain | {"sampling": Sampling(**sampling), "stop_ids": tuple(plain["stop_ids"])})


def make_manager(model: Any, session: Session, table: RowTable, on_gpu: bool) -> Any:
    """The manager with our processors, not started.

    Raises:
        DidNotStart: the GPU has no flash attention, or the model no pages.
    """
    from gristmill.engines.continuous.rows import row_processors

    before = model.config._attn_implementation
    try:
        manager = _plain_manager(model, session, on_gpu, graphs=(False, True))
    except (ValueError, NotImplementedError, AttributeError) as error:
        restore_attention(model, before)
        raise DidNotStart(f"continuous batching does not know {type(model).__name__}: {error}") from error
    if on_gpu and "flash" not in (found := model.config._attn_implementation):
        manager.destroy()
        restore_attention(model, before)
        raise DidNotStart(f"continuous batching over {found} attention is slower than static; set engine: static")
    if on_gpu and not manager.continuous_batching_config.max_blocks_per_request:
        # No attention that reads pages: new tokens take the way of prompts, which then needs the graphs.
        manager.destroy()
        manager = _plain_manager(model, session, on_gpu, graphs=(True, True))
    processors = manager.logit_processor
    ours = row_processors(table, session.rows, session.sampling)
    processors.logits_processor.extend(ours)
    processors.tensors_required += len(ours)
    processors.do_processing = True
    return manager


def restore_attention(model: Any, before: str) -> None:
    """Give a model the attention back that a manager took from it; one that was not started does not do so itself."""
    if model.config._attn_implementation != before:
        model.set_attn_implementation(before)


def room_tokens(manager: Any) -> int:
    """The most tokens that one row may have: all pages but one, which a row that is being moved may need."""
    settings = manager.continuous_batching_config
    page = getattr(settings, "page_size", None) or settings.block_size
    return int((settings.num_blocks - 1) * page)


def unblock(manager: Any) -> None:
    """Let waiting rows in again when nothing runs; transformers does so when a row ends, not when one is taken out."""
    scheduler = getattr(manager.batch_processor, "scheduler", None)
    if scheduler is not None and not scheduler.active_requests:
        scheduler.block_new_requests = False


def _plain_manager(model: Any, session: Session, on_gpu: bool, graphs: tuple[bool, bool]) -> Any:
    """Make the manager as transformers does; `graphs` says whether prompts and new tokens go through CUDA graphs.

    A graph is recorded for every size. Those of new tokens are few and save the launch of every kernel; those of
    prompts are many, are used once, and save nothing, since a pass over thousands of tokens keeps the GPU busy.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    new_tokens = session.sampling.max_new_tokens
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=list(session.stop_ids) or -1)
    settings = ContinuousBatchingConfig(
        max_requests_per_batch=session.rows,
        max_memory_percent=session.share if on_gpu else CPU_SHARE,
        max_batch_tokens=None if on_gpu else max(CPU_PASS_TOKENS, session.rows),
        use_cuda_graph=graphs if on_gpu else None,
    )
    hints = WorkloadHints(session.prompt_tokens, new_tokens, session.requests)
    return model.init_continuous_batching(generation, settings, hints)
