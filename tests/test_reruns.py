"""Facts about what runs again: one for each line of docs/reruns.md, counted in what the engine was asked and in rules.

Lines that are independent share one pipeline run: a project holds one run or judge for each, all are edited, and
snakemake runs once. Finished results are made once a module and copied with their dates, as `cp -a` does.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SNAKEMAKE, Project, echo_config

ANSWER = {"render_requests", "split", "generate", "merge"}
ANSWER_OF_MODEL = {"split", "generate", "merge"}
JUDGE = {"judge_requests", "judge_split", "judge_generate", "judge_merge", "verdicts"}
CHECKOUT = ("Snakefile", "rules", "scripts", "profiles", "envs")
JOB = re.compile(r"^(?:local)?rule (\w+):\n((?: {4}.*\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Place(Project):
    """A project, the checkout it is run with, and what it did last."""

    root: Path = ROOT

    def command(self, *arguments: str, gpu: int | None = None) -> list[str]:
        program, *words = super().command(*arguments, gpu=gpu)
        return [program, *(word.replace(str(ROOT), str(self.root), 1) for word in words)]

    def copied(self, folder: Path, root: Path | None = None) -> "Place":
        """The project with its results elsewhere, dates kept."""
        shutil.copytree(self.folder, folder, symlinks=True)
        config = (folder / "config.yaml").read_text()
        assert str(self.folder) not in config
        return Place(folder, root or self.root)

    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "config.yaml").read_text()))

    def write_config(self, config: dict[str, Any]) -> None:
        (self.folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML

    def edit(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the config in place."""
        config = self.config()
        change(config)
        self.write_config(config)

    def would_run(self, *arguments: str, gpu: int | None = None, **environment: str) -> dict[str, set[str]]:
        return rules_by_unit(self.done("-n", *arguments, gpu=gpu, **environment))

    def rerun(self, *arguments: str, gpu: int | None = None, **environment: str) -> "Rerun":
        before = {record for path in self.segments() for record in records_of(path)}
        dropped = {path.parent: doubles_of(path) for path in self.segments()}
        output = self.done(*arguments, gpu=gpu, **environment)
        asked: dict[str, list[str]] = {}
        for path in self.segments():
            new = [record for record in records_of(path) if record not in before]  # with the seconds it took
            rows = [name_of(record) for record in new]
            rows += ["dropped"] * (doubles_of(path) - dropped.get(path.parent, 0))
            if rows:
                unit = str(path.parent.parent.relative_to(self.folder / "results"))
                asked.setdefault(unit, []).extend(rows)
        return Rerun(rules_by_unit(output), {unit: sorted(rows) for unit, rows in asked.items()})

    def segments(self) -> list[Path]:
        return sorted((self.folder / "results").glob("**/journal/*.jsonl"))


@dataclass(frozen=True)
class Rerun:
    """What one run of snakemake did: unit → rules, and unit → rows that the engine was asked."""

    ran: dict[str, set[str]]
    asked: dict[str, list[str]]


def rules_by_unit(output: str) -> dict[str, set[str]]:
    """Run, judge/target, model, "logits <name>", "training <name>" or "" → the rules that snakemake named."""
    found: dict[str, set[str]] = {}
    for rule, body in JOB.findall(output):
        wildcards = dict(pair.split("=", 1) for pair in re.findall(r"\w+=[^,\n]+", _line(body, "wildcards")))
        names = [wildcards[name] for name in ("run", "judge", "target", "model") if name in wildcards]
        names += [f"{kind} {wildcards[kind]}" for kind in ("logits", "training") if kind in wildcards]
        if rule != "all":
            found.setdefault("/".join(names), set()).add(rule)
    return found


def _line(body: str, name: str) -> str:
    return next((line for line in body.splitlines() if line.strip().startswith(f"{name}: ")), "")


def records_of(segment: Path) -> list[bytes]:
    return [line for line in segment.read_bytes().split(b"\n")[1:] if line.startswith(b'{"key"')]


