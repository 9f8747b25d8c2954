"""The manifest: how a run's answers were made. It is written last, so one that is there means the run is complete."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gristmill import GENERATION_VERSION, __version__, checkout, journal
from gristmill.config.specs import ModelSpec
from gristmill.types import FAILURE_REASONS, NO_EARLIER_ANSWER, JsonDict

PACKAGES = ("torch", "transformers", "vllm", "llguidance", "accelerate", "snakemake", "pandas", "nvidia-ml-py")


@dataclass(slots=True)
class Tally:
    """What the generations add up to, counted while they pass through to the file."""

    keys: set[str] = field(default_factory=set)
    #: Of rows that failed and that the run goes on without, and of turns that were not asked after one of these.
    failed: set[str] = field(default_factory=set)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def through(self, generations: Iterable[JsonDict]) -> Iterator[JsonDict]:
        """Pass the generations on unchanged."""
        for line in generations:
            self.keys.add(line["key"])
            if line["finish_reason"] in (*FAILURE_REASONS, NO_EARLIER_ANSWER):
                self.failed.add(line["key"])
            self.finish_reasons[line["finish_reason"]] += 1
            self.prompt_tokens += line["prompt_tokens"]
            self.completion_tokens += line["completion_tokens"]
            yield line


def manifest(unit: str, spec: ModelSpec, weights: JsonDict, tally: Tally, journal_folder: Path) -> JsonDict:
    """The manifest of a run or judge target (docs/outputs.md)."""
    return {
        "unit": unit,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gristmill": __version__,
        "commit": checkout.commit(),
        "generation_version": GENERATION_VERSION,
        "python": platform.python_version(),
        "packages": installed_versions(),
        "spec": spec.model_dump(),
        "weights": weights,
        "requests": len(tally.keys),
        "finish_reasons": dict(sorted(tally.finish_reasons.items())),
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "workers": _workers(journal_folder, tally.keys - tally.failed),
    }


def _workers(journal_folder: Path, answered: set[str]) -> list[JsonDict]:
    """Who made the answers; those in no segment any more (damaged after their part was written) are nobody's."""
    found = journal.workers(journal_folder, answered)
    unknown = len(answered) - sum(worker["rows"] for worker in found)
    return [*found, {"rows": unknown}] if unknown else found


def installed_versions() -> dict[str, str | None]:
    """Package → version in this environment, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
