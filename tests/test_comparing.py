"""Facts about the steps that set runs beside each other: comparisons.json and rankings.json."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project, echo_config

from gristmill.comparing import comparisons
from gristmill.config.load import load_config
from gristmill.config.specs import CompareSpec, RankSpec
from gristmill.errors import UserError
from gristmill.files import write_jsonl
from gristmill.ranking import rankings


def spec(*pairs: tuple[str, str], metric: str = "contains") -> CompareSpec:
    listed = [{"dataset": "rows", "metric": metric, "runs": pair} for pair in pairs]
    return CompareSpec.model_validate({"comparisons": listed, "seed": 0, "resamples": 200})


def graded(*grades: Any, first: int = 0, metric: str = "contains") -> list[dict[str, Any]]:
    """Lines of grades.jsonl; a list is a row's samples."""
    return [
        {"id": f"r{first + row:03}", "sample": sample, "grades": {metric: grade}, "invalid": None}
        for row, samples in enumerate(grades)
        for sample, grade in enumerate(samples if isinstance(samples, list) else [samples])
    ]


def compared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    entry = comparisons(spec(("one", "other")), {"one": one, "other": other})["comparisons"][0]
    assert isinstance(entry, dict)
    return entry


# ---- comparisons


def test_two_runs_are_compared_row_by_row() -> None:
    one, other = [True] * 8 + [False] * 4, [True] * 2 + [False] * 7 + [True] * 3
    entry = compared(graded(*one), graded(*other))
    assert (entry["runs"], entry["dataset"], entry["metric"]) == (["one", "other"], "rows", "contains")
    assert entry["values"] == pytest.approx([8 / 12, 5 / 12])
    assert entry["difference"] == pytest.approx(0.25)
    assert entry["discordant"] == {"only_first": 6, "only_second": 3}
    assert (entry["test"], entry["p"]) == ("mcnemar_exact", pytest.approx(0.5078125))
    assert entry["ci95"][0] < 0.25 < entry["ci95"][1]
    assert entry["bootstrap_ci95"][0] < 0.25 < entry["bootstrap_ci95"][1]
    assert (entry["p_holm"], entry["family_size"], entry["note"]) == (entry["p"], 1, None)


def test_rows_of_one_run_only_are_left_out_and_counted() -> None:
    entry = compared(graded(True, False, True, False), graded(True, False, None, True, True, first=1))
    assert (entry["n_common"], entry["n_only_first"], entry["n_only_second"]) == (2, 2, 2)
    assert entry["values"] == [0.5, 0.5]
    assert entry["ungraded"] == [0, 1]
    assert entry["note"] == "4 rows have a score in one of the two runs only and are left out"


def test_a_row_of_several_samples_is_their_mean_and_has_no_mcnemar() -> None:
    entry = compared(graded([True, False], [True, True], [False, None]), graded(False, True, False))
    assert entry["values"] == [0.5, pytest.approx(1 / 3)]
    assert (entry["samples"], entry["discordant"], entry["test"]) == ([2, 1], None, "paired_t")


def test_samples_that_agree_do_not_pass_for_single_answers() -> None:
    entry = compared(graded([True, True], [False, False], [True, True]), graded(False, False, True))
    assert (entry["test"], entry["discordant"]) == ("paired_t", None)


def test_grades_between_0_and_1_are_compared_by_t() -> None:
    entry = compared(graded(0.5, 0.25, 1.0), graded(0.25, 0.25, 0.5))
    assert (entry["test"], entry["difference"]) == ("paired_t", pytest.approx(0.25))


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        (graded(True, True), graded(True, True, first=5), "no row has a score in both"),
        (graded(True, False), graded(True, False), "by the same amount"),
        (graded(True), graded(False), "only one independent row"),
    ],
)
def test_a_comparison_that_tells_nothing_has_no_interval_and_a_note(
    one: list[dict[str, Any]], other: list[dict[str, Any]], word: str
) -> None:
    entry = compared(one, other)
    assert (entry["ci95"], entry["bootstrap_ci95"]) == (None, None)
    assert word in entry["note"]