def doubles_of(segment: Path) -> int:
    """Answers that came twice and that a compaction dropped."""
    notes = [json.loads(line) for line in segment.read_bytes().split(b"\n") if line.startswith(b'{"summary"')]
    return sum(note["summary"].get("doubles", 0) for note in notes)


def name_of(record: bytes) -> str:
    """`r1`, with `#2` for a later sample and `/second_first` for a variant."""
    row = json.loads(record)["completion"]
    return row["id"] + (f"#{row['sample']}" if row["sample"] else "") + (f"/{row['variant']}" if row["variant"] else "")


def rows(*numbers: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "question": f"say {n}", "reference": n, "note": "", **more} for n in numbers]


def touch(*paths: Path) -> None:
    for path in paths:
        os.utime(path)


# ---- edits of a run: dataset, prompt, sampling, model


@dataclass
class Setup:
    """One run with a dataset, a prompt and a model of its own."""

    rows: list[dict[str, Any]] = field(default_factory=lambda: rows(0, 1, 2))
    text: str = "{{ question }}"
    prompt: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    model: dict[str, Any] = field(default_factory=dict)
    touched: bool = False


@dataclass(frozen=True)
class Line:
    """A line of the table: how a run is edited, which rows are asked, which rules run for it."""

    edit: Callable[[Setup], Any]
    asked: list[str]
    rules: set[str]
    start: Callable[[Setup], Any] = lambda setup: None


ALL = ["r0", "r1", "r2"]
LONG = {"id": "long", "question": "one two three four five six", "reference": "", "note": ""}
PLACEMENT = {
    "device_map": "balanced",
    "max_memory": {"0": "10GiB"},
    "attention": "sdpa",
    "max_batch_rows": 8,
    "allow_offload": True,
    "cache_dir": "cache",
    "local_copy": "$HOME/${UNSET}",
}
LINES = {
    "row-edited": Line(lambda run: run.rows[1].update(question="else"), ["r1"], ANSWER),
    "row-appended": Line(lambda run: run.rows.extend(rows(9)), ["r9"], ANSWER),
    "row-inserted": Line(lambda run: run.rows.insert(0, rows(9)[0]), ["r9"], ANSWER),
    "rows-reordered": Line(lambda run: run.rows.reverse(), [], ANSWER),
    "row-dropped": Line(lambda run: run.rows.pop(1), [], ANSWER),
    "column-unused": Line(lambda run: run.rows[1].update(note="seen"), [], ANSWER),
    "large-dataset-touched": Line(
        lambda run: setattr(run, "touched", True), [], ANSWER, lambda run: run.rows[0].update(note="x" * 1_100_000)
    ),
    "prompt-one-row": Line(
        lambda run: setattr(run, "text", "{{ question }}{% if id == 'r2' %}?{% endif %}"), ["r2"], ANSWER
    ),
    "system": Line(lambda run: run.prompt.update(system="Be brief."), ALL, ANSWER),
    "few-shot": Line(lambda run: run.prompt.update(few_shot=[{"user": "a", "assistant": "b"}]), ALL, ANSWER),
    "temperature": Line(lambda run: run.sampling.update(temperature=0.5), ALL, ANSWER),
    "samples": Line(lambda run: run.sampling.update(samples=2), [f"{row}#1" for row in ALL], ANSWER),
    "dtype": Line(lambda run: run.model.update(dtype="float16"), ALL, ANSWER_OF_MODEL),
    "quantization": Line(lambda run: run.model.update(quantization="4bit"), ALL, ANSWER_OF_MODEL),
    "chat-template": Line(lambda run: run.model.update(chat_template="chat.jinja"), ALL, ANSWER_OF_MODEL),
    "on-overflow": Line(
        lambda run: run.model.update(on_overflow="truncate_left"),
        ["long"],
        ANSWER_OF_MODEL,
        lambda run: (
            run.rows.append(dict(LONG)),
            run.sampling.update(max_new_tokens=2),
            run.model.update(context_tokens=5, on_overflow="skip"),
        ),
    ),
    "placement": Line(lambda run: run.model.update(PLACEMENT), [], set()),
}
OWN_MODEL = {"dtype", "quantization", "chat-template", "on-overflow", "placement"}


