"""Real judges' stored outputs, read and counted by the project's own code (../shared/data beside the checkout).

No text of the data is printed: rows are named by their ids and verdicts by their labels.
"""

import json
import math
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from gristmill.config.schema import JudgeConfig
from gristmill.config.specs import VerdictSpec
from gristmill.judging.agreement import UNREAD, HumanAgreement, agreeing, macro_f1, with_policy
from gristmill.judging.items import FIRST_SECOND, SECOND_FIRST, Item
from gristmill.judging.pairs import TIE, combined, first_is_better
from gristmill.judging.reading import Reader
from gristmill.judging.tallies import PairwiseTally
from gristmill.judging.verdicts import judged
from gristmill.stats.agreement import kappa_of

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text("utf-8")) if DATA.is_dir() else {}

ARENA_LABELS = {"A>>B": "much_first", "A>B": "first", "A=B": "tie", "B>A": "second", "B>>A": "much_second"}
JUDGEBENCH = "claude-3-5-sonnet-20240620|arena_hard|claude-3-haiku-20240307"
JUDGEBENCH_FILE = (
    "judgebench/outputs/dataset=judgebench,response_model=claude-3-5-sonnet-20240620,"
    "judge_name=arena_hard,judge_model=claude-3-haiku-20240307.jsonl"
)
Line = dict[str, Any]


def json_of(name: str) -> Any:
    return json.loads((DATA / name).read_text("utf-8"))


def lines_of(name: str) -> list[Line]:
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def pairwise(**settings: Any) -> JudgeConfig:
    return JudgeConfig.model_validate(
        {"kind": "pairwise", "model": "m", "prompt": "p", "pairs": [("x", "y")], **settings}
    )


# LLMBar: two outputs of which people prefer one, judged in both orders. Stored winners name the output, not its place.

ALPACA = "alpaca_eval/results/{name}/weighted_alpaca_eval_gpt4_turbo/annotations.json"
LLMBAR = list(EXPECTED.get("llmbar", {}))


def llmbar(name: str) -> list[tuple[str, list[str | None]]]:
    """Per row the output that people prefer, and the judge's choice in each order; the last of several draws counts."""
    rows = []
    for row in json_of(name):
        orders = row["results"][-1]
        choices = [orders[f"swap = {swapped}"]["winner"] for swapped in (False, True)]
        rows.append((str(row["label"]), [None if choice is None else str(choice) for choice in choices]))
    return rows


@pytest.mark.parametrize("name", LLMBAR)
def test_llmbar_orders_are_right_and_agree_as_often_as_counted(name: str) -> None:
    rows, expected = llmbar(name), EXPECTED["llmbar"][name]
    winners = [combined(["1", "2"], choices, by_sign=False) for _, choices in rows]
    assert len(rows) == expected["n"]
    assert sum(choices[0] == gold for gold, choices in rows) == expected["correct_orig"]
    assert sum(choices[1] == gold for gold, choices in rows) == expected["correct_swapped"]
    assert sum(winner == gold for (gold, _), (winner, _) in zip(rows, winners, strict=True)) == expected["correct_both"]
    assert sum(reason is None for _, reason in winners) == expected["consistent"]
    assert sum(reason == "unreadable" for _, reason in winners) == expected["null_verdicts"]


@pytest.mark.parametrize("name", LLMBAR)
def test_llmbar_kappa_with_people_is_not_the_one_that_is_stored(name: str) -> None:
    """The stored kappa compares people's labels 1 and 2 with verdicts that were mapped to 1 and 0.

    So a 2 that both said never counts as agreement: GPT-4/Swap on Natural is stored as .26398, and is .87765.
    """
    expected = EXPECTED["llmbar"][name]
    first = Counter((choices[0], gold) for gold, choices in llmbar(name) if choices[0] is not None)
    mapped: Counter[Any] = Counter()
    for (choice, gold), count in first.items():
        mapped[{"1": "1", "2": "0"}[str(choice)], gold] += count
    assert kappa_of(first) == pytest.approx(expected["kappa_vs_label_correct"], abs=1e-12)
    assert kappa_of(mapped) == pytest.approx(expected["stored_kappa_False_BUGGY"], abs=1e-12)


