"""Facts about the whole workflow, on the echo engine: the real Snakefile, rules, scripts, journal and merge."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ANSWERS, METRICS, ROOT, Project, echo_config, echo_project, wait_until

JUDGED = {
    "runs": {
        name: {"dataset": "rows", "model": "echo", "prompt": name, "metrics": ["contains"], "slices": ["kind"]}
        for name in ("plain", "loud")
    },
    "prompts": {
        "plain": {"file": "ask.jinja"},
        "loud": {"file": "loud.jinja"},
        "grade": {"file": "grade.jinja"},
        "compare": {"file": "compare.jinja"},
    },
    "judges": {
        "grader": {"kind": "pointwise", "model": "echo", "prompt": "grade", "runs": ["plain", "loud"]},
        "arena": {"kind": "pairwise", "model": "echo", "prompt": "compare", "pairs": [["plain", "loud"]]},
    },
}


JUDGED_TARGETS = ("grader/plain", "grader/loud", "arena/plain_vs_loud")


@pytest.fixture
def judged(project: Project) -> Project:
    """Two runs, a pointwise judge that always says A, and a pairwise one that always chooses the first answer."""
    return with_judges(project)


def with_judges(project: Project) -> Project:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n, "kind": "ab"[n % 2]} for n in range(8))
    project.write_prompt("loud.jinja", "{{ question }}!")
    project.write_prompt("grade.jinja", "Verdict: A")
    project.write_prompt("compare.jinja", "[[A]]")
    project.write_config(echo_config(**JUDGED))
    return project


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = echo_project(tmp_path_factory.mktemp("finished"))
    made.done()
    return made


@pytest.fixture(scope="module")
def judged_once(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = with_judges(echo_project(tmp_path_factory.mktemp("judged")))
    made.done(gpu=2)
    return made


@pytest.fixture
def finished(finished_once: Project, tmp_path: Path) -> Project:
    """`project` after a run."""
    return finished_once.copied(tmp_path)


@pytest.fixture
def finished_judged(judged_once: Project, tmp_path: Path) -> Project:
    """`judged` after a run."""
    return judged_once.copied(tmp_path)


def jobs(output: str) -> dict[str, int]:
    """Rule → jobs, from snakemake's table; empty when there was nothing to do."""
    _, found, table = output.rpartition("Job stats:\n")
    rows = [line.split() for line in table.split("\n\n")[0].splitlines()[2:]] if found else []
    return {name: int(count) for name, count in rows if name not in {"total", "all"}}


def test_the_whole_pipeline_leaves_the_documented_files(finished_judged: Project) -> None:
    results = finished_judged.folder / "results"
    sealed = {"requests.jsonl", "generations.jsonl"}
    always = sealed | {f"{name}.sha256" for name in sealed} | {"metrics.json", "manifest.json"}
    for run in ("plain", "loud"):
        there = {path.name for path in (results / "runs" / run).iterdir() if path.is_file()}
        assert there == always | {"grades.jsonl"}
    for target in JUDGED_TARGETS:
        there = {path.name for path in (results / "judges" / target).iterdir() if path.is_file()}
        assert there == always | {"verdicts.jsonl"}
    beside = {"report.html", "plan.txt", "invocation.json", "comparisons.json", "rankings.json"}
    assert {path.name for path in results.iterdir() if path.is_file()} == beside


def test_a_generation_line_has_the_documented_columns_in_the_dataset_order(judged: Project) -> None:
    judged.done("results/runs/plain/generations.jsonl", gpu=3)
    lines = judged.lines("runs/plain/generations.jsonl")
    assert [line["id"] for line in lines] == [f"r{n}" for n in range(8)]
    assert lines[3] | {"seconds": 0, "key": ""} == {
        "id": "r3",
        "sample": 0,
        "variant": "",
        "messages": [{"role": "user", "content": "say 3"}],
        "reference": 3,
        "row": {"id": "r3", "question": "say 3", "kind": "b"},
        "text": "say 3",
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "prompt_cut_tokens": 0,
        "seconds": 0,
        "key": "",
    }


