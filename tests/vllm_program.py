"""Run by test_vllm.py in an environment with vllm: what the real engine does, as one line of JSON. Starts it twice.

python tests/vllm_program.py MODEL_FOLDER BROKEN_FOLDER
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gristmill.config.schema import ModelConfig
from gristmill.engines import open_engine
from gristmill.engines.vllm import engine as vllm
from gristmill.engines.vllm.engine import VllmEngine
from gristmill.engines.vllm.limits import why_not
from gristmill.errors import UserError
from gristmill.types import Message, Outcome, Request, Sampling

QUESTIONS = (
    "What is the capital of France?",
    "Name a color.",
    "What is 2 + 3? Answer with one number, please, and do not explain how you got it.",
    "Say hello.",
    "Which planet do we live on? Think about the one that has oceans, cities, and all the people you have ever met.",
    "Tell me a long story about a fox.",
    "Is water wet?",
    "Write one line about the sea. " * 12,
    "Yes or no?",
    "List three fruits.",
    "What is the opposite of cold?",
    "Who wrote Hamlet?",
)
GREEDY = Sampling(max_new_tokens=40)
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
    "required": ["capital", "sure"],
    "additionalProperties": False,
}
WARM = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.95, top_k=50, seed=1)


def ask(texts: Sequence[str], sampling: Sampling) -> list[Request]:
    return [Request(f"r{n}", 0, "", (Message(role="user", content=text),), sampling) for n, text in enumerate(texts)]


def main(folder: Path, broken: Path) -> dict[str, Any]:
    config = {"source": "here", "dtype": "float32", "max_batch_rows": 4, "engine": "auto"}
    model = ModelConfig.model_validate(config)
    engine, why = opened(folder, model)
    facts: dict[str, Any] = {"why": why, "device_map": engine.device_map, "dtype": engine.dtype}
    facts["prompt_tokens"] = engine.prompt_tokens(ask(QUESTIONS, GREEDY))
    facts["greedy"] = timed(engine, ask(QUESTIONS, GREEDY))
    facts["stop"] = timed(engine, ask(QUESTIONS[:1], Sampling(max_new_tokens=16, stop=(" is",))))
    facts["warm"] = timed(engine, ask(QUESTIONS, WARM))
    facts["warm_alone"] = timed(engine, ask(QUESTIONS, WARM)[3:4])
    facts["warm_other"] = timed(engine, ask(QUESTIONS, Sampling(**{**asdict(WARM), "seed": 2})))
    facts["cut"] = timed(engine, ask(QUESTIONS[:1], Sampling(max_new_tokens=2)))
    facts["window"] = most_at_once(engine, ask(QUESTIONS * 2, Sampling(max_new_tokens=24)))
    schema = Sampling(max_new_tokens=80, json_schema=json.dumps(SCHEMA))
    facts["schema"] = timed(engine, ask(QUESTIONS[:4], schema))
    facts["refused"] = [
        refusal(engine, ask(QUESTIONS[:1], Sampling(max_new_tokens=4, json_schema='{"type": "nonsense"}'))),
        refusal(engine, [replace(ask(QUESTIONS[:1], GREEDY)[0], labels=("A", "B"))]),
    ]
    facts["slow"] = timed(
        with_settings(engine, timeout_seconds=0.3), ask(QUESTIONS[5:6], Sampling(max_new_tokens=2000))
    )
    facts["skipped"] = timed(with_settings(engine, on_overflow="skip", context_tokens=50), ask(QUESTIONS, GREEDY))
    engine.close()
    facts["reasons"] = {name: why_not(folder, **asked) for name, asked in choices(model).items()}
    second, _ = opened(broken, model)
    facts["broken"] = timed(second, ask(QUESTIONS, GREEDY))
    facts["stopped"] = stopped(second, ask(QUESTIONS[:11], GREEDY))
    second.close()
    return facts


def opened(folder: Path, model: ModelConfig) -> tuple[VllmEngine, str]:
    engine, why = open_engine(model, {"folder": str(folder), "context_tokens": 8192}, False, print)
    assert isinstance(engine, VllmEngine)
    return engine, why


def choices(model: ModelConfig) -> dict[str, dict[str, Any]]:
    return {
        "gpu": {"model": model, "gpus": 1},
        "4bit": {"model": model.model_copy(update={"quantization": "4bit"}), "gpus": 0},
    }


def timed(engine: VllmEngine, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """The outcomes in the order they came, with the seconds since the start."""
    start = time.monotonic()
    return [described(outcome) | {"after_s": time.monotonic() - start} for outcome in engine.generate(requests)]


def described(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome)


def refusal(engine: VllmEngine, requests: Sequence[Request]) -> str:
    """What the engine says when it does not take the requests."""
    try:
        return f"it answered {list(engine.generate(requests))}"
    except UserError as error:
        return str(error)


def with_settings(engine: VllmEngine, context_tokens: int | None = None, **settings: Any) -> VllmEngine:
    """The same loaded engine under other settings."""
    other = object.__new__(VllmEngine)
    other.__dict__ = {**engine.__dict__, "_config": engine._config.model_copy(update=settings)}
    other._context_tokens = context_tokens or engine._context_tokens
    return other


def most_at_once(engine: VllmEngine, requests: Sequence[Request]) -> int:
    """The most rows that vLLM had at a time, when they are fed one by one."""
    vllm.FEED_ROWS, before = 1, vllm.FEED_ROWS
    most, step = 0, engine._engine.step

    def counted() -> Any:
        nonlocal most
        most = max(most, engine._engine.get_num_unfinished_requests())
        return step()

    engine._engine.step = counted
    assert len(list(engine.generate(requests))) == len(requests)
    engine._engine.step, vllm.FEED_ROWS = step, before
    return most


def stopped(engine: VllmEngine, requests: Sequence[Request]) -> list[str]:
    """The rows that are answered when a signal comes with the first of them: those in flight."""
    found = []
    for outcome in engine.generate(requests):
        found.append(outcome.id)
        engine.stop()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
