"""Facts about the whole workflow on two GPUs that are not there: an inventory, a fake NVML and the echo engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, echo_config

FAKE = str(Path(__file__).parent / "fake_nvml")
UUIDS = ("GPU-aaaa", "GPU-bbbb")


@pytest.fixture
def machine(project: Project) -> Project:
    """The echo project on a machine with two fake GPUs."""
    gpus = [
        {"index": n, "uuid": uuid, "name": "Fake H100", "memory_total_mib": 81920, "memory_used_mib": 0}
        for n, uuid in enumerate(UUIDS)
    ]
    (project.folder / "gpus.json").write_text(json.dumps(gpus))
    return project


def environment(machine: Project, **cards: Any) -> dict[str, str]:
    nvml = {"FAKE_NVML": json.dumps({uuid: cards.get(uuid[-4:], {}) for uuid in UUIDS}), "PYTHONPATH": FAKE}
    return {**nvml, "GRISTMILL_INVENTORY": str(machine.folder / "gpus.json"), "GRISTMILL_ECHO_SECONDS": "0.2"}


def test_two_workers_leave_their_samples_and_the_metrics_sum_them_up(machine: Project) -> None:
    machine.done("results/report.html", gpu=2, **environment(machine))
    files = sorted((machine.folder / "results/runs/plain/gpu").iterdir())
    assert [path.name for path in files] == ["1-of-2.jsonl", "2-of-2.jsonl"]
    lines = machine.lines("runs/plain/gpu/1-of-2.jsonl") + machine.lines("runs/plain/gpu/2-of-2.jsonl")
    assert {line["uuid"] for line in lines if "uuid" in line} == set(UUIDS)
    gpu = machine.value("runs/plain/metrics.json")["gpu"]
    assert (gpu["jobs"], gpu["utilization_mean_ratio"], gpu["memory_peak_mib"]) == (2, 0.9, 1024)
    assert (gpu["energy_source"], gpu["completion_tokens"]) == ("counter", 24)
    assert gpu["tokens_per_joule"] == round(24 / gpu["energy_joules"], 4)


def test_without_gpus_the_gpu_section_is_null(project: Project) -> None:
    project.done("results/runs/plain/metrics.json")
    assert project.value("runs/plain/metrics.json")["gpu"] is None


def test_a_gpu_that_reports_an_xid_ends_its_job_and_the_retry_takes_another(machine: Project) -> None:
    said = machine.done(
        "results/runs/plain/metrics.json", gpu=1, **environment(machine, aaaa={"xids": [79], "xids_after": 2})
    )
    assert "error: GPU 0 (Fake H100, GPU-aaaa): Xid 79 (GPU has fallen off the bus); set aside for 24 h" in said
    assert (machine.folder / "leases" / "GPU-aaaa.sick").exists()
    workers = machine.value("runs/plain/manifest.json")["workers"]
    assert [worker["devices"][0]["uuid"] for worker in workers] == list(UUIDS)
    asked = machine.asked("runs/plain")
    assert sorted(asked) == sorted({line["id"] for line in machine.lines("runs/plain/generations.jsonl")})
    assert machine.value("runs/plain/metrics.json")["gpu"]["jobs"] == 2


def test_a_machine_without_a_fit_gpu_says_which_is_set_aside_and_why(machine: Project) -> None:
    (machine.folder / "leases").mkdir()
    for uuid in UUIDS:
        (machine.folder / "leases" / f"{uuid}.sick").touch()
    failed = machine.run("results/runs/plain/metrics.json", gpu=1, **environment(machine))
    assert failed.returncode == 1
    assert "gpus_per_model=1 but 0 of 2 GPUs are fit; GPU 0: set aside by hand; rm " in failed.stdout


def test_textfiles_for_prometheus_are_gone_when_the_jobs_are(machine: Project) -> None:
    machine.write_config(echo_config(gpus={"prometheus": "prometheus"}))
    machine.done("results/runs/plain/metrics.json", gpu=2, **environment(machine))
    assert list((machine.folder / "prometheus").iterdir()) == []