def write_setups(place: Place, setups: dict[str, Setup]) -> None:
    """The project of these runs; files that would stay the same are not written."""
    config = echo_config(datasets={}, prompts={}, runs={}, models={"echo": {"engine": "echo"}})
    for name, setup in setups.items():
        files = {f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in setup.rows), f"{name}.jinja": setup.text}
        for file, text in files.items():
            path = place.folder / file
            if setup.touched or not path.exists() or path.read_text() != text:
                path.write_text(text)
        config["datasets"][name] = {"path": f"{name}.jsonl"}
        config["prompts"][name] = {"file": f"{name}.jinja", **setup.prompt}
        model = name if name in OWN_MODEL else "echo"
        config["models"][model] = {"engine": "echo", **setup.model}
        config["runs"][name] = {"dataset": name, "model": model, "prompt": name, "sampling": setup.sampling}
    place.write_config(config)


def generations(names: list[str]) -> list[str]:
    return [f"results/runs/{name}/generations.jsonl" for name in names]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One finished run for each line of LINES; nothing may change it."""
    place = Place(tmp_path_factory.mktemp("answered"))
    (place.folder / "chat.jinja").write_text("{{ messages }}")
    setups = {name: Setup() for name in LINES}
    for name, line in LINES.items():
        line.start(setups[name])
    write_setups(place, setups)
    place.done(*generations(list(LINES)))
    return place


@pytest.fixture(scope="module")
def edited(answered: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Rerun]:
    """The same after all edits and one more run of snakemake."""
    place = answered.copied(tmp_path_factory.mktemp("edited") / "project")
    setups = {name: Setup() for name in LINES}
    for name, line in LINES.items():
        line.start(setups[name])
        line.edit(setups[name])
    write_setups(place, setups)
    return place, place.rerun(*generations(list(LINES)))


@pytest.mark.parametrize("name", LINES)
def test_an_edit_asks_the_rows_that_it_changes_and_no_other(edited: tuple[Place, Rerun], name: str) -> None:
    place, rerun = edited
    assert rerun.asked.get(f"runs/{name}", []) == LINES[name].asked
    assert rerun.ran.get(name, set()) - {"prepare_model"} == LINES[name].rules
    ids = [line["id"] for line in place.lines(f"runs/{name}/generations.jsonl") if line["sample"] == 0]
    assert ids == [json.loads(text)["id"] for text in (place.folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(OWN_MODEL))
def test_an_edit_of_a_model_prepares_that_model_only(edited: tuple[Place, Rerun], name: str) -> None:
    ran = edited[1].ran
    assert ("prepare_model" in ran.get(name, set())) == (name != "placement")
    assert "prepare_model" not in ran.get("echo", set())


OTHER_SAMPLING = [
    {"top_p": 0.5},
    {"top_k": 5},
    {"repetition_penalty": 1.5},
    {"stop": ["x"]},
    {"seed": 7},
    {"max_new_tokens": 99},
]


def test_every_other_sampling_setting_renders_and_answers_its_run_again(answered: Place, tmp_path: Path) -> None:
    place = answered.copied(tmp_path / "project")
    names = list(LINES)[: len(OTHER_SAMPLING)]

    def change(config: dict[str, Any]) -> None:
        for name, setting in zip(names, OTHER_SAMPLING, strict=True):
            config["runs"][name]["sampling"] |= setting

    place.edit(change)
    assert place.would_run(*generations(list(LINES))) == {name: ANSWER for name in names}


@pytest.mark.parametrize("setting", OTHER_SAMPLING, ids=str)
def test_every_other_sampling_setting_asks_every_row(setting: dict[str, Any], tmp_path: Path) -> None:
    from gristmill.codec import request_from_json
    from gristmill.config.schema import ModelConfig
    from gristmill.config.specs import RequestsSpec
    from gristmill.keys import RequestKeys, model_identity
    from gristmill.rendering import requests

    (tmp_path / "rows.jsonl").write_text('{"id": "r0", "question": "a"}\n{"id": "r1", "question": "b"}\n')
    (tmp_path / "ask.jinja").write_text("{{ question }}")
    model = ModelConfig(engine="echo")
    made = RequestKeys(model_identity(model, {"weights_hash": "echo"}, on_gpu=False), model)

    def keys(**sampling: Any) -> set[str]:
        named = {"path": str(tmp_path / "rows.jsonl")}, {"file": str(tmp_path / "ask.jinja")}
        spec = RequestsSpec.model_validate({"dataset": named[0], "prompt": named[1], "sampling": sampling})
        return {made.key(request_from_json(line), None) for line in requests(spec)}

    assert len(keys(temperature=1.0) | keys(temperature=1.0, **setting)) == 4


# ---- edits of judges, metrics and the report


JUDGES = ("prompt", "model", "labels", "sampling", "bar", "more")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Two finished runs, a pairwise judge, and a pointwise judge for each line; nothing may change it."""
    place = Place(tmp_path_factory.mktemp("judged"))
    place.write_rows({**row, "kind": "ab"[n % 2]} for n, row in enumerate(rows(0, 1, 2)))
    texts = {"plain": "{{ question }}", "loud": "{{ question }}!", "pair": "[[A]] {{ answer_a }} {{ answer_b }}"}
    texts |= {name: "Verdict: A {{ answer }}" for name in JUDGES}
    for name, text in texts.items():
        place.write_prompt(f"{name}.jinja", text)
    judge = {"kind": "pointwise", "model": "echo", "runs": ["plain"]}
    runs = {name: {"dataset": "rows", "model": "echo", "prompt": name} for name in ("plain", "loud")}
    runs["plain"] |= {"metrics": ["contains"], "slices": ["kind"]}
    judges: dict[str, Any] = {name: {**judge, "prompt": name} for name in JUDGES}
    judges["model"]["model"] = "other"
    judges["arena"] = {"kind": "pairwise", "model": "echo", "prompt": "pair", "pairs": [["plain", "loud"]]}
    prompts = {name: {"file": f"{name}.jinja"} for name in texts}
    models = {"echo": {"engine": "echo"}, "other": {"engine": "echo"}}
    place.write_config(echo_config(models=models, prompts=prompts, runs=runs, judges=judges))
    place.done()
    return place