def test_a_judge_that_always_says_a_is_unreliable_and_names_no_winner(finished_judged: Project) -> None:
    arena = finished_judged.value("judges/arena/plain_vs_loud/metrics.json")
    assert (arena["n"], arena["asked"], arena["disagreements"], arena["consistency"]) == (8, 16, 8, 0.0)
    assert arena["label_counts"] == {"A": 16, "B": 0, "C": 0}
    assert arena["wins"] == {"plain": 0, "loud": 0}
    assert not arena["reliable"]
    assert not finished_judged.value("judges/grader/plain/metrics.json")["reliable"]
    assert "unreliable" in (finished_judged.folder / "results/report.html").read_text()


def test_80_rows_on_3_workers_are_split_27_27_26(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(80))
    project.done("results/runs/plain/generations.jsonl", "--notemp", gpu=3)
    parts = sorted((project.folder / "results/runs/plain/parts/3").glob("*.jsonl"))
    assert sorted(len(path.read_text().splitlines()) for path in parts) == [26, 27, 27]
    assert [line["id"] for line in project.lines("runs/plain/generations.jsonl")] == [f"r{n}" for n in range(80)]


def test_2_rows_on_5_workers_make_2_shards(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(2))
    assert jobs(project.done(gpu=5))["generate"] == 2


def test_a_second_run_has_nothing_to_do(finished_judged: Project) -> None:
    assert "Nothing to be done" in finished_judged.done()


def test_the_dry_run_shows_every_job_and_makes_no_file(judged: Project) -> None:
    shown = jobs(judged.done("-n", gpu=4))
    assert (shown["generate"], shown["judge_generate"], shown["merge"], shown["judge_merge"]) == (8, 12, 2, 3)
    assert (shown["verdicts"], shown["metrics"], shown["report"]) == (3, 2, 1)
    assert shown["prepare_model"] == 1  # for two runs and three judge targets on one model
    assert not (judged.folder / "results").exists()


def sharded_config(each: int, **changes: Any) -> dict[str, Any]:
    return echo_config(models={"echo": {"engine": "echo", "shards_per_worker": each}}, **changes)


def loads(project: Project) -> int:
    """Jobs of the run that loaded the model, by their logs."""
    logs = project.folder.glob("results/runs/plain/logs/generate-*.log")
    return sum("loaded in" in path.read_text() for path in logs)


def test_a_model_loads_once_a_worker_and_once_a_shard_where_a_worker_has_several(project: Project) -> None:
    project.done("results/runs/plain/manifest.json", gpu=2)
    assert loads(project) == 2
    shutil.rmtree(project.folder / "results")
    project.write_config(sharded_config(3))
    assert jobs(project.done("results/runs/plain/manifest.json", "-n", gpu=2))["generate"] == 6
    project.done("results/runs/plain/manifest.json", gpu=2)
    assert loads(project) == 6
    workers = project.value("runs/plain/manifest.json")["workers"]
    assert [worker["rows"] for worker in workers] == [2] * 6
    assert all(worker["load_seconds"] >= 0 for worker in workers)


def test_another_number_of_shards_after_a_kill_asks_only_the_rows_in_flight_and_loses_none(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(40))
    for each, rows in ((4, 8), (2, 20)):  # killed, cut anew, killed again
        project.write_config(sharded_config(each))
        slow = project.environment(GRISTMILL_ECHO_SECONDS="0.2")
        words = project.command("results/runs/plain/generations.jsonl", gpu=2)
        running = subprocess.Popen(words, cwd="/", env=slow, start_new_session=True, stderr=subprocess.DEVNULL)
        wait_until(lambda rows=rows: len(project.asked("runs/plain")) >= rows)
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert len(project.asked("runs/plain")) < 40

    project.write_config(sharded_config(7))
    project.done("results/runs/plain/generations.jsonl", gpu=2)
    asked = project.asked("runs/plain")
    assert sorted(asked, key=lambda name: int(name[1:])) == [f"r{n}" for n in range(40)]  # nothing twice
    assert [line["text"] for line in project.lines("runs/plain/generations.jsonl")] == [f"say {n}" for n in range(40)]


