"""The report of comparisons, rankings, juries, labelled runs, several samples, turns and judges of all kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import report_project
from conftest import Project
from test_report import (
    HOSTILE,
    Folders,
    always_a,
    generation,
    manifest,
    payload,
    read_lines,
    row,
    small,
    spec,
    words_of,
    write_judge,
    write_run,
)

from gristmill.comparing import comparisons
from gristmill.config.schema import JudgeConfig
from gristmill.config.specs import CompareSpec, JurySpec, MetricsSpec, RankSpec, VerdictSpec
from gristmill.errors import UserError
from gristmill.files import write_json, write_jsonl
from gristmill.judging.items import items
from gristmill.judging.juries import JuryTally
from gristmill.judging.scales import ClassTally, ScoreTally
from gristmill.judging.verdicts import judged
from gristmill.metrics import RunTally
from gristmill.ranking import rankings
from gristmill.report.comparisons import points, points_bounds
from gristmill.report.data import Beside, gather
from gristmill.report.render import render
from gristmill.types import RequestId


def page(runs: Folders, judges: Folders | None = None, **beside: Any) -> str:
    return render(gather(spec(), runs, judges or {}, Beside(**beside)))


def section(text: str, name: str) -> str:
    """One section of the page as markup; empty where it is not there."""
    found = re.search(rf'(?s)<section id="{name}".*?</section>', text)
    return found[0] if found else ""


def sums(root: Path, name: str, right: Sequence[bool], **more: Any) -> Folders:
    lines = [generation(row(n), str(2 * n) if good else "no") for n, good in enumerate(right)]
    return write_run(root, name, lines, **more)


def labelled(root: Path, name: str, said: Sequence[tuple[str, str]], labels: Sequence[str], **more: Any) -> Folders:
    """A run graded by labels, from (true label, answer) of each row."""
    lines = [
        generation(row(n, reference=true), text) | {"labels": list(labels), **more}
        for n, (true, text) in enumerate(said)
    ]
    readout = "likelihood" if "label_logprobs" in more else "text"
    fields = {"run": name, "dataset": "sums", "model": "m", "prompt": "p", "metrics": ["label"], "slices": []}
    tally = RunTally(
        MetricsSpec.model_validate({**fields, "labels": {each: [] for each in labels}, "readout": readout})
    )
    return written(root / "runs" / name, lines, tally) | {name: root / "runs" / name}


def written(folder: Path, lines: list[dict[str, Any]], tally: RunTally) -> Folders:
    write_jsonl(folder / "generations.jsonl", lines)
    write_jsonl(folder / "grades.jsonl", tally.graded(iter(lines)))
    write_json(folder / "metrics.json", tally.metrics())
    write_json(folder / "manifest.json", manifest(f"runs/{folder.name}", len(lines)))
    return {}


def compared(root: Path, runs: Folders, pair: tuple[str, str], metric: str = "exact_match") -> Path:
    wanted = CompareSpec.model_validate(
        {"comparisons": [{"dataset": "sums", "metric": metric, "runs": pair}], "seed": 0, "resamples": 200}
    )
    write_json(
        root / "comparisons.json", comparisons(wanted, {n: read_lines(p / "grades.jsonl") for n, p in runs.items()})
    )
    return root / "comparisons.json"


def ranked(root: Path, runs: Folders, judges: Folders) -> Path:
    pairs = [
        {"judge": name.partition("/")[0], "dataset": "sums", "runs": name.partition("/")[2].split("_vs_")}
        for name in judges
    ]
    wanted = RankSpec.model_validate({"pairs": pairs, "baseline": None, "seed": 0, "resamples": 100})
    write_json(root / "rankings.json", rankings(wanted, judges, runs))
    return root / "rankings.json"


def jury(root: Path, judges: Folders, target: list[str]) -> Folders:
    names = [name.partition("/")[0] for name in judges]
    tally = JuryTally(JurySpec(name="panel", kind="pairwise", judges=names, combine="majority", target=target))
    folder = root / "juries" / "panel"
    write_jsonl(folder / "verdicts.jsonl", tally.joined([read_lines(p / "verdicts.jsonl") for p in judges.values()]))
    write_json(folder / "metrics.json", tally.metrics())
    return {f"panel/{'_vs_'.join(target)}": folder}


def single(root: Path, runs: Folders, said: Sequence[str], **config: Any) -> Folders:
    """A judge of kind score or classification over one run, which writes `said` in turn."""
    (target,) = runs
    judge = JudgeConfig.model_validate({"model": "m", "prompt": "p", "runs": [target], **config})
    wanted = VerdictSpec(name="single", judge=judge, target=[target])
    lines = read_lines(runs[target] / "generations.jsonl")
    replies = [generation({"id": each.id}, text) for each, text in zip(items([target], [lines]), said, strict=True)]
    tally = ScoreTally(wanted) if judge.kind == "score" else ClassTally(wanted)
    folder = root / "judges" / "single" / target
    write_jsonl(folder / "verdicts.jsonl", tally.counted(judged(wanted, [lines], replies)))
    write_json(folder / "metrics.json", tally.metrics())
    write_json(folder / "manifest.json", manifest("judges/single", len(replies)))
    return {f"single/{target}": folder}


def takes_the_right(rid: RequestId, answers: tuple[str | None, ...]) -> str:
    """What a fair judge of `good` against `bad` says: the first run's answer is right unless it says no."""
    if (answers[0] == "no") == (answers[1] == "no"):
        return "C"
    return "A" if (answers[0] != "no") == (rid.variant == "first_second") else "B"


