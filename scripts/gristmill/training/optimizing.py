"""The optimizer's groups and the learning rate: functions of the recipe alone, so that no checkpoint holds them."""

from __future__ import annotations

import math
from typing import Any

from gristmill.config.schema import TrainingConfig


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def learning_rate(training: TrainingConfig, step: int, steps: int) -> float:
    """The rate of a step, counted from 0, of so many: a linear warm-up, then the schedule.

    Its end would be the step after the last one: a last step at a rate of 0 would do nothing.
    """
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / (training.warmup_steps + 1)
    passed = (step - training.warmup_steps) / max(1, steps - training.warmup_steps)
    return training.learning_rate * _left(training, min(1.0, passed))


def _left(training: TrainingConfig, passed: float) -> float:
    """What is left of the highest rate after a share of the way."""
    if training.schedule == "constant":
        return 1.0
    fallen = passed if training.schedule == "linear" else (1 - math.cos(math.pi * passed)) / 2
    return 1.0 - (1.0 - training.final_learning_rate_ratio) * fallen
