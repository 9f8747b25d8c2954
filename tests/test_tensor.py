"""Facts about tensor parallel: a model cut over two processes gives the answers of the whole one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import countdown
import pytest
from conftest import ROOT, wait_until

from gristmill.config.schema import ModelConfig
from gristmill.engines.ranks import RankGone, Ranks, why_not
from gristmill.files import read_json, write_bytes

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from gristmill.config.schema import ModelConfig
from gristmill.engines.continuous.engine import ContinuousEngine
from gristmill.errors import UserError
from gristmill.types import Completion, Message, Request, Sampling

folder, ranks, asked = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
model = ModelConfig.model_validate({"source": str(folder), "dtype": "float32", "engine": "continuous"})
engine = ContinuousEngine(folder, model, 1024, False, lambda text: print(text, file=sys.stderr, flush=True), ranks)
try:
    for settings in asked["samplings"]:
        rows = [Request(name, 0, "", (Message(role="user", content=text),), Sampling(**settings))
                for name, text in asked["prompts"].items()]
        for outcome in engine.generate(rows):
            print(json.dumps([outcome.id, outcome.text]), flush=True)
except UserError as error:
    print(json.dumps(["error", str(error)]), flush=True)
    raise SystemExit(1)
finally:
    engine.close()
"""
ITEMS = countdown.items(countdown.Lengths(20, 20, 0.6, 60).draw(12, seed=0), countdown.SHAPES["tiny"].vocabulary, 1)
GREEDY, WARM = {"max_new_tokens": 80}, {"max_new_tokens": 10, "temperature": 6.0, "seed": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return countdown.make_model(tmp_path_factory.mktemp("countdown"), countdown.SHAPES["tiny"])


def start(folder: Path, ranks: int, samplings: list[dict[str, Any]]) -> subprocess.Popen[str]:
    asked = {"samplings": samplings, "prompts": {item.id: item.prompt for item in ITEMS}}
    library = os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(ranks), json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": library, "OMP_NUM_THREADS": "1"},
    )


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that it started as ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(parent) == process.pid and b"gristmill.engines.continuous.follower" in command:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[int, list[list[str]]]:
    """What one process and two processes say, greedy and sampled."""
    found = {}
    for ranks in (1, 2):
        process = start(folder, ranks, [GREEDY, WARM])
        out, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
        found[ranks] = sorted(json.loads(line) for line in out.splitlines())
    return found


@pytest.mark.slow
@pytest.mark.model
def test_two_processes_give_the_answers_of_one_greedy_and_sampled(answers: dict[int, list[list[str]]]) -> None:
    assert answers[2] == answers[1]
    assert {item.id: item.answer for item in ITEMS}.items() <= {(name, text) for name, text in answers[2]}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_the_ranks_end_with_a_job_that_is_killed(folder: Path) -> None:
    process = start(folder, 2, [GREEDY] * 50)
    assert process.stdout is not None
    process.stdout.readline()
    (rank,) = ranks_of(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not Path(f"/proc/{rank}").exists() or "Z" in Path(f"/proc/{rank}/stat").read_text().split()[2])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_rank_that_dies_ends_the_job_with_one_line(folder: Path) -> None:
    process = start(folder, 2, [GREEDY] * 50)
    assert process.stdout is not None
    process.stdout.readline()
    (rank,) = ranks_of(process)
    os.kill(rank, signal.SIGKILL)
    begun = time.monotonic()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    name, said = json.loads(out.splitlines()[-1])
    assert (name, "run again to go on" in said) == ("error", True)
    assert time.monotonic() - begun < 100


def test_a_rank_that_is_gone_before_a_session_is_one_line() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE)
    process.wait()
    ranks = object.__new__(Ranks)
    ranks._processes = [process]
    with pytest.raises(RankGone, match=r"cannot go on: the process of rank 1 ended with status 3; .* run again"):
        ranks.tell({"rows": 1})


@pytest.fixture
def described(tmp_path: Path) -> Iterator[Any]:
    def write(**changes: Any) -> Path:
        plain = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
        write_bytes(str(tmp_path / "config.json"), json.dumps(plain | changes).encode())
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("config", "settings", "ranks", "reason"),
    [
        ({}, {}, 4, None),
        ({}, {}, 8, "8 heads and 4 key-value heads do not divide by 8 GPUs"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, {}, 2, "9 heads and 3 key-value heads do not divide"),
        ({"model_type": "gpt2"}, {}, 2, "transformers has no plan to cut gpt2 models"),
        ({}, {"quantization": "4bit"}, 2, "a quantized model is not cut"),
        ({}, {"max_memory": {"0": "10GiB"}}, 2, "place whole layers"),
    ],
)
def test_what_cannot_be_cut_is_told_before_it_is_loaded(
    described: Any, config: dict[str, Any], settings: dict[str, Any], ranks: int, reason: str | None
) -> None:
    folder = described(**config)
    assert read_json(folder / "config.json")["hidden_size"] == 64
    said = why_not(folder, ModelConfig.model_validate({"source": str(folder), **settings}), ranks)
    assert (said is None) == (reason is None)
    assert (reason or "") in (said or "")