def test_the_p_values_of_one_dataset_and_metric_are_adjusted_together() -> None:
    grades = {"a": graded(*[True] * 20), "b": graded(*[False] * 20), "c": graded(*[True] * 14, *[False] * 6)}
    found = comparisons(spec(("a", "b"), ("a", "c"), ("b", "c")), grades)["comparisons"]
    assert [entry["family_size"] for entry in found] == [3, 3, 3]
    smallest = min(found, key=lambda entry: float(entry["p"]))
    assert smallest["p_holm"] == pytest.approx(3 * smallest["p"])
    assert all(entry["p_holm"] >= entry["p"] for entry in found)


def test_grades_without_the_metric_are_refused() -> None:
    with pytest.raises(UserError, match="one has no grades by contains \\(it has: other\\)"):
        compared(graded(True, metric="other"), graded(True))


def test_a_run_whose_grades_are_not_given_is_named() -> None:
    with pytest.raises(UserError, match="the grades of other are not given"):
        comparisons(spec(("one", "other")), {"one": graded(True)})


# ---- rankings


def verdict(row: int, winner: str | None, runs: Sequence[str], reason: str | None = None) -> dict[str, Any]:
    return {"id": f"r{row}", "sample": 0, "runs": list(runs), "winner": winner, "reason": reason}


def ranked(
    folder: Path, winners: dict[tuple[str, str], list[str | None]], baseline: str | None = None, reliable: bool = True
) -> dict[str, Any]:
    """The one ranking of a judge's verdicts; `x` writes longer answers on the whole."""
    pairs = [{"judge": "arena", "dataset": "rows", "runs": pair} for pair in winners]
    judges, runs = {}, {}
    for pair, won in winners.items():
        place = judges[f"arena/{'_vs_'.join(pair)}"] = folder / "-".join(pair)
        place.mkdir()
        reason = "unreadable"
        lines = [verdict(row, name, pair, reason if name is None else None) for row, name in enumerate(won)]
        write_jsonl(place / "verdicts.jsonl", lines)
        because = [] if reliable else ["it says A"]
        (place / "metrics.json").write_text(json.dumps({"reliable": reliable, "unreliable_because": because}))
        for run in pair:
            runs[run] = folder / run
            texts = ["word " * (1 + row % (4 if run == "x" else 3)) for row in range(len(won))]
            write_jsonl(
                folder / run / "generations.jsonl",
                [{"id": f"r{row}", "sample": 0, "text": text} for row, text in enumerate(texts)],
            )
    made = {"pairs": pairs, "baseline": baseline, "seed": 0, "resamples": 100}
    found = rankings(RankSpec.model_validate(made), judges, runs)["rankings"]
    assert len(found) == 1
    return dict(found[0])


XY = {("x", "y"): ["x", "y", "x", "tie", None, "x", "y", "x", "x", "y", "x", "tie"] * 2}


def test_a_judges_pairs_become_a_ranking(tmp_path: Path) -> None:
    found = ranked(tmp_path, {**XY, ("y", "z"): ["y", "z", "y", "y", "z", "y", "tie", "y", "y", "z", "y", "y"] * 2})
    assert (found["judge"], found["dataset"], found["reliable"]) == ("arena", "rows", True)
    assert [line["run"] for line in found["ratings"]] == ["x", "y", "z"]
    assert sum(line["rating"] for line in found["ratings"]) == pytest.approx(3000)
    assert all(line["ci95"][0] <= line["rating"] <= line["ci95"][1] for line in found["ratings"])
    assert (found["n"], found["unread"], found["baseline"]) == (46, 2, None)
    first = found["ratings"][0]
    assert (first["wins"], first["losses"], first["ties"], first["place"]) == (12, 6, 4, "rated")
    assert found["win_matrix"]["x"] == {"y": 14.0, "z": 0.0}
    assert found["win_matrix"]["y"]["x"] == 8.0


def test_a_pair_has_a_raw_and_a_length_controlled_win_rate_and_counts_what_was_unread(tmp_path: Path) -> None:
    pair = ranked(tmp_path, XY)["pairs"][0]
    assert (pair["n"], pair["wins"], pair["ties"], pair["unread"]) == (22, {"x": 12, "y": 6}, 4, {"unreadable": 2})
    assert pair["win_rate"] == pytest.approx(14 / 22)
    assert pair["win_rate_ci95"][0] < 14 / 22 < pair["win_rate_ci95"][1]
    controlled = pair["length_controlled"]
    assert 0 < controlled["ci95"][0] < controlled["win_rate"] < controlled["ci95"][1] < 1
    assert (controlled["overlap"], controlled["note"]) == (True, None)