def test_shards_of_unlike_groups_follow_the_speeds_and_no_job_waits_for_the_other_groups_gpu(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(48))
    inventory = project.folder / "gpus.json"
    inventory.write_text(json.dumps([{"name": "fake", "memory_total_mib": 80_000, "count": 2}]))
    groups = [{"devices": [0], "speed": 2}, {"devices": [1], "speed": 1}]
    project.write_config(sharded_config(4, gpus={"groups": groups}))
    words = ("results/runs/plain/manifest.json", "--cores", "8")
    project.done(*words, GRISTMILL_INVENTORY=str(inventory), GRISTMILL_ECHO_SECONDS="0.1")
    logs = [path.read_text() for path in project.folder.glob("results/runs/plain/logs/generate-*.log")]
    assert len(logs) == 8
    assert not any("waiting for" in log for log in logs)  # a job that waits would keep a token from the other group
    rows: Counter[int] = Counter()
    for worker in project.value("runs/plain/manifest.json")["workers"]:
        rows[worker["devices"][0]["index"]] += worker["rows"]
    assert rows == {0: 32, 1: 16}


def test_the_command_line_of_a_merge_does_not_grow_with_the_shards(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": "say", "reference": n} for n in range(1000))
    name = "".join(f"{n:04}" for n in range(20))  # as long as a name may be
    project.write_config(sharded_config(500, runs={name: echo_config()["runs"]["plain"]}))
    shown = project.done(f"results/runs/{name}/generations.jsonl", "-n", "-p", gpu=2)
    assert jobs(shown)["generate"] == 1000
    (command,) = [line for line in shown.splitlines() if "merge.py" in line]
    assert len(command) < 5_000


def test_kill_9_in_the_middle_of_generate_costs_only_the_rows_in_flight(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(40))
    slow = project.environment(GRISTMILL_ECHO_SECONDS="0.25")
    first = subprocess.Popen(
        project.command(ANSWERS), cwd="/", env=slow, start_new_session=True, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: len(project.asked("runs/plain")) >= 8)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = project.asked("runs/plain")
    assert 8 <= len(before) < 40
    assert not (project.folder / "results/runs/plain/generations.jsonl").exists()

    project.done(ANSWERS)
    asked = project.asked("runs/plain")
    assert sorted(asked, key=lambda name: int(name[1:])) == [f"r{n}" for n in range(40)]  # nothing twice
    assert [line["text"] for line in project.lines("runs/plain/generations.jsonl")] == [f"say {n}" for n in range(40)]


def test_term_to_a_job_keeps_its_rows_and_its_retry_goes_on(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(40))
    slow = project.environment(GRISTMILL_ECHO_SECONDS="0.25")
    pipe = {"stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(project.command(ANSWERS), cwd="/", env=slow, start_new_session=True, **pipe)
    wait_until(lambda: len(project.asked("runs/plain")) >= 8)
    worker = next((project.folder / "results/runs/plain/journal").glob("*.jsonl")).read_bytes().split(b"\n")[1]
    os.kill(json.loads(worker)["worker"]["pid"], signal.SIGTERM)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 0
    assert "stopped by SIGTERM" in said  # the retry has a log of its own
    assert len(project.asked("runs/plain")) == 40


def test_a_changed_judge_prompt_asks_the_judge_again_and_generates_nothing(finished_judged: Project) -> None:
    finished_judged.write_prompt("grade.jinja", "Verdict: B")
    ran = jobs(finished_judged.done(*(f"results/judges/{name}/metrics.json" for name in JUDGED_TARGETS)))
    assert not {"generate", "merge"} & set(ran)
    assert ran["judge_generate"] == 2
    assert (len(finished_judged.asked("runs/plain")), len(finished_judged.asked("judges/grader/plain"))) == (8, 16)
    assert len(finished_judged.asked("judges/arena/plain_vs_loud")) == 16
    assert finished_judged.value("judges/grader/plain/metrics.json")["label_counts"] == {"A": 0, "B": 8}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"report": {"title": "Other"}}, {"report"}),
        ({"gpus": {"wait_minutes": 5}}, set()),
    ],
)
def test_an_edit_reruns_only_what_depends_on_it(
    finished_judged: Project, change: dict[str, Any], expected: set[str]
) -> None:
    finished_judged.write_config(echo_config(**JUDGED, **change))
    assert set(jobs(finished_judged.done("-n"))) == expected


