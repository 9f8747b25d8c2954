"""Which models the decode loop can run: a plain key-value cache, and a forward that says all there is to say.

The loop moves rows in and out of a batch by their columns of the cache. That needs layers of full attention, positions
that belong to the row, and no state or input that only the model's own generate() knows how to carry.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

#: Rotary embeddings that change with the longest row there is: a row's answer would depend on its neighbours'.
_SHARED_ROPE = {"dynamic", "longrope"}
#: They prepare inputs of their own only for a rope that changes.
_PLAIN_WITH_PLAIN_ROPE = {"Phi3ForCausalLM", "PhimoeForCausalLM"}


def obstacle(model: Any) -> str | None:
    """Why the loop cannot run a loaded model; None when it can."""
    from transformers import GenerationMixin
    from transformers.cache_utils import DynamicCache, DynamicLayer

    config, kind = model.config, type(model)
    if not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} is not of transformers"
    if config.is_encoder_decoder or getattr(kind, "_is_stateful", False):
        return f"{kind.__name__} keeps a state of its own"
    taken = inspect.signature(kind.forward).parameters
    if lacking := [name for name in ("attention_mask", "position_ids") if name not in taken]:
        return f"{kind.__name__} takes no {' and no '.join(lacking)}"
    own = kind.prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if own and kind.__name__ not in _PLAIN_WITH_PLAIN_ROPE:
        return f"{kind.__name__} prepares inputs of its own"
    if shared := shared_rope(getattr(config.get_text_config(), "rope_parameters", None)):
        return shared
    layers = DynamicCache(config=config).layers
    if other := sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}):
        return f"its cache has {', '.join(other)}"
    return None


def cache_argument(model: Any) -> str:
    """What the model's forward calls the cache; transformers 5.24 has a new name for it."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def takes_logits_to_keep(model: Any) -> bool:
    """Whether the forward can leave out the logits of all tokens but the last."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


def shared_rope(parameters: Any) -> str | None:
    """What is wrong with the rope of a config's rope_parameters (or rope_scaling) in a batch; None: nothing."""
    shared = sorted(_SHARED_ROPE & _rope_types(parameters))
    return f"its positions are scaled by the longest row ({', '.join(shared)} rope)" if shared else None


def _rope_types(parameters: Any) -> set[str]:
    """Every rope_type in a config's rope_parameters, which may have one a kind of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    own = {kind for name in ("rope_type", "type") if isinstance(kind := parameters.get(name), str)}
    return own.union(*(_rope_types(value) for value in parameters.values()))
