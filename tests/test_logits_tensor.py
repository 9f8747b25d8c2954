"""Facts about a teacher that is cut over two processes: the numbers of the whole one, and what a lost rank does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, wait_until
from tiny_teacher import config_of, described, make_teacher

from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.logits.worker import open_teacher

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from gristmill.config.schema import ModelConfig
from gristmill.errors import UserError
from gristmill.logits.scoring import TransformersTeacher
from gristmill.logits.texts import Window, WindowId

folder, ranks, passes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
settings = {"source": str(folder), "engine": "auto", "dtype": "float32", "parallel": "tensor", "max_batch_rows": 4}
said = lambda text: print(text, file=sys.stderr, flush=True)
teacher = TransformersTeacher(folder, ModelConfig.model_validate(settings), 8, False, said, ranks)
windows = [(f"k{n}", Window(WindowId(f"r{n}", 0, "", 0), 1 + n % 3, [(n * 7 + t * 3) % 50 for t in range(6 + n * 2)]))
           for n in range(10)]
try:
    for number in range(passes):
        for key, row in teacher.score(windows):
            found = {name: getattr(row, name).tolist() for name in ("top_ids", "top_logprobs", "target_logprob")}
            print(json.dumps([key, found | {"tail": [str(value) for value in row.tail_logprob]}]), flush=True)
except UserError as error:
    print(json.dumps(["error", str(error)]), flush=True)
    raise SystemExit(1)
finally:
    teacher.close()
print(json.dumps(["device_map", teacher.device_map]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "teacher")


def start(folder: Path, ranks: int, passes: int = 1) -> "subprocess.Popen[str]":
    library = os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(ranks), str(passes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": library, "OMP_NUM_THREADS": "1"},
    )


def followers(parent: int) -> list[int]:
    """The processes that a teacher started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if above == parent and b"gristmill.logits.follower" in command:
            found.append(int(entry.name))
    return found


def scored(folder: Path, ranks: int) -> dict[str, Any]:
    out, said = start(folder, ranks).communicate(timeout=240)
    return dict(json.loads(line) for line in out.splitlines()) or pytest.fail(said)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(folder: Path) -> None:
    one, two = scored(folder, 1), scored(folder, 2)
    assert two.pop("device_map") == {"0": "a part of every layer", "1": "a part of every layer"}
    one.pop("device_map")
    assert list(one) == list(two)
    assert len(one) == 10
    for key in one:
        assert one[key]["top_ids"] == two[key]["top_ids"]
        for name in ("top_logprobs", "target_logprob"):
            np.testing.assert_allclose(one[key][name], two[key][name], atol=1e-5)
        np.testing.assert_allclose([*map(float, one[key]["tail"])], [*map(float, two[key]["tail"])], atol=1e-4)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_teacher_with_one_line_and_leaves_no_process(folder: Path) -> None:
    process = start(folder, 2, passes=100_000)
    assert process.stdout is not None
    process.stdout.readline()
    (rank,) = followers(process.pid)
    os.kill(rank, signal.SIGKILL)
    begun = time.monotonic()
    out, _ = process.communicate(timeout=200)
    name, said = json.loads(out.splitlines()[-1])
    assert (name, process.returncode) == ("error", 1)
    assert said.endswith("see the log above, and run again to go on")
    assert "cannot go on: " in said
    assert time.monotonic() - begun < 150
    wait_until(lambda: not followers(process.pid))


@pytest.mark.slow
def test_the_other_processes_end_with_a_teacher_that_is_killed(folder: Path) -> None:
    process = start(folder, 2, passes=100_000)
    assert process.stdout is not None
    process.stdout.readline()
    (rank,) = followers(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not Path(f"/proc/{rank}").exists())


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [({}, 3, "4 heads and 2 key-value heads do not divide by 3 GPUs"), ({"quantization": "8bit"}, 2, "is not cut")],
)
def test_a_teacher_that_cannot_be_cut_is_refused_before_it_is_loaded(
    folder: Path, settings: dict[str, Any], gpus: int, said: str
) -> None:
    plain = {"engine": "auto", "parallel": "tensor", "source": str(folder), "dtype": "float32", **settings}
    model = ModelConfig.model_validate(plain)
    weights = described(folder)
    with pytest.raises(UserError, match=f"parallel: tensor cannot be used: .*{said}.*; set parallel: auto or layers"):
        open_teacher(model, weights, 8, True, gpus)


def test_without_being_asked_a_teacher_is_laid_out_in_layers(folder: Path) -> None:
    weights = described(folder)
    teacher = open_teacher(config_of(folder, engine="auto"), weights, 8, False, 2)
    assert set(teacher.device_map) == {"cpu"}
    teacher.close()