@pytest.fixture(scope="module")
def rejudged(judged: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Rerun]:
    """The same after an edit of each judge, and of the prompt of one of the two runs for one row."""
    place = judged.copied(tmp_path_factory.mktemp("rejudged") / "project")
    place.write_prompt("prompt.jinja", "Verdict: B {{ answer }}")
    place.write_prompt("loud.jinja", "{{ question }}{% if id == 'r1' %}?{% else %}!{% endif %}")

    def change(config: dict[str, Any]) -> None:
        config["models"]["other"]["dtype"] = "float16"
        config["judges"]["labels"]["labels"] = {"A": "correct", "B": "incorrect", "Yes": "correct"}
        config["judges"]["sampling"]["sampling"] = {"max_new_tokens": 8}
        config["judges"]["bar"]["reliability"] = {"min_kappa": 0.5}
        config["judges"]["more"]["runs"] = ["plain", "loud"]

    place.edit(change)
    return place, place.rerun()


@pytest.mark.parametrize(
    ("target", "asked", "rules"),
    [
        ("prompt/plain", ALL, JUDGE),
        ("model/plain", ALL, JUDGE - {"judge_requests"}),
        ("sampling/plain", ALL, JUDGE),
        ("labels/plain", [], JUDGE),
        ("bar/plain", [], {"verdicts"}),
        ("more/plain", [], set()),
        ("more/loud", ALL, JUDGE),
        ("arena/plain_vs_loud", ["r1/first_second", "r1/second_first"], JUDGE),
    ],
)
def test_an_edit_of_a_judge_or_of_what_it_judges_asks_it_only_what_is_new(
    rejudged: tuple[Place, Rerun], target: str, asked: list[str], rules: set[str]
) -> None:
    _, rerun = rejudged
    assert rerun.asked.get(f"judges/{target}", []) == asked
    assert rerun.ran.get(target, set()) == rules


