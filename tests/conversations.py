"""Rows of several turns taken through rendering, splitting, workers and merge, by an engine that a test speaks for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gristmill import worker
from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.config.specs import ModelSpec, RequestsSpec
from gristmill.files import read_jsonl, write_jsonl
from gristmill.judging.asking import Asking
from gristmill.keys import every_key
from gristmill.merging import merged
from gristmill.planning.workers import Worker
from gristmill.rendering import requests
from gristmill.splitting import split
from gristmill.types import Completion, Failure, JsonDict, Outcome, Request
from gristmill.worker import Shard, run_shard

ECHO = ModelConfig(engine="echo")
WEIGHTS: JsonDict = {"name": "m", "folder": None, "weights_hash": "echo", "context_tokens": None}
Says = Callable[[Request], Outcome | str]


def spoken(request: Request) -> str:
    """An answer that tells all that was in the prompt."""
    return "<" + "|".join(message["content"] for message in request.messages) + ">"


@dataclass
class Speaker:
    """An engine that answers as `says` says, and remembers what it was asked, wave by wave."""

    says: Says = spoken
    name: str = "fake"
    waves: list[list[Request]] = field(default_factory=list)

    def prompt_tokens(self, requests: Sequence[Request]) -> list[int]:
        return [1 for _ in requests]

    def generate(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        self.waves.append([])
        for request in requests:
            self.waves[-1].append(request)
            said = self.says(request)
            yield said if isinstance(said, Completion | Failure) else Completion(*request.rid, said, "stop", 1, 1, 0.1)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass

    def asked(self) -> list[str]:
        """The names of what was asked, in order."""
        return [str(request.rid) for wave in self.waves for request in wave]


@dataclass
class Way:
    """A folder with a dataset, and what its run's jobs make of it."""

    folder: Path
    patch: pytest.MonkeyPatch
    model: ModelConfig = ECHO
    weights: JsonDict = field(default_factory=lambda: WEIGHTS)
    sampling: dict[str, Any] = field(default_factory=lambda: {"max_new_tokens": 8})
    template: str = "{{ turn }}"
    system: str | None = None

    def rows(self, *rows: JsonDict) -> None:
        """Write the dataset, and the requests that are made of it."""
        write_jsonl(self.folder / "rows.jsonl", rows)
        self.ask(requests(self.spec()))

    def ask(self, lines: Any) -> None:
        write_jsonl(self.folder / "requests.jsonl", lines)

    def spec(self) -> RequestsSpec:
        (self.folder / "turn.jinja").write_text(self.template)
        prompt = {"file": str(self.folder / "turn.jinja"), "turns": "turns", "system": self.system}
        dataset = {"path": str(self.folder / "rows.jsonl")}
        return RequestsSpec.model_validate({"dataset": dataset, "prompt": prompt, "sampling": self.sampling})

    def requests(self) -> list[JsonDict]:
        return list(read_jsonl(self.folder / "requests.jsonl"))

    def shards(self, count: int, **more: Any) -> list[Shard]:
        """Split the requests."""
        where = self.folder / f"shards-{count}"
        split(self.folder / "requests.jsonl", where, count, ModelSpec(name="m", model=self.model), self.weights)
        return [self._shard(where, f"{number}-of-{count}", more) for number in range(1, count + 1)]

    def _shard(self, where: Path, name: str, more: dict[str, Any]) -> Shard:
        part, samples = self.folder / "parts" / f"{name}.jsonl", self.folder / "gpu" / f"{name}.jsonl"
        paths = (where / f"{name}.jsonl", self.folder / "journal", part, samples)
        return Shard("runs/a", name, *paths, Worker(gpus=1), **more)

    def work(self, shard: Shard, says: Says = spoken) -> Speaker:
        """One job, with an engine that answers so."""
        engine = Speaker(says)
        self.patch.setattr(worker, "open_engine", lambda *_: (engine, "the test says so"))
        run_shard(shard, self.model, self.weights, GpusConfig(wait_minutes=0), 1)
        return engine

    def run(self, count: int = 1, says: Says = spoken, **more: Any) -> list[str]:
        """All jobs; gives the names of what the engine was asked."""
        return [name for shard in self.shards(count, **more) for name in self.work(shard, says).asked()]

    def merge(self, count: int = 1) -> list[JsonDict]:
        """The generations."""
        parts = [self.folder / "parts" / f"{number}-of-{count}.jsonl" for number in range(1, count + 1)]
        lines = merged(self.requests(), parts, every_key(self.model, self.weights))
        write_jsonl(self.folder / "generations.jsonl", lines)
        return list(read_jsonl(self.folder / "generations.jsonl"))

    def judge(self, **settings: Any) -> Asking:
        """A pointwise judge's asking."""
        from gristmill.config.schema import JudgeConfig

        named = {"kind": "pointwise", "model": "m", "prompt": "p", "runs": ["a"]}
        return Asking.of("grader", JudgeConfig.model_validate(named | settings))


def texts(generations: list[JsonDict]) -> dict[str, str | None]:
    """name → text."""
    return {f"{line['id']}#{line['sample']}/{line['variant']}": line["text"] for line in generations}
