"""A training of a few thousand parameters in a folder, and what runs it with real processes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from conftest import ROOT
from forked_training import run_forked
from tiny_teacher import WORDS, make_teacher

from gristmill.config.schema import Config
from gristmill.config.specs import TrainingDataSpec, TrainingSpec, encode
from gristmill.files import read_json, write_json, write_jsonl
from gristmill.training.logs import read_steps
from gristmill.training.texts import write_texts
from gristmill.types import JsonDict
from gristmill.weights import prepare

LLAMA: JsonDict = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2: JsonDict = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
#: Dropout off, so that GPT-2 can be compared bit for bit.
STILL: JsonDict = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RECIPE: JsonDict = {
    "objective": "pretrain",
    "architecture": LLAMA,
    "tokenizer": "words",
    "dataset": "rows",
    "text_field": "text",
    "steps": 6,
    "sequence_tokens": 32,
    "batch_rows": 8,
    "micro_batch_rows": 2,
    "learning_rate": 0.01,
    "warmup_steps": 2,
    "checkpoint_every_steps": 2,
}


def texts(count: int = 120, seed: int = 0) -> list[JsonDict]:
    """Texts of 3 to 20 words, each word mostly followed by the next one."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        words = [int(random.integers(44))]
        for _ in range(int(random.integers(2, 20))):
            words.append((words[-1] + 1) % 44 if random.random() < 0.9 else int(random.integers(44)))
        said = [f"w{word}" for word in words]
        found.append({"id": f"t{number}", "text": " ".join(said), "question": said[0], "reference": " ".join(said[1:])})
    return found


@dataclass
class Made:
    """A folder with a tokenizer, rows, and the work of one training."""

    folder: Path
    config: Config

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def model(self) -> Path:
        return self.work / "model"

    def weights(self) -> JsonDict:
        name = self.config.trainings["t"].tokenizer_of()
        return prepare(name, self.config.models[name], print)

    def steps(self) -> list[JsonDict]:
        return list(read_steps(self.work / "steps.jsonl"))

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps() if "loss" in line]

    def metrics(self) -> JsonDict:
        return dict(read_json(self.work / "metrics.json"))

    def write_data(self) -> Path:
        """The token ids; of a distillation the logits that are there already."""
        data = self.folder / "data"
        if self.config.trainings["t"].logits is None and not data.exists():
            write_texts(TrainingDataSpec.of(self.config, "t"), self.weights(), data, print)
        return data

    def command(self, script: Path | None = None, **placement: Any) -> list[str]:
        """scripts/train.py on this training, on so many processes."""
        spec = TrainingSpec.of(self.config, "t")
        weights = self.folder / "weights.json"
        write_json(weights, self.weights())
        program = script or ROOT / "scripts" / "train.py"
        written = {name: value for name, value in self.config.trainings["t"].model_dump().items() if name in _PLACED}
        words = [sys.executable, str(program), "--spec", encode(spec), "--weights", str(weights)]
        words += ["--placements", json.dumps({"t": written | placement}), "--threads", "1"]
        words += ["--data", str(self.write_data()), "--work", str(self.work), "--model", str(self.model)]
        return [*words, "--metrics", str(self.work / "metrics.json")]

    def run(self, script: Path | None = None, **placement: Any) -> "subprocess.CompletedProcess[str]":
        """Run it to its end; stdout and stderr together in .stdout."""
        return subprocess.run(
            self.command(script, **placement),
            env=environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    def done(self, **placement: Any) -> str:
        """Run it, require success, give what it said."""
        return succeeded(self.run(**placement))

    def run_forked(self, **placement: Any) -> "subprocess.CompletedProcess[str]":
        """The same as `run` with processes that are forked instead of started: much faster."""
        processes = placement.get("processes", self.config.trainings["t"].processes)
        return run_forked(self.command(**placement), environment(self.folder), processes)

    def forked(self, **placement: Any) -> str:
        """The same as `done` in that way."""
        return succeeded(self.run_forked(**placement))


def succeeded(found: "subprocess.CompletedProcess[str]") -> str:
    assert found.returncode == 0, found.stdout[-6000:]
    return found.stdout


_PLACED = {"processes", "micro_batch_rows", "checkpoint_every_steps", "keep_checkpoints", "timeout_minutes", "sharding"}


def environment(folder: Path) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "GRISTMILL_LEASES": str(folder / "leases"), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own}


def make(folder: Path, rows: list[JsonDict] | None = None, **recipe: Any) -> Made:
    """A training `t` of RECIPE with these changes; a key that is None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "words").exists():
        make_teacher(folder / "words")
    write_jsonl(folder / "rows.jsonl", rows or texts())
    (folder / "ask.jinja").write_text("{{ question }}")
    training = {name: value for name, value in {**RECIPE, **recipe}.items() if value is not None}
    config = Config.model_validate(
        {
            "datasets": {"rows": {"path": str(folder / "rows.jsonl")}},
            "models": {"words": {"source": str(folder / "words")}},
            "prompts": {"ask": {"file": str(folder / "ask.jinja")}},
            "runs": {"r": {"dataset": "rows", "model": "words", "prompt": "ask"}},
            "trainings": {"t": training},
        }
    )
    return Made(folder, config)


assert len(WORDS) == 50