def test_an_edit_of_judges_asks_no_run_and_grades_only_the_run_that_changed(rejudged: tuple[Place, Rerun]) -> None:
    _, rerun = rejudged
    assert "plain" not in rerun.ran
    assert rerun.ran["loud"] == ANSWER | {"metrics"}
    assert {unit: asked for unit, asked in rerun.asked.items() if unit.startswith("runs/")} == {"runs/loud": ["r1"]}


VERDICTS_ON_PLAIN = {f"{name}/plain": {"verdicts"} for name in JUDGES}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c["runs"]["plain"].update(metrics=["exact_match"]), {"plain": {"metrics"}, **VERDICTS_ON_PLAIN}),
        (lambda c: c["runs"]["plain"].update(slices=[]), {"plain": {"metrics"}, **VERDICTS_ON_PLAIN}),
        (lambda c: c.update(report={"title": "Other"}), {}),
        (lambda c: c.update(report={"max_rows": 2}), {}),
        (lambda c: c["runs"]["plain"].update(formats=["csv"]), {"plain": {"export"}}),
        (lambda c: c.update(rankings={"baseline": "plain"}), {"": {"rank"}}),
        (lambda c: c["runs"]["loud"].update(metrics=["contains"]), {"loud": {"metrics"}, "": {"compare"}}),
    ],
    ids=["metric", "slices", "title", "report rows", "another format", "baseline", "comparison"],
)
def test_an_edit_of_metrics_or_report_starts_no_model(
    judged: Place, tmp_path: Path, change: Callable[[dict[str, Any]], Any], expected: dict[str, set[str]]
) -> None:
    place = judged.copied(tmp_path / "project")
    place.edit(change)
    report = set() if "export" in expected.get("plain", ()) else {"report"}
    beside = expected.get("", set()) | report
    assert place.would_run() == {**expected, **({"": beside} if beside else {})}


# ---- what runs nothing again


def test_another_number_of_gpus_or_their_settings_run_nothing_again(judged: Place, tmp_path: Path) -> None:
    place = judged.copied(tmp_path / "project")
    assert place.would_run("--cores", "7", gpu=3) == {}
    place.edit(lambda config: config.update(gpus={"wait_minutes": 1, "health": False, "stall_minutes": None}))
    place.edit(lambda config: config["models"]["echo"].update(gpus_per_model=2, shards_per_worker=3))
    inventory = place.folder / "gpus.json"
    inventory.write_text(json.dumps([{"name": "fake", "memory_total_mib": 80_000, "count": 4}]))
    assert place.would_run(GRISTMILL_INVENTORY=str(inventory)) == {}


