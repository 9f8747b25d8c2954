"""Facts about the manifest: what it counts, and that it has what docs/outputs.md promises."""

from pathlib import Path

from gristmill import GENERATION_VERSION, __version__
from gristmill.config.schema import ModelConfig
from gristmill.config.specs import ModelSpec
from gristmill.journal import Segment
from gristmill.manifest import Tally, manifest
from gristmill.types import Completion, FinishReason, JsonDict

SPEC = ModelSpec(name="m", model=ModelConfig(engine="echo"))


def line(key: str, finish_reason: FinishReason) -> JsonDict:
    return {"key": key, "finish_reason": finish_reason, "prompt_tokens": 3, "completion_tokens": 2}


def test_a_tally_passes_lines_on_unchanged_and_counts_them(tmp_path: Path) -> None:
    lines = [line("a", "stop"), line("b", "length"), line("c", "stop")]
    tally = Tally()
    assert list(tally.through(lines)) == lines
    found = manifest("runs/a", SPEC, {"weights_hash": "echo"}, tally, tmp_path / "journal")
    assert found["finish_reasons"] == {"length": 1, "stop": 2}
    assert (found["requests"], found["prompt_tokens"], found["completion_tokens"]) == (3, 9, 6)


def test_a_manifest_says_what_made_the_answers(tmp_path: Path) -> None:
    tally = Tally()
    keys = ["a" * 32, "b" * 32]
    list(tally.through([line(key, "stop") for key in keys]))
    with Segment(tmp_path, {"engine": "echo"}) as segment:
        segment.append(keys[0], Completion("r1", 0, "", "x", "stop", 3, 2, 0.1))
        segment.append("c" * 32, Completion("of another model", 0, "", "x", "stop", 3, 2, 0.1))
    found = manifest("runs/a", SPEC, {"weights_hash": "echo"}, tally, tmp_path)
    assert (found["unit"], found["gristmill"], found["generation_version"]) == (
        "runs/a",
        __version__,
        GENERATION_VERSION,
    )
    assert found["spec"]["model"]["engine"] == "echo"
    assert found["weights"] == {"weights_hash": "echo"}
    assert found["packages"]["torch"]
    first, nobody = found["workers"]
    assert (first["engine"], first["rows"]) == ("echo", 1)
    assert nobody == {"rows": 1}  # in the part, and in no segment any more


def test_rows_that_failed_are_nobodys_answers(tmp_path: Path) -> None:
    tally = Tally()
    list(tally.through([line("a" * 32, "out_of_memory")]))
    found = manifest("runs/a", SPEC, {"weights_hash": "echo"}, tally, tmp_path)
    assert (found["requests"], found["workers"]) == (1, [])