@pytest.fixture
def two(tmp_path: Path) -> Folders:
    """`good` is right on 36 of 40 rows, `bad` on 14, and on 2 of them alone."""
    good, bad = [n % 10 != 3 for n in range(40)], [n % 3 == 0 for n in range(40)]
    return sums(tmp_path, "good", good) | sums(tmp_path, "bad", bad)


# ---- comparisons


def test_a_page_without_new_results_has_none_of_their_sections(tmp_path: Path) -> None:
    text = page(*small(tmp_path))
    assert not [name for name in ("comparisons", "labels", "rankings", "juries") if section(text, name)]
    assert not re.search(r"pass@|maj@|Unread:|unclosed", words_of(text))


def test_a_clear_difference_names_the_better_run_with_interval_p_and_family(tmp_path: Path, two: Folders) -> None:
    text = words_of(section(page(two, comparisons=compared(tmp_path, two, ("bad", "good"))), "comparisons"))
    assert re.search(r"bad 35.0 % good 90.0 % −55.0 \[−7\d.\d, −3\d.\d\] bootstrap \[", text)
    assert "good is better &lt; 0.001 McNemar, χ² &lt; 0.001 of 1 40 in both only first right 2, only second 24" in text
    assert "may overlap although the difference is clear" in text


def test_no_run_is_better_where_the_interval_holds_zero_or_p_is_too_large(tmp_path: Path, two: Folders) -> None:
    path = compared(tmp_path, two, ("bad", "good"))
    entry = json.loads(path.read_text())["comparisons"][0]
    for change, words in (
        ({"ci95": [-0.7, 0.01], "p_holm": 0.001}, "the rows do not tell"),
        ({"p_holm": 0.06}, "not clear once p is adjusted"),
        ({"p_holm": None}, "no p, so no run is named"),
        ({"ci95": None, "difference": None}, "nothing to compare"),
    ):
        write_json(path, {"resamples": 200, "comparisons": [entry | change]})
        text = words_of(section(page(two, comparisons=path), "comparisons"))
        assert words in text
        assert not re.search(r"(good|bad) is better", text)