def test_touched_files_and_a_config_written_in_another_way_run_nothing_again(judged: Place, tmp_path: Path) -> None:
    place = judged.copied(tmp_path / "project")
    config = place.config()
    reordered = {name: config[name] for name in reversed(config)}
    (place.folder / "config.yaml").write_text("# a comment\n" + json.dumps(reordered, indent=2))
    touch(*place.folder.glob("*.jinja"), *place.folder.glob("*.jsonl"))
    assert place.would_run() == {}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Another clone of the code: other path, new dates."""
    root = tmp_path / "clone"
    root.mkdir()
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, root / name, copy_function=shutil.copy, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(source, root / name)
    return root


def add_to(root: Path, module: str, text: str = "\n# edited\n") -> None:
    path = root / "scripts/gristmill" / module
    path.write_text(path.read_text() + text)


def test_a_fresh_clone_elsewhere_runs_nothing_again(judged: Place, tmp_path: Path, checkout: Path) -> None:
    place = judged.copied(tmp_path / "project", root=checkout)
    assert place.would_run() == {}


def every_target(rules: set[str]) -> dict[str, set[str]]:
    return dict.fromkeys([*VERDICTS_ON_PLAIN, "arena/plain_vs_loud"], rules)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("engines/static/engine.py", {}),
        ("worker.py", {}),
        ("merging.py", {}),
        ("report/words.py", {"": {"report"}}),
        ("judging/readout.py", {**every_target({"verdicts"}), "": {"rank", "report"}}),
        (
            "metrics.py",
            {"plain": {"metrics"}, "loud": {"metrics"}, **VERDICTS_ON_PLAIN, "": {"report"}},
        ),
        ("judging/requests.py", {**every_target(JUDGE), "": {"rank", "report"}}),
        ("stats/bradley_terry.py", {"": {"rank", "report"}}),
    ],
)
def test_an_edit_of_code_runs_the_steps_that_use_it(
    judged: Place, tmp_path: Path, checkout: Path, module: str, expected: dict[str, set[str]]
) -> None:
    place = judged.copied(tmp_path / "project", root=checkout)
    add_to(checkout, module)
    assert place.would_run() == expected


# ---- small finished results: renamed, removed, moved, damaged


ANSWERS = "results/runs/{}/generations.jsonl"
RUN = {"dataset": "rows", "model": "echo", "prompt": "ask", "metrics": ["contains"]}
GRADER = {"kind": "pointwise", "model": "echo", "prompt": "grade", "runs": ["plain"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One finished run and a judge of it; nothing may change it."""
    place = Place(tmp_path_factory.mktemp("finished"))
    place.write_rows(rows(0, 1, 2))
    place.write_prompt("ask.jinja", "{{ question }}")
    place.write_prompt("grade.jinja", "Verdict: A {{ answer }}")
    prompts = {name: {"file": f"{name}.jinja"} for name in ("ask", "grade")}
    place.write_config(echo_config(prompts=prompts, runs={"plain": RUN}, judges={"grader": GRADER}))
    place.done()
    return place


@pytest.fixture
def small(finished: Place, tmp_path: Path) -> Place:
    return finished.copied(tmp_path / "my project")


def test_an_edit_of_prompt_code_asks_nothing_that_is_rendered_as_before(small: Place, checkout: Path) -> None:
    add_to(checkout, "prompts.py")
    rerun = Place(small.folder, checkout).rerun()
    assert rerun.asked == {}
    assert rerun.ran["plain"] == ANSWER | {"metrics"}
    assert rerun.ran["grader/plain"] == JUDGE


def test_a_new_generation_version_asks_everything_again(small: Place, checkout: Path) -> None:
    add_to(checkout, "__init__.py", "\nGENERATION_VERSION += 1\n")
    rerun = Place(small.folder, checkout).rerun()
    assert rerun.asked == {"runs/plain": ALL, "judges/grader/plain": ALL}
    assert "render_requests" not in rerun.ran["plain"]


def test_new_rows_on_another_number_of_gpus_are_the_only_ones_asked(small: Place) -> None:
    small.write_rows(rows(5, 0, 1, 2))
    assert small.rerun(gpu=4).asked == {"runs/plain": ["r5"], "judges/grader/plain": ["r5"]}


def test_a_renamed_run_and_judge_find_their_answers(small: Place) -> None:
    judge = {**GRADER, "runs": ["renamed"]}
    small.edit(lambda config: config.update(runs={"renamed": RUN}, judges={"critic": judge}))
    rerun = small.rerun(gpu=2)
    assert rerun.asked == {}
    assert rerun.ran["renamed"] == ANSWER | {"metrics"}
    workers = small.value("runs/renamed/manifest.json")["workers"]
    assert {worker["unit"] for worker in workers} == {"runs/plain"}
    assert sum(worker["rows"] for worker in workers) == 3
    shutil.rmtree(small.folder / "results/runs/plain")
    small.write_rows(rows(0, 1, 2, 3))
    assert small.rerun(ANSWERS.format("renamed")).asked == {"runs/renamed": ["r3"]}