def test_a_changed_metric_starts_no_model(finished_judged: Project) -> None:
    config = echo_config(**json.loads(json.dumps(JUDGED)))
    config["runs"]["plain"]["metrics"] = ["exact_match"]
    finished_judged.write_config(config)
    ran = jobs(finished_judged.done())
    assert set(ran) == {"metrics", "verdicts", "report"}


def test_an_edited_chat_template_file_asks_again(project: Project) -> None:
    project.write_prompt("chat.jinja", "{{ messages }}")
    project.write_config(echo_config(models={"echo": {"engine": "echo", "chat_template": "chat.jinja"}}))
    project.done(ANSWERS)
    project.write_prompt("chat.jinja", "{{ messages[0].content }}")
    project.done(ANSWERS)
    assert len(project.asked("runs/plain")) == 24


def test_a_result_that_was_removed_is_made_again_without_a_model(finished: Project) -> None:
    (finished.folder / "results/runs/plain/generations.jsonl").unlink()
    finished.done(ANSWERS)
    assert len(finished.lines("runs/plain/generations.jsonl")) == 12
    assert len(finished.asked("runs/plain")) == 12


def test_added_and_edited_rows_are_the_only_ones_asked(finished: Project) -> None:
    rows = [{"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(12)]
    rows[4]["question"] = "say something else"
    finished.write_rows([{"id": "new", "question": "say new", "reference": 0}, *rows[::-1]])
    finished.done(ANSWERS, gpu=3)
    assert sorted(finished.asked("runs/plain")[12:]) == ["new", "r4"]
    assert [line["id"] for line in finished.lines("runs/plain/generations.jsonl")][:2] == ["new", "r11"]


def test_another_number_of_gpus_asks_nothing_again(finished: Project) -> None:
    finished.done(ANSWERS, "--forcerun", "merge", gpu=4)
    assert len(finished.asked("runs/plain")) == 12


def test_samples_become_rows_of_their_own(project: Project) -> None:
    config = echo_config()
    config["runs"]["plain"]["sampling"] = {"samples": 3, "temperature": 1.0}
    project.write_config(config)
    project.done(METRICS, gpu=2)
    lines = project.lines("runs/plain/generations.jsonl")
    assert [(line["id"], line["sample"]) for line in lines[:4]] == [("r0", 0), ("r0", 1), ("r0", 2), ("r1", 0)]
    assert project.value("runs/plain/metrics.json")["n"] == 36


def test_csv_and_parquet_are_written_on_request(project: Project) -> None:
    import pyarrow.parquet as pq

    project.write_rows([{"id": "r0", "question": 'a "b"\n, c\r\u2028', "reference": None}])
    config = echo_config()
    config["runs"]["plain"] |= {"formats": ["csv", "parquet"], "metrics": []}
    project.write_config(config)
    project.done(*(f"results/runs/plain/generations.{name}" for name in ("csv", "parquet")))
    folder = project.folder / "results/runs/plain"
    with open(folder / "generations.csv", newline="", encoding="utf-8") as handle:
        assert next(csv.DictReader(handle))["text"] == 'a "b"\n, c\r\u2028'
    assert pq.read_table(folder / "generations.parquet").to_pylist()[0]["text"] == 'a "b"\n, c\r\u2028'


def test_without_a_limit_no_more_jobs_run_than_there_are_gpus_and_each_has_its_own(project: Project) -> None:
    inventory = project.folder / "gpus.json"
    gpus = [
        {"index": n, "uuid": f"GPU-{n}", "name": "fake", "memory_total_mib": 80_000, "memory_used_mib": 0}
        for n in range(2)
    ]
    inventory.write_text(json.dumps(gpus))
    runs = {name: echo_config()["runs"]["plain"] for name in ("a", "b", "c")}
    project.write_config(echo_config(runs=runs))
    targets = [f"results/runs/{name}/generations.jsonl" for name in runs]
    output = project.done(*targets, "--cores", "8", GRISTMILL_INVENTORY=str(inventory), GRISTMILL_ECHO_SECONDS="0.1")
    assert jobs(output)["generate"] == 6
    logs = [path.read_text() for run in runs for path in project.folder.glob(f"results/runs/{run}/logs/generate-*.log")]
    assert len(logs) == 6
    assert all("lease on GPU" in log for log in logs)
    assert not any("waiting for" in log for log in logs)  # the tokens kept a third job from starting
    assert "GPU 1  fake  80000 MiB  GPU-1" in (project.folder / "results/plan.txt").read_text()


def test_a_model_larger_than_the_tokens_stops_before_any_job(project: Project) -> None:
    project.write_config(echo_config(models={"echo": {"engine": "echo", "gpus_per_model": 2}}))
    result = project.run(gpu=1)
    assert result.returncode != 0
    assert "gpus_per_model is 2, but there are 1 GPU token" in result.stdout
    assert not (project.folder / "results").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"foo": 1}, "foo is not a known key"),
        (
            {"datasets": {"rows": {"path": "rows.jsonl", "max_row": 3}}},
            "datasets.rows.max_row is not a known key",
        ),
        ({"datasets": {"rows": {"path": "none.jsonl"}}}, "datasets.rows.path is 'none.jsonl', which does not exist"),
        ({"prompts": {"ask": {"file": "typo.jinja"}}}, "{{ qestion }}"),
    ],
)
def test_a_config_mistake_is_one_line_without_a_traceback(project: Project, change: dict[str, Any], line: str) -> None:
    project.write_prompt("typo.jinja", "{{ qestion }}")
    project.write_config(echo_config(**change))
    result = project.run("-n")
    assert result.returncode == 2
    errors = [text for text in result.stdout.splitlines() if text.startswith("config error: ")]
    assert len(errors) == 1
    assert line in errors[0]
    assert "Traceback" not in result.stdout
    assert not (project.folder / "results").exists()


