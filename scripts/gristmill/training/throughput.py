"""What a token costs and what a GPU could do: model FLOPs utilization (MFU) as PaLM counts it (arXiv:2204.02311).

A token takes 6 floating-point operations a parameter (forward 2, backward 4), the embedding table left out where the
head is another, and 12 · layers · width · L for attention over rows of L tokens, not halved for being causal. What
gradient checkpointing computes twice counts once. Adapters skip part of the backward pass, so they have no MFU here.
"""

from __future__ import annotations

from typing import Any

from gristmill.config.schema import TrainingConfig

#: Part of the GPU's name → dense 16-bit floating-point operations a second with 32-bit sums, by the vendor's data
#: sheets; the first that fits counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def flops_per_token(model: Any, sequence_tokens: int) -> float | None:
    """Floating-point operations of a trained token; None where the shape is not known or only adapters are trained."""
    parameters = list(model.parameters())
    if not all(parameter.requires_grad for parameter in parameters):
        return None
    count = sum(parameter.numel() for parameter in parameters)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table is not None and head is not None and head.weight is not table.weight:
        count -= table.weight.numel()
    config = model.config
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if layers is None or width is None:
        return None
    return float(6 * count + 12 * layers * width * sequence_tokens)


def peak_flops(name: str, training: TrainingConfig) -> float | None:
    """What one GPU of that name could do in the precision of the training; None where nobody says so."""
    if training.mixed_precision == "none" and training.dtype == "float32":
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
