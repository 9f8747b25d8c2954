"""What trainings refer to: models, datasets, prompts and logits that are there, and nothing made from itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping

from gristmill.config.schema import Config, TrainingConfig
from gristmill.config.training import TRAINED


def training_problems(config: Config) -> Iterator[str]:
    """One line for each name that is none, and for each circle."""
    for name, training in config.trainings.items():
        key = f"trainings.{name}"
        yield from _model_problems(config, key, training)
        named: list[tuple[str, str | None, Mapping[str, object]]]
        named = [("dataset", training.dataset, config.datasets), ("prompt", training.prompt, config.prompts)]
        named.append(("logits", training.logits, config.logits))
        if training.evaluation is not None:
            named.append(("evaluation.dataset", training.evaluation.dataset, config.datasets))
        for what, value, known in named:
            yield from _unknown(f"{key}.{what}", value, known)
        if training.prompt in config.prompts and config.prompts[training.prompt].turns is not None:
            yield f"{key}.prompt: {training.prompt} has turns, of which no reference is an answer; use one without"
    for name, model in config.models.items():
        if (made := made_by(model.source)) is not None:
            yield from _unknown(f"models.{name}.source", made, config.trainings)
    for name in config.trainings:
        if (circle := _circle(config, name)) is not None:
            yield f"trainings.{name} is made from itself ({circle}); name another base, tokenizer or teacher"


def made_by(source: str | None) -> str | None:
    """The training that a model's source names; None for other sources."""
    return source.removeprefix(TRAINED) if source is not None and source.startswith(TRAINED) else None


def _model_problems(config: Config, key: str, training: TrainingConfig) -> Iterable[str]:
    name = training.tokenizer_of()
    what = "tokenizer" if training.tokenizer is not None else "base"
    yield from _unknown(f"{key}.{what}", name, config.models)
    if name in config.models and (engine := config.models[name].engine) in ("echo", "endpoint"):
        yield f"{key}.{what}: {name} has engine {engine}, which has no weights here; name another model"


def _unknown(key: str, value: str | None, known: Mapping[str, object]) -> Iterable[str]:
    if value is not None and value not in known:
        near = difflib.get_close_matches(value, list(known), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
        yield f"{key}: {value!r} is not there; {hint}"


def _circle(config: Config, start: str) -> str | None:
    """The way from a training back to it: training → model → training → …"""
    seen: list[str] = []
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in config.trainings:
            continue
        seen.append(name)
        made = [training for training in _needed(config, name) if training is not None]
        if start in made:
            return " → ".join(dict.fromkeys([start, *seen]))
        waiting += made
    return None


def _needed(config: Config, name: str) -> list[str | None]:
    """The trainings whose results one needs."""
    training = config.trainings[name]
    models = [training.tokenizer_of()]
    if training.logits in config.logits:
        logits = config.logits[training.logits or ""]
        models.append(logits.model)
        models += [config.runs[logits.run].model] if logits.run in config.runs else []
    return [made_by(config.models[model].source) for model in models if model in config.models]