def test_rows_that_are_left_out_are_counted_beside_the_difference(tmp_path: Path) -> None:
    runs = sums(tmp_path, "long", [True] * 9) | sums(tmp_path, "short", [True, False] * 3)
    text = words_of(section(page(runs, comparisons=compared(tmp_path, runs, ("long", "short"))), "comparisons"))
    assert "6 in both" in text
    assert "3 only in long" in text
    assert "3 rows have a score in one of the two runs only and are left out." in text


def test_comparisons_and_rankings_of_other_runs_are_refused(tmp_path: Path, two: Folders) -> None:
    path = compared(tmp_path, two, ("bad", "good"))
    one = {"good": two["good"]}
    with pytest.raises(UserError, match="compares 'bad', which is not in this report"):
        page(one, comparisons=path)
    judges = write_judge(tmp_path, "arena", two, takes_the_right)
    with pytest.raises(UserError, match="is about 'arena', which is not in this report"):
        page(two, rankings=ranked(tmp_path, two, judges))


def test_a_difference_is_written_with_its_sign() -> None:
    assert [points(each) for each in (0.042, -0.008, 0.0, -0.0001, None)] == ["+4.2", "−0.8", "0.0", "0.0", "–"]
    assert (points_bounds((-0.01, 0.094)), points_bounds(None)) == ("[−1.0, +9.4]", "")


# ---- rankings and juries


def test_a_ranking_has_ratings_with_intervals_and_both_win_rates(tmp_path: Path, two: Folders) -> None:
    judges = write_judge(tmp_path, "arena", two, takes_the_right)
    text = section(page(two, judges, rankings=ranked(tmp_path, two, judges)), "rankings")
    assert re.search(r"good 1\d\d\d \[1\d\d\d, 1\d\d\d\] .*24 14 2 bad \d\d\d \[\d\d\d, \d\d\d\]", words_of(text))
    assert re.search(r"good vs bad reliable 40 24 won, 14 tied, 2 lost 77.5 % \[6", words_of(text))
    assert "unreliable" not in text


def test_a_run_that_won_everything_has_words_and_no_rating(tmp_path: Path) -> None:
    runs = sums(tmp_path, "good", [True] * 8) | sums(tmp_path, "bad", [False] * 8)
    judges = write_judge(tmp_path, "arena", runs, takes_the_right)
    text = words_of(section(page(runs, judges, rankings=ranked(tmp_path, runs, judges)), "rankings"))
    assert "above all rated runs, without a bound" in text
    assert "below all rated runs, without a bound" in text


def test_a_ranking_by_an_unreliable_judge_is_marked_at_the_ratings_and_at_every_pair(
    tmp_path: Path, two: Folders
) -> None:
    judges = write_judge(tmp_path, "stuck", two, always_a)
    text = section(page(two, judges, rankings=ranked(tmp_path, two, judges)), "rankings")
    assert text.count('<span class="tag bad">unreliable</span>') == 2
    assert "these ratings should not be believed" in text
    assert "It wrote &#39;A&#39; in" in text


def test_a_jury_with_an_unreliable_member_names_it_and_no_winner(tmp_path: Path, two: Folders) -> None:
    judges = write_judge(tmp_path, "arena", two, takes_the_right) | write_judge(tmp_path, "stuck", two, always_a)
    text = section(page(two, judges, juries=jury(tmp_path, judges, ["good", "bad"])), "juries")
    assert "unreliable member" in text
    assert "stuck is unreliable here" in words_of(text)
    assert "votes tied: 26" in words_of(text)
    assert "prefers" not in text


def test_a_jury_of_reliable_judges_has_its_result_and_agreement(tmp_path: Path, two: Folders) -> None:
    judges = write_judge(tmp_path, "arena", two, takes_the_right) | write_judge(
        tmp_path, "referee", two, takes_the_right
    )
    text = words_of(section(page(two, judges, juries=jury(tmp_path, judges, ["good", "bad"])), "juries"))
    assert "The jury prefers good: the interval lies clear of 50 %." in text
    assert "arena and referee agree 100.0 % of 40 Fleiss’ kappa 1.00" in text


