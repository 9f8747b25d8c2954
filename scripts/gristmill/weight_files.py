"""Whether a model folder's safetensors are whole, from their headers alone: a few KB a file, before any worker starts.

A download that broke off, a full disk or a Git LFS pointer would otherwise be found by every worker, after it has
waited for its GPUs, each with a traceback. Pickled weights (.bin) have no header to look at.
"""

from __future__ import annotations

from pathlib import Path

from gristmill.errors import UserError, some
from gristmill.files import read_json
from gristmill.memory.shapes import AGAIN, raw_header

#: What transformers looks for, in this order.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def require_whole(folder: Path, allow_pickle: bool = False) -> None:
    """Every safetensors file is as long as its header says, and what the index names is there.

    Args:
        folder: a model folder.
        allow_pickle: whether .bin files may be the model instead.

    Raises:
        UserError: names the first file that is not whole, or what is missing.
    """
    files = sorted(folder.glob("*.safetensors"))
    tensors = {path.name: _tensors(path) for path in files}
    if (folder / SINGLE).exists() or not files or (allow_pickle and any(folder.glob("*.bin"))):
        return
    if not (folder / INDEX).exists():
        raise UserError(
            f"{folder} has {some([path.name for path in files])}, but neither {SINGLE} nor {INDEX}, one of which says "
            f"what the model is made of; {AGAIN}"
        )
    _require_named(folder / INDEX, tensors)


def _tensors(path: Path) -> set[str]:
    """The names of a file's tensors; refuses a file that is not as long as its header says."""
    header, start = raw_header(path)
    try:
        wanted = start + max((int(item["data_offsets"][1]) for item in header.values()), default=0)
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(f"{path} is no whole safetensors file; {AGAIN}") from error
    if (size := path.stat().st_size) != wanted:
        raise UserError(f"{path} has {size:,} bytes, but its header speaks of {wanted:,}; {AGAIN}")
    return set(header)


def _require_named(index: Path, tensors: dict[str, set[str]]) -> None:
    """Refuse an index of files or tensors that are not there."""
    try:
        places: dict[str, str] = dict(read_json(index)["weight_map"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{index} has no readable weight_map; {AGAIN}") from error
    if missing := sorted(set(places.values()) - tensors.keys()):
        raise UserError(f"{index.parent} lacks {some(missing)}, which {INDEX} names; {AGAIN}")
    if lost := sorted(name for name, file in places.items() if name not in tensors[file]):
        raise UserError(f"{index.parent} lacks the tensors {some(lost)}, which {INDEX} names; {AGAIN}")
