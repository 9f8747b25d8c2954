"""Facts about what the service promises: its OpenAPI document against schemathesis, and metrics for Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the extra service is not installed")
pytest.importorskip("prometheus_client", reason="the extra service is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed (make env-dev)")

import hypothesis
import schemathesis
from conftest import ROOT, wait_until
from prometheus_client import parser
from schemathesis.specs.openapi.checks import ignored_auth
from service_project import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("study") / "here")
    made.write_project()
    made.start()
    with made.client as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
    yield made
    made.close()


@pytest.mark.slow
def test_every_answer_is_one_that_the_openapi_document_names(served: Served) -> None:
    headers = {"Authorization": f"Bearer {served.token}"}
    tried: list[str] = []
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", headers=headers)
    settings = hypothesis.settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings
        @hypothesis.given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            # guesses are slowed down to 429, which that check does not know; test_service_auth.py has its facts
            case.call_and_validate(headers=headers, timeout=20, excluded_checks=[ignored_auth])

        check()
        tried.append(operation.label)
    assert len(tried) == 15


def test_the_document_names_the_token_and_problems_for_all_but_health(served: Served) -> None:
    with served.client as client:
        document = client.get("/openapi.json").json()
    operations = [(path, each) for path, operations in document["paths"].items() for each in operations.values()]
    assert len(operations) == 15
    for path, operation in operations:
        assert operation.get("security") == (None if path == "/health" else [{"token": []}])
        for status, response in operation["responses"].items():
            if not status.startswith("2"):
                assert set(response["content"]) == {"application/problem+json"}, (path, status)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_prometheus_can_read_the_metrics_and_units_are_base_units(served: Served) -> None:
    with served.client as client:
        client.get("/v1/gpus")
        client.get("/v1/nothing/at/all")
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.text)
    assert found["gristmill_gpu_memory_total_bytes"][0][1] == 81920 * 2**20
    assert [labels["index"] for labels, _ in found["gristmill_gpu_memory_used_bytes"]] == ["0", "1"]
    assert "gristmill_gpu_power_watts" not in found
    assert {labels["state"] for labels, _ in found["gristmill_runs"]} >= {"running", "finished", "lost"}
    routes = {labels["route"] for labels, _ in found["gristmill_service_requests_total"]}
    assert "/v1/gpus" in routes
    assert not any("nothing" in route for route in routes)
    units = ("_bytes", "_ratio", "_seconds", "_watts", "_celsius", "_hertz", "_joules_total", "_total", "_bucket")
    plain = {
        "_per_second",
        "_workers",
        "_held",
        "_fit",
        "_throttled",
        "_runs",
        "_rows",
        "_rows_done",
        "_rows_failed",
        "_streams",
        "_info",
    }
    ends = (*units, *plain, "_sum", "_count")
    assert [name for name in found if not name.endswith(ends)] == []


def test_every_metric_of_the_grafana_dashboard_is_one_of_the_services() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    named = {name for expression in expressions for name in re.findall(r"gristmill_\w+", expression)}
    assert len(named) >= 8
    assert named <= names_of_a_machine_at_work()


def names_of_a_machine_at_work() -> set[str]:
    """All metric names, from a machine of which everything is known."""
    from pathlib import Path

    from prometheus_client import CollectorRegistry, generate_latest

    from gristmill.live import UnitProgress, WorkerProgress
    from gristmill.service.metrics import MachineCollector
    from gristmill.service.processes import Identity
    from gristmill.service.readings import Reading, Readings
    from gristmill.service.records import Record
    from gristmill.service.requests import RequestMetrics
    from gristmill.service.runs import Seen
    from gristmill.service.units import UnitView
    from gristmill.types import Gpu

    sample = {"utilization_ratio": 0.5, "memory_used_mib": 7, "power_watts": 1.5, "temperature_celsius": 40}
    sample |= {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "energy_joules": 12.5,
        "throttle_reasons": ["sync_boost"],
    }
    reading = Reading(Gpu(0, "GPU-0", 'a "name"\\\n', 80, 7), (sample,))
    record = Record("r", Path("r"), {}, Identity(1, ""), None, None)
    done = WorkerProgress("1-of-1", "here", "running", 2, 3, 1, 50, 5.0, 5.0, 8, 0, "static", ())
    known = UnitProgress("runs/a", "run", 2, 3, 1, 50, 5.0, 5.0, 1.0, (done,), (), "running")
    new = UnitProgress("runs/b", "run", 0, None, 0, 0, None, None, None, (), (), "waiting")
    seen = Seen(record, "running", (UnitView.of(known), UnitView.of(new)))
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)
    requests.count("GET", "/health", 200, 0.002)
    requests.count("BREW", "/v1/runs/{run_id}/events", 200, 5.0)
    MachineCollector.register(registry, lambda: Readings((reading,), 1.0), lambda: [seen])
    found = samples(generate_latest(registry).decode())
    assert found["gristmill_gpu_sm_clock_hertz"] == [
        ({"uuid": "GPU-0", "index": "0", "name": 'a "name"\\\n'}, 1_980_000_000.0)
    ]
    assert found["gristmill_gpu_energy_joules_total"][0][1] == 12.5
    assert found["gristmill_run_rows"] == [({"run": "r", "unit": "runs/a"}, 3.0)]  # not known is no line
    assert [value for _, value in found["gristmill_run_rows_done"]] == [2.0, 0.0]
    assert found["gristmill_run_tokens_per_second"] == [({"run": "r", "unit": "runs/a"}, 5.0)]
    assert found["gristmill_run_workers"] == [({"run": "r", "unit": "runs/a", "state": "running"}, 1.0)]
    assert [labels["method"] for labels, _ in found["gristmill_service_requests_total"]] == ["GET", "other"]
    return set(found)