@pytest.mark.parametrize(("rows", "status"), [(12, 2), (150, 1)], ids=["among the first, before any job", "further on"])
def test_a_broken_dataset_line_is_refused_with_file_line_and_reason(project: Project, rows: int, status: int) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(rows))
    with open(project.folder / "rows.jsonl", "a") as handle:
        handle.write("{broken\n")
    result = project.run()
    assert result.returncode == status
    assert f"rows.jsonl, line {rows + 1}" in result.stdout
    assert "Traceback" not in result.stdout


def test_few_shot_turns_too_long_for_a_command_line_are_refused_in_one_line(project: Project) -> None:
    turns = [{"user": "u" * 60_000, "assistant": "a" * 60_000}]
    project.write_config(echo_config(prompts={"ask": {"file": "ask.jinja", "few_shot": turns}}))
    result = project.run("-n")
    assert result.returncode == 2
    assert "prompts.ask: system and few_shot take 120" in result.stdout
    assert "Traceback" not in result.stdout


def test_config_overrides_on_the_command_line_reach_the_run(project: Project) -> None:
    project.done(ANSWERS, "--config", "runs={plain: {sampling: {max_new_tokens: 1}}}")
    lines = project.lines("runs/plain/generations.jsonl")
    assert {(line["text"], line["finish_reason"]) for line in lines} == {("say", "length")}


def test_the_workflow_runs_without_any_profile(project: Project) -> None:
    words = [word for word in project.command() if "profile" not in word and "profiles" not in word]
    subprocess.run(words, cwd=project.folder, env=project.environment(), check=True, capture_output=True, timeout=300)
    assert len(project.lines("runs/plain/generations.jsonl")) == 12


