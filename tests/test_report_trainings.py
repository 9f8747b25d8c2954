"""Facts about trainings on the report: trained models beside base and teacher, curves, and what teachers left."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_report import HOSTILE, Folders, run_script, small, spec, words_of
from test_report_results import compared, section, sums

from gristmill.config.schema import Config
from gristmill.config.specs import ReportSpec, ReportTraining, encode
from gristmill.errors import UserError
from gristmill.files import write_json, write_jsonl
from gristmill.report import charts, trainings
from gristmill.report.data import Beside, gather
from gristmill.report.render import render
from gristmill.report.trainings import MAX_POINTS, Point, curve, read_trainings, roles_of, thinned

ORIGIN = ReportTraining(base="small", teacher="large", models=["tuned"])
METRICS: dict[str, Any] = {
    "training": "tuned", "objective": "distill", "steps": 40, "result_of_step": 30, "stopped_early": True,
    "epochs": 2.5, "batch": {"factors": "8 rows a step = 2 processes × 4 rows × 1 micro-batch"},
    "parameters": 6_900_000, "trained_parameters": 6_900_000, "tokens": 123_456, "seconds": 61.0,
    "evaluation": {
        "first": {"step": 0, "evaluation_loss": 9.5}, "best": {"step": 30, "evaluation_loss": 5.25},
        "last": {"step": 40, "evaluation_loss": None},
    },
    "tokens_per_second": 2040.4, "model_flops_utilization": None, "memory_gib": 1.25, "resumed_from_step": 20,
}  # fmt: skip
TEACHER: dict[str, Any] = {
    "unit": "logits/taught", "teacher": "large", "k": 64, "rows": 12, "positions": 4321, "perplexity": 17.25,
    "target_is_top1": 0.345, "tail_mass_mean": 0.125, "bytes_per_position": 184.5, "plain_bytes_per_position": 384,
    "failed": 2, "skipped": {"no_text": 3}, "rows_without_positions": 4, "cut_rows": 5, "cut_tokens": 60,
    "score_seconds": 12.0,
}  # fmt: skip

GPUS = [{"index": 1, "name": "Fake H100"}]
MANIFEST: dict[str, Any] = {
    "created": "2026-01-02T03:04:05Z", "gristmill": "0.1.0", "commit": "0123456789abcdef-dirty", "python": "3.11.9",
    "packages": {"torch": "2.9.0"}, "devices": GPUS, "spec": {"training": {"seed": 7, "dtype": "bfloat16"}},
    "start": {"name": "small", "source": "org/small", "commit": "fedcba", "weights_hash": "ab" * 16},
}  # fmt: skip
LOGITS_MANIFEST: dict[str, Any] = {
    "created": "2026-01-02T03:04:05Z", "gristmill": "0.1.0", "weights": {"source": "org/large"},
    "workers": [{"shard": "1-of-1", "host": "node1", "engine": "transformers", "devices": GPUS, "dtype": "float32"}],
}  # fmt: skip


def steps(count: int = 40) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"step": 0, "evaluation_loss": 9.5}]
    for n in range(1, count + 1):
        norm = None if n == 3 else 1.5
        lines.append({"step": n, "loss": 9 - n / 10, "learning_rate": 0.001, "gradient_norm": norm, "tokens": 512})
    return [*lines, {"step": count, "evaluation_loss": None}]


def trained(root: Path, name: str = "tuned", **changes: Any) -> Folders:
    folder = root / "trainings" / name
    write_json(folder / "metrics.json", METRICS | {"training": name} | changes)
    write_json(folder / "model" / "training" / "manifest.json", MANIFEST)
    write_jsonl(folder / "steps.jsonl", steps())
    return {name: folder}


def taught(root: Path, **changes: Any) -> Folders:
    folder = root / "logits" / "taught"
    write_json(folder / "metrics.json", TEACHER | changes)
    write_json(folder / "manifest.json", LOGITS_MANIFEST)
    return {"taught": folder}


def three(root: Path) -> Folders:
    """Runs named otherwise than their models: the base has 10 rows of 40 right, the student 30, the teacher 36."""
    right = {"before": ("small", 10), "after": ("tuned", 30), "best": ("large", 36)}
    found: Folders = {}
    for name, (model, count) in right.items():
        found |= sums(root, name, [n < count for n in range(40)], model=model)
    return found


def page(runs: Folders, origins: dict[str, ReportTraining] | None = None, **beside: Any) -> str:
    told = spec().model_copy(update={"trainings": origins or {"tuned": ORIGIN}})
    return section(render(gather(told, runs, {}, Beside(**beside))), "trainings")


def test_a_page_without_trainings_has_no_section_of_them(tmp_path: Path) -> None:
    whole = render(gather(spec(), *small(tmp_path)))
    assert section(whole, "trainings") == ""
    assert "#trainings" not in whole


def test_the_trained_model_stands_between_its_base_and_its_teacher_with_the_paired_difference(tmp_path: Path) -> None:
    runs = {name: folder for name, folder in reversed(three(tmp_path).items())}
    for pair, more in ((("after", "before"), ""), (("before", "after"), "turned")):
        text = words_of(page(runs, trainings=trained(tmp_path), comparisons=compared(tmp_path, runs, pair)))
        names = re.findall(r"(small|tuned|large) run (before|after|best) (base|trained|teacher)", text)
        assert names == [("small", "before", "base"), ("tuned", "after", "trained"), ("large", "best", "teacher")], more
        found = re.search(r"after trained 75.0 % \[[\d., ]+\] \+50.0 \[\+(\d+\.\d), \+(\d+\.\d)\] 40", text)
        assert found, more
        assert 20 < float(found[1]) < 50 < float(found[2]) < 80
        assert re.search(r"best teacher 90.0 % \[[\d., ]+\] – 40", text)


def test_what_is_not_run_over_the_same_rows_and_prompt_is_said_to_be_missing(tmp_path: Path) -> None:
    runs = three(tmp_path)
    other = sums(tmp_path, "elsewhere", [True] * 4, model="large", prompt="another")
    text = words_of(page({"after": runs["after"], **other}, trainings=trained(tmp_path)))
    assert "No run over sums with this prompt and metric of the base model small" in text
    assert "No run over sums with this prompt and metric of the teacher model large" in text
    assert "elsewhere" not in text


def test_a_model_may_have_several_roles() -> None:
    first = ReportTraining(base=None, teacher="large", models=["seed"])
    second = ReportTraining(base="seed", teacher="seed", models=["tuned"])
    assert roles_of([first, second]) == {
        "large": ["teacher"],
        "seed": ["base", "trained", "teacher"],
        "tuned": ["trained"],
    }


def test_the_numbers_of_a_training_stand_on_the_page(tmp_path: Path) -> None:
    text = words_of(page(three(tmp_path), trainings=trained(tmp_path)))
    assert "distill · from the weights of small · taught by large · 8 rows a step = 2 processes × 4 rows" in text
    assert "steps stopped early its last job went on from 20 40 the model is of 30" in text
    assert "held-out loss, first 9.5000 step 0 held-out loss, best 5.2500 step 30 held-out loss, last – step 40" in text
    assert "tokens seen 123,456 2.50 epochs" in text
    assert "tokens/s 2,040" in text
    assert "MFU" not in text
    text = words_of(page(three(tmp_path), trainings=trained(tmp_path, model_flops_utilization=0.361, evaluation=None)))
    assert "MFU 36.1 %" in text
    assert "held-out loss" not in text


def test_what_a_teacher_left_stands_on_the_page_with_bytes_and_failures(tmp_path: Path) -> None:
    text = words_of(page(three(tmp_path), logits=taught(tmp_path)))
    left_out = "2 windows failed 3 skipped: no text 4 without a position 60 tokens cut off 5"
    assert f"taught of large 64 4,321 {left_out} 184.5 384 plain 12.5 % 17.25 34.5 % 12.0 s" in text


def test_what_is_left_out_of_a_trainings_texts_is_counted(tmp_path: Path) -> None:
    texts = {"texts": {"count": 75, "cut_tokens": 1200, "rows_without_targets": 3}}
    text = words_of(page(three(tmp_path), trainings=trained(tmp_path, data=texts)))
    assert "left out of 75 texts 1,200 tokens cut 3 texts without a target" in text


def test_a_model_from_fresh_weights_has_no_difference_from_another_trainings_base(tmp_path: Path) -> None:
    runs = three(tmp_path)
    fresh = {"tuned": ReportTraining(models=["tuned"]), "other": ReportTraining(base="small", models=["large"])}
    folders = trained(tmp_path) | trained(tmp_path, "other")
    text = words_of(page(runs, fresh, trainings=folders, comparisons=compared(tmp_path, runs, ("after", "before"))))
    assert re.search(r"after trained 75.0 % \[[\d., ]+\] – 40", text)


def test_a_curve_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    folders = trained(tmp_path)
    (folders["tuned"] / "steps.jsonl").unlink()
    assert f"No curve: {folders['tuned']}/steps.jsonl is not there." in words_of(
        page(three(tmp_path), trainings=folders)
    )


def test_a_curve_keeps_what_is_finite_and_its_end() -> None:
    found = curve(steps())
    assert [point.step for point in found["loss"]] == list(range(1, 41))
    assert found["evaluation_loss"] == [Point(0, 9.5)]
    assert 3 not in [point.step for point in found["gradient_norm"]]
    assert "tokens_per_second" not in found


@pytest.mark.parametrize("count", [0, 1, MAX_POINTS, MAX_POINTS + 1, 1000])
def test_a_long_curve_is_thinned_to_means_with_the_last_step_kept(count: int) -> None:
    points = [Point(n, float(n)) for n in range(1, count + 1)]
    found = thinned(points)
    assert len(found) <= MAX_POINTS
    assert [point.step for point in found[-1:]] == ([count] if count else [])
    if count <= MAX_POINTS:
        assert found == points
    else:
        assert found[0] == Point(-(-count // MAX_POINTS), (1 + -(-count // MAX_POINTS)) / 2)


def test_a_curve_is_drawn_in_colours_that_the_style_sheet_knows_and_dots_mark_what_was_held_out() -> None:
    drawing = charts.draw_curve(curve(steps()) | {"evaluation_loss": [Point(0, 9.5), Point(40, 5.0)]})
    known = {colour.lower() for colour in (*charts.PALETTE, charts.INK, charts.MUTED, charts.GRID)}
    for svg in (drawing.desk, drawing.phone):
        used = set(re.findall(r'(?:fill|stroke)="(#\w+)"', svg))
        assert {charts.PALETTE[0], charts.PALETTE[1]} <= used <= known
        assert svg.count(f'fill="{charts.PALETTE[1]}"') == 2
        assert "tokens/s" not in svg  # a panel without points is not drawn
        assert "gradient norm, by step" in svg


def test_files_of_others_and_broken_ones_are_named(tmp_path: Path) -> None:
    folders = trained(tmp_path)
    with pytest.raises(UserError, match="is of training 'tuned', not 'x'; check --training x="):
        read_trainings({"x": folders["tuned"]}, {})
    with pytest.raises(UserError, match="is of logits/taught, not logits/x; check --logits x="):
        trainings.read_teachers({"x": taught(tmp_path)["taught"]})
    trained(tmp_path, steps=None)
    with pytest.raises(UserError, match="steps: Input should be a valid integer; make the file again"):
        read_trainings(folders, {})


def test_names_of_models_and_trainings_stay_text(tmp_path: Path) -> None:
    folders = trained(tmp_path, HOSTILE.replace("/", "_"))
    origin = ReportTraining(base=HOSTILE, models=[HOSTILE])
    runs = sums(tmp_path, "a", [True], model=HOSTILE)
    found = page(runs, {HOSTILE.replace("/", "_"): origin}, trainings=folders)
    assert "<script" not in found
    assert "<img" not in found


def test_the_spec_names_base_teacher_and_what_is_made(tmp_path: Path) -> None:
    recipe = {"steps": 1, "learning_rate": 0.1}
    scratch = {"objective": "pretrain", "architecture": {"model_type": "gpt2"}, "tokenizer": "large", "dataset": "d"}
    config = Config.model_validate(
        {
            "datasets": {"d": {"path": "d.jsonl"}},
            "models": {
                "large": {"source": "some/folder"},
                "one": {"source": "training:seed"},
                "two": {"source": "training:tuned"},
            },
            "prompts": {"p": {"file": "p.jinja"}},
            "runs": {"a": {"dataset": "d", "model": "two", "prompt": "p"}},
            "logits": {"taught": {"model": "large", "dataset": "d", "text_field": "t"}},
            "trainings": {
                "seed": {**scratch, "text_field": "t", **recipe},
                "tuned": {"objective": "distill", "base": "one", "logits": "taught", **recipe},
            },
        }
    )
    told = ReportSpec.from_config(config).trainings
    assert told["seed"] == ReportTraining(base=None, teacher=None, models=["one"])
    assert told["tuned"] == ReportTraining(base="one", teacher="large", models=["two"])


def test_the_program_takes_trainings_and_logits(tmp_path: Path) -> None:
    told = spec().model_copy(update={"trainings": {"tuned": ORIGIN}})
    named = [f"--run={name}={folder}" for name, folder in three(tmp_path).items()]
    named += [f"--training={name}={folder}" for name, folder in trained(tmp_path).items()]
    named += [f"--logits={name}={folder}" for name, folder in taught(tmp_path).items()]
    done = run_script("--spec", encode(told), *named, "--out", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stderr
    found = section((tmp_path / "report.html").read_text(), "trainings")
    assert "Teachers’ log-probabilities" in found
    assert json.loads(encode(told))["trainings"]["tuned"]["base"] == "small"


def test_trainings_and_teachers_have_their_lines_of_provenance(tmp_path: Path) -> None:
    beside = Beside(trainings=trained(tmp_path), logits=taught(tmp_path))
    told = spec().model_copy(update={"trainings": {"tuned": ORIGIN}})
    text = words_of(section(render(gather(told, small(tmp_path)[0], {}, beside)), "provenance"))
    assert "gristmill 0.1.0 (0123456789ab, edited)" in text
    assert "torch 2.9.0" in text
    line = (
        "tuned training · 2026-01-02 03:04 small org/small @ fedcba abababababababab distill bfloat16 Fake H100 (1) 7 –"
    )
    assert f"{line} 1 min 01 s 2,040.4" in text
    line = "taught logits · 2026-01-02 03:04 large org/large – transformers float32 Fake H100 (1) – 12"
    assert f"{line} 12.0 s 360.1" in text


def test_a_report_without_runs_has_what_is_there_and_no_empty_sections(tmp_path: Path) -> None:
    page = render(gather(spec(), {}, {}, Beside(trainings=trained(tmp_path), logits=taught(tmp_path))))
    assert re.findall(r'<a href="#([a-z]+)">', page) == ["trainings", "provenance"]
    assert re.findall(r'<section id="([a-z]+)"', page) == ["trainings", "provenance"]
    assert "No runs · 1 training · logits of 1 teacher" in words_of(page)
    assert "<script" not in page
    assert 'href="#samples"' not in page


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    said = run_script("--spec", encode(spec()), "--out", str(tmp_path / "report.html"))
    assert said.returncode == 2
    assert "nothing to report on: give at least one --run, --training or --logits" in said.stderr
