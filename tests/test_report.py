"""The report, from small results folders that are graded and judged by the real code (docs/outputs.md).

`write_demo` makes a folder like the demo's of any size; the screenshot of the README comes from it:
    PYTHONPATH=scripts python tests/test_report.py /tmp/report-demo 120
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.config.schema import Config, JudgeConfig
from gristmill.config.specs import MetricsSpec, ReportJudge, ReportSpec, VerdictSpec, decode, encode
from gristmill.errors import UserError
from gristmill.files import write_json, write_jsonl
from gristmill.judging.items import items
from gristmill.judging.tallies import PairwiseTally, PointwiseTally
from gristmill.judging.verdicts import judged
from gristmill.metrics import RunTally
from gristmill.report import charts
from gristmill.report.data import gather
from gristmill.report.render import HERE, pack, render, write_report
from gristmill.report.rows import share_cap
from gristmill.types import RequestId

SCRIPT = Path(__file__).parents[1] / "scripts" / "report.py"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>&amp;\u2028"
LONE = "\ud83d"

Folders = dict[str, Path]
Row = dict[str, Any]


def row(number: int, **columns: Any) -> Row:
    question = columns.pop("question", f"What is {number} + {number}?")
    kind = ("easy", "hard")[number % 2]
    values = {"id": f"q-{number:03d}", "reference": str(2 * number), "question": question, "kind": kind}
    return values | columns


def generation(source: Row, text: str | None, finish: str = "stop", sample: int = 0, variant: str = "") -> Row:
    columns = {name: value for name, value in source.items() if name not in {"id", "reference"}}
    return {
        "id": source["id"],
        "sample": sample,
        "variant": variant,
        "messages": [{"role": "user", "content": f"Answer briefly. {source.get('question')}"}],
        "reference": source.get("reference"),
        "row": columns,
        "text": text,
        "finish_reason": finish,
        "prompt_tokens": 12,
        "completion_tokens": len((text or "").split()),
        "prompt_cut_tokens": 0,
        "seconds": 0.25,
        "key": "k",
    }


def manifest(unit: str, n: int) -> Row:
    gpu = {"index": 0, "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3"}
    worker = {
        "shard": "1-of-2",
        "host": "node1",
        "engine": "static",
        "why": "auto: generate() works with any device_map",
    }
    worker |= {"dtype": "bfloat16", "load_seconds": 3.2, "generate_seconds": 40.5, "tokens_per_second": 1210.4}
    return {
        "unit": unit,
        "created": "2026-11-27T10:00:00Z",
        "gristmill": "0.1.0",
        "python": "3.11.7",
        "packages": {"torch": "2.11.0", "transformers": "5.17.0", "accelerate": None},
        "spec": {"name": "smollm2"},
        "weights": {
            "name": "smollm2",
            "source": "org/smollm2",
            "commit": "abc123",
            "weights_hash": "9f2c41d07be355aa01",
        },
        "seed": 7,
        "requests": n,
        "completions": n,
        "from_journal": 0,
        "generated": n,
        "prompt_tokens": 12 * n,
        "completion_tokens": 9 * n,
        "seconds": 61.4,
        "workers": [
            {**worker, "devices": [gpu]},
            {**worker, "shard": "2-of-2", "devices": [{**gpu, "index": 1}], "tokens_per_second": 1189.0},
        ],
    }


def write_run(
    root: Path, name: str, lines: Sequence[Row], metrics: Sequence[str] = ("exact_match",), dataset: str = "sums",
    slices: Sequence[str] = ("kind",), prompt: str = "direct", model: str = "smollm2",
) -> Folders:  # fmt: skip
    """One run's folder, graded by the real code."""
    folder = root / "runs" / name
    names = {"run": name, "dataset": dataset, "model": model, "prompt": prompt}
    tally = RunTally(MetricsSpec.model_validate(names | {"metrics": list(metrics), "slices": list(slices)}))
    write_jsonl(folder / "generations.jsonl", lines)
    write_jsonl(folder / "grades.jsonl", tally.graded(iter(lines)))
    write_json(folder / "metrics.json", tally.metrics())
    write_json(folder / "manifest.json", manifest(f"runs/{name}", len(lines)))
    return {name: folder}


Reply = Callable[[RequestId, tuple[str | None, ...]], str]


