"""Facts about whole trainings on the CPU: what stays the same, and what comes out.

One begins as scripts/train.py begins it, one with torchrun; the others, whose processes are forked, equal them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import GPT2, STILL, Made, make, texts

from gristmill.files import read_json
from gristmill.training.models import build, tokenizer_of
from gristmill.weights import fingerprint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Texts of unlike length, each a row of its own, on one process and in one micro-batch a step."""
    made = make(tmp_path_factory.mktemp("one"), packing=False, micro_batch_rows=8, deterministic=True)
    made.done()
    return made


def weights(made: Made) -> dict[str, torch.Tensor]:
    return load_file(made.model / "model.safetensors")


def same_training(one: Made, other: Made) -> None:
    """The same but for rounding: losses and gradients to 1e-6, and the weights that Adam makes of them."""
    for key, tolerance in (("loss", 1e-6), ("gradient_norm", 1e-5)):
        pairs = zip(one.steps(), other.steps(), strict=True)
        assert [line[key] for line, _ in pairs] == pytest.approx([line[key] for line in other.steps()], rel=tolerance)
    theirs = weights(other)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("placement", "start"),
    [
        ({"micro_batch_rows": 1}, Made.forked),
        ({"processes": 2, "micro_batch_rows": 4}, Made.forked),
        ({"processes": 2, "micro_batch_rows": 1}, Made.done),
    ],
    ids=["accumulated", "two processes", "both"],
)
def test_the_effective_batch_alone_decides(
    tmp_path: Path, one: Made, placement: dict[str, Any], start: Callable[..., str]
) -> None:
    made = make(tmp_path, packing=False)
    said = start(made, **placement)
    processes, micro = placement.get("processes", 1), placement["micro_batch_rows"]
    batches = 8 // processes // micro
    plural = ("es" if processes > 1 else "", "s" if micro > 1 else "", "es" if batches > 1 else "")
    factors = f"{processes} process{plural[0]} × {micro} row{plural[1]} × {batches} micro-batch{plural[2]}"
    assert f"8 rows a step = {factors}" in said
    assert "Warning" not in said
    same_training(made, one)


@pytest.mark.parametrize("processes", [1, 2])
def test_sharding_changes_rounding_only(tmp_path: Path, one: Made, processes: int) -> None:
    made = make(tmp_path, packing=False)
    made.forked(processes=processes, micro_batch_rows=2, sharding="fsdp")
    same_training(made, one)


def test_another_number_of_processes_goes_on_from_a_checkpoint(tmp_path: Path, one: Made) -> None:
    made = make(tmp_path, packing=False, micro_batch_rows=2)
    made.forked(processes=2, checkpoint_every_steps=3)
    for path in made.work.glob("checkpoints/*/step-00000006"):
        path.rename(path.with_name("moved-away"))
    said = made.forked(processes=1)
    assert "going on from step 3" in said
    assert "now 8 rows a step = 1 process × 2 rows × 4 micro-batches" in said
    same_training(made, one)


def test_a_sharded_checkpoint_goes_on_without_sharding(tmp_path: Path, one: Made) -> None:
    made = make(tmp_path, packing=False, micro_batch_rows=2)
    made.forked(processes=2, sharding="fsdp", checkpoint_every_steps=3)
    for path in made.work.glob("checkpoints/*/step-00000006"):
        path.rename(path.with_name("moved-away"))
    assert "going on from step 3" in made.forked(processes=1)
    same_training(made, one)


def test_processes_that_cannot_share_the_batch_are_refused_with_the_factors(tmp_path: Path) -> None:
    found = make(tmp_path).run_forked(processes=3)
    assert found.returncode == 2
    assert "batch_rows=8 is no multiple of 6 = 3 processes × micro_batch_rows 2" in found.stdout


def test_a_changed_recipe_starts_anew_and_the_old_one_goes_on_with_its_own_curve(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"evaluation": {"held_out_ratio": 0.2}, "checkpoint_every_steps": 3}
    make(tmp_path, **recipe).forked()
    before = make(tmp_path, **recipe).steps()
    (last,) = (tmp_path / "work").glob("checkpoints/*/step-00000006")
    assert "going on from" not in make(tmp_path, **recipe, learning_rate=0.02).forked()
    other = make(tmp_path, **recipe).steps()
    assert [line["step"] for line in other] == [line["step"] for line in before] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert [line.get("loss") for line in other] != [line.get("loss") for line in before]
    last.rename(last.with_name("moved-away"))
    assert "going on from step 3" in make(tmp_path, **recipe).forked()
    again = make(tmp_path, **recipe).steps()
    assert [line.get("loss") for line in again] == [line.get("loss") for line in before]


def test_the_same_training_leaves_the_same_model_folder(tmp_path: Path, one: Made) -> None:
    again = make(tmp_path, packing=False, micro_batch_rows=8, deterministic=True)
    again.forked()
    assert fingerprint(again.model) == fingerprint(one.model)
    assert weights(again).keys() == weights(one).keys()


def test_checkpointed_activations_give_the_same_training(tmp_path: Path, one: Made) -> None:
    made = make(tmp_path, packing=False, micro_batch_rows=8, gradient_checkpointing=True)
    made.forked()
    same_training(made, one)


