"""The processes of a training, through accelerate: one a device, gradients averaged over them (DDP) or cut up (FSDP).

- DDP and FSDP average gradients over processes. The loop wants the gradient of a sum over all targets of the step
  divided by their number, so each process multiplies its sums by the number of processes; no micro-batch and no process
  counts more than its targets.
- Gradients are exchanged at the last micro-batch of a step only.
- FSDP is torch's fully_shard, the layers that the model must not split as units. accelerate would do the same, but on
  GPUs only, and what cannot be run on a CPU cannot be tested there. No GPU ever holds more than its share and one unit,
  and no process but the first holds the weights in host memory: it sends the others theirs.
- nn.DataParallel is not used: one process then feeds all GPUs, copies the model to each at every step, and gathers all
  outputs on the first.
- A process that waits longer than timeout_minutes for the others ends with an error instead of waiting for ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from gristmill.config.schema import TrainingConfig
from gristmill.errors import UserError

_PRECISION = {"none": "no", "bf16": "bf16", "fp16": "fp16"}


class Parallel:
    """This process among the others."""

    def __init__(self, training: TrainingConfig, on_gpu: bool, threads: int) -> None:
        """Meet the other processes.

        Raises:
            UserError: torch sees no GPU, or fp16 is asked for on a CPU.
        """
        import torch
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

        if on_gpu and not torch.cuda.is_available():
            raise UserError(f"torch {torch.__version__} sees no GPU though this job holds one; make env DEVICE=gpu")
        if training.mixed_precision == "fp16" and not on_gpu:
            raise UserError("mixed_precision fp16 scales losses for GPUs, and there is none here; use bf16 or none")
        self.training = training
        self._accelerator = Accelerator(
            cpu=not on_gpu,
            mixed_precision=_PRECISION[training.mixed_precision],
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(minutes=training.timeout_minutes)),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
        )
        torch.set_num_threads(max(1, threads))
        if training.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        self.device: Any = self._accelerator.device
        self.rank: int = self._accelerator.process_index
        self.processes: int = self._accelerator.num_processes
        self.main: bool = self._accelerator.is_main_process
        self._sharded = training.sharding == "fsdp" and self.processes > 1

    @property
    def is_sent_weights(self) -> bool:
        """Whether `wrap` puts the first process's parameters and buffers into this one's model."""
        return self._sharded and not self.main

    def wrap(self, model: Any) -> Any:
        """The model whose forward and backward are those of all processes."""
        return self._shard(model) if self._sharded else self._accelerator.prepare_model(model.to(self.device))

    def optimizer(self, optimizer: Any) -> Any:
        """An optimizer that also knows fp16's loss scale."""
        return self._accelerator.prepare_optimizer(optimizer, device_placement=False)

    def autocast(self) -> Any:
        """The context in which a model that is not wrapped, or is sharded, computes."""
        return self._accelerator.autocast()

    def backward(self, model: Any, loss: Callable[[], Any], last: bool) -> None:
        """Compute a loss and its gradients; they are exchanged with the last micro-batch of a step."""
        if self._sharded:
            model.set_requires_gradient_sync(last)
        silent = not last and not self._sharded and self.processes > 1
        with self._accelerator.no_sync(model) if silent else contextlib.nullcontext():
            self._accelerator.backward(loss())

    def clip(self, model: Any, optimizer: Any) -> float:
        """The norm of the gradients; longer ones are shortened to max_grad_norm."""
        import torch

        self._accelerator.unscale_gradients(optimizer)
        most = self.training.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if most is None else most)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    @property
    def scaler(self) -> Any:
        """fp16's loss scale; None without."""
        return self._accelerator.scaler

    def unwrapped(self, model: Any) -> Any:
        """The model itself."""
        return self._accelerator.unwrap_model(model)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes, in float64."""
        import torch

        if self.processes == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        found: list[float] = total.tolist()
        return found

    def together(self, step: Callable[[], None]) -> None:
        """Run something on every process; where one fails, all raise.

        Raises:
            UserError: it failed here or elsewhere.
        """
        error: BaseException | None = None
        try:
            step()
        except (Exception, _checkpoint_error()) as caught:  # the latter is a BaseException
            error = caught
        failed = self.sums([float(error is not None)])[0]
        if error is not None:
            raise error
        if failed:
            raise UserError("another process of the training failed at this step; its error stands above")

    def close(self) -> None:
        """Leave the others."""
        self._accelerator.end_training()

    def _shard(self, model: Any) -> Any:
        import torch
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = self.training.mixed_precision == "bf16"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        mesh = init_device_mesh(self.device.type, (self.processes,))
        units = set(getattr(model, "_no_split_modules", None) or [])
        state = model.state_dict() if self.main else {}
        for module in list(model.modules()):
            if type(module).__name__ in units:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
        set_model_state_dict(sharded, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for buffer in sharded.buffers():
            torch.distributed.broadcast(buffer, 0)
        return sharded


def _checkpoint_error() -> type[BaseException]:
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def local_rank() -> int:
    """This process's place on its machine, as torchrun says; 0 of one that is alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))