def write_judge(root: Path, name: str, runs: Folders, reply: Reply, **config: Any) -> Folders:
    """One judge target's folder: what `reply` says of (request, answers), read by the real code."""
    target = list(runs)
    spec = _verdict_spec(name, target, config)
    lines = [read_lines(folder / "generations.jsonl") for folder in runs.values()]
    both = spec.judge.both_orders
    asked = [(rid, item.answers) for item in items(target, lines) for rid in item.asked(both)]
    replies = [
        generation({"id": rid.id}, reply(rid, answers), sample=rid.sample, variant=rid.variant)
        for rid, answers in asked
    ]
    stream = judged(spec, lines, replies)
    folder = root / "judges" / name / "_vs_".join(target)
    if spec.judge.kind == "pairwise":
        pair = PairwiseTally(spec)
        write_jsonl(folder / "verdicts.jsonl", pair.counted(stream))
        write_json(folder / "metrics.json", pair.metrics())
    else:
        grades = read_lines(runs[target[0]] / "grades.jsonl")
        point = PointwiseTally(spec, next(iter(grades[0]["grades"]), None))
        write_jsonl(folder / "verdicts.jsonl", point.counted(stream, grades))
        write_json(folder / "metrics.json", point.metrics())
    write_json(folder / "manifest.json", manifest(f"judges/{name}", len(replies)))
    return {f"{name}/{'_vs_'.join(target)}": folder}


def _verdict_spec(name: str, target: list[str], config: dict[str, Any]) -> VerdictSpec:
    kind = "pairwise" if len(target) == 2 else "pointwise"
    what = {"pairs": [tuple(target)]} if kind == "pairwise" else {"runs": target}
    judge = JudgeConfig.model_validate({"kind": kind, "model": "smollm2", "prompt": "judge", **what, **config})
    return VerdictSpec(name=name, judge=judge, target=target)


def read_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def spec(max_rows: int = 2000, title: str = "A test") -> ReportSpec:
    point, pair = {"A": "correct", "B": "incorrect"}, {"A": "first", "B": "second", "C": "tie"}
    known = {
        "grader": ReportJudge(labels=point),
        "arena": ReportJudge(labels=pair),
        "referee": ReportJudge(labels=pair),
    }
    return ReportSpec(title=title, max_rows=max_rows, judges=known)


def always_a(rid: RequestId, answers: tuple[str | None, ...]) -> str:
    return "A"


def small(root: Path, count: int = 12) -> tuple[Folders, Folders]:
    """Two runs over one dataset with truncated, empty, skipped and hostile answers, and an always-A judge."""
    rows = [row(number) for number in range(count)]
    rows[3] = row(3, id=HOSTILE, question=HOSTILE, reference=HOSTILE, kind=HOSTILE)
    rows[9] = row(9, id=f"lone{LONE}")
    terse = [generation(each, str(each["reference"])) for each in rows]
    wordy = [generation(each, f"I believe it is {number}") for number, each in enumerate(rows)]
    wordy[1] |= {"text": "It is, let me think,", "finish_reason": "length"}
    wordy[2] |= {"text": None, "finish_reason": "skipped"}
    wordy[4] |= {"text": ""}
    wordy[5] |= {"text": HOSTILE + LONE}
    runs = write_run(root, "terse", terse) | write_run(
        root, "wordy", wordy, ("exact_match", "contains"), prompt="wordy"
    )
    return runs, write_judge(root, "arena", runs, always_a)


def page_of(runs: Folders, judges: Folders | None = None, **kwargs: Any) -> str:
    return render(gather(spec(**kwargs), runs, judges or {}))