def test_dropout_is_resumed_too(tmp_path: Path) -> None:
    """GPT-2 has dropout: the random states of two processes are in the checkpoint."""
    recipe: dict[str, Any] = {"architecture": GPT2, "processes": 2, "checkpoint_every_steps": 3}
    whole = make(tmp_path / "whole", **recipe)
    whole.forked()
    made = make(tmp_path / "made", **recipe)
    made.forked()
    for path in made.work.glob("checkpoints/*/step-00000006"):
        path.rename(path.with_name("moved-away"))
    assert "going on from step 3" in made.forked()
    assert made.losses() == whole.losses()
    assert (made.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()


def test_mixed_precision_keeps_float32_weights_and_saves_its_own_dtype(tmp_path: Path) -> None:
    made = make(tmp_path, mixed_precision="bf16", steps=12)
    made.forked()
    assert {tensor.dtype for tensor in weights(made).values()} == {torch.bfloat16}
    assert made.losses()[-1] < made.losses()[0]


def test_a_sharded_model_computes_in_bf16_too(tmp_path: Path) -> None:
    made = make(tmp_path, mixed_precision="bf16", steps=12, processes=2, evaluation={"held_out_ratio": 0.2})
    made.forked(sharding="fsdp")
    assert {tensor.dtype for tensor in weights(made).values()} == {torch.bfloat16}
    assert made.losses()[-1] < made.losses()[0]
    first, last = (line["evaluation_loss"] for line in made.steps() if "evaluation_loss" in line)
    assert last < first


def test_sharded_adapters_are_the_same_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    recipe: dict[str, Any] = {"architecture": None, "tokenizer": None, "base": "words", "lora": {"r": 4}}
    plain, sharded = (make(tmp_path / name, **recipe) for name in ("plain", "sharded"))
    plain.forked()
    sharded.forked(processes=2, sharding="fsdp")
    same_training(sharded, plain)


def test_a_sharded_model_with_tied_weights_and_packed_rows_is_the_same(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"architecture": {**GPT2, **STILL}, "gradient_checkpointing": True}
    plain, sharded = (make(tmp_path / name, **recipe) for name in ("plain", "sharded"))
    plain.forked(micro_batch_rows=8)
    sharded.forked(processes=2, sharding="fsdp")
    same_training(sharded, plain)


def test_a_model_that_waits_for_its_weights_is_the_same_but_takes_no_memory(tmp_path: Path) -> None:
    wide = {**GPT2, "n_embd": 2048, "n_layer": 4, "n_head": 4}
    made = make(tmp_path, architecture=wide)
    recipe, model, weights = made.config.trainings["t"], made.config.models["words"], made.weights()
    tokenizer = tokenizer_of(weights, model)
    before = _resident_bytes()
    empty = build(recipe, model, weights, tokenizer, empty=True)
    taken = _resident_bytes() - before
    size = sum(parameter.numel() * parameter.element_size() for parameter in empty.parameters())
    assert size > 800_000_000
    assert taken < size / 8
    whole = build(recipe, model, weights, tokenizer)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in whole.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in empty.state_dict().items()} == shapes
    assert empty.lm_head.weight is empty.transformer.wte.weight
    assert not [name for name, tensor in (*empty.named_parameters(), *empty.named_buffers()) if tensor.is_meta]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_fp16_without_a_gpu_is_refused(tmp_path: Path) -> None:
    found = make(tmp_path, mixed_precision="fp16").run_forked()
    assert found.returncode == 2
    assert "mixed_precision fp16 scales losses for GPUs, and there is none here" in found.stdout


def test_adapters_alone_are_trained_and_merged_into_a_plain_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from torch.distributed.checkpoint import FileSystemReader
    from transformers import AutoModelForCausalLM

    recipe: dict[str, Any] = {
        "architecture": None,
        "tokenizer": None,
        "base": "words",
        "lora": {"r": 4, "dropout": 0.1},
    }
    recipe |= {"checkpoint_every_steps": 3, "objective": "sft", "text_field": None, "prompt": "ask"}
    whole, made = (make(tmp_path / name, **recipe) for name in ("whole", "made"))
    whole.forked()
    made.forked()
    (kept,) = made.work.glob("checkpoints/*/step-00000003")
    names = FileSystemReader(kept / "tensors").read_metadata().state_dict_metadata
    assert {"lora_" in name for name in names if "param_groups" not in name} == {True}, "the base is not in it"
    for path in made.work.glob("checkpoints/*/step-00000006"):
        path.rename(path.with_name("moved-away"))
    assert "going on from step 3" in made.forked()
    assert (made.model / "model.safetensors").read_bytes() == (whole.model / "model.safetensors").read_bytes()
    metrics = made.metrics()
    assert 0 < metrics["trained_parameters"] < metrics["parameters"]
    base = load_file(made.folder / "words" / "model.safetensors")
    trained = weights(made)
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if "_proj" in name}
    assert AutoModelForCausalLM.from_pretrained(made.model).config.model_type == "llama"
    assert (made.model / "adapter" / "adapter_model.safetensors").exists()


