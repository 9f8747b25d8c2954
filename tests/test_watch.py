"""Sampling, health, quarantine and hangs, against an NVML that is not there (fake_nvml/pynvml.py)."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gristmill.config.schema import GpusConfig
from gristmill.gpu import health, prometheus
from gristmill.gpu.cards import Card, Lost
from gristmill.gpu.health import Doctor, Fault, SickGpu, Vitals
from gristmill.gpu.monitor import Monitor, SampleFile, sample, throttle_reasons
from gristmill.gpu.watch import FAULT_EXIT, Place, Watch
from gristmill.types import Completion, Gpu, JsonDict

FAKE = Path(__file__).parent / "fake_nvml"
SCRIPTS = Path(__file__).parents[1] / "scripts"
GPU = Gpu(index=3, uuid="GPU-3", name="Fake H100", memory_total_mib=81920, memory_used_mib=0)
SLICE = Gpu(index=0, uuid="MIG-7", name="Fake H100 MIG 1g.10gb", memory_total_mib=9856, memory_used_mib=0)
PLACE = {"unit": "runs/plain", "shard": "1-of-1"}


def fake(**settings: Any) -> ModuleType:
    """A fresh fake NVML with GPU-3 and MIG-7 as the settings say."""
    spec = importlib.util.spec_from_file_location("fake_pynvml", FAKE / "pynvml.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CARDS.update({"GPU-3": settings, "MIG-7": settings})
    module.SAMPLES.update({"GPU-3": 0, "MIG-7": 0})
    return module


def lines(path: Path) -> list[JsonDict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def doctor(nvml: Any, gpu: Gpu = GPU) -> Doctor:
    found = Doctor(nvml)
    assert found.admit(gpu) is None
    return found


def verdict(nvml: Any, samples: int = 1) -> str | None:
    """What the doctor says after some samples of GPU 3."""
    found = doctor(nvml)
    for _ in range(samples):
        nvml.SAMPLES["GPU-3"] += 1
    fault = found.examine(found.cards[0])
    return None if fault is None else fault.reason


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_a_sample_has_the_documented_fields_in_their_units() -> None:
    nvml = fake(reasons=0x04 | 0x20 | 0x8000)
    found = sample(Card(nvml, GPU))
    assert found | {"time_unix_s": 0, "monotonic_s": 0} == {
        "time_unix_s": 0,
        "monotonic_s": 0,
        "uuid": "GPU-3",
        "utilization_ratio": 0.9,
        "memory_used_mib": 1024,
        "power_watts": 300.0,
        "temperature_celsius": 50,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 1980,
        "throttle_reasons": ["sw_power_cap", "sw_thermal_slowdown", "bit_15"],
        "energy_joules": 1005.0,
    }


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("utilization_percent", "utilization_ratio"),
        ("memory_mib", "memory_used_mib"),
        ("milliwatts", "power_watts"),
        ("celsius", "temperature_celsius"),
        ("clock_1", "sm_clock_mhz"),
        ("clock_2", "memory_clock_mhz"),
        ("reasons", "throttle_reasons"),
        ("millijoules", "energy_joules"),
    ],
)
def test_a_field_that_a_card_does_not_have_is_null_and_the_others_stay(setting: str, field: str) -> None:
    if setting == "memory_mib":  # the fake multiplies it
        nvml = fake()
        del nvml.nvmlDeviceGetMemoryInfo  # as in an nvidia-ml-py without the function
    else:
        nvml = fake(**{setting: None})
    found = sample(Card(nvml, GPU))
    assert [name for name, value in found.items() if value is None] == [field]


def test_a_mig_slice_has_memory_but_not_its_cards_power_energy_and_utilization() -> None:
    found = sample(Card(fake(parent="GPU-3", instance=2), SLICE))
    assert found["memory_used_mib"] == 1024
    assert [found[name] for name in ("utilization_ratio", "power_watts", "energy_joules")] == [None] * 3


def test_an_old_driver_tells_the_memory_in_use_too() -> None:
    assert sample(Card(fake(old_driver=True), GPU))["memory_used_mib"] == 1024


def test_no_reason_to_throttle_is_an_empty_list_and_an_unknown_one_is_null() -> None:
    assert throttle_reasons(0) == []
    assert throttle_reasons(None) is None


def watched(path: Path, nvml: Any, **arguments: Any) -> tuple[Monitor, list[str]]:
    said: list[str] = []
    job: Callable[[], JsonDict] = lambda: {"phase": "generate", "completion_tokens": 7}  # noqa: E731
    textfiles = arguments.get("textfiles")
    made = Monitor([Card(nvml, GPU)], SampleFile(path, PLACE), job, lambda card: None, textfiles, said.append)
    return made, said


def test_the_monitor_writes_a_header_a_first_and_a_last_sample(tmp_path: Path) -> None:
    made, said = watched(tmp_path / "gpu" / "1-of-1.jsonl", fake())
    made.start()
    assert made.stop()
    header, *samples = lines(tmp_path / "gpu" / "1-of-1.jsonl")
    assert header | PLACE | {"gristmill_gpu": 1, "pid": os.getpid()} == header
    assert len(samples) >= 1
    assert {each["session"] for each in samples} == {header["session"]}
    assert [(each["phase"], each["completion_tokens"]) for each in samples] == [("generate", 7)] * len(samples)
    assert said == []


def test_attempts_share_a_file_under_their_own_session_and_a_torn_line_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "1-of-1.jsonl"
    first = SampleFile(path, PLACE)
    first.write({"uuid": "GPU-3"})
    first.close()
    with open(path, "ab") as handle:
        handle.write(b'{"session":"torn","uu')
    second = SampleFile(path, PLACE)
    second.write({"uuid": "GPU-3"})
    second.close()
    whole = [line for line in path.read_bytes().split(b"\n") if line.endswith(b"}")]
    assert len(whole) == 4
    assert len({json.loads(line)["session"] for line in whole}) == 2


def test_a_sample_is_in_the_file_before_the_next_one_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "1-of-1.jsonl"
    file = SampleFile(path, PLACE)
    for count in (2, 3):
        file.write({"uuid": "GPU-3"})
        assert len(lines(path)) == count


def test_samples_that_cannot_be_written_are_said_once_and_do_not_stop_the_job(tmp_path: Path) -> None:
    (tmp_path / "gpu").write_text("a file where the folder should be")
    made, said = watched(tmp_path / "gpu" / "1-of-1.jsonl", fake())
    made.start()
    assert made.stop()
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_without_a_driver_the_job_runs_and_the_log_says_that_nothing_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = fake()
    nvml.CARDS.clear()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    said: list[str] = []
    with Watch([GPU], Place("runs/plain", "1-of-1", tmp_path / "s.jsonl"), GpusConfig(), said.append) as watch:
        watch.loaded()
    assert said == ["GPUs are not watched: NVML Shared Library Not Found"]
    assert not (tmp_path / "s.jsonl").exists()


def test_the_watch_counts_the_jobs_tokens_into_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake())
    with Watch([GPU], Place("runs/plain", "1-of-1", tmp_path / "s.jsonl"), GpusConfig(), print) as watch:
        watch.loaded()
        watch.add(Completion("r1", 0, "", "four", "stop", 3, 41, 0.1))
    last = lines(tmp_path / "s.jsonl")[-1]
    assert (last["phase"], last["completion_tokens"]) == ("generate", 41)


# ---- Prometheus -----------------------------------------------------------------------------------------------------

METRIC_LINE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\} ([0-9.e+-]+)')


def parsed(text: str) -> dict[str, tuple[str, str, float]]:
    """Metric → (type, labels, value), by the rules of the text format: HELP, TYPE, then the sample."""
    assert text.endswith("\n")
    found = {}
    rows = text.removesuffix("\n").split("\n")
    for about, kind, line in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        match = METRIC_LINE.fullmatch(line)
        assert match, line
        assert about.startswith(f"# HELP {match[1]} ")
        assert kind.startswith(f"# TYPE {match[1]} ")
        found[match[1]] = (kind.rpartition(" ")[2], match[2], float(match[3]))
    return found


def test_the_textfile_has_base_units_types_and_labels() -> None:
    labels = {"uuid": "GPU-3", "index": "3", "name": 'a "fast"\\card\n', "job": "runs/plain/1-of-1"}
    found = parsed(prometheus.exposition(labels, sample(Card(fake(), GPU))))
    assert {name: (kind, value) for name, (kind, _, value) in found.items()} == {
        "gristmill_gpu_utilization_ratio": ("gauge", 0.9),
        "gristmill_gpu_memory_used_bytes": ("gauge", 2**30),
        "gristmill_gpu_power_watts": ("gauge", 300),
        "gristmill_gpu_temperature_celsius": ("gauge", 50),
        "gristmill_gpu_sm_clock_hertz": ("gauge", 1.98e9),
        "gristmill_gpu_memory_clock_hertz": ("gauge", 1.98e9),
        "gristmill_gpu_energy_joules_total": ("counter", 1005),
    }
    wanted = r'uuid="GPU-3",index="3",name="a \"fast\"\\card\n",job="runs/plain/1-of-1"'
    assert {text for _, text, _ in found.values()} == {wanted}


def test_the_textfile_leaves_out_what_a_card_does_not_report() -> None:
    found = parsed(prometheus.exposition({"uuid": "GPU-3"}, sample(Card(fake(millijoules=None), GPU))))
    assert "gristmill_gpu_energy_joules_total" not in found
    assert len(found) == 6


def test_a_jobs_textfiles_leave_with_it_and_nothing_temporary_stays(tmp_path: Path) -> None:
    textfiles = prometheus.Textfiles(tmp_path, "runs/plain/1-of-1")
    textfiles.write(GPU, sample(Card(fake(), GPU)))
    assert [path.name for path in tmp_path.iterdir()] == ["gristmill-GPU-3.prom"]
    textfiles.remove()
    assert list(tmp_path.iterdir()) == []


# ---- health ---------------------------------------------------------------------------------------------------------


def test_a_healthy_gpu_stays_healthy() -> None:
    assert verdict(fake(ecc=5, remapped=[[3, 1, 0, 0]])) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ecc": [5, 6]}, "1 uncorrectable ECC error during the job"),
        ({"ecc": [5, 8]}, "3 uncorrectable ECC errors during the job"),
        ({"remapped": [[0, 0, 0, 0], [0, 1, 1, 0]]}, "a row of its memory waits to be remapped"),
        ({"xids": [79]}, "Xid 79 (GPU has fallen off the bus)"),
        ({"xids": [13, 31, 48]}, "Xid 48 (double-bit ECC error)"),
        ({"xids": [150]}, "Xid 150"),
        ({"lost_after": 1}, "it was lost during the job (GPU is lost)"),
    ],
)
def test_what_goes_wrong_during_a_job_is_named(settings: dict[str, Any], reason: str) -> None:
    assert verdict(fake(**settings)) == reason


def test_xids_that_an_application_causes_do_not_blame_the_gpu() -> None:
    assert verdict(fake(xids=[13, 31, 43, 45, 68, 109])) is None


def test_a_card_without_ecc_rows_and_events_is_healthy() -> None:
    nvml = fake(ecc=None, remapped=None)
    del nvml.nvmlEventSetCreate
    assert verdict(nvml) is None


def test_an_xid_of_another_mig_slice_is_not_this_ones() -> None:
    mine, other = (fake(parent="GPU-3", instance=2, xids=[48], event_instance=place) for place in (2, 5))
    faults = [found.examine(found.cards[0]) for found in (doctor(mine, SLICE), doctor(other, SLICE))]
    assert faults == [Fault((SLICE,), "Xid 48 (double-bit ECC error)"), None]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lost_after": 0}, "the driver does not find it (GPU is lost)"),
        ({"remapped": [[0, 1, 1, 0]]}, "a row of its memory waits to be remapped"),
        ({"remapped": [[0, 1, 0, 1]]}, "a broken row of its memory could not be remapped"),
    ],
)
def test_a_sick_gpu_is_refused_before_anything_is_loaded_and_set_aside(
    settings: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake(**settings))
    monkeypatch.setenv("GRISTMILL_LEASES", str(tmp_path / "leases"))
    place = Place("runs/plain", "1-of-1", tmp_path / "s.jsonl")
    with pytest.raises(SickGpu, match=re.escape(reason)) as caught, Watch([GPU], place, GpusConfig(), print):
        pytest.fail("the block must not begin")
    sick = tmp_path / "leases" / "GPU-3.sick"
    assert str(caught.value).startswith(f"GPU 3 (Fake H100, GPU-3): {reason}; set aside for 24 h")
    assert str(caught.value).endswith(f"then rm {sick}")
    assert json.loads(sick.read_text())["reason"] == reason


def test_with_health_off_a_sick_gpu_is_used_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake(remapped=[[0, 1, 1, 0]]))
    monkeypatch.setenv("GRISTMILL_LEASES", str(tmp_path / "leases"))
    said: list[str] = []
    place = Place("runs/plain", "1-of-1", tmp_path / "s.jsonl")
    with Watch([GPU], place, GpusConfig(health=False), said.append):
        pass
    assert said == ["going on although GPU-3: a row of its memory waits to be remapped"]
    assert not (tmp_path / "leases").exists() or not list((tmp_path / "leases").iterdir())


def test_a_card_that_was_let_in_with_a_fault_is_not_reported_for_it_again() -> None:
    pending = Vitals(uncorrected_errors=None, remap_pending=True, remap_failed=False)
    assert health.worsened(pending, pending) is None


def test_a_lost_card_is_told_apart_from_a_question_it_cannot_answer() -> None:
    nvml = fake(lost_after=1, millijoules=None)
    card = Card(nvml, GPU)
    assert card.ask("nvmlDeviceGetTotalEnergyConsumption") is None
    nvml.SAMPLES["GPU-3"] = 1
    with pytest.raises(Lost):
        card.ask("nvmlDeviceGetTotalEnergyConsumption")


# ---- quarantine -----------------------------------------------------------------------------------------------------


def test_a_gpu_is_set_aside_until_its_time_is_over(tmp_path: Path) -> None:
    health.set_aside(tmp_path, Fault((GPU,), "Xid 79"), now=1000.0)
    sick = tmp_path / "GPU-3.sick"
    assert health.quarantined(tmp_path, 1000.0 + 24 * 3600 - 1) == {"GPU-3": f"Xid 79; rm {sick} to use it"}
    assert health.quarantined(tmp_path, 1000.0 + 24 * 3600) == {}


def test_a_second_fault_replaces_the_first_note(tmp_path: Path) -> None:
    health.set_aside(tmp_path, Fault((GPU,), "a long story about an error " * 9), now=1000.0)
    health.set_aside(tmp_path, Fault((GPU,), "Xid 79"), now=9e9)
    assert health.quarantined(tmp_path, 9e9)["GPU-3"].startswith("Xid 79;")


def test_an_empty_note_made_by_hand_holds_until_it_is_removed(tmp_path: Path) -> None:
    (tmp_path / "GPU-3.sick").touch()
    assert health.quarantined(tmp_path, 9e9)["GPU-3"].startswith("set aside by hand")
    (tmp_path / "GPU-3.sick").unlink()
    assert health.quarantined(tmp_path, 9e9) == {}


def test_a_note_that_cannot_be_read_holds_too(tmp_path: Path) -> None:
    (tmp_path / "GPU-3.sick").write_text('{"uuid": "GPU-')
    assert "cannot be read" in health.quarantined(tmp_path, 0.0)["GPU-3"]


def test_a_link_in_place_of_a_note_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "GPU-3.sick").symlink_to(tmp_path / "precious")
    health.set_aside(tmp_path, Fault((GPU,), "Xid 79"))
    assert (tmp_path / "precious").read_text() == "keep me"


# ---- ending a job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "after_s", "reason"),
    [
        ("load", 3599, None),
        ("load", 3601, "the model did not load within 60 minutes (gpus.load_minutes)"),
        ("generate", 7199, None),
        ("generate", 7201, "no row was answered within 120 minutes (gpus.stall_minutes)"),
    ],
)
def test_a_hang_is_named_with_the_limit_that_it_passed(phase: str, after_s: float, reason: str | None) -> None:
    watch = Watch([GPU], Place("runs/plain", "1-of-1", Path("s.jsonl")), GpusConfig(), print)
    if phase == "generate":
        watch.loaded()
    fault = watch.hang(time.monotonic() + after_s)
    assert (fault and fault.reason) == reason


def test_no_limit_means_never() -> None:
    place = Place("runs/plain", "1-of-1", Path("s.jsonl"))
    assert Watch([GPU], place, GpusConfig(load_minutes=None), print).hang(time.monotonic() + 1e9) is None


HANGS = """
import json, sys, time
from pathlib import Path
from gristmill import journal
from gristmill.config.schema import GpusConfig
from gristmill.types import Completion, Gpu
from gristmill.gpu.watch import Place, Watch

