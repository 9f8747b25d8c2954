"""Facts about the recommendations: pure functions of readings, each with the numbers that it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.live import UnitProgress, WorkerProgress
from gristmill.live.snapshot import Kind
from gristmill.service import recommendations
from gristmill.service.readings import Holder, Reading
from gristmill.service.recommendations import ActiveRun, Recommendation, Seen, recommend
from gristmill.service.units import UnitView
from gristmill.types import Gpu

USUAL = {"utilization_ratio": 0.9, "memory_used_mib": 60_000, "temperature_celsius": 60, "throttle_reasons": []}
JOB = Holder(7, "generate direct 1-of-2", 0.0)


def gpu(index: int = 0, holder: Holder | None = JOB, seconds: int = 60, **values: Any) -> Reading:
    samples = tuple({**USUAL, **values, "time_unix_s": 1000.0 + second} for second in range(seconds))
    place = Gpu(index, f"GPU-{index}", "Fake", 80_000, 0)
    return Reading(place, samples, holder)


def found(*gpus: Reading, runs: tuple[ActiveRun, ...] = ()) -> dict[str, Recommendation]:
    return {each.kind: each for each in recommend(Seen(gpus, runs))}


def run(
    rows: int | None = 100,
    done: int = 40,
    failed: int = 0,
    quiet_s: float = 1.0,
    unit: str = "runs/direct",
    workers: tuple[WorkerProgress, ...] = (),
) -> ActiveRun:
    kind: Kind = "run" if unit.startswith("runs/") else "judge"
    read = UnitProgress(unit, kind, done, rows, failed, 0, None, None, None, workers, (), "running")
    return ActiveRun("r1", (UnitView.of(read),), quiet_s)


def worker(engine: str, retries: int) -> WorkerProgress:
    return WorkerProgress("1-of-1", "here", "running", 4, 10, 0, 50, 1.0, 1.0, 8, retries, engine, ())


def test_a_machine_where_all_is_well_gets_no_recommendation() -> None:
    assert found(gpu(0), gpu(1), runs=(run(),)) == {}
    assert found() == {}


def test_a_busy_gpu_with_half_its_memory_free_is_told_to_take_larger_batches() -> None:
    one = found(gpu(memory_used_mib=20_000))["memory_half_empty"]
    assert "larger batches" in one.advice
    cited = {each.measure: (each.subject, each.value) for each in one.evidence}
    assert cited == {"peak of memory in use": ("GPU 0", 0.25), "mean utilization": ("GPU 0", 0.9)}
    assert "memory_half_empty" not in found(gpu(memory_used_mib=40_000))
    assert "memory_half_empty" not in found(gpu(memory_used_mib=20_000, utilization_ratio=0.2))
    assert "memory_half_empty" not in found(gpu(memory_used_mib=20_000, holder=None))


def test_a_gpu_at_the_edge_of_its_memory_is_told_to_take_smaller_batches() -> None:
    one = found(gpu(memory_used_mib=79_000))["memory_nearly_full"]
    assert (one.severity, one.evidence[0].value) == ("warning", 0.9875)
    assert "memory_nearly_full" not in found(gpu(memory_used_mib=77_000))


def test_an_idle_gpu_in_a_group_is_told_to_use_tensor_parallelism() -> None:
    both = found(gpu(0, utilization_ratio=0.95), gpu(1, utilization_ratio=0.02))
    assert "tensor" in both["idle_in_group"].advice
    assert [each.value for each in both["idle_in_group"].evidence] == [0.95, 0.02]
    assert "low_utilization" not in both
    apart = found(gpu(0, utilization_ratio=0.95), gpu(1, holder=Holder(8, "another", 0.0), utilization_ratio=0.02))
    assert "idle_in_group" not in apart
    assert "low_utilization" in apart


def test_a_held_gpu_that_mostly_waits_is_told_so() -> None:
    assert found(gpu(utilization_ratio=0.2))["low_utilization"].evidence[0].value == 0.2
    assert "low_utilization" not in found(gpu(utilization_ratio=0.4))
    assert "low_utilization" not in found(gpu(utilization_ratio=0.0, holder=None))


@pytest.mark.parametrize(
    ("reason", "kind", "word"),
    [
        ("sw_thermal_slowdown", "throttled_by_heat", "cooling"),
        ("hw_thermal_slowdown", "throttled_by_heat", "cooling"),
        ("sw_power_cap", "throttled_by_power", "power limit"),
        ("hw_power_brake_slowdown", "throttled_by_power", "power limit"),
        ("hw_slowdown", "throttled_by_hardware", "supply"),
    ],
)
def test_clocks_that_are_held_back_are_told_by_cause(reason: str, kind: str, word: str) -> None:
    [one] = recommend(Seen((gpu(throttle_reasons=[reason, "gpu_idle"]),)))
    assert one.kind == kind
    assert word in one.advice
    assert one.evidence[0].measure == f"samples with {reason}"
    assert one.evidence[0].value == 1.0


def test_clocks_of_an_idle_gpu_are_not_held_back() -> None:
    assert found(gpu(throttle_reasons=["gpu_idle", "applications_clocks_setting"])) == {}


def test_a_hot_gpu_is_told_before_it_is_held_back() -> None:
    assert found(gpu(temperature_celsius=90))["hot"].evidence[0].value == 90
    assert "hot" not in found(gpu(temperature_celsius=84))


def test_free_gpus_beside_waiting_rows_are_told() -> None:
    idle = gpu(1, holder=None, memory_used_mib=10)
    assert [each.value for each in found(gpu(0), idle, runs=(run(),))["free_gpus"].evidence] == ["no", 60]
    assert "free_gpus" not in found(gpu(0), idle, runs=(run(done=100),))
    assert "free_gpus" not in found(gpu(0), idle)
    assert "free_gpus" not in found(gpu(0), gpu(1, holder=None, memory_used_mib=50_000), runs=(run(),))


def test_a_gpu_that_is_set_aside_or_lost_comes_first() -> None:
    sick = Reading(Gpu(1, "GPU-1", "Fake", 80_000, 0), (), None, "Xid 79; rm the note to use it")
    lost = Reading(Gpu(2, "GPU-2", "Fake", 80_000, 0), (), None, None, lost=True)
    both = recommend(Seen((gpu(0, utilization_ratio=0.2), sick, lost)))
    assert [(each.kind, each.severity) for each in both[:2]] == [("set_aside", "critical")] * 2
    assert [each.evidence[0].value for each in both[:2]] == ["Xid 79; rm the note to use it", "it does not answer"]


def test_a_gpu_that_others_fill_is_told() -> None:
    one = found(gpu(holder=None, memory_used_mib=5000))["filled_by_others"]
    assert (one.evidence[0].value, one.evidence[0].unit) == (5000, "MiB")
    assert "filled_by_others" not in found(gpu(holder=None, memory_used_mib=1024))
    assert "filled_by_others" not in found(gpu(memory_used_mib=50_000))


def test_failing_rows_are_told_with_their_share() -> None:
    assert found(runs=(run(failed=2),))["failing_rows"].evidence[0].value == 0.02
    assert "failing_rows" not in found(runs=(run(rows=1000, failed=9),))
    assert "failing_rows" not in found(runs=(run(rows=None, failed=9),))
    assert found(runs=(run(rows=0, done=0),)) == {}


def test_batches_that_did_not_fit_are_told_but_not_judges_that_were_asked_again() -> None:
    [one] = found(runs=(run(workers=(worker("static", 3),)),))["halved_batches"].evidence
    assert (one.subject, one.value) == ("runs/direct 1-of-1", 3)
    assert "halved_batches" not in found(runs=(run(workers=(worker("static", 0),)),))
    assert "halved_batches" not in found(runs=(run(workers=(worker("endpoint", 3),)),))
    assert "halved_batches" not in found(runs=(run(unit="judges/a/direct", workers=(worker("static", 3),)),))


def test_a_run_without_progress_is_told() -> None:
    assert [each.value for each in found(runs=(run(quiet_s=1000),))["stalled"].evidence] == [1000, 60]
    assert "stalled" not in found(runs=(run(quiet_s=800),))
    assert "stalled" not in found(runs=(run(done=100, quiet_s=1000),))
    assert "stalled" not in found(runs=(run(rows=None, quiet_s=1000),))


def test_what_is_not_known_is_evidence_of_nothing() -> None:
    nothing = dict.fromkeys(USUAL)
    assert found(gpu(0, **nothing), gpu(1, **nothing), Reading(Gpu(2, "GPU-2", "", 0, 0), ())) == {}


def test_a_few_samples_and_those_before_the_job_say_nothing() -> None:
    assert found(gpu(seconds=9, utilization_ratio=0.0)) == {}
    assert "low_utilization" in found(gpu(seconds=10, utilization_ratio=0.0))
    assert found(gpu(seconds=60, utilization_ratio=0.0, holder=Holder(7, "generate", 1055.0))) == {}


def test_every_function_is_tested_here_by_the_kind_that_it_gives() -> None:
    kinds = {function.__name__ for function in recommendations.FUNCTIONS}
    text = Path(__file__).read_text("utf-8")
    assert {kind for kind in kinds if f'"{kind}"' not in text} == set()


def test_every_recommendation_cites_evidence() -> None:
    every = recommend(
        Seen(
            (gpu(0, memory_used_mib=79_900, temperature_celsius=91, throttle_reasons=["sw_power_cap"]), gpu(1, None)),
            (run(failed=50, quiet_s=1e6),),
        )
    )
    assert len(every) >= 5
    assert all(each.evidence and each.advice for each in every)
