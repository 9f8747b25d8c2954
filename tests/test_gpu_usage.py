"""What samples add up to, from samples written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.gpu.usage import Usage, quantile, read_lines, usage_of

Sample = dict[str, Any]


def sample(second: float, session: str = "a", uuid: str = "GPU-0", tokens: int = 0, **fields: Any) -> Sample:
    base = {"session": session, "uuid": uuid, "monotonic_s": second, "time_unix_s": 1e9 + second, "phase": "generate"}
    base |= {"completion_tokens": tokens, "utilization_ratio": 0.5, "memory_used_mib": 1000, "power_watts": 100.0}
    base |= {"temperature_celsius": 50, "sm_clock_mhz": 1980, "memory_clock_mhz": 2619, "throttle_reasons": []}
    return {**base, "energy_joules": None, **fields}


def summary(*samples: Sample) -> dict[str, Any]:
    usage = Usage()
    for each in samples:
        usage.add(each)
    found = usage.summary()
    assert found is not None
    return found


def test_utilization_is_a_mean_over_seconds_so_a_late_sample_weighs_what_it_lasted() -> None:
    found = summary(sample(0), sample(1, utilization_ratio=1.0), sample(10, utilization_ratio=0.0))
    assert found["utilization_mean_ratio"] == 0.1
    assert found["gpu_seconds"] == 10.0
    assert found["samples"] == 3


def test_p95_is_the_smallest_utilization_that_95_percent_of_the_time_does_not_exceed() -> None:
    busy = [sample(second, utilization_ratio=0.99 if second > 95 else 0.2) for second in range(101)]
    assert summary(*busy)["utilization_p95_ratio"] == 0.2
    assert summary(*busy, sample(102, utilization_ratio=0.99))["utilization_p95_ratio"] == 0.99
    assert quantile({}, 0.95) is None


def test_jobs_of_different_length_weigh_their_seconds() -> None:
    long = [sample(second, "a", utilization_ratio=1.0) for second in (0, 30)]
    short = [sample(second, "b", "GPU-1", utilization_ratio=0.0) for second in (500, 510)]
    found = summary(*long, *short)
    assert (found["jobs"], found["gpu_seconds"], found["utilization_mean_ratio"]) == (2, 40.0, 0.75)


def test_energy_is_the_difference_of_each_cards_counter() -> None:
    found = summary(
        sample(0, energy_joules=1000.0), sample(0, uuid="GPU-1", energy_joules=50.0),
        sample(9, energy_joules=1900.0), sample(9, uuid="GPU-1", energy_joules=150.0),
    )  # fmt: skip
    assert (found["energy_joules"], found["energy_source"]) == (1000.0, "counter")


def test_without_a_counter_power_is_integrated_over_uneven_samples() -> None:
    found = summary(sample(0, power_watts=100.0), sample(1, power_watts=300.0), sample(5, power_watts=100.0))
    assert (found["energy_joules"], found["energy_source"]) == (200 + 800, "power")


def test_a_counter_that_was_reset_falls_back_to_power() -> None:
    found = summary(sample(0, energy_joules=900.0), sample(10, energy_joules=5.0))
    assert (found["energy_joules"], found["energy_source"]) == (1000.0, "power")


def test_two_sources_are_said_to_be_mixed() -> None:
    found = summary(
        sample(0, energy_joules=0.0), sample(1, energy_joules=70.0), sample(0, "b"), sample(1, "b", power_watts=100.0)
    )
    assert (found["energy_joules"], found["energy_source"]) == (170.0, "mixed")


def test_energy_is_null_when_one_device_tells_none_for_a_part_would_pass_for_the_whole() -> None:
    found = summary(
        sample(0, energy_joules=0.0), sample(1, energy_joules=70.0),
        sample(0, uuid="MIG-1", power_watts=None), sample(1, uuid="MIG-1", power_watts=None),
    )  # fmt: skip
    assert (found["energy_joules"], found["energy_source"], found["tokens_per_joule"]) == (None, None, None)


def test_tokens_per_joule_counts_each_jobs_tokens_once_also_with_two_gpus() -> None:
    found = summary(
        sample(0, energy_joules=0.0), sample(0, uuid="GPU-1", energy_joules=0.0),
        sample(9, tokens=600, energy_joules=200.0), sample(9, uuid="GPU-1", tokens=600, energy_joules=200.0),
        sample(0, "b", energy_joules=0.0), sample(5, "b", tokens=200, energy_joules=100.0),
    )  # fmt: skip
    assert (found["completion_tokens"], found["energy_joules"], found["tokens_per_joule"]) == (800, 500.0, 1.6)


def test_what_no_card_reports_is_null_and_never_0() -> None:
    nothing = {"utilization_ratio": None, "memory_used_mib": None, "power_watts": None, "throttle_reasons": None}
    found = summary(sample(0, **nothing), sample(4, **nothing))
    names = ("utilization_mean_ratio", "utilization_p95_ratio", "memory_peak_mib", "energy_joules", "energy_source")
    assert [found[name] for name in names] == [None] * 5
    assert (found["gpu_seconds"], found["throttled_seconds"]) == (4.0, {})


def test_the_peak_of_memory_is_that_of_one_gpu() -> None:
    found = summary(sample(0, memory_used_mib=700), sample(1, memory_used_mib=900), sample(0, uuid="GPU-1"))
    assert found["memory_peak_mib"] == 1000


def test_seconds_of_held_back_clocks_are_added_up_by_reason_without_idle_ones() -> None:
    found = summary(
        sample(0), sample(2, throttle_reasons=["gpu_idle"]), sample(5, throttle_reasons=["sw_power_cap", "gpu_idle"])
    )
    assert found["throttled_seconds"] == {"sw_power_cap": 3.0}


def test_torn_lines_foreign_formats_and_headers_do_not_count(tmp_path: Path) -> None:
    whole = [json.dumps({"gristmill_gpu": 1, "session": "a"}), json.dumps(sample(0)), json.dumps(sample(1))]
    torn = whole[1][:40]
    other = [json.dumps({"gristmill_gpu": 99, "session": "z"}), json.dumps({"session": "z", "uuid": "GPU-0"})]
    (tmp_path / "1-of-2.jsonl").write_text("\n".join([*whole, torn, *other, json.dumps(sample(2)), torn]))
    found = usage_of(tmp_path)
    assert found is not None
    assert (found["samples"], found["gpu_seconds"]) == (3, 2.0)


def test_a_run_without_samples_has_no_gpu_section(tmp_path: Path) -> None:
    assert usage_of(tmp_path) is None
    assert usage_of(tmp_path / "not there") is None
    assert list(read_lines([])) == []


@pytest.mark.parametrize("lines", [1, 2])
def test_a_session_of_a_single_sample_has_lasted_no_time(lines: int) -> None:
    found = summary(*[sample(7, uuid=f"GPU-{number}", energy_joules=5.0) for number in range(lines)])
    assert (found["gpu_seconds"], found["energy_joules"], found["utilization_mean_ratio"]) == (0, None, None)