def test_scripts_import_neither_torch_nor_transformers_to_start() -> None:
    code = """
import runpy, sys
sys.argv = [{script!r}, "--help"]
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as stop:
    assert stop.code == 0, stop.code
loaded = {{"torch", "transformers"}} & set(sys.modules)
assert not loaded, loaded
"""
    for script in sorted(Path(ROOT / "scripts").glob("*.py")):
        result = subprocess.run(
            [sys.executable, "-c", code.format(script=str(script))],
            env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, f"{script.name}: {result.stderr[-500:]}"


# ---- rows that fail


def test_a_failed_row_stops_the_run_and_the_next_asks_it_alone(project: Project) -> None:
    result = project.run(ANSWERS, GRISTMILL_ECHO_FAILS="r3|r7")
    assert result.returncode == 1
    assert "2 rows failed: r3#0 (out_of_memory), r7#0 (out_of_memory); run again to retry only these" in result.stdout
    assert not (project.folder / "results/runs/plain/generations.jsonl").exists()
    assert sorted(project.asked("runs/plain")) == sorted([f"r{n}" for n in range(12)] + ["r3", "r7"])  # one retry
    project.done(ANSWERS)
    assert len(project.asked("runs/plain")) == 12  # failures that have an answer by now are dropped
    assert [line["text"] for line in project.lines("runs/plain/generations.jsonl")] == [f"say {n}" for n in range(12)]


def test_a_run_goes_on_without_as_many_rows_as_it_may_and_asks_them_again_when_told(project: Project) -> None:
    config = echo_config()
    config["runs"]["plain"]["max_failed_ratio"] = 0.2
    judge = {"kind": "pointwise", "model": "echo", "prompt": "ask", "runs": ["plain"]}
    project.write_config(config | {"judges": {"grader": judge}})
    targets = (METRICS, "results/runs/plain/manifest.json", "results/judges/grader/plain/verdicts.jsonl")
    project.done(*targets, gpu=3, GRISTMILL_ECHO_FAILS="r3|r7")
    lines = {line["id"]: line for line in project.lines("runs/plain/generations.jsonl")}
    assert (lines["r3"]["text"], lines["r3"]["finish_reason"]) == (None, "out_of_memory")
    metrics = project.value("runs/plain/metrics.json")
    assert (metrics["invalid"]["out_of_memory"], metrics["n"], metrics["metrics"]["contains"]["correct"]) == (2, 12, 10)
    assert [row["id"] for row in metrics["failed_rows"]] == ["r3", "r7"]
    assert project.value("runs/plain/manifest.json")["finish_reasons"] == {"out_of_memory": 2, "stop": 10}
    verdicts = {line["id"]: line["reason"] for line in project.lines("judges/grader/plain/verdicts.jsonl")}
    assert verdicts["r3"] == "no_answer"
    assert "Nothing to be done" in project.done(*targets, gpu=3)
    project.done(*targets[:2], "--forcerun", "merge", gpu=3)
    assert project.value("runs/plain/metrics.json")["failed_rows"] == []
    assert project.value("runs/plain/manifest.json")["finish_reasons"] == {"stop": 12}


def test_more_failed_rows_than_the_run_may_have_are_no_result(project: Project) -> None:
    config = echo_config()
    config["runs"]["plain"]["max_failed_ratio"] = 0.1
    project.write_config(config)
    result = project.run(METRICS, gpu=2, GRISTMILL_ECHO_FAILS="r3|r7")
    assert result.returncode == 1
    assert "2 of 12 rows failed, over max_failed_ratio 0.1" in result.stdout or "2 rows failed" in result.stdout
    assert not (project.folder / "results/runs/plain/generations.jsonl").exists()
    project.done(METRICS, gpu=2)
    assert project.value("runs/plain/metrics.json")["failed_rows"] == []


# ---- what a newcomer met


def test_a_plan_is_shown_in_a_folder_with_results(finished: Project) -> None:
    assert "model echo: " in finished.done("plan")
    assert "Nothing to be done" in finished.done()


def test_a_prompt_that_is_put_back_with_its_old_date_is_noticed(finished: Project) -> None:
    old = (finished.folder / "ask.jinja").stat()
    finished.write_prompt("ask.jinja", "please {{ question }}")
    finished.done(ANSWERS)
    finished.write_prompt("ask.jinja", "{{ question }}")
    os.utime(finished.folder / "ask.jinja", ns=(old.st_atime_ns, old.st_mtime_ns))
    finished.done(ANSWERS)
    assert finished.lines("runs/plain/generations.jsonl")[3]["text"] == "say 3"


def test_results_that_are_a_file_or_a_link_to_nowhere_are_one_line(project: Project) -> None:
    results = project.folder / "results"
    results.write_text("")
    assert "config error: results is a file" in project.run().stdout
    results.unlink()
    results.symlink_to("gone")
    assert "config error: results is a link that leads nowhere (gone)" in project.run().stdout


def journal_program(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "journal.py"), *arguments]
    return subprocess.run(command, cwd=project.folder, capture_output=True, text=True, check=False)