def test_a_second_run_is_not_given_the_answers_of_one_that_is_still_there(small: Place) -> None:
    small.edit(lambda config: config["runs"].update(second=RUN))
    assert small.rerun(ANSWERS.format("second")).asked == {"runs/second": ALL}


def test_a_renamed_model_or_dataset_asks_nothing(small: Place) -> None:
    os.rename(small.folder / "rows.jsonl", small.folder / "questions.jsonl")

    def change(config: dict[str, Any]) -> None:
        config["datasets"] = {"questions": {"path": "questions.jsonl"}}
        config["models"] = {"parrot": {"engine": "echo"}}
        config["runs"]["plain"] |= {"dataset": "questions", "model": "parrot"}
        config["judges"]["grader"]["model"] = "parrot"

    small.edit(change)
    rerun = small.rerun()
    assert rerun.asked == {}
    assert rerun.ran["parrot"] == {"prepare_model"}
    assert small.value("runs/plain/metrics.json")["model"] == "parrot"


def test_a_renamed_dataset_of_the_same_file_is_only_named_anew(small: Place) -> None:
    def change(config: dict[str, Any]) -> None:
        config["datasets"] = {"questions": config["datasets"]["rows"]}
        config["runs"]["plain"]["dataset"] = "questions"

    small.edit(change)
    assert small.would_run() == {"plain": {"metrics"}, "grader/plain": {"verdicts"}, "": {"report"}}


@pytest.mark.parametrize(
    ("path", "rules"),
    [
        ("results/report.html", {"": {"report"}}),
        ("results/runs/plain/metrics.json", {"plain": {"metrics"}, "grader/plain": {"verdicts"}, "": {"report"}}),
        ("results/judges/grader/plain/verdicts.jsonl", {"grader/plain": {"verdicts"}, "": {"report"}}),
    ],
)
def test_a_removed_result_is_made_again_by_its_step(small: Place, path: str, rules: dict[str, set[str]]) -> None:
    (small.folder / path).unlink()
    assert small.would_run() == rules


def test_removed_results_come_back_from_the_journal(small: Place) -> None:
    for path in (small.folder / "results").rglob("*"):
        if path.is_file() and path.parent.name != "journal":
            path.unlink()
    rerun = small.rerun()
    assert rerun.asked == {}
    assert len(small.lines("runs/plain/generations.jsonl")) == 3
    assert (small.folder / "results/report.html").exists()


def test_a_removed_journal_runs_nothing_until_an_answer_is_needed(small: Place) -> None:
    shutil.rmtree(small.folder / "results/runs/plain/journal")
    assert small.would_run() == {}
    small.write_rows(rows(0, 1, 2, 3))
    assert small.rerun(ANSWERS.format("plain")).asked == {"runs/plain": ["r0", "r1", "r2", "r3"]}


def test_a_removed_run_is_asked_again(small: Place) -> None:
    shutil.rmtree(small.folder / "results/runs/plain")
    assert small.rerun(ANSWERS.format("plain")).asked == {"runs/plain": ALL}


def test_an_upgraded_package_asks_nothing_and_the_manifest_says_what_made_which_rows(small: Place) -> None:
    upgraded = small.folder / "site"
    (upgraded / "nvidia_ml_py-99.0.dist-info").mkdir(parents=True)
    (upgraded / "nvidia_ml_py-99.0.dist-info/METADATA").write_text("Name: nvidia-ml-py\nVersion: 99.0\n")
    there = {"PYTHONPATH": str(upgraded)}
    assert small.would_run(**there) == {}
    small.write_rows(rows(0, 1, 2, 3))
    assert small.rerun(ANSWERS.format("plain"), **there).asked == {"runs/plain": ["r3"]}
    manifest = small.value("runs/plain/manifest.json")
    made = {(worker["packages"]["nvidia-ml-py"] == "99.0", worker["rows"]) for worker in manifest["workers"]}
    assert manifest["packages"]["nvidia-ml-py"] == "99.0"
    assert made == {(True, 1), (False, 3)}


