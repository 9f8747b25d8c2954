"""Trainings against the plan: enough GPU tokens for their processes, and a batch that these can share."""

from __future__ import annotations

from gristmill.config.schema import Config, TrainingConfig
from gristmill.errors import UserError
from gristmill.planning.plan import Plan, count
from gristmill.training.task import Effective


def training_gpus(plan: Plan, training: TrainingConfig) -> int:
    """GPU tokens of a training's job; without a GPU its processes share the CPU: one token here, none of a cluster."""
    if on_gpus(plan):
        return training.gpus * training.nodes
    return 0 if plan.cluster else 1


def on_gpus(plan: Plan) -> bool:
    """Whether trainings run on GPUs."""
    return bool(plan.gpus or plan.cluster) and not plan.cpu_only


def training_threads(plan: Plan, training: TrainingConfig) -> int:
    """CPU threads of a training's job."""
    if plan.cores is None:
        return 4 * (training.gpus if on_gpus(plan) else training.processes)
    return min(plan.cores, 4 * training.gpus) if on_gpus(plan) else plan.cores


def refuse_unfit_trainings(config: Config, plan: Plan) -> None:
    """Stop before the first job when a training cannot have its GPUs, or its processes cannot share its batch.

    Raises:
        UserError: one line for each such training.
    """
    problems: list[str] = []
    for name, training in config.trainings.items():
        wanted = training_gpus(plan, training)
        if wanted > plan.tokens:
            said = f"{count(wanted, 'GPU')} (gpus {training.gpus} × nodes {training.nodes})"
            problems.append(
                f"trainings.{name} takes {said}, and there are {count(plan.tokens, 'GPU token')}; lower gpus (the "
                "effective batch stays), or use a larger machine"
            )
        if training.nodes > 1 and not plan.cluster:
            problems.append(
                f"trainings.{name}.nodes is {training.nodes}, and this is one machine; use 1 (docs/training.md)"
            )
        processes = training.gpus * training.nodes if on_gpus(plan) else training.processes * training.nodes
        try:
            Effective.of(training, processes)
        except UserError as error:
            problems.append(f"trainings.{name}: {error}")
    if problems:
        raise UserError("\n".join(problems))