def test_prune_drops_what_no_request_asks_for_and_refuses_when_that_is_not_known(finished: Project) -> None:
    finished.write_prompt("ask.jinja", "please {{ question }}")
    finished.done(ANSWERS)
    assert "12 answers that generations.jsonl does not use" in journal_program(finished, "prune").stdout
    folder = finished.folder / "results/runs/plain"
    whole = (folder / "generations.jsonl").read_bytes()
    (folder / "generations.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    assert "is not what generations.jsonl.sha256 says" in journal_program(finished, "prune", "--apply").stderr
    (folder / "generations.jsonl").write_bytes(whole)
    asked = (folder / "requests.jsonl").read_bytes()
    (folder / "requests.jsonl").write_bytes(asked.replace(b"please say 3", b"say 3"))  # a run that was killed since
    assert "does not answer the current requests" in journal_program(finished, "prune", "--apply").stderr
    (folder / "requests.jsonl").write_bytes(asked)
    assert journal_program(finished, "prune", "--apply").returncode == 0
    assert sorted(finished.asked("runs/plain")) == sorted(f"r{n}" for n in range(12))
    assert journal_program(finished, "check").returncode == 0
    assert "1 segments, 12 answers, 0 failures" in journal_program(finished, "show").stdout


@pytest.mark.parametrize(("name", "after"), [("requests.jsonl", "split"), ("generations.jsonl", "metrics")])
def test_a_result_that_is_cut_or_edited_by_hand_is_refused_and_made_anew(
    finished: Project, name: str, after: str
) -> None:
    path = finished.folder / "results/runs/plain" / name
    whole = path.read_bytes()
    for damaged in (b"".join(whole.splitlines(keepends=True)[:5]), whole.replace(b"say 7", b"say 8")):
        path.write_bytes(damaged)
        result = finished.run(METRICS)
        assert (result.returncode, f"Error in rule {after}" in result.stdout) == (1, True)
        assert f"plain/{name} is not what {name}.sha256 says; the file was cut or edited" in result.stdout
    path.unlink()
    finished.done(METRICS)
    assert [line["id"] for line in finished.lines("runs/plain/generations.jsonl")] == [f"r{n}" for n in range(12)]
    assert sorted(finished.asked("runs/plain")) == sorted(f"r{n}" for n in range(12))


def test_a_clock_that_jumped_is_said_and_costs_no_answer(project: Project) -> None:
    future = 2_208_988_800  # 2040
    rows = project.folder / "rows.jsonl"
    os.utime(rows, (future, future))
    result = project.run(ANSWERS)
    assert (result.returncode, "clock skew" in result.stdout) == (1, True)
    os.utime(rows)
    project.done(ANSWERS)
    for path in (project.folder / "results").rglob("*"):  # the clock was ahead while they were made
        os.utime(path, (future, future))
    project.write_prompt("ask.jinja", "please {{ question }}")
    result = project.run(ANSWERS)
    assert (result.returncode, "clock skew" in result.stdout) == (1, True)
    advice = "find results -newermt now -exec touch -d 2001-01-01 {} +"
    assert advice in (ROOT / "docs/troubleshooting.md").read_text()
    subprocess.run(shlex.split(advice), cwd=project.folder, check=True)
    project.done(ANSWERS)
    assert [line["text"] for line in project.lines("runs/plain/generations.jsonl")][3] == "please say 3"
    assert len(project.asked("runs/plain")) == 24  # 12 of each prompt