def test_fine_tuning_starts_from_the_bases_weights_and_learns_the_answers(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"objective": "sft", "text_field": None, "prompt": "ask"}
    recipe |= {"architecture": None, "tokenizer": None, "base": "words", "steps": 30}
    made = make(tmp_path, **recipe, evaluation={"held_out_ratio": 0.2, "every_steps": 15})
    made.forked()
    measured = [line["evaluation_loss"] for line in made.steps() if "evaluation_loss" in line]
    assert [line["step"] for line in made.steps() if "evaluation_loss" in line] == [0, 15, 30]
    assert measured[2] < measured[0] - 1


def test_early_stopping_counts_from_the_first_step_and_no_evaluation_that_is_not_finite() -> None:
    from types import SimpleNamespace
    from typing import cast

    from gristmill.training.loop import Progress, Training

    recipe = SimpleNamespace(early_stopping=SimpleNamespace(min_improvement=0.0, patience=2))
    training = SimpleNamespace(recipe=recipe, progress=Progress())
    noted = []
    for step, loss in ((0, 1.0), (1, float("nan")), (2, 5.0), (3, 4.0), (4, 6.0)):
        training.progress.step = step
        noted.append(Training._note(cast(Training, training), loss))
    assert noted == [False, False, True, True, False]
    assert (training.progress.best_step, training.progress.evaluations_since_best) == (3, 1)


def test_early_stopping_keeps_the_best_step(tmp_path: Path) -> None:
    """A rate that is much too high after the warm-up: the evaluation falls, then rises."""
    recipe: dict[str, Any] = {"learning_rate": 1.5, "warmup_steps": 300, "steps": 300, "schedule": "constant"}
    recipe |= {"evaluation": {"held_out_ratio": 0.3, "every_steps": 2}, "early_stopping": {"patience": 3}}
    made = make(tmp_path, **recipe, max_grad_norm=None)
    made.forked()
    metrics = made.metrics()
    best = metrics["evaluation"]["best"]
    assert metrics["stopped_early"]
    assert metrics["result_of_step"] == best["step"] == metrics["steps"] - 6
    assert evaluated(made) == pytest.approx(best["evaluation_loss"], rel=1e-5)


def evaluated(made: Made) -> float:
    """The loss of the result on the held-out rows, measured here."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    from gristmill.training.data import IGNORED, TokenTexts, batch_of, held_out
    from gristmill.training.objectives import cross_entropy

    found = TokenTexts(made.folder / "data" / "training")
    model = AutoModelForCausalLM.from_pretrained(made.model)
    total, count = 0.0, 0
    for text in np.flatnonzero(held_out(found, 0.3, 0)):
        batch = batch_of(found, [[int(text)]], None)
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids).logits
        there = batch.targets != IGNORED
        total += float(cross_entropy(logits[there], batch.targets[there]).sum())
        count += batch.count
    return total / count


def test_what_is_said_of_a_training_is_in_its_files(tmp_path: Path) -> None:
    made = make(tmp_path, processes=2, evaluation={"held_out_ratio": 0.2}, keep_checkpoints=1)
    made.forked()
    metrics = made.metrics()
    assert metrics["batch"]["factors"] == "8 rows a step = 2 processes × 2 rows × 2 micro-batches"
    assert metrics["tokens"] == sum(line["tokens"] for line in made.steps() if "loss" in line)
    assert metrics["model_flops_utilization"] is None, "a CPU's peak is not known"
    assert [line["step"] for line in made.steps() if "loss" in line] == list(range(1, 7))
    card = (made.model / "README.md").read_text()
    assert "| effective batch | 8 rows a step = 2 processes × 2 rows × 2 micro-batches |" in card
    assert f"{metrics['parameters']:,} parameters" in card
    manifest = read_json(made.model / "training" / "manifest.json")
    assert manifest["spec"]["training"]["learning_rate"] == 0.01
    assert manifest["metrics"] == metrics
    assert len(list(made.work.glob("checkpoints/*/step-*"))) == 1


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    made = make(tmp_path)
    made.forked()
    events = accumulator.EventAccumulator(str(made.work / "tensorboard"))
    events.Reload()
    for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "memory_gib"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in made.steps()]


def test_a_longer_row_than_the_models_context_is_refused(tmp_path: Path) -> None:
    found = make(tmp_path, sequence_tokens=256).run_forked()
    assert found.returncode == 2
    assert "sequence_tokens=256, but the model reads 128 tokens" in found.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ({"model_type": "lama"}, "architecture.model_type 'lama' is none of transformers'"),
        ({"model_type": "gpt2", "n_layers": 2}, "architecture.n_layers is no key of a gpt2 config"),
        ({"model_type": "gpt2", "vocab_size": 7}, "architecture.vocab_size is 7, and the tokenizer has 50 tokens"),
    ],
)
def test_an_architecture_that_is_none_is_refused(tmp_path: Path, architecture: dict[str, Any], said: str) -> None:
    found = make(tmp_path, rows=texts(8), architecture=architecture).run_forked()
    assert found.returncode == 2
    assert said in found.stdout.strip().splitlines()[-1]
