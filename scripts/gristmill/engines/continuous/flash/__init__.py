"""Flash attention where no package brings it: torch's own kernels and a paged decode in Triton, for transformers.

transformers' continuous batching is many times faster with a flash attention that knows sequences of uneven lengths and
a paged cache, and looks for it under the module name of flash-attention 3. flash/site holds such a module; `offer` puts
it on the path of this process when nothing better is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from gristmill.types import JsonDict

OURS = "torch's flash kernels"
SITE = Path(__file__).parent / "site"
#: The smallest compute capability of torch's flash kernels.
MIN_CAPABILITY = (8, 0)
#: The largest head that they take.
MAX_HEAD = 256


def offer() -> str:
    """Name the flash attention that transformers will find; ours is offered only where it would find none."""
    for module, name in (
        ("flash_attn_interface", "flash-attn-3"),
        ("flash_attn", "flash-attn"),
        ("kernels", "kernels"),
    ):
        if importlib.util.find_spec(module) is not None and str(SITE) not in sys.path:
            return f"the package {name}"
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
        _look_again()
    return OURS


def _look_again() -> None:
    """Make transformers forget what it found before, if it has looked already: it lists the packages only once."""
    if (utils := sys.modules.get("transformers.utils.import_utils")) is None:
        return
    for name in ("_package_distribution_mapping", "is_flash_attn_3_available"):
        if (clear := getattr(getattr(utils, name, None), "cache_clear", None)) is not None:
            clear()
    if isinstance(mapping := getattr(utils, "PACKAGE_DISTRIBUTION_MAPPING", None), dict):
        mapping["flash_attn_interface"] = ["flash-attn-3"]


def capability() -> tuple[int, int]:
    """The compute capability of the worker's first GPU; (0, 0) where torch sees none."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def why_not(config: JsonDict) -> str | None:
    """Why a model cannot run on these kernels; None when it can.

    Args:
        config: the model's config.json (of its text part).
    """
    if (found := capability()) < MIN_CAPABILITY:
        return f"flash attention needs compute capability 8.0, and this GPU has {found[0]}.{found[1]}"
    head = config.get("head_dim") or config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
    if head > MAX_HEAD:
        return f"heads of {head} are larger than the {MAX_HEAD} of flash attention"
    if config.get("attn_logit_softcapping"):
        return "its attention is soft-capped"
    if config.get("model_type") == "gpt_oss":
        return "its attention has sinks"
    return None