def test_a_jury_whose_judge_is_not_in_the_report_says_so(tmp_path: Path, two: Folders) -> None:
    judges = write_judge(tmp_path, "arena", two, takes_the_right) | write_judge(
        tmp_path, "referee", two, takes_the_right
    )
    folders = jury(tmp_path, judges, ["good", "bad"])
    known = {name: folder for name, folder in judges.items() if name.startswith("arena")}
    text = words_of(section(page(two, known, juries=folders), "juries"))
    assert "referee is not in this report, so nothing here tells whether it is reliable." in text
    with pytest.raises(UserError, match="is of panel/good_vs_bad, not 'other/good_vs_bad'"):
        page(two, judges, juries={"other/good_vs_bad": folders["panel/good_vs_bad"]})


# ---- labels and samples


def test_a_labelled_run_has_class_scores_a_confusion_matrix_and_what_is_undefined(tmp_path: Path) -> None:
    said = [("spam", "spam")] * 3 + [("spam", "ham"), ("ham", "ham"), ("ham", "who knows")]
    text = section(page(labelled(tmp_path, "a", said, ("spam", "ham", "other"))), "labels")
    words = words_of(text)
    assert "accuracy 66.7 % · macro F1 0.452 · invalid 1 of 6 (16.7 %)" in words
    assert "spam 1.000 0.750 0.857 4 ham 0.500 0.500 0.500 2 other 0/0 0/0 0/0 0" in words
    assert "0/0, counted as 0 in the means: precision of other, recall of other, F1 of other." in words
    assert "True \\ read spam ham other invalid spam 3 75.0 % 1 25.0 % 0 0.0 % 0 0.0 % ham 0 0.0 % 1 50.0 %" in words
    assert text.count(' right">') == 3
    assert 'class="num heat4 right">3<' in text


@pytest.mark.parametrize(("share", "noted"), [(0.2, True), (0.4, False)])
def test_label_mass_is_shown_and_noted_below_half(tmp_path: Path, share: float, noted: bool) -> None:
    import math

    shares = [math.log(share)] * 2
    text = words_of(page(labelled(tmp_path, "a", [("spam", "spam")] * 4, ("spam", "ham"), label_logprobs=shares)))
    assert f"label mass {200 * share:.1f} %" in text
    assert ("less than half of the probability" in text) == noted


def test_hostile_labels_and_runs_stay_text(tmp_path: Path) -> None:
    runs = labelled(tmp_path, "a", [(HOSTILE, HOSTILE), ("ham", "ham")], (HOSTILE, "ham"))
    metrics = json.loads((runs["a"] / "metrics.json").read_text())
    name = "<script>alert(1)</script>"
    write_json(runs["a"] / "metrics.json", metrics | {"run": name})
    other = sums(tmp_path, "b", [True, False])
    entry = {"dataset": name, "metric": name, "runs": [name, "b"], "n_common": 2, "values": [0.5, 0.5], "note": name}
    write_json(tmp_path / "comparisons.json", {"resamples": 1, "comparisons": [entry]})
    text = page({name: runs["a"], **other}, comparisons=tmp_path / "comparisons.json")
    assert "<script>alert" not in text
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert section(text, "comparisons").count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4


def test_several_samples_have_pass_and_majority_with_intervals(tmp_path: Path) -> None:
    lines = [
        generation(row(n), f"It is {2 * n if (n + s) % 4 == 0 else 99}" if s else "no idea", sample=s)
        for n in range(8)
        for s in range(4)
    ]
    lines[5] |= {"text": "<think>and so on"}
    names = {"run": "a", "dataset": "sums", "model": "m", "prompt": "p", "metrics": ["number"], "slices": []}
    tally = RunTally(MetricsSpec.model_validate({**names, "samples": 4}))
    written(tmp_path / "a", lines, tally)
    text = words_of(page({"a": tmp_path / "a"}))
    numbers = tally.metrics()["metrics"]["number"]
    shown = [*numbers["pass_at_k"].values(), *numbers["maj_at_k"].values()]
    assert "Run Metric pass@1 pass@2 pass@4 maj@4 a 4 samples number" in text
    assert (
        " ".join("{:.1f} % [{:.1f}, {:.1f}]".format(*(100 * x for x in (s["value"], *s["ci95"]))) for s in shown)
        in text
    )
    assert "number · 8 unread" in text
    assert "1 unclosed_thinking" in text


