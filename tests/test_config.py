"""Facts about the config: what is accepted, and that a mistake is one line with the key, the value and a next step."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gristmill.config.check import check_data, rows_up_to
from gristmill.config.load import find_file, load_config
from gristmill.config.schema import Config
from gristmill.errors import UserError
from gristmill.files import write_jsonl

BASE: dict[str, Any] = yaml.safe_load("""
datasets:
  questions: {path: questions.jsonl}
  others: {path: others.jsonl}
models:
  small: {engine: echo}
prompts:
  direct: {file: direct.jinja}
  judge: {file: judge.jinja}
  compare: {file: compare.jinja}
runs:
  one: {dataset: questions, model: small, prompt: direct}
  two: {dataset: questions, model: small, prompt: direct}
  far: {dataset: others, model: small, prompt: direct}
judges:
  grader: {kind: pointwise, model: small, prompt: judge, runs: [one, two]}
  referee: {kind: pairwise, model: small, prompt: compare, pairs: [[one, two]]}
""")
MISSING = object()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that BASE names."""
    monkeypatch.chdir(tmp_path)
    row = {"question": "Why?", "reference": "So.", "topic": "x"}
    write_jsonl("questions.jsonl", [{"id": str(number), **row} for number in range(3)])
    write_jsonl("others.jsonl", [{"id": "1", "question": "Why?"}])
    Path("direct.jinja").write_text("{{ question }}")
    Path("judge.jinja").write_text("{{ question }} {{ answer }} {{ reference }} {{ labels }}")
    Path("compare.jinja").write_text("{{ question }} {{ answer_a }} {{ answer_b }} {{ labels }}")
    Path("folder").mkdir()
    return tmp_path


def edited(place: str, value: Any) -> dict[str, Any]:
    """BASE with one value set (`runs.one.model`), or removed."""
    config = copy.deepcopy(BASE)
    *parents, last = place.split("/") if "/" in place else place.split(".")
    section: Any = config
    for name in parents:
        section = section.setdefault(name, {}) if isinstance(section, dict) else section[int(name)]
    if value is MISSING:
        del section[last]
    else:
        section[last] = value
    return config


def load(values: Any) -> Config:
    return load_config(values, [Path.cwd()])


def refusals(values: Any) -> list[str]:
    """The lines that loading and checking end with."""
    with pytest.raises(UserError) as caught:
        check_data(load(values))
    lines = str(caught.value).split("\n")
    for line in lines:
        assert line == line.strip()
        assert re.search(r"[;:?] \S", line), f"no next step: {line}"
    return lines


def refusal(place: str, value: Any) -> str:
    (line,) = refusals(edited(place, value))
    return line


def test_the_config_that_the_tests_edit_is_good(root: Path) -> None:
    check_data(load(BASE))


# ---- keys