def test_a_project_moved_with_its_results_runs_nothing_again(small: Place, tmp_path: Path) -> None:
    os.rename(small.folder, tmp_path / "moved")
    assert Place(tmp_path / "moved").would_run() == {}


def test_results_copied_without_snakemakes_records_are_pointed_out(small: Place) -> None:
    shutil.rmtree(small.folder / ".snakemake")
    said = small.done("-n")
    assert "results/ is here without .snakemake/metadata" in said
    assert rules_by_unit(said) == {}
    rerun = small.rerun(ANSWERS.format("plain"), "--forcerun", "prepare_model", "render_requests")
    assert rerun.asked == {}
    assert rerun.ran["plain"] == ANSWER
    assert "without .snakemake" not in small.done("-n")


def test_a_torn_model_description_is_refused_in_one_line(small: Place) -> None:
    path = small.folder / "results/models/echo.json"
    path.write_text(path.read_text()[:40])
    result = small.run("-n")
    assert result.returncode == 2
    errors = [line for line in result.stdout.splitlines() if line.startswith("config error: ")]
    assert len(errors) == 1
    assert "results/models/echo.json is not whole" in errors[0]
    assert "Traceback" not in result.stdout
    path.unlink()
    assert small.rerun().asked == {}


def test_the_description_of_another_model_is_refused_before_anything_is_asked(small: Place) -> None:
    path = small.folder / "results/models/echo.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "source": "org/other", "weights_hash": "f" * 32}))
    before = small.segments()
    result = small.run()
    assert result.returncode == 1
    assert "echo.json has source 'org/other', but the config's is None; remove it and run again" in result.stdout
    assert small.segments() == before


def test_a_relative_configfile_is_that_of_the_folder_where_the_command_is_typed(small: Place) -> None:
    other = small.folder / "config.yaml"
    config = small.config()
    config["report"] = {"title": "From outside"}
    (small.folder.parent / "mine.yaml").write_text(json.dumps(config))
    other.write_text("not: this")
    command = [str(SNAKEMAKE), "--snakefile", str(ROOT / "Snakefile"), "--cores", "2", "-n", "--directory"]
    command += [small.folder.name, "--configfile", "mine.yaml"]
    command += ["--workflow-profile", os.path.relpath(ROOT / "profiles/default", small.folder.parent)]
    found = subprocess.run(
        command, cwd=small.folder.parent, env=small.environment(), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert rules_by_unit(found.stdout + found.stderr) == {"": {"report"}}


# ---- a real model: what echo has not


@pytest.mark.model
def test_dtype_counts_as_it_is_in_force_and_a_local_model_by_its_files_and_not_its_place(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    place = Place(tmp_path / "project")
    weights = place.folder / "weights"
    weights.mkdir(parents=True)
    for path in smollm2_folder.iterdir():
        (weights / path.name).symlink_to(path)
    place.write_rows(rows(0, 1))
    place.write_prompt("ask.jinja", "{{ question }}")
    place.write_config(echo_config(models={"echo": {"source": "weights"}}))
    place.edit(lambda config: config["runs"]["plain"].update(sampling={"max_new_tokens": 2}))
    target = "results/runs/plain/generations.jsonl"
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    assert place.rerun(target, **no_gpu).asked == {"runs/plain": ["r0", "r1"]}
    assert place.value("models/echo.json")["dtype"] == "bfloat16"  # on a GPU, auto would be this

    place.edit(lambda config: config["models"]["echo"].update(dtype="float32"))  # what auto is on a CPU
    assert place.rerun(target, **no_gpu).asked == {}
    os.rename(place.folder, tmp_path / "moved")
    place, weights = Place(tmp_path / "moved"), tmp_path / "moved/weights"
    assert place.would_run(target, **no_gpu) == {}

    changed = weights / "generation_config.json"
    text = changed.read_text()
    changed.unlink()
    changed.write_text(text.replace("{", '{"note": 1,', 1))
    assert place.rerun(target, **no_gpu).asked == {"runs/plain": ["r0", "r1"]}
