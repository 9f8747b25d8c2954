"""Public datasets, the whole way from file to merged answers: ../shared/data beside the checkout.

Some of their texts are offensive: a failure shows positions and hashes, never a text.
"""

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_way import expected, rows_of, whole_way

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
#: File → lines, an array, or a table; read here by the standard library alone.
FILES = {
    "hatecheck/test_suite_cases.csv": "table",
    "hate_davidson/labeled_data.csv": "table",
    "truthfulqa/TruthfulQA.csv": "table",
    "humaneval/HumanEval.jsonl.gz": "lines",
    "gsm8k/test.jsonl": "lines",
    "arena_hard/arena-hard-v2.0/question.jsonl": "lines",
    "pandalm/testset-v1.json": "array",
    "llmbar/Natural/dataset.json": "array",
}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")


def rows_in(path: Path, form: str) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    if form == "array":
        return list(json.loads(text))
    if form == "lines":
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    return list(_table(text))


def _table(text: str) -> Iterator[dict[str, str]]:
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    names = [name or f"column_{position}" for position, name in enumerate(header, 1)]
    for cells in rows:
        yield dict(zip(names, cells, strict=True))


def digests(values: list[bytes]) -> list[str]:
    return [hashlib.sha256(value).hexdigest()[:12] for value in values]


@pytest.mark.parametrize(("name", "form"), FILES.items())
def test_every_row_of_a_public_file_comes_back_once_unchanged_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    (tmp_path / "gpus.json").write_text("[]")
    monkeypatch.setenv("GRISTMILL_INVENTORY", str(tmp_path / "gpus.json"))
    link = tmp_path / Path(name).name
    link.symlink_to(DATA / name)
    generations = whole_way(link, 3, id_field=None)
    assert digests(rows_of(generations)) == digests(expected(rows_in(DATA / name, form)))
    unlike = [number for number, line in enumerate(generations) if line["text"] != line["messages"][-1]["content"]]
    assert unlike == []