@pytest.mark.parametrize(
    ("place", "near"),
    [
        ("runz", "runs"),
        ("datasets.questions.pth", "path"),
        ("datasets.questions.max_row", "max_rows"),
        ("models.small.dtyp", "dtype"),
        ("prompts.direct.sytem", "system"),
        ("runs.one.sampling.max_tokens", "max_new_tokens"),
        ("runs.one.modell", "model"),
        ("judges.grader.label", "labels"),
        ("judges.grader.sampling.temprature", "temperature"),
        ("judges.grader.reliability.max_unreadable", "max_unreadable_ratio"),
        ("gpus.device", "devices"),
        ("report.titel", "title"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_one_at_every_level(root: Path, place: str, near: str) -> None:
    assert refusal(place, {}) == f"{place} is not a known key; did you mean {near}?"


def test_a_misspelt_key_inside_a_list_is_named_with_its_place(root: Path) -> None:
    turn = {"user": "a", "assistant": "b", "asistant": "c"}
    line = refusal("prompts.direct.few_shot", [turn])
    assert line == "prompts.direct.few_shot.0.asistant is not a known key; did you mean assistant?"


def test_a_key_like_no_other_gets_the_list_of_keys(root: Path) -> None:
    line = refusal("runs.one.xyzzy", 1)
    assert line.startswith("runs.one.xyzzy is not a known key; known here: cluster, dataset, formats, labels, max_fai")


@pytest.mark.parametrize("place", ["datasets", "models"])
def test_a_missing_section_is_named(root: Path, place: str) -> None:
    assert f"{place} is missing; add it (config/README.md explains every key)" in refusals(edited(place, MISSING))


@pytest.mark.parametrize("runs", [MISSING, {}])
def test_a_config_without_anything_to_do_is_refused(root: Path, runs: Any) -> None:
    line = "runs is missing; add it, or logits or trainings (config/README.md explains every key)"
    assert line in refusals(edited("runs", runs))


@pytest.mark.parametrize("values", [None, [], 0])
def test_runs_that_are_no_mapping_are_one_line(root: Path, values: Any) -> None:
    (line,) = refusals(edited("runs", values))
    assert line.startswith("runs ")


def test_a_training_or_a_teacher_needs_no_runs(root: Path) -> None:
    taught = {"model": "small", "dataset": "questions", "text_field": "question"}
    config = {"datasets": BASE["datasets"], "models": {"small": {"source": "org/small"}}}
    assert load(config | {"logits": {"taught": taught}}).runs == {}
    trained = {"objective": "pretrain", "base": "small", "steps": 1, "learning_rate": 0.1}
    trained |= {"dataset": "questions", "text_field": "question"}
    assert load(config | {"trainings": {"trained": trained}}).prompts == {}


@pytest.mark.parametrize(
    "place", ["datasets.questions.path", "prompts.direct.file", "runs.one.dataset", "judges.grader.kind"]
)
def test_a_missing_key_is_named(root: Path, place: str) -> None:
    assert refusal(place, MISSING).startswith(f"{place} is missing; add it")


@pytest.mark.parametrize(
    "place", ["judges", "runs.one", "runs.one.metrics", "models.small.dtype", "prompts.direct.file"]
)
def test_a_key_without_a_value_is_named(root: Path, place: str) -> None:
    assert refusal(place, None) == f"{place} has no value; give it one, or remove the line"


def test_a_section_called_like_a_type_keeps_its_name(root: Path) -> None:
    assert "runs.int.dataset is missing; add it (config/README.md explains every key)" in refusals(
        edited("runs.int", {})
    )


# ---- whole configs that are none


@pytest.mark.parametrize("values", [None, [], [1], "runs", 7, [("runs", {})]])
def test_a_config_that_is_no_mapping_is_refused_in_one_line(root: Path, values: Any) -> None:
    (line,) = refusals(values)
    assert line == f"the config is {values!r}; write sections (datasets, models, …), see config/README.md"


def test_an_empty_config_names_every_section_it_needs(root: Path) -> None:
    assert [line.partition(" ")[0] for line in refusals({})] == ["datasets", "models", "runs"]


def test_several_problems_give_several_lines(root: Path) -> None:
    config = edited("runs.one.model", "tiny")
    config["runs"]["two"]["prompt"] = "dirct"
    config["datasets"]["others"]["path"] = "gone.jsonl"
    lines = refusals(config)
    assert [line.partition(" ")[0] for line in lines] == ["runs.one.model:", "runs.two.prompt:", "datasets.others.path"]
    typed = edited("runs.one.sampling", {"top_p": 2, "samples": 0, "topk": 1})
    assert len(refusals(typed)) == 3


# ---- names


@pytest.mark.parametrize("section", ["runs", "datasets", "models", "prompts", "judges"])
@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "", ".hidden", "-x", "ü", "a\nb", "a\n"])
def test_a_name_that_is_no_folder_name_is_refused(root: Path, section: str, name: str) -> None:
    config = copy.deepcopy(BASE)
    config[section][name] = next(iter(BASE[section].values()))
    (line,) = refusals(config)
    assert line.endswith(f" is {name!r}; use letters, digits, '.', '_' and '-', beginning with a letter or digit")
    assert line.startswith(f"{section}.")


@pytest.mark.parametrize("name", ["a", "7", "A.b_c-d", "gpt-4.1", "x" * 80])
def test_a_plain_name_is_accepted(root: Path, name: str) -> None:
    load(edited(f"runs/{name}", BASE["runs"]["one"]))


def test_a_very_long_name_is_refused(root: Path) -> None:
    assert "at most 80 characters" in refusal(f"runs/{'x' * 81}", BASE["runs"]["one"])


def test_a_name_that_yaml_reads_as_a_number_or_a_truth_is_refused(root: Path) -> None:
    for name in (7, True, 1.5):
        config = copy.deepcopy(BASE)
        config["runs"][name] = BASE["runs"]["one"]
        assert refusals(config) == [f"runs has the key {name!r}; a key is text: put it in quotes"]


@pytest.mark.parametrize("name", ["^", "a=b", "a,b", "{x}", "a{run}", "..", ".", "~", "$(id)", "a\u2028b", "e\u0301"])
def test_a_name_that_snakemake_or_a_shell_would_read_otherwise_is_refused(root: Path, name: str) -> None:
    for section in ("runs", "judges", "models", "datasets", "prompts"):
        config = copy.deepcopy(BASE)
        config[section][name] = next(iter(BASE[section].values()))
        (line,) = refusals(config)
        assert "; use letters, digits, '.', '_' and '-'" in line


@pytest.mark.parametrize(("section", "known"), [("runs", "one"), ("models", "small"), ("judges", "grader")])
def test_names_that_differ_only_in_case_are_refused_where_they_become_folders(
    root: Path, section: str, known: str
) -> None:
    line = refusal(f"{section}/{known.title()}", BASE[section][known])
    assert line == f"{section}.{known.title()} differs from {section}.{known} only in upper and lower case; rename one"


def test_names_that_become_no_folders_may_differ_in_case_only(root: Path) -> None:
    load(edited("datasets/Questions", BASE["datasets"]["questions"]))
    load(edited("prompts/Direct", BASE["prompts"]["direct"]))


def test_vs_in_a_runs_name_is_kept_for_pairs(root: Path) -> None:
    line = refusal("runs.one_vs_two", BASE["runs"]["one"])
    assert line == "runs.one_vs_two: '_vs_' in a run's name is kept for pairs; rename the run"


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("runs.one.dataset", "dataset"),
        ("runs.one.model", "model"),
        ("runs.one.prompt", "prompt"),
        ("judges.grader.model", "model"),
        ("judges.grader.prompt", "prompt"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_or_all(root: Path, place: str, what: str) -> None:
    known = list(BASE[f"{what}s"])
    near = known[0] + "s"
    near_line, far_line = (refusals(edited(place, value))[0] for value in (near, "xyzzy"))
    assert near_line == f"{place}: {near!r} is not a {what}; did you mean {known[0]}?"
    assert far_line == f"{place}: 'xyzzy' is not a {what}; the {what}s are: {', '.join(known)}"


def test_an_unknown_run_of_a_judge_is_refused(root: Path) -> None:
    assert refusal("judges.grader.runs", ["one", "tow"]) == "judges.grader.runs: 'tow' is not a run; did you mean two?"
    lines = refusals(edited("judges.referee.pairs", [["one", "tow"], ["xyzzy", "one"]]))
    assert lines == [
        "judges.referee.pairs: 'tow' is not a run; did you mean two?",
        "judges.referee.pairs: 'xyzzy' is not a run; the runs are: one, two, far",
    ]


# ---- values


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("models.small.dtype", "bf16", "'bf16'; it should be 'auto', 'bfloat16', 'float16' or 'float32'"),
        ("models.small.quantization", "2bit", "'2bit'; it should be '8bit' or '4bit'"),
        ("models.small.engine", "vlm", "'vlm'; it should be"),
        ("models.small.on_overflow", "cut", "'cut'; it should be"),
        ("models.small.gpus_per_model", 0, "0; it should be greater than or equal to 1"),
        ("models.small.gpus_per_model", -1, "-1; it should be"),
        ("models.small.gpus_per_model", 1.5, "1.5; it should be a valid integer"),
        ("models.small.gpus_per_model", "two", "'two'; it should be a valid integer"),
        ("models.small.gpus_per_model", True, "True; write a number"),
        ("models.small.max_batch_rows", False, "False; write a number"),
        ("models.small.context_tokens", 0, "0; it should be"),
        ("models.small.revision", 1234567, "1234567; write text, in quotes if need be"),
        ("models.small.trust_remote_code", "5", "'5'; it should be a valid boolean"),
        ("models.small.device_map", 5, "'balanced_low_0' or 'sequential', or write a mapping (key: value)"),
        ("models.small", [1], "[1]; write a mapping (key: value)"),
        ("models", "x", "'x'; write a mapping (key: value)"),
        ("runs", [BASE["runs"]["one"]], "; write a mapping (key: value)"),
        ("datasets.questions.max_rows", 0, "0; it should be"),
        ("datasets.questions.fields", ["a"], "['a']; write a mapping (key: value)"),
        ("datasets.questions.path", ["a"], "['a']; write text"),
        ("prompts.direct.few_shot", "x", "'x'; write a list, for example [a, b]"),
        ("runs.one.metrics", "contains", "'contains'; write a list"),
        ("runs.one.sampling.max_new_tokens", 0, "0; it should be"),
        ("runs.one.sampling.max_new_tokens", True, "True; write a number"),
        ("runs.one.sampling.temperature", -0.1, "-0.1; it should be"),
        ("runs.one.sampling.temperature", "hot", "'hot'; it should be a valid number"),
        ("runs.one.sampling.temperature", float("nan"), "nan; it should be a finite number"),
        ("runs.one.sampling.temperature", True, "True; write a number"),
        ("runs.one.sampling.top_p", 0, "0; it should be greater than 0"),
        ("runs.one.sampling.top_p", 1.01, "1.01; it should be less than or equal to 1"),
        ("runs.one.sampling.top_k", -1, "-1; it should be"),
        ("runs.one.sampling.repetition_penalty", 0, "0; it should be"),
        ("runs.one.sampling.repetition_penalty", float("inf"), "inf; it should be a finite number"),
        ("runs.one.sampling.stop", "x", "'x'; write a list"),
        ("runs.one.sampling.seed", -1, "-1; it should be"),
        ("runs.one.sampling.samples", 0, "0; it should be"),
        ("judges.grader.kind", "single", "'single'; it should be 'pointwise', 'pairwise', 'score' or 'classification'"),
        ("judges.grader.reliability.max_label_share", 0, "0; it should be"),
        ("judges.grader.reliability.min_kappa", 1.5, "1.5; it should be"),
        ("gpus.devices", "0,1", "'0,1'; it should be 'auto' or 'none', or write a list, for example [a, b]"),
        ("gpus.devices", 0, "0; it should be 'auto' or 'none', or write a list, for example [a, b]"),
        ("gpus.wait_minutes", -1, "-1; it should be"),
        ("gpus.wait_minutes", float("inf"), "inf; it should be a finite number"),
        ("gpus.total", 0, "0; it should be"),
        ("report.max_rows", -1, "-1; it should be"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_would_do(root: Path, place: str, value: Any, said: str) -> None:
    line = refusal(place, value)
    assert line.startswith(f"{place} is ")
    assert said in line
    assert len(line) < 250


@pytest.mark.parametrize(
    ("place", "value", "start"),
    [
        ("runs.one.metrics", ["exactly"], "runs.one.metrics.0 is 'exactly'; it should be 'exact', 'exact_match', "),
        ("runs.one.metrics", [{"regexp": "a"}], "runs.one.metrics.0.regexp is 'regexp'; it should be 'regex' or 'pyt"),
        ("runs.one.formats", ["csv", "xlsx"], "runs.one.formats.1 is 'xlsx'; it should be 'csv' or 'parquet'"),
        ("runs.one.sampling.stop", ["x", ""], "runs.one.sampling.stop.1 is ''; "),
        ("gpus.devices", [0, [1]], "gpus.devices.1 is [1]; it should be a valid integer, or write text"),
        ("models.small.device_map", {"a": [1]}, "models.small.device_map.a is [1]; it should be a valid integer, or"),
        ("judges.referee.pairs", ["one", "two"], "judges.referee.pairs.0 is 'one'; write a list"),
        ("judges.referee.pairs", [["one"]], "judges.referee.pairs.0.1 is missing; add it"),
        (
            "judges.referee.pairs",
            [["one", "two", "far"]],
            "judges.referee.pairs.0 is ['one', 'two', 'far']; name two runs",
        ),
        (
            "judges.grader.labels",
            {"A": "good"},
            "judges.grader: labels: 'good' is no meaning for kind pointwise; use correct, incorrect, partial",
        ),
        ("judges.grader.labels", {"": "correct"}, "judges.grader.labels.'' is ''; "),
    ],
)
def test_a_wrong_value_inside_a_list_or_a_mapping_is_named_with_its_place(
    root: Path, place: str, value: Any, start: str
) -> None:
    assert refusals(edited(place, value))[0].startswith(start)


def test_a_long_value_is_shown_in_part(root: Path) -> None:
    assert "…; write a list" in refusal("runs.one.metrics", "x" * 500)


@pytest.mark.parametrize(
    ("place", "text", "value"),
    [
        ("models.small.gpus_per_model", "5", 5),
        ("models.small.trust_remote_code", "true", True),
        ("models.small.allow_offload", "false", False),
        ("runs.one.sampling.temperature", "0.5", 0.5),
        ("datasets.questions.max_rows", "5", 5),
        ("gpus.wait_minutes", "1.5", 1.5),
        ("judges.referee.both_orders", "false", False),
    ],
)
def test_text_from_the_command_line_becomes_the_value_it_spells(root: Path, place: str, text: str, value: Any) -> None:
    found: Any = load(edited(place, text))
    for name in place.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_labels_that_yaml_reads_as_truth_are_to_be_quoted(root: Path) -> None:
    labels = yaml.safe_load("{Yes: correct, No: incorrect}")
    assert refusals(edited("judges.grader.labels", labels)) == [
        "judges.grader.labels has the key True; a key is text: put it in quotes",
        "judges.grader.labels has the key False; a key is text: put it in quotes",
    ]


# ---- rules between values


def test_a_model_needs_a_source_unless_it_echoes(root: Path) -> None:
    assert refusal("models.small", {"engine": "auto"}).startswith("models.small: source is missing; give a hub id")


def test_samples_without_temperature_are_refused(root: Path) -> None:
    line = refusal("runs.one.sampling", {"samples": 3})
    assert line.startswith("runs.one.sampling: samples is 3 but temperature 0 gives the same answer every time; raise")
    load(edited("runs.far.sampling", {"samples": 3, "temperature": 0.7}))


@pytest.mark.parametrize(
    ("judge", "change", "said"),
    [
        ("grader", {"runs": []}, "kind pointwise needs runs; list at least one"),
        ("referee", {"pairs": []}, "kind pairwise needs pairs; list pairs, or runs and a baseline"),
        ("grader", {"pairs": [["one", "two"]]}, "kind pointwise takes runs, not pairs; remove pairs"),
        ("referee", {"runs": ["one"]}, "kind pairwise takes pairs, not runs; remove runs"),
        ("referee", {"pairs": [["one", "one"]]}, "pairs: a run cannot be compared with itself; name two runs"),
        ("grader", {"runs": ["one", "one"]}, "runs: one is there twice; remove one"),
        ("referee", {"pairs": [["one", "two"]] * 2}, "pairs: one_vs_two is there twice; remove one"),
        (
            "grader",
            {"labels": {"A": "first"}},
            "labels: 'first' is no meaning for kind pointwise; use correct, incorrect",
        ),
        (
            "referee",
            {"labels": {"A": "correct"}},
            "labels: 'correct' is no meaning for kind pairwise; use first, second",
        ),
        (
            "grader",
            {"labels": {"A": "correct"}},
            "labels: kind pointwise needs a label for each of correct, incorrect; add",
        ),
        (
            "referee",
            {"labels": {"A": "first", "T": "tie"}},
            "labels: kind pairwise needs a label for each of first, second",
        ),
        (
            "grader",
            {"sampling": {"samples": 2, "temperature": 1}},
            "sampling.samples is 2; a judge answers once, leave it at 1",
        ),
    ],
)
def test_a_judge_whose_parts_do_not_fit_is_refused(root: Path, judge: str, change: Any, said: str) -> None:
    assert refusal(f"judges.{judge}", BASE["judges"][judge] | change).startswith(f"judges.{judge}: {said}")


def test_a_pair_over_two_datasets_is_refused(root: Path) -> None:
    line = refusal("judges.referee.pairs", [["one", "far"]])
    assert line == (
        "judges.referee.pairs: one and far answer different datasets (questions, others); pair runs of one dataset"
    )


def test_a_pair_with_different_numbers_of_answers_is_refused(root: Path) -> None:
    line = refusal("runs.two.sampling", {"samples": 3, "temperature": 1})
    assert line == (
        "judges.referee.pairs: one has 1 answers per row and two has 3; give both runs the same sampling.samples"
    )


def test_labels_have_defaults_and_targets_are_folder_names(root: Path) -> None:
    judges = load(BASE).judges
    assert judges["grader"].meanings() == {"A": "correct", "B": "incorrect"}
    assert judges["referee"].meanings() == {"A": "first", "B": "second", "C": "tie"}
    assert (judges["grader"].targets(), judges["referee"].targets()) == (["one", "two"], ["one_vs_two"])


# ---- files


@pytest.mark.parametrize("place", ["datasets.questions.path", "prompts.direct.file", "models.small.chat_template"])
def test_a_file_that_is_missing_or_a_folder_is_named_with_where_it_was_looked_for(root: Path, place: str) -> None:
    line = refusal(place, "gone.txt")
    assert line == f"{place} is 'gone.txt', which does not exist (looked in {root}); correct the path"
    assert f"{place} is 'folder', which is a folder, not a file" in refusal(place, "folder")
    assert f"{place} is 'a\\x00b', which does not exist" in refusal(place, "a\0b")


@pytest.mark.parametrize("place", ["datasets.questions.path", "prompts.direct.file", "models.small.chat_template"])
def test_a_pipe_is_no_file(root: Path, place: str) -> None:
    os.mkfifo("pipe.jsonl")
    assert f"{place} is 'pipe.jsonl', which is a pipe or device, not a file" in refusal(place, "pipe.jsonl")
    assert f"{place} is '/dev/zero', which is a pipe or device, not a file" in refusal(place, "/dev/zero")


@pytest.mark.parametrize("place", ["datasets.questions.path", "prompts.direct.file", "models.small.chat_template"])
def test_a_file_name_with_braces_is_refused(root: Path, place: str) -> None:
    for name in ("{run}.jsonl", "a{b", "}"):
        Path(name).write_text("{}")
        line = refusal(place, name)
        assert line == f"{place} is {name!r}, and Snakemake takes {{…}} in a path for a wildcard; rename it"


def test_a_model_folder_with_braces_is_refused_and_a_working_directory_with_them_is_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = root / "{run}"
    folder.mkdir()
    assert "Snakemake takes {…} in a path for a wildcard" in refusal("models.small.source", "{run}")
    for name in ("questions.jsonl", "others.jsonl", "direct.jinja", "judge.jinja", "compare.jinja"):
        (root / name).rename(folder / name)
    monkeypatch.chdir(folder)
    assert load_config(BASE, [folder]).datasets["questions"].path == "questions.jsonl"


def test_half_of_a_surrogate_pair_is_refused_anywhere_in_a_config(root: Path) -> None:
    line = refusal("prompts.direct.system", "a\ud800")
    assert line == "prompts.direct.system is 'a\\ud800', with half of a surrogate pair; write the character itself"
    assert "runs.one.sampling.stop.1 is '\\udfff'" in refusal("runs.one.sampling.stop", ["x", "\udfff"])
    line = refusal("datasets.questions.fields", {"\ud800": "question"})
    assert line.startswith("a key of datasets.questions.fields is '\\ud800'")


@pytest.mark.parametrize("value", ["", ";;", "a", "7", '"', "\n", "\r", "\0", "é"])
def test_a_delimiter_that_separates_nothing_is_refused(root: Path, value: str) -> None:
    line = refusal("datasets.questions.delimiter", value)
    known = "datasets.questions.delimiter: one character that is no letter, digit, quote or line end; "
    assert line == f"{known}correct {value!r}"


def test_a_delimiter_reaches_the_check_the_count_and_only_csv(root: Path) -> None:
    Path("rows.csv").write_text("id;question\n1;a,b\n2;c\n")
    config = load(edited("datasets.questions", {"path": "rows.csv", "delimiter": ";"}))
    check_data(config)
    assert rows_up_to(config, "questions", 5) == 2
    with pytest.raises(UserError, match=r'it seems to use semicolons, not commas; set the dataset.s delimiter to ";"'):
        check_data(load(edited("datasets.questions", {"path": "rows.csv"})))
    with pytest.raises(UserError, match=r"delimiter is ';', but only \.csv, \.tsv files have one; remove it"):
        check_data(load(edited("datasets.questions.delimiter", ";")))


def test_a_refusal_lists_some_of_10_000_columns(root: Path) -> None:
    write_jsonl("others.jsonl", [{"id": "1", "question": "a"} | {f"c{number}": 0 for number in range(10_000)}])
    config = load(edited("runs.far", {**BASE["runs"]["far"], "metrics": ["contains"], "slices": ["nowhere"]}))
    with pytest.raises(UserError) as caught:
        check_data(config)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.endswith(" and 9982 more") and len(line) < 500 for line in lines)


def test_an_empty_path_is_no_file(root: Path) -> None:
    assert "is '', which is a folder" in refusal("prompts.direct.file", "")


@pytest.mark.parametrize("source", ["./gone", "/gone", "~/gone", "./direct.jinja"])
def test_a_source_that_looks_like_a_folder_and_is_none_is_refused(root: Path, source: str) -> None:
    line = refusal("models.small", {"source": source})
    assert line == f"models.small.source is {source!r}, which is not a folder; correct the path"


def test_sources_of_other_kinds_pass_unchanged_and_a_folder_is_named_from_the_working_directory(root: Path) -> None:
    for source in ("org/model", "package:module/file.gguf"):
        assert load(edited("models.small.source", source)).models["small"].source == source
    assert load(edited("models.small.source", "folder")).models["small"].source == "folder"
    assert load(edited("models.small.source", str(root / "folder"))).models["small"].source == "folder"


def test_a_path_is_looked_up_in_each_root_in_order(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    beside = tmp_path_factory.mktemp("workflow")
    (beside / "direct.jinja").write_text("beside")
    (beside / "only.jinja").write_text("beside")
    assert find_file("direct.jinja", [root, beside]) == Path("direct.jinja")
    assert find_file("only.jinja", [root, beside]) == beside / "only.jinja"
    assert find_file("gone.jinja", [root, beside]) is None


# ---- what the data must have


def test_a_placeholder_that_is_no_column_is_refused_in_a_runs_prompt(root: Path) -> None:
    Path("direct.jinja").write_text("{{ questoin }}")
    lines = refusals(BASE)
    assert lines[0].startswith("prompts.direct: {{ questoin }} in direct.jinja is not a column of the dataset; did you")
    assert len(lines) == 2  # once for each dataset, since the columns differ


def test_an_answer_is_no_placeholder_of_a_runs_prompt(root: Path) -> None:
    Path("direct.jinja").write_text("{{ answer }}")
    assert "{{ answer }} in direct.jinja is not a column" in refusals(BASE)[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [("judge.jinja", "{{ answer_a }}"), ("judge.jinja", "{{ answr }}"), ("compare.jinja", "{{ answer }}")],
)
def test_a_placeholder_that_a_judges_kind_does_not_have_is_refused_once(root: Path, file: str, text: str) -> None:
    Path(file).write_text(text)
    (line,) = refusals(BASE)
    assert f"{text} in {file} is not a column of the dataset" in line


def test_a_slice_that_is_no_column_is_refused(root: Path) -> None:
    line = refusal("runs.one.slices", ["topic", "topics"])
    assert line.startswith(
        "runs.one.slices: 'topics' is not a column of questions; columns: id, question, reference, topic"
    )


def test_a_metric_of_ones_own_needs_no_reference_column_and_a_cluster_needs_its_column(root: Path) -> None:
    check_data(load(edited("runs.far.metrics", [{"python": "mine:f"}])))
    assert refusal("runs.far.cluster", "nowhere").startswith("runs.far.cluster: 'nowhere' is not a column of others; ")


def test_metrics_need_a_reference_column(root: Path) -> None:
    line = refusal("runs.far.metrics", ["contains"])
    assert line.startswith("runs.far.metrics need a column 'reference' in others; name one with datasets.others.fields")
    config = edited("runs.far.metrics", ["contains"])
    config["datasets"]["others"]["fields"] = {"reference": "question"}
    Path("direct.jinja").write_text("{{ id }}")
    check_data(load(config))


def test_a_column_that_the_first_row_lacks_is_a_column(root: Path) -> None:
    write_jsonl(
        "others.jsonl", [{"id": "1", "question": "?"}, {"id": "2", "question": "?", "reference": 1, "era": "x"}]
    )
    check_data(load(edited("runs.far", BASE["runs"]["far"] | {"metrics": ["contains"], "slices": ["era"]})))
    config = edited("runs.far.slices", ["era"])
    config["datasets"]["others"]["max_rows"] = 1
    (line,) = refusals(config)
    assert "'era' is not a column of others" in line


def test_a_dataset_that_cannot_be_read_is_named_and_the_others_are_still_checked(root: Path) -> None:
    Path("questions.jsonl").write_text("no JSON\n")
    lines = refusals(edited("runs.far.metrics", ["contains"]))
    assert lines[0].startswith("datasets.questions: questions.jsonl, line 1: ")
    assert lines[1].startswith("runs.far.metrics need a column 'reference'")
    assert len(lines) == 2


def test_an_empty_dataset_is_refused(root: Path) -> None:
    Path("others.jsonl").write_text("")
    (line,) = refusals(BASE)
    assert line.startswith("datasets.others: others.jsonl has no rows; ")


def test_a_dataset_that_no_run_uses_is_not_read(root: Path) -> None:
    Path("others.jsonl").write_text("no JSON\n")
    check_data(load(edited("runs.far", MISSING)))


@pytest.mark.parametrize(("limit", "most", "rows"), [(2, None, 2), (9, None, 3), (9, 1, 1), (1, 2, 1)])
def test_rows_are_counted_up_to_a_limit(root: Path, limit: int, most: int | None, rows: int) -> None:
    assert rows_up_to(load(edited("datasets.questions.max_rows", most)), "questions", limit) == rows