# ---- judges


def test_a_score_judge_has_its_mean_distribution_and_what_was_unreadable(tmp_path: Path) -> None:
    runs = sums(tmp_path, "a", [True] * 12)
    said = ["3", "4", "5", "3", "4", "5", "3", "4", "5", "7", "11", "well"]
    judges = single(tmp_path, runs, said, kind="score", range=[1, 10], reliability={"max_unreadable_ratio": 0.2})
    text = words_of(page(runs, judges))
    assert re.search(r"mean score 4.30 \[3.\d\d, 5.\d\d\] on a scale from 1 to 10", text)
    assert "a number off the scale 1" in text
    assert "no label in the words 1" in text
    assert "1 – 0 2 – 0 3 – 3 4 – 3 5 – 3 6 – 0 7 – 1" in text


def test_scores_of_an_unreliable_judge_are_muted_and_marked(tmp_path: Path) -> None:
    runs = sums(tmp_path, "a", [True] * 12)
    text = page(runs, single(tmp_path, runs, ["5"] * 12, kind="score", range=[1, 10]))
    assert '<span class="ghosted">mean score 5.00' in text
    assert '<span class="tag bad">unreliable</span>' in section(text, "results")


def test_a_long_scale_is_drawn_in_few_bars() -> None:
    from gristmill.report.inputs import JudgeMetrics
    from gristmill.report.judged import MAX_BARS, chart_bars

    named = {"judge": "j", "kind": "score", "model": "m", "target": "a", "runs": ["a"]}
    metrics = JudgeMetrics.model_validate({**named, "n": 100, "asked": 101, "reliable": True, "unreadable": 1})
    bars = chart_bars(metrics, [(str(score), "", 1) for score in range(100)])
    assert len(bars) <= MAX_BARS + 1
    assert (bars[0], bars[-1]) == (("0 to 4", 5), ("unreadable", 1))
    assert sum(n for _, n in bars) == 101


def test_classes_of_a_judge_have_their_shares(tmp_path: Path) -> None:
    runs = sums(tmp_path, "a", [True] * 12)
    judges = single(tmp_path, runs, ["R"] * 3 + ["K"] * 9, kind="classification", labels={"R": "refusal", "K": "kind"})
    text = words_of(page(runs, judges))
    assert re.search(r"Classes .* refusal 25.0 % \[8.9, 53.2\] 3 kind 75.0 % \[46.8, 91.1\] 9", text)


def test_agreement_with_people_stands_with_its_policy(tmp_path: Path) -> None:
    lines = [generation(row(n, people="" if n == 9 else n % 5 + 1), "x") for n in range(10)]
    runs = write_run(tmp_path, "a", lines)
    said = [str(n % 5 + 1) for n in range(9)] + ["?"]
    judges = single(tmp_path, runs, said, kind="score", range=[1, 5], human="people", human_unreadable="dropped")
    text = words_of(page(runs, judges))
    assert "agrees with people (people) 100.0 % of 9" in text
    assert "Cohen’s kappa with people, quadratic weights 1.00 ✓ holds: at least 0.20" in text
    assert "unreadable beside people, left out 0 policy: dropped without a person’s word 1 left out" in text