def payload(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', page)
    assert found
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return data


def words_of(page: str) -> str:
    """The page's text without markup, data and code, whitespace collapsed."""
    body = re.sub(r"(?s)<(script|style|svg).*?</\1>", " ", page)
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


# ---- numbers and words ----------------------------------------------------------------------------------------------


def test_a_score_is_shown_with_its_interval_and_n(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "half", [generation(row(n), "0" if n % 2 else str(2 * n)) for n in range(40)])
    text = words_of(page_of(runs))
    assert "50.0 % [35.2, 64.8]" in text
    assert re.search(r"half smollm2 · prompt direct 50.0 % \[35.2, 64.8\] exact_match 40 0 0 0 0", text)


def test_invalid_truncated_and_missing_references_are_counted_in_the_headline(tmp_path: Path) -> None:
    runs, _ = small(tmp_path)
    folder = runs["wordy"]
    metrics = json.loads((folder / "metrics.json").read_text()) | {"prompts_cut": 3, "no_reference": 1}
    write_json(folder / "metrics.json", metrics)
    assert re.search(r"12 2 1 skipped 1 empty 1 3 1 ", words_of(page_of(runs)))


def test_an_unreliable_pairwise_judge_gets_no_winner_and_the_reason_in_words(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    text = words_of(page_of(runs, judges))
    asked = 2 * (12 - 1)  # the skipped answer is not judged
    said = f"The judge wrote A in {asked} of {asked} verdicts; when the two answers were swapped it still wrote A."
    assert f"{said} This says nothing about which run is better." in text
    assert "1 of 1 judge targets is unreliable" in text
    assert "prefers" not in text
    assert "wins of" not in text


def test_every_place_that_shows_an_unreliable_judge_says_so(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    page = page_of(runs, judges)
    sections = {name: part for name, part in re.findall(r'(?s)<section id="(\w+)"(.*?)</section>', page)}
    for name in ("results", "judges", "pairs"):
        assert '<span class="tag bad">unreliable</span>' in sections[name]
    assert payload(page)["judges"][0]["reliable"] is False


def test_a_reliable_judge_names_the_winner_when_the_interval_is_clear_of_half(tmp_path: Path) -> None:
    runs, _ = small(tmp_path, 40)

    def prefers_terse(rid: RequestId, answers: tuple[str | None, ...]) -> str:
        return "A" if rid.variant == "first_second" else "B"

    judges = write_judge(tmp_path, "referee", runs, prefers_terse)
    text = words_of(page_of(runs, judges))
    assert "The judge prefers terse to wordy: the interval lies clear of 50 %." in text
    assert "wins of terse 39" in text


def test_a_reliable_judge_names_no_winner_when_the_interval_includes_half(tmp_path: Path) -> None:
    runs, _ = small(tmp_path, 40)

    def undecided(rid: RequestId, answers: tuple[str | None, ...]) -> str:
        first = (int(hashlib.sha256(ascii(rid.id).encode()).hexdigest(), 16) % 2 == 0) == (
            rid.variant == "first_second"
        )
        return "A" if first else "B"

    text = words_of(page_of(runs, write_judge(tmp_path, "referee", runs, undecided)))
    assert "No clear winner: the interval includes 50 %." in text


def test_unreadable_verdicts_are_counted_and_make_the_judge_unreliable(tmp_path: Path) -> None:
    runs, _ = small(tmp_path)
    one = {"terse": runs["terse"]}
    judges = write_judge(tmp_path, "grader", one, lambda rid, _: "A" if rid.id.endswith("1") else "hard to say")
    text = words_of(page_of(runs, judges))
    assert "10 of its 12 verdicts could not be read." in text
    assert "This says nothing about how many answers are correct." in text
    states = [verdict["state"] for each in payload(page_of(runs, judges))["rows"] for verdict in each["verdicts"]]
    assert states.count("unreadable") == 10


def test_the_bars_that_a_judge_was_held_to_stand_beside_its_numbers(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    text = words_of(page_of(runs, judges))
    assert "wrote A 100.0 % ✗ fails: at most 95 %" in text
    assert "could not be read 0 of 22 (0.0 %) ✓ holds: at most 10 %" in text
    assert "same choice in both orders 0.0 % ✗ fails: at least 60 %" in text
    assert "chose the answer shown first 100.0 %" in text
    assert "winner is the longer answer – " in text


# ---- what is missing ------------------------------------------------------------------------------------------------


def test_a_run_without_metric_or_reference_is_shown_without_a_score(tmp_path: Path) -> None:
    lines = [generation(row(n, reference=None), "text") for n in range(3)]
    runs = write_run(tmp_path, "free", lines, metrics=()) | write_run(tmp_path, "graded", lines)
    text = words_of(page_of(runs))
    assert "no metric" in text
    assert "nothing to grade" in text
    assert "No judge was given to this report." in text


def test_a_judge_that_was_asked_nothing_is_shown_with_dashes(tmp_path: Path) -> None:
    lines = [generation(row(n), None, "skipped") for n in range(3)]
    runs = write_run(tmp_path, "a", lines) | write_run(tmp_path, "b", lines)
    judges = write_judge(tmp_path, "arena", runs, always_a) | write_judge(
        tmp_path, "grader", {"a": runs["a"]}, always_a
    )
    text = words_of(page_of(runs, judges))
    assert "no verdict to count" in text
    assert "It was asked nothing." in text


def test_runs_over_different_datasets_are_kept_apart(tmp_path: Path) -> None:
    sums = write_run(tmp_path, "a", [generation(row(n), "0") for n in range(3)])
    facts = write_run(tmp_path, "b", [generation(row(n), "1") for n in range(3)], dataset="facts")
    page = page_of(sums | facts)
    data = payload(page)
    assert data["datasets"] == ["sums", "facts"]
    assert [(each["dataset"], len(each["answers"])) for each in data["rows"]] == [("sums", 1)] * 3 + [("facts", 1)] * 3
    assert "Runs over sums" in words_of(page)
    assert "Runs over facts" in words_of(page)


def test_samples_of_a_row_are_joined_by_id_and_sample(tmp_path: Path) -> None:
    twice = [generation(row(n), f"s{s}", sample=s) for n in range(2) for s in range(2)]
    runs = write_run(tmp_path, "twice", twice) | write_run(
        tmp_path, "once", [generation(row(n), "x") for n in range(2)]
    )
    rows = payload(page_of(runs))["rows"]
    assert [(each["id"], each["sample"], len(each["answers"])) for each in rows] == [
        ("q-000", 0, 2), ("q-000", 1, 1), ("q-001", 0, 2), ("q-001", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["generations.jsonl", "grades.jsonl", "metrics.json", "manifest.json"])
def test_a_missing_or_broken_file_of_a_run_is_named_with_its_path(tmp_path: Path, name: str) -> None:
    runs, _ = small(tmp_path)
    path = runs["wordy"] / name
    path.write_text('{"torn')
    with pytest.raises(UserError, match=re.escape(str(path))):
        page_of(runs)
    path.unlink()
    with pytest.raises(UserError, match=re.escape(f"{path} is missing")):
        page_of(runs)


@pytest.mark.parametrize("name", ["verdicts.jsonl", "metrics.json", "manifest.json"])
def test_a_missing_or_broken_file_of_a_judge_is_named_with_its_path(tmp_path: Path, name: str) -> None:
    runs, judges = small(tmp_path)
    path = next(iter(judges.values())) / name
    path.write_text("{}\n" if name == "verdicts.jsonl" else "[]")
    with pytest.raises(UserError, match=re.escape(str(path))):
        page_of(runs, judges)
    path.unlink()
    with pytest.raises(UserError, match=re.escape(f"{path} is missing")):
        page_of(runs, judges)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    runs, _ = small(tmp_path)
    with pytest.raises(UserError, match="is of run 'terse', not 'wordy'"):
        page_of({"wordy": runs["terse"]})


# ---- size -----------------------------------------------------------------------------------------------------------


def test_the_cap_on_rows_is_said_on_the_page_with_the_file_that_has_the_rest(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "a", [generation(row(n), "0") for n in range(30)])
    page = page_of(runs, max_rows=10)
    assert len(payload(page)["rows"]) == 10
    assert f"Showing the first 10 of 30 rows; the rest is in {runs['a']}/generations.jsonl ." in words_of(page)


def test_no_file_is_read_beyond_the_rows_that_are_shown(tmp_path: Path) -> None:
    lines = [generation(row(n), f"s{s}", sample=s) for n in range(30) for s in range(2)]
    runs = write_run(tmp_path, "twice", lines) | write_run(tmp_path, "once", lines[::2])
    judges = write_judge(tmp_path, "grader", {"once": runs["once"]}, always_a)
    for path in (
        *tmp_path.rglob("generations.jsonl"),
        *tmp_path.rglob("grades.jsonl"),
        *tmp_path.rglob("verdicts.jsonl"),
    ):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]) + "not a line of a result\n")
    page = page_of(runs, judges, max_rows=10)
    assert [len(each["answers"]) for each in payload(page)["rows"]] == [2, 1] * 5
    assert sum(len(each["verdicts"]) for each in payload(page)["rows"]) == 5
    assert "Showing the first 10 of 60 rows × samples; the rest is in" in words_of(page)


def test_fewer_rows_are_shown_where_long_answers_would_fill_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.report.rows.MAX_BYTES", 100_000)
    long = write_run(tmp_path, "a", [generation(row(n), "x" * 9_000) for n in range(20)])
    short = write_run(tmp_path, "b", [generation(row(n), "x") for n in range(3)], dataset="short")
    page = page_of(long | short)
    assert [each["dataset"] for each in payload(page)["rows"]] == ["sums"] * 5 + ["short"] * 3
    assert "Showing the first 5 of 20 rows of sums ; the rest is in" in words_of(page)
    assert "All 3 rows of short are on this page." in words_of(page)


def test_no_rows_are_embedded_when_the_cap_is_zero(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    page = page_of(runs, judges, max_rows=0)
    assert payload(page)["rows"] == []
    assert "still wrote A." in words_of(page)  # the numbers do not depend on what is embedded


def test_the_cap_is_shared_evenly_among_datasets() -> None:
    assert share_cap({"big": 100, "small": 3, "mid": 50}, 20) == {"big": 9, "small": 3, "mid": 8}
    assert share_cap({"a": 5, "b": 5}, 100) == {"a": 5, "b": 5}
    assert share_cap({"a": 5, "b": 5}, 1) == {"a": 1, "b": 0}
    assert share_cap({}, 10) == {}


def test_a_chart_draws_the_largest_values_and_the_table_has_all(tmp_path: Path) -> None:
    lines = [generation(row(n, kind=f"kind {n % 50}"), "0") for n in range(120)]
    page = page_of(write_run(tmp_path, "a", lines))
    assert f"drawn: the {charts.MAX_VALUES} values with the most answers of 50" in words_of(page)
    assert page.count("<bdi>kind ") == 50


def test_a_table_of_very_many_values_is_cut_and_says_where_the_rest_is(tmp_path: Path) -> None:
    lines = [generation(row(n, kind=f"kind {n}"), "0") for n in range(charts.MAX_LISTED + 1)]
    runs = write_run(tmp_path, "a", [*lines, generation(row(1000, kind="kind 500"), "0")])
    page = page_of(runs, max_rows=0)
    assert page.count("<bdi>kind ") == charts.MAX_LISTED
    assert "<bdi>kind 500<" in page  # it has the most answers
    said = f"The 500 values with the most answers of 501; the rest is in {runs['a']}/metrics.json ."
    assert said in words_of(page)


# ---- safety ---------------------------------------------------------------------------------------------------------


def test_markup_in_answers_ids_references_categories_and_title_stays_text(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    page = page_of(runs, judges, title=HOSTILE)
    assert "<img" not in page
    assert page.count("</script>") == 2
    first = payload(page)["rows"][3]
    assert [first["id"], first["reference"], first["slices"]["kind"]] == [HOSTILE] * 3
    assert payload(page)["rows"][5]["answers"][1]["text"] == HOSTILE + LONE


def test_packed_rows_unpack_to_the_same_value_and_no_text_can_end_their_block() -> None:
    value = {"a": HOSTILE, "b": [LONE, "\U0001f600", "\u2029", "\x00\x1f", 12345678901234567890], "<c>": None}
    text = pack(value)
    assert re.fullmatch("[A-Za-z0-9+/=]*", text)
    assert json.loads(gzip.decompress(base64.b64decode(text))) == value
    assert pack(value) == text


def test_half_a_surrogate_pair_outside_the_data_is_shown_as_a_replacement_character(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "a", [generation(row(n, kind=LONE), "0") for n in range(3)])
    page = page_of(runs, title=f"x{LONE}")
    assert "x\ufffd</title>" in page
    page.encode("utf-8")


def test_the_policy_allows_the_inlined_style_and_script_by_hash_and_nothing_else(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    page = page_of(runs, judges)
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert found
    policy = found[1].replace("&#39;", "'")
    for tag in ("style", "script"):
        (inlined,) = re.findall(rf"(?s)<{tag}>(.*?)</{tag}>", page)
        digest = base64.b64encode(hashlib.sha256(inlined.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    page = page_of(runs, judges)
    assert set(re.findall(r'(?:src|href|action|data|poster)="([^"#][^"]*)"', page)) == {"data:,"}
    tags = re.findall(r"<[^>]*>", re.sub(r"(?s)<(script|style)>.*?</\1>", "", page))
    assert not [tag for tag in tags if re.search(r"\s(?:style|on\w+)=", tag)]
    assert not re.search(r"@import|url\(", (HERE / "report.css").read_text())
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", (HERE / "report.js").read_text()
    )


def test_labels_in_charts_are_escaped() -> None:
    svg = charts.draw_labels([(HOSTILE, 3), ("\x00\ud800", 1)])
    assert "<img" not in svg
    assert "&lt;/script&gt;" in svg


def test_the_style_sheet_recolours_every_colour_that_charts_draw_with() -> None:
    css = (HERE / "report.css").read_text()
    for number, colour in enumerate(charts.PALETTE):
        assert f'.chart [fill="{colour}"] {{ fill: var(--s{number}); }}' in css
        assert f'.chart [stroke="{colour}"] {{ stroke: var(--s{number}); }}' in css
        assert f"--s{number}: {colour};" in css
    for fill in (charts.INK, charts.MUTED, charts.SLATE, charts.TIE):
        assert f'.chart [fill="{fill}"]' in css
    for stroke in (charts.INK, charts.GRID, charts.HALO):
        assert f'.chart [stroke="{stroke}"]' in css


def test_more_runs_than_colours_are_told_apart_by_their_names_in_the_chart(tmp_path: Path) -> None:
    runs: Folders = {}
    for number in range(9):
        runs |= write_run(tmp_path, f"run-{number}", [generation(row(n), "0") for n in range(2)])
    (chart,) = (charts.draw_slice(data) for data in gather(spec(), runs, {}).slices)
    assert "100.0 % run-8" in chart.desk


# ---- the program ----------------------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    for name in ("one.html", "two.html"):
        write_report(spec(), runs, judges, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_the_spec_of_a_config_has_what_the_report_shows_of_it() -> None:
    judge = {"kind": "pointwise", "model": "m", "prompt": "p", "runs": ["a"], "reliability": {"min_kappa": 0.5}}
    config = Config.model_validate(
        {
            "datasets": {"d": {"path": "d.jsonl"}},
            "models": {"m": {"engine": "echo"}},
            "prompts": {"p": {"file": "p.jinja"}},
            "runs": {"a": {"dataset": "d", "model": "m", "prompt": "p", "sampling": {"max_new_tokens": 9}}},
            "judges": {"grader": judge},
            "report": {"title": "T", "max_rows": 5},
        }
    )
    made = decode(ReportSpec, encode(ReportSpec.from_config(config)))
    assert (made.title, made.max_rows, made.sampling["a"].max_new_tokens) == ("T", 5, 9)
    assert made.judges["grader"].labels == {"A": "correct", "B": "incorrect"}
    assert made.judges["grader"].reliability.min_kappa == 0.5


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_the_script_writes_the_report_from_the_folders_it_is_given(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    named = [f"--run={name}={folder}" for name, folder in runs.items()]
    named += [f"--judge={name}={folder}" for name, folder in judges.items()]
    done = run_script("--spec", encode(spec()), *named, "--out", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stderr
    assert "2 runs, 1 judge targets" in done.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("argument", ["--run=a", "--run==x", "--run=a="])
def test_the_script_refuses_a_run_that_is_not_name_and_folder(tmp_path: Path, argument: str) -> None:
    done = run_script("--spec", encode(spec()), argument, "--out", str(tmp_path / "report.html"))
    assert done.returncode == 2
    assert "is not NAME=FOLDER" in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_versions_devices_counts_and_speeds_stand_in_the_provenance(tmp_path: Path) -> None:
    runs, _ = small(tmp_path)
    text = words_of(page_of(runs))
    assert "gristmill 0.1.0 · Python 3.11.7 · torch 2.11.0 · transformers 5.17.0" in text
    assert "accelerate None" not in text
    assert "org/smollm2 @ abc123 9f2c41d07be355aa static bfloat16" in text
    assert "NVIDIA H100 80GB HBM3 (0, 1)" in text
    assert "0 from the journal 12 generated" in text
    assert "1,189.0–1,210.4 each of 2 jobs" in text


# ---- a folder like the demo's ---------------------------------------------------------------------------------------

TOPICS = {
    "arithmetic": ("What is {a} plus {b}?", lambda a, b: str(a + b)),
    "comparison": ("Which is larger, {a} or {b}?", lambda a, b: str(max(a, b))),
    "counting": ("How many whole numbers lie between 0 and {a}, both included, but without {b}?", lambda a, b: str(a)),
    "spelling": ("Write the number {a}{b} backwards.", lambda a, b: f"{a}{b}"[::-1]),
}
SKILL = {"direct": 0.48, "step_by_step": 0.66, "few_shot": 0.58}


def write_demo(root: Path, count: int = 120) -> tuple[Folders, Folders]:
    """Three prompts over one dataset, a usable grader, a judge that always writes A, and one that is fine."""
    chance = random.Random(0)
    rows = [_demo_row(number, chance) for number in range(count)]
    runs: Folders = {}
    for name, skill in SKILL.items():
        lines = [_demo_answer(each, name, skill, chance) for each in rows]
        runs |= write_run(root, name, lines, ("contains", "exact_match"), "questions", ("category", "level"), name)
    judges: Folders = {}
    for name in runs:
        judges |= write_judge(root, "grader", {name: runs[name]}, _demo_grader(runs[name], chance))
    pairs = list(itertools.combinations(runs, 2))
    judges |= write_judge(root, "arena", {name: runs[name] for name in pairs[0]}, always_a)
    judges |= write_judge(root, "referee", {name: runs[name] for name in pairs[0]}, _demo_referee(chance))
    return runs, judges


def _demo_row(number: int, chance: random.Random) -> Row:
    topic = list(TOPICS)[number % 4]
    ask, answer = TOPICS[topic]
    a, b = chance.randrange(11, 99), chance.randrange(2, 11)
    level = chance.choice(["easy", "medium", "hard"])
    return {"id": f"{topic[:3]}-{number // 4 + 1:02d}", "category": topic, "level": level} | {
        "question": ask.format(a=a, b=b), "reference": answer(a, b),
    }  # fmt: skip


def _demo_answer(source: Row, run: str, skill: float, chance: random.Random) -> Row:
    right = chance.random() < skill - 0.12 * (source["level"] == "hard") + 0.1 * (source["category"] == "comparison")
    said = source["reference"] if right else str(chance.randrange(10, 120))
    steps = "First I look at the numbers in the question. Then I work it out one digit at a time."
    text = {"direct": said, "few_shot": f"The answer is {said}.", "step_by_step": f"{steps}\n\nSo it is {said}."}[run]
    cut = run == "step_by_step" and chance.random() < 0.08
    line = generation(source, text[:60] if cut else text, "length" if cut else "stop")
    line["messages"] = [
        {"role": "system", "content": "You answer short questions."},
        {
            "role": "user",
            "content": f"{source['question']}\n{'Think step by step.' if 'step' in run else 'Answer in one word.'}",
        },
    ]
    return line


def _demo_grader(run: Path, chance: random.Random) -> Reply:
    right = {line["id"]: line["grades"]["contains"] for line in read_lines(run / "grades.jsonl")}

    def reply(rid: RequestId, answers: tuple[str | None, ...]) -> str:
        if chance.random() < 0.03:
            return "That depends on what is meant by the question."
        return "A" if right[rid.id] == (chance.random() < 0.86) else "B"

    return reply


def _demo_referee(chance: random.Random) -> Reply:
    choices: dict[str, str] = {}

    def reply(rid: RequestId, answers: tuple[str | None, ...]) -> str:
        choice = choices.setdefault(rid.id, chance.choices("ABC", (30, 55, 15))[0])
        if chance.random() < 0.1:
            return chance.choice("AB")
        return choice if rid.variant == "first_second" else {"A": "B", "B": "A", "C": "C"}[choice]

    return reply


def test_a_report_of_five_thousand_short_rows_stays_under_three_megabytes(tmp_path: Path) -> None:
    chance = random.Random(0)
    lines = []
    for number in range(5000):  # of words that do not repeat much, so that packing gains no more than with real texts
        said = " ".join(f"{chance.randrange(20_000):x}" for _ in range(30))
        lines.append(generation(row(number, question=said), f"{said} {chance.random()}"))
    runs = write_run(tmp_path, "one", lines)
    assert write_report(spec(max_rows=5000), runs, {}, tmp_path / "report.html") < 3_000_000


def main(arguments: Iterable[str]) -> None:
    folder, count = arguments
    runs, judges = write_demo(Path(folder), int(count))
    size = write_report(spec(title="Four kinds of questions"), runs, judges, Path(folder) / "report.html")
    print(f"{folder}/report.html: {size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