folder, phase = Path(sys.argv[1]), sys.argv[2]
config = GpusConfig(**json.loads(sys.argv[3]))
gpu = Gpu(3, "GPU-3", "Fake H100", 81920, 0)
with Watch([gpu], Place("runs/plain", "1-of-1", folder / "s.jsonl"), config, print) as watch:
    if phase == "generate":
        watch.loaded()
        with journal.Segment(folder / "journal", {}) as segment:
            for number in range(20):
                segment.append(f"{number:032d}", Completion(f"r{number}", 0, "", "text", "stop", 1, 1, 0.0))
            time.sleep(60)
    time.sleep(60)
"""


def hang(
    folder: Path, phase: str, config: JsonDict, card: JsonDict, program: str = HANGS
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{FAKE}:{SCRIPTS}", "GRISTMILL_LEASES": str(folder / "leases")}
    environment |= {"FAKE_NVML": json.dumps({"GPU-3": card})}
    command = [sys.executable, "-c", program, str(folder), phase, json.dumps(config)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)


def test_a_hung_load_ends_the_process_with_one_line_and_sets_the_gpu_aside(tmp_path: Path) -> None:
    ended = hang(tmp_path, "load", {"load_minutes": 0.01}, {})
    assert ended.returncode == FAULT_EXIT
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(
        "error: GPU 3 (Fake H100, GPU-3): the model did not load within 0.01 minutes (gpus.load_minutes); "
        "set aside for 1 h"
    )
    assert "GPU-3" in health.quarantined(tmp_path / "leases", time.time())


def test_a_load_that_hangs_with_the_interpreters_lock_ends_too(tmp_path: Path) -> None:
    locked = "import ctypes\nfrom gristmill.gpu import watch\nwatch.BACKSTOP_S = 1\n" + HANGS.replace(
        "    time.sleep(60)\n", "    ctypes.PyDLL(None).sleep(40)\n"
    )
    ended = hang(tmp_path, "load", {"load_minutes": 0.01}, {}, locked)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Timeout (0:00:01")
    assert "in <module>" in ended.stderr


@pytest.mark.parametrize(
    ("config", "card", "reason"),
    [
        ({"stall_minutes": 0.01}, {}, "no row was answered"),
        ({}, {"xids": [79], "xids_after": 2}, "Xid 79"),
        ({}, {"lost_after": 2}, "it was lost during the job"),
    ],
)
def test_a_fault_in_the_middle_leaves_journal_and_samples_whole(
    config: JsonDict, card: JsonDict, reason: str, tmp_path: Path
) -> None:
    ended = hang(tmp_path, "generate", config, card)
    assert ended.returncode == FAULT_EXIT, ended.stderr
    assert f"error: GPU 3 (Fake H100, GPU-3): {reason}" in ended.stderr
    from gristmill.journal.lines import read_lines

    (segment,) = (tmp_path / "journal").glob("*.jsonl")
    assert [line.completion().id for line in read_lines(segment) if line.kind == "completion"] == [
        f"r{number}" for number in range(20)
    ]
    assert lines(tmp_path / "s.jsonl")[-1]["uuid"] == "GPU-3"