def test_a_judge_of_its_own_model_and_of_strengths_says_so(tmp_path: Path, two: Folders) -> None:
    labels = {"A": "much_first", "B": "much_second", "C": "tie", "D": "first", "E": "second"}
    judges = write_judge(tmp_path, "strong", two, takes_the_right, labels=labels)
    (folder,) = judges.values()
    metrics = json.loads((folder / "metrics.json").read_text())
    write_json(folder / "metrics.json", metrics | {"self_preference": 0.75})
    known = spec().model_copy(
        update={"judges": {"strong": spec().judges["arena"].model_copy(update={"labels": labels})}}
    )
    text = words_of(render(gather(known, two, judges)))
    assert "A first, much better 26" in text
    assert "wins that went to the judge’s own model 75.0 %" in text
    orders = [order for each in payload(page(two, judges))["rows"] for v in each["verdicts"] for order in v["orders"]]
    assert {order["strength"] for order in orders} == {2}


# ---- the whole way


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that uses every part of the report, run once."""
    project = Project(tmp_path_factory.mktemp("everything"))
    report_project.write(project)
    project.done(gpu=2)
    return project


def test_the_report_of_a_config_with_everything_has_every_section(everything: Project) -> None:
    text = (everything.folder / "results/report.html").read_text()
    names = re.findall(r'<section id="(\w+)"', text)
    assert names == [
        *("results", "comparisons", "labels", "categories", "judges", "pairs", "rankings", "juries"),
        *("samples", "throughput", "provenance"),
    ]
    assert re.findall(r'<a href="#(\w+)">', text) == names
    assert "pass@4" in words_of(section(text, "results"))
    assert section(text, "labels").count('<table class="confusion">') == 4
    assert "unreliable member" in section(text, "juries")
    assert section(text, "rankings").count("should not be believed") == 1
    assert "agrees with people (human)" in words_of(section(text, "judges"))
    assert "mean preference for two" in words_of(section(text, "judges"))


def test_the_turns_of_a_row_are_one_row_of_the_browser(everything: Project) -> None:
    rows = payload((everything.folder / "results/report.html").read_text())["rows"]
    (talk,) = [each for each in rows if each["id"] == "t3"]
    assert [(each["turn"], each["text"]) for each in talk["answers"]] == [(1, "Take 3"), (2, "Then 4")]
    assert [(each["turn"], each["state"]) for each in talk["verdicts"]] == [(1, "correct"), (2, "correct")]
    assert talk["references"] == {"1": "3", "2": "7"}
    assert talk["answers"][1]["extracted"] == {"number": "4"}
    mail = next(each for each in rows if each["id"] == "r01")
    likely = next(each for each in mail["answers"] if "probabilities" in each)
    assert list(likely["probabilities"]) == list(report_project.LABELS)


def test_results_of_an_earlier_config_are_not_shown(everything: Project) -> None:
    config = report_project.config()
    names = {"judges", "juries", "rankings"}
    everything.write_config({k: v for k, v in config.items() if k not in names} | {"comparisons": {"pairs": []}})
    everything.done(gpu=2)
    text = (everything.folder / "results/report.html").read_text()
    assert (everything.folder / "results/comparisons.json").exists()
    assert not [name for name in ("comparisons", "rankings", "juries", "judges") if section(text, name)]
    assert section(text, "labels")


def test_how_often_a_judge_was_asked_again_stands_among_its_measures() -> None:
    from gristmill.config.schema import ReliabilityBar
    from gristmill.report.inputs import JudgeMetrics
    from gristmill.report.judged import measures

    known = {"judge": "j", "kind": "score", "model": "m", "target": "t", "runs": ["t"], "n": 3, "asked": 3}
    once = JudgeMetrics.model_validate({**known, "reliable": True})
    again = JudgeMetrics.model_validate({**known, "reliable": True, "asked_again": 2, "unreadable_attempts": 4})
    assert "asked again" not in [each.name for each in measures(once, ReliabilityBar())]
    (shown,) = (each for each in measures(again, ReliabilityBar()) if each.name == "asked again")
    assert (shown.value, shown.bar) == ("2", "4 answers in all could not be read")