@pytest.mark.parametrize("name", LLMBAR)
def test_llmbar_kappa_of_the_two_orders(name: str) -> None:
    """An unreadable verdict is a class of its own there, as with human_unreadable: wrong."""
    orders = with_policy(Counter((first, second or UNREAD) for _, (first, second) in llmbar(name)), "wrong")
    expected = EXPECTED["llmbar"][name]["kappa_order_agreement_correct"]
    assert kappa_of(orders) == pytest.approx(expected, abs=1e-12)


# JudgeBench: raw words of a judge with arena-hard's five labels, in both orders.


def judgebench() -> list[Line]:
    return lines_of(JUDGEBENCH_FILE) if DATA.is_dir() else []


def verdict_lines(rows: list[Line], judge: JudgeConfig) -> tuple[list[Line], Line]:
    """The project's verdicts on the raw words, and its metrics; people's labels stand in the rows."""
    generations: list[list[Line]] = [[], []]
    replies = []
    for row in rows:
        named = {"id": row["pair_id"], "sample": 0}
        for run, answers in zip("AB", generations, strict=True):
            columns = {"people": {"A>B": "first", "B>A": "second"}[row["label"]]}
            answers.append({**named, "variant": "", "text": run, "reference": None, "row": columns})
        for variant, judgment in zip((FIRST_SECOND, SECOND_FIRST), row["judgments"], strict=True):
            text = judgment["judgment"]["response"]
            replies.append({**named, "variant": variant, "text": text, "finish_reason": "stop"})
    spec = VerdictSpec(name="j", judge=judge, target=["x", "y"])
    tally = PairwiseTally(spec)
    return list(tally.counted(judged(spec, generations, replies))), tally.metrics()


def test_judgebench_words_are_read_as_the_stored_decisions_row_by_row() -> None:
    """Their parser refuses words with different labels in brackets, as several_labels: unreadable does."""
    reader = Reader.of(pairwise(labels=ARENA_LABELS, several_labels="unreadable"))
    differ, unread = [], 0
    for row in judgebench():
        for order, judgment in enumerate(row["judgments"]):
            reading = reader.read(judgment["judgment"]["response"])
            label = {"A>>B": "A>B", "B>>A": "B>A"}.get(str(reading.label), reading.label)
            if label != judgment["decision"]:
                differ.append((row["pair_id"], order, reading.label, judgment["decision"]))
            unread += reading.reason == "several_labels"
    assert differ == []
    assert unread == EXPECTED["judgebench"][JUDGEBENCH]["overall"]["null"]


def test_the_last_label_is_read_where_a_judge_changes_its_mind() -> None:
    last, strict = (Reader.of(pairwise(labels=ARENA_LABELS, several_labels=how)) for how in ("last", "unreadable"))
    texts = [judgment["judgment"]["response"] for row in judgebench() for judgment in row["judgments"]]
    assert [last.read(text).reason for text in texts if strict.read(text).label is None] == [None] * 13
    assert all(last.read(text) == strict.read(text) for text in texts if strict.read(text).label is not None)