def test_the_baselines_rating_is_1000(tmp_path: Path) -> None:
    found = ranked(tmp_path, XY, baseline="y")
    assert found["baseline"] == "y"
    assert found["ratings"][1]["rating"] == pytest.approx(1000)


def test_a_run_that_won_everything_has_a_place_and_no_rating(tmp_path: Path) -> None:
    found = ranked(tmp_path, {("x", "y"): ["x"] * 6})
    assert [(line["run"], line["place"], line["rating"]) for line in found["ratings"]] == [
        ("x", "above", None),
        ("y", "below", None),
    ]
    assert "bound" in found["ratings"][0]["note"]
    assert found["pairs"][0]["length_controlled"]["win_rate"] is None
    assert "same run" in found["pairs"][0]["length_controlled"]["note"]


def test_a_judge_that_read_nothing_ranks_nothing(tmp_path: Path) -> None:
    found = ranked(tmp_path, {("x", "y"): [None] * 3})
    assert (found["n"], found["unread"]) == (0, 3)
    assert {line["note"] for line in found["ratings"]} == {"no pair has a verdict"}
    assert (found["pairs"][0]["win_rate"], found["pairs"][0]["win_rate_ci95"]) == (None, None)


def test_an_unreliable_judge_is_marked_in_the_ranking_and_in_its_pairs(tmp_path: Path) -> None:
    found = ranked(tmp_path, XY, reliable=False)
    assert found["reliable"] is False
    assert (found["pairs"][0]["reliable"], found["pairs"][0]["unreliable_because"]) == (False, ["it says A"])


def test_verdicts_on_other_answers_are_refused(tmp_path: Path) -> None:
    ranked(tmp_path, XY)
    lines = [{"id": f"r{row}", "sample": 0, "text": "t"} for row in (1, 0)]
    write_jsonl(tmp_path / "x" / "generations.jsonl", lines)
    made = {"pairs": [{"judge": "arena", "dataset": "rows", "runs": ("x", "y")}], "baseline": None, "seed": 0}
    folders = {"arena/x_vs_y": tmp_path / "x-y"}, {run: tmp_path / run for run in "xy"}
    with pytest.raises(UserError, match="no answer to r0#0 at its place"):
        rankings(RankSpec.model_validate({**made, "resamples": 100}), *folders)


# ---- the config


def loaded(runs: dict[str, Any], **sections: Any) -> Any:
    base = {"dataset": "rows", "model": "echo", "prompt": "ask", "metrics": ["contains"]}
    config = echo_config(runs={name: {**base, **run} for name, run in runs.items()}, **sections)
    config["datasets"]["rows"]["path"] = "config/data/questions.jsonl"
    config["datasets"]["others"] = {"path": "config/data/questions.jsonl"}
    config["prompts"]["ask"]["file"] = "config/prompts/direct.jinja"
    return load_config(config, [ROOT])


def planned(config: Any) -> list[tuple[str, str, str]]:
    from gristmill.config.comparisons import compare_spec

    return [(*each.runs, each.metric) for each in compare_spec(config).comparisons]


def test_runs_of_one_dataset_that_share_their_headline_are_compared() -> None:
    runs = {"a": {}, "b": {}, "c": {"metrics": ["exact_match", "contains"]}, "d": {"dataset": "others"}}
    assert planned(loaded({**runs, "e": {"metrics": []}})) == [("a", "b", "contains")]


