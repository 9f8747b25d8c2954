"""A dataset taken the whole way through the library as the workflow's jobs take it, with the echo engine."""

from pathlib import Path
from typing import Any

from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.config.specs import ModelSpec, RequestsSpec
from gristmill.files import canonical, read_jsonl, write_jsonl
from gristmill.merging import merged
from gristmill.planning.workers import Worker
from gristmill.rendering import requests
from gristmill.splitting import split
from gristmill.types import JsonDict
from gristmill.worker import Shard, run_shard

ECHO = ModelConfig(engine="echo")
WEIGHTS: JsonDict = {"name": "echo", "folder": None, "weights_hash": "echo", "context_tokens": None}
#: Every value of a row, in the row's order.
EVERY_VALUE = "{% for name in row %}{{ row[name] }}|{% endfor %}"


def whole_way(dataset: Path, shards: int, samples: int = 1, **settings: Any) -> list[JsonDict]:
    """dataset → requests → shards → journal and parts → generations; the lines of the last file."""
    folder = dataset.parent / f"{dataset.name} in {shards}"
    (dataset.parent / "every.jinja").write_text(EVERY_VALUE)
    sampling = {"max_new_tokens": 10**9, "samples": samples, "temperature": float(samples > 1)}
    spec = RequestsSpec.model_validate(
        {
            "dataset": {"path": str(dataset), **settings},
            "prompt": {"file": str(dataset.parent / "every.jinja")},
            "sampling": sampling,
        }
    )
    write_jsonl(folder / "requests.jsonl", requests(spec))
    split(folder / "requests.jsonl", folder / "shards", shards, ModelSpec(name="echo", model=ECHO), WEIGHTS)
    parts = []
    for number in range(1, shards + 1):
        name = f"{number}-of-{shards}"
        paths = (folder / f"shards/{name}.jsonl", folder / "journal", folder / f"parts/{name}.jsonl", folder / "gpu")
        run_shard(Shard("runs/echo", name, *paths, Worker(gpus=1)), ECHO, WEIGHTS, GpusConfig(wait_minutes=0), 1)
        parts.append(paths[2])
    write_jsonl(folder / "generations.jsonl", merged(read_jsonl(folder / "requests.jsonl"), parts))
    return list(read_jsonl(folder / "generations.jsonl"))


def rows_of(generations: list[JsonDict]) -> list[bytes]:
    """Each line's row as the dataset had it, in bytes that tell 1 from 1.0 and from true."""
    return [canonical({**line["row"], "reference": line["reference"]}) for line in generations]


def expected(rows: list[JsonDict]) -> list[bytes]:
    """What rows_of must give for these rows; one without a reference has none, null."""
    return [canonical({"reference": None, **row}) for row in rows]