@pytest.mark.parametrize("source", ["overall", "livebench-math", "livebench-reasoning", "livecodebench", "mmlu-pro"])
def test_judgebench_pairs_come_out_as_counted(source: str) -> None:
    """JudgeBench lets the order that was read decide where the other was not; a winner here needs both."""
    expected = EXPECTED["judgebench"][JUDGEBENCH][source]
    rows = [row for row in judgebench() if source == "overall" or row["source"].startswith(source)]
    lines, metrics = verdict_lines(rows, pairwise(labels=ARENA_LABELS, several_labels="unreadable", human="people"))
    gold = [{"A>B": "x", "B>A": "y"}[row["label"]] for row in rows]
    choices = [[order["choice"] for order in line["orders"]] for line in lines]
    read = [combined(["x", "y"], [c for c in pair if c is not None], by_sign=True)[0] for pair in choices]
    right = sum(winner == wanted for winner, wanted in zip(read, gold, strict=True))
    assert len(rows) == expected["n"]
    assert (right, sum(winner in (None, TIE) for winner in read)) == (expected["correct"], expected["tie"])
    assert len(rows) - right - expected["tie"] == expected["incorrect"]
    assert 100 * right / len(rows) == pytest.approx(expected["paired_acc"])
    assert sum(pair[0] != pair[1] for pair in choices) == expected["inconsistent"]
    assert sum(pair[0] == wanted for pair, wanted in zip(choices, gold, strict=True)) == expected["single_correct"]
    assert metrics["unreadable_pairs"] == sum(None in pair for pair in choices) == expected["null"]
    assert metrics["human"]["n"] == len(rows)
    # Every pair that this project calls, JudgeBench calls the same.
    called = [(line["winner"], winner) for line, winner in zip(lines, read, strict=True) if line["winner"] is not None]
    assert [pair for pair in called if pair[0] != pair[1]] == []


# PandaLM: pairs that three people labelled, and two judges of which one wrote 25 verdicts that cannot be read.


def pandalm_majority() -> list[str]:
    people = []
    for row in json_of("pandalm/testset-v1.json"):
        votes = Counter(str(row[f"annotator{number}"]) for number in (1, 2, 3))
        people.append(votes.most_common(1)[0][0])
    return people


def pandalm_agreement(verdicts: list[str | None], policy: str) -> Line:
    judge = pairwise(human="people", human_unreadable=policy)
    human = HumanAgreement(judge, ["x", "y"])
    named = {"0": TIE, "1": "x", "2": "y", None: None}
    for number, (verdict, gold) in enumerate(zip(verdicts, pandalm_majority(), strict=True)):
        people = {"people": {"0": "tie", "1": "first", "2": "second"}[gold]}
        human.add(Item(str(number), 0, ("x", "y"), None, people), named[verdict])
    return human.numbers()


def gpt35() -> list[str | None]:
    meaning = {"1": "1", "2": "2", "Tie": "0"}
    return [meaning.get(str(row["gpt_result"])) for row in json_of("pandalm/gpt-3.5-turbo-testset-v1.json")]


def test_pandalm_majority_of_three_people() -> None:
    assert Counter(pandalm_majority()) == Counter(EXPECTED["pandalm"]["majority"])


@pytest.mark.parametrize(
    ("policy", "percent", "n"),
    [("wrong", 0.6976976976976977, 999), ("tie", 0.7107107107107107, 999), ("dropped", 697 / 974, 974)],
)
def test_what_an_unreadable_verdict_counts_as_has_a_name_and_a_number(policy: str, percent: float, n: int) -> None:
    numbers = pandalm_agreement(gpt35(), policy)
    assert (numbers["n"], numbers["unreadable"], numbers["policy"]) == (n, 25, policy)
    assert numbers["percent"] == pytest.approx(percent, abs=1e-12)


def test_pandalm_7b_agrees_with_people_as_published() -> None:
    verdicts: list[str | None] = [str(row["pandalm_result"]) for row in json_of("pandalm/pandalm-7b-testset-v1.json")]
    numbers, expected = pandalm_agreement(verdicts, "wrong"), EXPECTED["pandalm"]["pandalm7b"]
    assert numbers["percent"] == pytest.approx(expected["acc"], abs=1e-12)
    assert numbers["macro_f1"] == pytest.approx(expected["macro_f1"], abs=1e-12)


def test_pandalm_people_among_themselves() -> None:
    rows = json_of("pandalm/testset-v1.json")
    for one, other in ((1, 2), (1, 3), (2, 3)):
        table: Counter[Any] = Counter((row[f"annotator{one}"], row[f"annotator{other}"]) for row in rows)
        assert kappa_of(table) == pytest.approx(EXPECTED["pandalm"][f"kappa_{one}{other}"], abs=1e-12)


# AlpacaEval: one token, M or m, and its log-probability; the answers are shown in a random order.


