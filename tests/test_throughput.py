"""Facts about benchmarks/throughput.py: the countdown model, the workload, the floor, and ways that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import countdown
import pipeline_rates
import pytest
import throughput
import ways
from children import Child, Result
from conftest import ROOT
from countdown import CHAIN_END, END, MOST, SHAPES, Lengths
from floor import Machine, floor
from workload import Work, asked, batches

from gristmill.config.schema import ModelConfig
from gristmill.engines.static.engine import StaticEngine
from gristmill.types import Completion, Message, Request, Sampling

SHORT = Lengths(prompt_median=20, answer_median=15)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return countdown.make_model(tmp_path_factory.mktemp("tiny"), SHAPES["tiny"])


@pytest.fixture(scope="module")
def generate(tiny: Path) -> ways.Generate:
    return ways.Generate(spec(tiny, "generate"))


def spec(folder: Path, kind: str) -> ways.Spec:
    return ways.Spec(kind, str(folder), Work("tiny", 6, lengths=SHORT), False, "float32")


def result(way: str, **last: Any) -> Result:
    return Result(way, "ok", passes=[{"turn": 0, "complete": True, "tokens_per_second": None, **last}])


def test_lengths_are_uneven_in_the_files_order_and_the_same_for_a_seed() -> None:
    drawn = Lengths().draw(20_000, 1)
    prompts, answers = ([pair[place] for pair in drawn] for place in (0, 1))
    assert sorted(prompts)[10_000] == pytest.approx(180, rel=0.03)
    assert sorted(answers)[10_000] == pytest.approx(160, rel=0.03)
    assert (max(prompts), max(answers)) == (1024, 1024)
    shortest = Lengths(1, 1).draw(1000, 1)
    assert (min(prompt for prompt, _ in shortest), min(answer for _, answer in shortest)) == (4, 1)
    assert prompts != sorted(prompts)
    assert drawn == Lengths().draw(20_000, 1)
    assert drawn != Lengths().draw(20_000, 2)


def test_a_second_pass_asks_for_the_same_lengths_with_other_words() -> None:
    first, second = (asked(Work("8B", 50), turn) for turn in (0, 1))
    texts = [[each.request.messages[0]["content"] for each in one] for one in (first, second)]
    assert [each.answer for each in first] == [each.answer for each in second]
    assert [len(text.split()) for text in texts[0]] == [len(text.split()) for text in texts[1]]
    assert set(texts[0]).isdisjoint(texts[1])
    for each, text, (prompt_tokens, answer_tokens) in zip(first, texts[0], Work("8B", 50).drawn(), strict=True):
        assert len(text.split()) == prompt_tokens
        assert text.split()[-1] == f"c{answer_tokens + 1}"
        assert each.is_right(" ".join(f"c{n}" for n in range(answer_tokens, 0, -1)), answer_tokens)
        assert not each.is_right(each.answer, answer_tokens + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_answer_of_the_countdown_is_right_under_the_static_engine(tiny: Path, dtype: str) -> None:
    config = ModelConfig.model_validate({"source": str(tiny), "dtype": dtype})
    engine = StaticEngine(tiny, config, countdown.CONTEXT_TOKENS, on_gpu=False, log=print)
    lengths = [*SHORT.draw(9, 3), (5, 1), (5, MOST), (200, 2)]
    items = countdown.items(lengths, SHAPES["tiny"].vocabulary, 7)
    sampling = Sampling(max_new_tokens=MOST)
    requests = [Request(item.id, 0, "", (Message(role="user", content=item.prompt),), sampling) for item in items]
    found = {one.id: one for one in engine.generate(requests) if isinstance(one, Completion)}
    for item, (prompt_tokens, answer_tokens) in zip(items, lengths, strict=True):
        one = found[item.id]
        assert (one.prompt_tokens, one.completion_tokens) == (prompt_tokens, answer_tokens)
        assert one.text == item.answer
        assert one.finish_reason == ("length" if answer_tokens == MOST else "stop")


@pytest.mark.parametrize("shape", ["tiny", "deep"])
def test_the_next_token_wins_by_a_wide_margin_in_bfloat16_also_after_32_layers(tmp_path: Path, shape: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    countdown.make_model(tmp_path, SHAPES[shape], seed=5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    chain = torch.arange(END + 1, CHAIN_END)  # c1 … c1025
    filler = torch.randint(CHAIN_END, SHAPES[shape].vocabulary, (len(chain), 3))
    with torch.inference_mode():
        logits = model(torch.cat([filler, chain[:, None]], 1)).logits[:, -1].float()  # (1025, V)
    best, second = logits.topk(2).values.T
    assert torch.equal(logits.argmax(-1), chain - 1)
    assert (best - second).min() > 2  # a tenth of a logit is what bfloat16 loses here


def test_the_weights_are_dense_and_the_same_for_a_seed() -> None:
    first, again, other = (dict(countdown.tensors_of(SHAPES["tiny"], seed, "cpu")) for seed in (0, 0, 1))
    for name, tensor in first.items():
        assert (tensor != 0).float().mean() > 0.99, name
        assert tensor.equal(again[name])
        assert tensor.equal(other[name]) == name.endswith("norm.weight")
    layers = [first[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)]
    assert not layers[0].equal(layers[1])


def test_the_floor_is_what_the_hand_computes() -> None:
    shape = countdown.Shape(hidden=4, intermediate=8, layers=2, heads=2, kv_heads=1, vocabulary=10)
    # a layer: q and o 16 each, k and v 8 each, three of 32 = 144; two layers 288, the head 40
    assert (shape.kv, shape.layer_parameters, shape.head_parameters) == (2, 288, 40)
    machine = Machine(bytes_per_second=1000.0, operations_per_second=100_000.0, memory_bytes=816)
    found = floor([(3, 2), (5, 4)], 4, shape, machine)
    # weights 2 × 328 = 656 bytes; a token's keys and values 2 × 2 × 2 layers × 2 = 16; room (816 − 656) / 16
    assert found.room_tokens == 10
    # steps 2 and 3 (the fourth token's end is cut off); contexts 4 + 5 and 6 + 7 + 8: 30 over 10 a step
    assert (found.steps, found.weight_bytes, found.cache_bytes) == (3, 3 * 656, 30 * 16)
    # prompts 8 × 576 + pairs (6 + 15) × 4 × 2 × 4 + heads 2 × 80; answers 5 × (576 + 80) + 30 × 32
    assert found.operations == 4608 + 672 + 160 + 3280 + 960
    assert found.prompt_s == pytest.approx(5440 / 100_000)
    assert (found.bytes_s, found.operations_s) == (pytest.approx(2.448), pytest.approx(0.0968))
    assert (found.seconds, found.tokens_per_second) == (pytest.approx(2.448), pytest.approx(6 / 2.448))


def test_the_floor_of_little_memory_has_more_steps_and_two_cards_halve_the_times() -> None:
    shape = countdown.Shape(4, 8, 2, 2, 1, 10)
    crowded = floor([(3, 2), (5, 4)], 4, shape, Machine(1000.0, 100_000.0, 656 + 4 * 16))
    assert crowded.steps == 8  # 30 contexts, 4 at a time
    with pytest.raises(ValueError, match="no room"):
        floor([(3, 2)], 4, shape, Machine(1000.0, 100_000.0, 600))
    one, two = (floor([(3, 2), (5, 4)], 4, shape, Machine(1000.0, 1000.0, 10_000, cards)) for cards in (1, 2))
    assert one.operations_s == 2 * two.operations_s


def test_batches_are_in_the_files_order_or_longest_first() -> None:
    assert batches(5, 2, [3, 9, 1, 7, 5], longest_first=False) == [[0, 1], [2, 3], [4]]
    assert batches(5, 2, [3, 9, 1, 7, 5], longest_first=True) == [[1, 3], [4, 0], [2]]


def test_a_sample_tells_the_rate_of_the_whole_file_from_its_steps() -> None:
    requests = asked(Work("tiny", 4, max_new_tokens=50, lengths=SHORT), 0)
    known = [each.answer_tokens or 0 for each in requests]
    steps = sum(min(50, max(known[place] + 1 for place in pair)) for pair in ([0, 1], [2, 3]))
    found = ways._whole_rate(requests, [[0, 1], [2, 3]], 50, 0.1)
    assert found == {"whole_steps": steps, "whole_tokens_per_second": pytest.approx(sum(known) / (0.1 * steps))}
    assert ways._whole_rate(requests, [[0, 1], [2, 3]], 50, None) == {}


def test_only_finished_batches_of_a_sample_count(generate: ways.Generate, tiny: Path) -> None:
    requests = asked(spec(tiny, "generate").work, 0)
    whole = ways.summary(generate.run("generate-4-sorted-nocudnn", requests, 60), requests, 0)
    assert (whole["right"], whole["wrong"], whole["complete"]) == (6, 0, True)
    assert whole["tokens"] == sum(each.answer_tokens or 0 for each in requests)
    cut = ways.summary(generate.run("generate-4", requests, 1e-9), requests, 0)
    assert (cut["answered"], cut["tokens_per_second"], cut["complete"]) == (0, None, False)


def test_a_wrong_answer_is_counted_and_shown_and_is_not_useful(tiny: Path) -> None:
    requests = asked(spec(tiny, "generate").work, 0)
    answers = {each.request.id: (str(each.answer), each.answer_tokens or 0) for each in requests}
    spoilt: dict[str, tuple[str, int] | None] = {**answers, "r0": ("c9 c9", 2), "r1": None}
    found = ways.summary(ways.Pass(2.0, spoilt, True), requests, 0)
    assert (found["right"], found["wrong"], found["failed"]) == (4, 1, 1)
    assert found["tokens"] == sum(tokens for name, (_, tokens) in answers.items() if name not in {"r0", "r1"})
    assert (found["first_wrong"]["id"], found["first_wrong"]["text"]) == ("r0", "c9 c9")


def test_ratios_take_the_larger_rate_of_a_sample_and_the_median_of_rounds() -> None:
    sample = result("generate-4", complete=False, tokens_per_second=40.0, whole_tokens_per_second=50.0)
    bare, mine = result("bare-vllm", tokens_per_second=100.0), result("vllm", tokens_per_second=90.0)
    bare.passes += [{**bare.passes[0], "turn": 1, "tokens_per_second": 200.0}]
    mine.passes += [{**mine.passes[0], "turn": 1, "tokens_per_second": 200.0}]
    found = throughput.ratios(mine, [sample, bare, mine], {"floor": {"tokens_per_second": 400.0}})
    assert found == {"over_batch_4": 4.0, "of_bare": pytest.approx(0.95), "of_floor": 0.5}
    runs = [
        {"reason": None, "workers": count, "tokens_per_second": rate, "wall_s": wall_s}
        for count, rate, wall_s in ((1, 80.0, 30.0), (2, 158.0, 20.0))
    ]
    compared = pipeline_rates.compare(runs, [mine])
    assert compared == {"generating_ratio": 1.975, "end_to_end_ratio": 1.5, "one_worker_of_vllm": pytest.approx(8 / 9)}


def test_ways_of_one_process_stand_together_and_a_library_follows_its_engine() -> None:
    found = throughput.jobs(["generate-1", "bare-vllm", "generate-4", "bare-continuous"], ["vllm", "static"])
    assert found == [["generate-1", "generate-4"], ["vllm"], ["bare-vllm"], ["static"], ["bare-continuous"]]


@pytest.mark.slow
def test_a_run_keeps_what_there_is_when_other_ways_crash_or_are_not_there(tiny: Path, tmp_path: Path) -> None:
    crash = tmp_path / "python-that-crashes"
    crash.write_text("#!/bin/sh\necho 'no such kernel' >&2\nexit 3\n")
    crash.chmod(0o755)
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks/throughput.py"), "engines", "--shape", "tiny", "--requests", "6"]
    command += ["--prompt-median", "20", "--answer-median", "15", "--model-folder", str(tiny), "--passes", "2"]
    command += ["--engines", "nonesuch,static", "--bare", "generate-4,bare-vllm", "--vllm-python", str(crash)]
    command += ["--out", str(out), "--logs", str(tmp_path / "logs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    ways_by_name = {one["way"]: one for one in report["ways"]}
    assert {name: one["status"] for name, one in ways_by_name.items()} == {
        "generate-4": "ok",
        "nonesuch": "not available",
        "static": "ok",
        "bare-vllm": "failed",
    }
    assert ways_by_name["bare-vllm"]["reason"] == "the process ended with 3: no such kernel"
    assert "engine" in ways_by_name["nonesuch"]["reason"]
    assert [(one["right"], one["complete"]) for one in ways_by_name["static"]["passes"]] == [(6, True), (6, True)]
    assert ways_by_name["static"]["ratios"]["over_batch_4"] > 0
    assert ways_by_name["static"]["about"]["packages"]["torch"]
    assert report["workload"]["answer_tokens"] == ways_by_name["generate-4"]["passes"][0]["tokens"]
    assert report["floor"]["tokens_per_second"] > 0
    assert {"command", "date", "cards", "driver", "settings"} <= report.keys()
    table = done.stdout.splitlines()
    assert table[0].startswith("way ")
    assert [line.split()[0] for line in table[1:5]] == ["generate-4", "nonesuch", "static", "bare-vllm"]
    assert table[-1] == f"written to {out}"


def test_a_way_that_is_too_late_is_killed_and_says_so(tmp_path: Path) -> None:
    slow = tmp_path / "python-that-sleeps"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    child = Child(spec(tmp_path, "bare-vllm"), str(slow), {}, tmp_path / "log")
    found = Result("bare-vllm")
    try:
        assert not found.note(child.ready(0.5))
    finally:
        child.close()
    assert (found.status, found.reason) == ("failed", "loading took longer than 0.5 s")


def test_a_pass_that_is_too_late_is_stopped_and_what_was_answered_stands(tiny: Path, tmp_path: Path) -> None:
    one = ways.Spec("static", str(tiny), Work("tiny", 6, lengths=SHORT), False, "float32", {"max_batch_rows": 2})
    child = Child(one, sys.executable, {"OMP_NUM_THREADS": "1"}, tmp_path / "log")
    found = Result("static")
    try:
        assert child.ready(120)["event"] == "loaded"
        assert not found.note(child.run("static", 0, 0.0, 60))
    finally:
        child.close()
    assert (found.status, found.passes[0]["right"], found.passes[0]["complete"]) == ("partial", 2, False)


@pytest.mark.slow
def test_the_real_workflow_answers_the_countdowns_and_its_rates_come_from_the_manifest(
    tiny: Path, tmp_path: Path
) -> None:
    work = Work("tiny", 8, lengths=SHORT)
    model = {"source": str(tiny), "dtype": "float32", "engine": "static"}
    found = pipeline_rates.run(2, work, model, 300, tmp_path)
    assert found["reason"] is None, found["reason"]
    assert (found["workers"], found["right"], found["requests"], found["engine"]) == (2, 8, 8, ["static"])
    assert found["tokens"] == sum(answer for _, answer in work.drawn()) == sum(found["worker_tokens"])
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / max(found["generate_s"]))
    refused = pipeline_rates.run(1, work, {**model, "source": str(tmp_path / "nothing")}, 300, tmp_path)
    assert "config error" in refused["reason"]
    assert "config error" in pipeline_rates.table([refused], {})
