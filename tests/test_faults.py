"""Facts about runs under fire: a short campaign of benchmarks/faults.py, and that its checks can fail."""

import time
from pathlib import Path

import pytest
from fault_checks import Asked, differences, explain
from fault_kinds import Fault
from fault_round import ECHO
from faults import Campaign, table

ROW = ("runs/plain", "r1", "0", "")


@pytest.mark.slow
def test_two_dozen_random_faults_lose_nothing_and_ask_only_what_was_in_flight(tmp_path: Path) -> None:
    campaign = Campaign(seed=11, folder=tmp_path.resolve(), deadline=time.monotonic() + 600)
    campaign.run(ECHO, count=24, at_once=2)
    problems = [(each.number, problem) for each in campaign.rounds for problem in each.problems]
    assert problems == []
    faults = [fault for each in campaign.rounds for fault in each.faults]
    assert len(faults) >= 24
    assert all(fault.identical for fault in faults)
    assert all(fault.asked_again <= fault.allowed for fault in faults)


def asked(*times: float, pid: int = 7) -> list[Asked]:
    return [Asked(pid + number, at, ROW, 1) for number, at in enumerate(times)]


def test_a_row_that_is_asked_again_without_a_cause_is_named() -> None:
    (said,) = explain(asked(1, 2), [Fault("kill -9", "generate", 1, pids={99})])
    assert said == "runs/plain r1 0  was asked by 7 and again by 8"


def test_a_row_in_flight_is_charged_to_the_fault_that_stopped_its_worker() -> None:
    fault = Fault("kill -9", "generate", 1, pids={7}, allowed=1)
    assert explain(asked(1, 2), [fault]) == []
    assert fault.asked_again == 1


def test_a_damaged_record_is_charged_to_what_damaged_it_between_the_two_times() -> None:
    early, late = (Fault("byte flipped", "segment", 1, at=at, rows={ROW}, allowed=1) for at in (0.5, 1.5))
    assert explain(asked(1, 2), [early, late]) == []
    assert (early.asked_again, late.asked_again) == (0, 1)


def test_more_rows_than_were_in_flight_are_a_problem() -> None:
    (said,) = explain(asked(1, 2), [Fault("TERM", "generate", 1, pids={7}, allowed=0)])
    assert said == "TERM generate: 1 rows asked again, 0 were in flight"


def test_another_prompt_is_another_question() -> None:
    first, again = asked(1, 2)
    assert explain([first, Asked(again.pid, again.time, ROW, 2)], []) == []


def test_a_result_that_differs_is_named() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b is not that of the undisturbed run"]


def test_the_table_says_how_often_and_whether_all_was_identical() -> None:
    faults = [Fault("TERM", "merge", 1, reruns=1), Fault("TERM", "merge", 2, identical=False, asked_again=1, allowed=2)]
    assert table(faults).splitlines()[2] == "| TERM | merge | 2 | 1 | 1 | 0.50 | 2 | no: 1 |"