def alpaca_preferences(name: str) -> tuple[list[tuple[int, float, float | None]], Counter[str]]:
    """Per row: its place, the stored preference, and ours as it stands nearest (direct or flipped)."""
    judge = pairwise(readout="likelihood", labels={"m": "second", "M": "first"})
    reader = Reader.of(judge)
    rows, how = [], Counter[str]()
    for number, row in enumerate(json_of(ALPACA.format(name=name))):
        stored = row["preference"] - 1
        if row["raw_completion"] is None:
            how["no_call"] += 1
            rows.append((number, stored, 0.5 if row["output_1"].strip() == row["output_2"].strip() else None))
            continue
        likeliest = row["raw_completion"]["logprobs"]["content"][0]["top_logprobs"]
        tokens = {each["token"]: each["logprob"] for each in likeliest}
        reading = reader.read(row["raw_completion"]["text"], [tokens.get("m", -math.inf), tokens.get("M", -math.inf)])
        assert reading.probabilities is not None
        first = first_is_better(judge.meanings(), reading)
        assert first is not None
        direct = abs(1 - first - stored) <= abs(first - stored)
        how["direct" if direct else "flipped"] += 1
        rows.append((number, stored, 1 - first if direct else first))
    return rows, how


@pytest.mark.parametrize("name", ["alpaca-7b", "text_davinci_001"])
def test_alpaca_eval_preferences_follow_from_the_stored_log_probabilities(name: str) -> None:
    rows, how = alpaca_preferences(name)
    expected = EXPECTED["alpaca_eval_logprob_verdicts"][name]
    assert {key: how[key] for key in ("direct", "flipped", "no_call")} == {
        key: expected[key] for key in ("direct", "flipped", "no_call")
    }
    assert [number for number, stored, ours in rows if ours is None or abs(ours - stored) > 1e-8] == []


@pytest.mark.parametrize("name", ["alpaca-7b", "text_davinci_001"])
def test_alpaca_eval_win_rate_and_standard_error(name: str) -> None:
    expected = EXPECTED["alpaca_eval"][f"{name}/weighted_alpaca_eval_gpt4_turbo"]
    ours = [preference for _, _, preference in alpaca_preferences(name)[0] if preference is not None]
    assert len(ours) == expected["n_total"]
    assert 100 * fmean(ours) == pytest.approx(expected["win_rate"], abs=1e-7)
    assert 100 * stdev(ours) / math.sqrt(len(ours)) == pytest.approx(expected["standard_error"], abs=1e-7)


# MT-bench with a resume that went wrong: questions judged twice, and errors stored as the score -1.


def mtbench() -> list[Line]:
    rows = lines_of("mtbench_forks/dreaming-panda/gpt-4_single-origin.jsonl")
    return [row for row in rows if row["model"].endswith("Normal") and row["turn"] == 1]


def test_mt_bench_scores_are_read_again_from_the_words_and_errors_are_no_scores() -> None:
    settings = {"kind": "score", "model": "m", "prompt": "p", "runs": ["x"], "range": [1, 10], "step": 0.5}
    reader = Reader.of(JudgeConfig.model_validate(settings))
    expected = EXPECTED["mtbench_dreaming_panda_Normal_turn1"]
    first: dict[int, float] = {}
    rows = mtbench()
    for row in rows:
        reading = reader.read(row["judgment"])
        assert reading.value == (None if row["score"] == -1 else row["score"]), row["question_id"]
        if reading.value is not None:
            first.setdefault(row["question_id"], reading.value)
    assert (len(rows), len(first)) == (expected["rows"], expected["distinct"])
    assert fmean(first.values()) == pytest.approx(expected["first_valid"], abs=1e-12)


def test_the_policies_are_not_the_same_table() -> None:
    table: Counter[Any] = Counter({(None, "x"): 2, ("x", "x"): 1})
    assert agreeing(with_policy(table, "wrong")) == pytest.approx(1 / 3)
    assert agreeing(with_policy(table, "dropped")) == 1
    assert with_policy(table, "tie")[TIE, "x"] == with_policy(table, "wrong")[UNREAD, "x"] == 2
    assert macro_f1(with_policy(table, "dropped")) == 1
