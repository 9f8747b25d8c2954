"""What a restart needs, in a folder that is whole or not there: checkpoints/<recipe>/step-00000500.

- Every process writes its part of parameters and optimizer (torch.distributed.checkpoint, which another number of
  processes can read) and its random states; then the first writes state.json with every file's size and renames the
  folder. A folder under its name is therefore whole; one whose files are shorter by now is passed over.
- steps.jsonl: the curve so far, since the one beside may be another recipe's by the time that this one goes on.
- state.json: the step, which is also the position in the data (data.py), fp16's loss scale, what early stopping knows.
- When a new one stands, the oldest and those that are not whole are removed; the best step's stays with early stopping.
- A recipe has a folder of its own: a changed learning rate starts anew and finds the old one's checkpoints no more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gristmill.errors import UserError
from gristmill.files import read_json, write_json
from gristmill.training.parallel import Parallel
from gristmill.types import JsonDict

_NAME = re.compile(r"step-(\d{8})")
_STATE, _TENSORS = "state.json", "tensors"


def steps_there(folder: Path, log: Callable[[str], None]) -> list[int]:
    """The steps of the checkpoints that are whole, ascending."""
    found: list[int] = []
    for path in sorted(folder.glob("step-*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and _is_whole(path, log):
            found.append(int(match[1]))
    return found


def place(folder: Path, step: int) -> Path:
    """The folder of a step."""
    return folder / f"step-{step:08d}"


def curve_of(checkpoint: Path) -> Path:
    """The steps.jsonl of a checkpoint."""
    return checkpoint / "steps.jsonl"


def save(folder: Path, step: int, state: JsonDict, curve: Path, model: Any, optimizer: Any, parallel: Parallel) -> None:
    """Write a checkpoint, all processes together.

    Args:
        folder: of the recipe's checkpoints.
        step: how many steps are done.
        state: goes into state.json.
        curve: steps.jsonl.
        model: wrapped.
        optimizer: torch's own.
        parallel: the processes.

    Raises:
        UserError: the disk does not take it; the earlier ones are as they were.
    """
    target = place(folder, step)
    temporary = folder / f".{target.name}.tmp"
    try:
        parallel.together(lambda: _begin(temporary, curve) if parallel.main else None)
        parallel.together(lambda: _write(temporary, model, optimizer, parallel))
        parallel.together(lambda: _finish(temporary, target, state) if parallel.main else None)
    except BaseException as error:
        if parallel.main:
            shutil.rmtree(temporary, ignore_errors=True)
        if (said := _disk_error(error)) is not None:
            raise UserError(
                f"the checkpoint of step {step} cannot be written: {said}; the earlier ones are kept, make room in "
                f"{folder} and run again"
            ) from error
        raise


def load(folder: Path, step: int, model: Any, optimizer: Any, parallel: Parallel) -> JsonDict:
    """Put a checkpoint into model, optimizer and random states; gives its state.json.

    A process that had none at the time, because there were fewer, keeps the random state that it has.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    path = place(folder, step)
    options = _options(model)
    parameters, moments = get_state_dict(model, optimizer, options=options)
    tensors = {"model": parameters, "optimizer": moments}
    with _alone() as alone:
        load_tensors(tensors, checkpoint_id=path / _TENSORS, no_dist=alone)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments, options=options)
    own = path / f"random-{parallel.rank}.pt"
    if own.exists():
        random = torch.load(own, weights_only=True)
        torch.set_rng_state(random["cpu"])
        if parallel.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], parallel.device)
    found: JsonDict = read_json(path / _STATE)
    if parallel.scaler is not None and found.get("scaler"):
        parallel.scaler.load_state_dict(found["scaler"])
    return found


def rotate(folder: Path, keep: int, best: int | None) -> None:
    """Remove all checkpoints but the newest whole ones and the best; for one process."""
    there = [int(match[1]) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    kept = {*steps_there(folder, lambda _: None)[-keep:], best}
    for step in there:
        if step not in kept:
            shutil.rmtree(place(folder, step), ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what broken writers left; for one process, before it writes."""
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def full_state(model: Any) -> JsonDict:
    """All parameters on the CPU, on the first process; every process takes part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


def _options(model: Any) -> Any:
    """Frozen parameters, which are the base's, stay out of the checkpoints of adapters."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether this process is in no group, which torch warns of even when it is told so."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield not torch.distributed.is_initialized()


def _begin(temporary: Path, curve: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if curve.exists():
        shutil.copyfile(curve, curve_of(temporary))


def _write(temporary: Path, model: Any, optimizer: Any, parallel: Parallel) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    parameters, moments = get_state_dict(model, optimizer, options=_options(model))
    tensors = {"model": parameters, "optimizer": moments}
    with _alone() as alone:
        save_tensors(tensors, checkpoint_id=temporary / _TENSORS, no_dist=alone)
    random = {"cpu": torch.get_rng_state()}
    if parallel.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(parallel.device)
    with open(temporary / f"random-{parallel.rank}.pt", "wb") as handle:
        torch.save(random, handle)
        handle.flush()
        os.fsync(handle.fileno())


def _finish(temporary: Path, target: Path, state: JsonDict) -> None:
    sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in temporary.rglob("*") if path.is_file()}
    write_json(temporary / _STATE, {**state, "files": sizes})
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)


def _is_whole(path: Path, log: Callable[[str], None]) -> bool:
    try:
        sizes: dict[str, int] = read_json(path / _STATE)["files"]
        torn = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, KeyError) as error:
        torn = [f"{_STATE} ({type(error).__name__})"]
    if torn:
        log(f"{path} is not whole ({torn[0]}); passed over")
    return not torn


def _disk_error(error: BaseException) -> str | None:
    """What the disk said, of an OSError or of what torch made of one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror
    if isinstance(error, UserError) and isinstance(error.__cause__, OSError):
        return error.__cause__.strerror
    failures = getattr(error, "failures", None)  # torch's CheckpointException: rank → (error, traceback)
    for failure in (failures or {}).values():
        if (said := _disk_error(failure[0])) is not None:
            return said
    words = str(error)
    known = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
    return next((os.strerror(number) for number in known if os.strerror(number) in words), None)
