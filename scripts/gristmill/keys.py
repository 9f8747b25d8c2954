"""A request's key: the content hash under which its answer is known.

- The key covers all that changes an answer and nothing else: where the row stands, how many shards or GPUs there are,
  and what the report is called do not enter it.
- The model enters by the fingerprint of its weights, tokenizer and code, not by its name or folder; dtype and
  quantization as they are in force, not as they are written.
- Attention kernels, device_map, GPUs, batch sizes and, for greedy answers, the engine stay out: they change the order
  of additions and so the last bits, as the neighbours in a batch do, and an answer that depends on those bits was never
  repeatable. A sampled answer names the family of engines that draw alike, and so does one that follows a JSON Schema:
  static and continuous write the same white space.
- A model that is served elsewhere is known by its name at the server and by what `extra` adds, since its weights cannot
  be looked at; where the server is stays out. Its answers, greedy ones too, are a family of their own: `endpoint`.
- The overflow policy enters only for a prompt that does not fit, so that changing it asks only those rows again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill import GENERATION_VERSION
from gristmill.codec import request_to_json
from gristmill.config.schema import ModelConfig
from gristmill.engines import context_limit
from gristmill.files import canonical
from gristmill.types import JsonDict, Request

#: What `8bit` and `4bit` stand for, as transformers' quantization_config. Double quantization takes 0.4 bits a weight
#: less: 3 GB of a 70B.
QUANTIZATION: dict[str, JsonDict] = {
    "8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "4bit": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    },
}
#: Engines that draw the same answer from the same seed. `auto` is a family of its own: it may pick any of them, and who
#: leaves the choice open gets no promise about the draws.
DRAWS = {"static": "rows", "continuous": "rows"}
#: Engines without weights and a dtype of their own; greedy answers too are known by their name.
WEIGHTLESS = frozenset({"echo", "endpoint"})


def digest(value: Any) -> str:
    """32 hex digits that equal JSON values share."""
    return hashlib.sha256(canonical(value)).hexdigest()[:32]


def model_identity(model: ModelConfig, weights: JsonDict, on_gpu: bool) -> JsonDict:
    """What of a model decides its answers.

    Args:
        model: the model's config.
        weights: results/models/<model>.json.
        on_gpu: whether it runs on GPUs, which decides what dtype `auto` is.
    """
    template = Path(model.chat_template).read_text("utf-8") if model.chat_template else None
    named = model.quantization
    return {
        "weights": weights["weights_hash"],
        "engine": DRAWS.get(model.engine, model.engine),
        "dtype": dtype_in_force(model, weights, on_gpu),
        "quantization": QUANTIZATION[named] if isinstance(named, str) else named,
        "chat_template": template,
        "generation_version": GENERATION_VERSION,
    }


def dtype_in_force(model: ModelConfig, weights: JsonDict, on_gpu: bool) -> str:
    """The dtype that a model is loaded in; `auto` only where nothing tells: one without weights has none."""
    if model.dtype != "auto" or model.engine in WEIGHTLESS:
        return model.dtype
    return str(weights.get("dtype") or "auto") if on_gpu else "float32"


class RequestKeys:
    """The keys of one model's requests; what they share is hashed once."""

    def __init__(self, identity: JsonDict, model: ModelConfig) -> None:
        """Begin.

        Args:
            identity: `model_identity` of the model that answers.
            model: the model's config, for the overflow policy.
        """
        greedy = identity if identity["engine"] in WEIGHTLESS else identity | {"engine": None}
        self._sampled, self._greedy = (
            hashlib.sha256(b'{"model":' + canonical(found) + b',"overflow":') for found in (identity, greedy)
        )
        self._policy = model.on_overflow

    def key(self, request: Request, overflowed: int | None) -> str:
        """The key of one request: `digest` of {model, overflow, request}.

        Args:
            request: the request; its sampling settings and seed are part of the key.
            overflowed: the context that prompt and max_new_tokens exceed; None when they fit.
        """
        policy = None if overflowed is None else [self._policy, overflowed]
        own = request.sampling.temperature > 0 or request.sampling.json_schema
        total = (self._sampled if own and not request.labels else self._greedy).copy()
        total.update(canonical(policy) + b',"request":' + canonical(request_to_json(request)) + b"}")
        return total.hexdigest()[:32]


def every_key(model: ModelConfig, weights: JsonDict) -> Callable[[Request], set[str]]:
    """What gives the keys that a model's answer to a request may have: made on a GPU or not, the prompt fitting or not.

    For who holds answers and wants to know whether they answer this: the merge sees neither the GPUs nor the tokens.
    """
    places = [RequestKeys(model_identity(model, weights, on_gpu), model) for on_gpu in (False, True)]
    limits = {None, context_limit(model, weights)}
    return lambda request: {keys.key(request, limit) for keys in places for limit in limits}


def row_seed(request: Request) -> int:
    """The 63-bit seed of one row, sample and attempt, whatever batch or worker it lands in."""
    text = f"{request.sampling.seed}:{request.id}:{request.sample}:{request.variant}"
    text += f":{request.attempt}" if request.attempt > 1 else ""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


#: Files up to this size are known by their content; larger ones by size and date, for a start must take no time.
MAX_HASHED_BYTES = 16_000_000


def file_fingerprint(path: Path) -> str:
    """What tells an input file from another one, whatever their dates; a file that is not there has none."""
    try:
        found = path.stat()
        if found.st_size > MAX_HASHED_BYTES:
            return f"{found.st_size}:{found.st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def code_digest(*modules: str) -> str:
    """A hash of the source of modules or packages of this library: a param that reruns cheap steps when they change.

    Raises FileNotFoundError for a module that is not there: a renamed one would no longer be watched.
    """
    root = Path(__file__).parent
    total = hashlib.sha256()
    for module in modules:
        place = root / module.replace(".", "/")
        for path in _package_files(place) if place.is_dir() else [place.with_suffix(".py")]:
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def _package_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