def test_metrics_and_pairs_that_are_named_are_compared() -> None:
    runs = {"a": {"metrics": ["contains", "exact_match"]}, "b": {"metrics": ["exact_match", "contains"]}, "c": {}}
    both = loaded(runs, comparisons={"metrics": ["exact_match", "contains"]})
    assert planned(both) == [("a", "b", "exact_match"), ("a", "b", "contains"), ("a", "c", "contains"),
                             ("b", "c", "contains")]  # fmt: skip
    assert planned(loaded(runs, comparisons={"pairs": [["c", "a"]]})) == [("c", "a", "contains")]
    assert planned(loaded(runs, comparisons={"pairs": []})) == []


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([["a", "q"]], "'q' is not a run"),
        ([["a", "a"]], "cannot be compared with itself"),
        ([["a", "b"], ["b", "a"]], "are there twice"),
        ([["a", "d"]], "answer different datasets"),
        ([["a", "e"]], "share no metric"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_refused(pairs: list[list[str]], message: str) -> None:
    runs = {"a": {}, "b": {}, "d": {"dataset": "others"}, "e": {"metrics": []}}
    with pytest.raises(UserError, match=message) as caught:
        loaded(runs, comparisons={"pairs": pairs})
    assert len(str(caught.value).splitlines()) <= 2


def test_more_pairs_than_45_must_be_named() -> None:
    assert len(planned(loaded({f"run{n}": {} for n in range(10)}))) == 45
    with pytest.raises(UserError, match="55 pairs of runs share a metric, over the limit of 45"):
        loaded({f"run{n}": {} for n in range(11)})
    assert planned(loaded({f"run{n}": {} for n in range(11)}, comparisons={"pairs": []})) == []


def test_a_baseline_that_no_judge_compares_is_refused() -> None:
    with pytest.raises(UserError, match=r"rankings\.baseline: 'a' is in no pair"):
        loaded({"a": {}}, rankings={"baseline": "a"})


# ---- the workflow


def test_the_workflow_compares_and_ranks(project: Project) -> None:
    project.write_prompt("loud.jinja", "{% if reference % 2 %}{{ question }}{% else %}nothing{% endif %}")
    project.write_prompt("compare.jinja", "{% if answer_a == 'nothing' %}[[B]]{% else %}[[A]]{% endif %}")
    run = {"dataset": "rows", "model": "echo", "metrics": ["contains"]}
    prompts = {"ask": {"file": "ask.jinja"}, "loud": {"file": "loud.jinja"}, "compare": {"file": "compare.jinja"}}
    arena = {"kind": "pairwise", "model": "echo", "prompt": "compare", "pairs": [["plain", "loud"]]}
    runs = {"plain": {**run, "prompt": "ask"}, "loud": {**run, "prompt": "loud"}}
    project.write_config(
        echo_config(runs=runs, prompts=prompts, judges={"arena": arena}, comparisons={"resamples": 100})
    )
    project.done("results/comparisons.json", "results/rankings.json", gpu=2)
    entry = project.value("comparisons.json")["comparisons"][0]
    assert (entry["n_common"], entry["values"], entry["discordant"]) == (
        12,
        [1.0, 0.5],
        {"only_first": 6, "only_second": 0},
    )
    ranking = project.value("rankings.json")["rankings"][0]
    assert (ranking["n"], ranking["pairs"][0]["wins"], ranking["pairs"][0]["ties"]) == (12, {"plain": 6, "loud": 0}, 6)
    assert [line["place"] for line in ranking["ratings"]] == ["rated", "rated"]


def test_runs_with_one_cluster_column_are_compared_by_clusters() -> None:
    rng = random.Random(3)
    books = [f"b{n // 10}" for n in range(80)]
    good = {book: rng.random() < 0.5 for book in books}

    def lines(of: Callable[[int], bool]) -> list[dict[str, Any]]:
        return [
            {"id": f"r{n}", "sample": 0, "grades": {"exact_match": of(n)}, "invalid": None, "cluster": books[n]}
            for n in range(80)
        ]

    grades = {"x": lines(lambda n: good[books[n]]), "y": lines(lambda n: False)}

    def entry(cluster: str | None) -> dict[str, Any]:
        named = {"dataset": "d", "metric": "exact_match", "runs": ["x", "y"], "cluster": cluster}
        spec = CompareSpec.model_validate({"comparisons": [named], "seed": 0, "resamples": 200})
        (found,) = comparisons(spec, grades)["comparisons"]
        return dict(found)

    rows, clusters = entry(None), entry("book")
    assert rows["difference"] == clusters["difference"]
    # Eight books that are right or wrong as a whole: as many observations as books, not as rows.
    assert clusters["standard_error"] == pytest.approx(rows["standard_error"] * math.sqrt(10 * 79 / 80 * 8 / 7))
    assert (rows["test"], clusters["test"]) == ("mcnemar_chi2", "paired_t")
    assert clusters["p"] > rows["p"]
