"""Facts about runs over the service: a real server, a real port, real Snakemakes of the echo engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra service is not installed")
pytest.importorskip("prometheus_client", reason="the extra service is not installed")

import httpx2
from conftest import ROOT, wait_until
from service_project import LASTING, Served, group_members, is_alive

from gristmill import locks
from gristmill.files import write_json
from gristmill.service.models import RunView
from gristmill.service.processes import Identity, identify
from gristmill.service.runs import Runs
from gristmill.service.settings import Settings

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "a study")
    made.write_project()
    made.start()
    yield made
    made.close()


def test_a_run_starts_its_rows_move_its_events_say_so_and_its_report_is_there(served: Served) -> None:
    served.write_rows(60)
    run = served.begin(cores=2, gpus=1)
    assert (run["config"], run["kinds"], run["state"]) == ("plain.yaml", ["generation"], "starting")
    with served.client as client:
        assert client.get(f"/v1/runs/{run['id']}/report").status_code == 404
    seen = list(served.events(run["id"]))
    done = [state["done"] for name, state in seen if name == "progress"]
    assert done == sorted(done)
    assert len({each for each in done if 0 < each < 60}) >= 3
    assert [name for name, _ in seen if name != "progress"] == ["end"]
    last = seen[-1][1]
    assert (last["state"], last["exit_code"], last["rows"], last["done"], last["failed"]) == ("finished", 0, 60, 60, 0)
    [unit] = last["units"]
    assert (unit["unit"], unit["kind"], unit["state"], unit["rows"]) == ("runs/plain", "run", "done", 60)
    assert (unit["worker_states"], unit["workers"], unit["tokens"]) == ({"done": 1}, [], 120)
    with served.client as client:
        report = client.get(f"/v1/runs/{run['id']}/report")
        assert report.text == (served.folder / "results" / "report.html").read_text()
        assert report.headers["content-security-policy"].startswith("sandbox allow-scripts;")
        (served.folder / "results" / "report.html").rename(served.folder / "elsewhere.html")
        (served.folder / "results" / "report.html").symlink_to(served.folder / "elsewhere.html")
        answer = client.get(f"/v1/runs/{run['id']}/report")
        assert (answer.status_code, "is a link" in answer.json()["detail"]) == (404, True)
        [entry] = client.get("/v1/history").json()
        assert entry["run"]["id"] == run["id"]
        assert entry["rows_per_second"] == pytest.approx(60 / entry["seconds"])
        assert client.get("/v1/history", params={"before": run["id"]}).json() == []
        assert client.delete(f"/v1/runs/{run['id']}").status_code == 409
    assert [name for name, _ in served.events(run["id"])] == ["end"]


def test_a_second_run_of_one_results_folder_is_409_and_one_of_another_is_not(served: Served) -> None:
    served.write_rows(LASTING)
    first = served.begin()
    served.wait_for_rows(first["id"])
    (served.folder / "workspaces").mkdir()
    (served.folder / "workspaces" / "alias").symlink_to(served.folder)
    with served.client as client:
        for body in (
            {"config": "plain.yaml"},
            {"config": "wrong.yaml"},
            {"config": "plain.yaml", "workspace": "alias"},
        ):
            answer = client.post("/v1/runs", json=body)
            assert answer.status_code == 409
            assert answer.headers["content-type"] == "application/problem+json"
            assert first["id"] in answer.json()["detail"]
    second = served.begin(workspace="other")
    served.wait_for_rows(second["id"])
    for run in (first, second):
        with served.client as client:
            assert client.delete(f"/v1/runs/{run['id']}").json()["state"] == "stopping"
    assert served.wait_for(first["id"], "stopped", "failed", "lost")["state"] == "stopped"
    assert served.wait_for(second["id"], "stopped", "failed", "lost")["state"] == "stopped"


def test_a_results_folder_that_a_snakemake_from_elsewhere_holds_is_409(served: Served) -> None:
    (served.folder / "results" / ".gristmill").mkdir(parents=True)
    lock = locks.try_lock(served.folder / "results" / ".gristmill" / "lock", "snakemake")
    assert lock is not None
    with served.client as client:
        answer = client.post("/v1/runs", json={"config": "plain.yaml"})
    locks.release(lock)
    assert answer.status_code == 409
    assert f"pid {os.getpid()} (snakemake)" in answer.json()["detail"]
    assert not list((served.state / "runs").iterdir())


def test_a_stopped_run_ends_with_all_its_jobs_and_goes_on_where_it_was(served: Served) -> None:
    served.write_rows(60)
    run = served.begin()
    served.wait_for_rows(run["id"], 2)
    pid = json.loads((served.state / "runs" / run["id"] / "process.json").read_text())["pid"]
    assert len(group_members(pid)) >= 3  # the launcher, Snakemake, a job
    with served.client as client:
        assert client.delete(f"/v1/runs/{run['id']}").status_code == 202
        assert client.delete(f"/v1/runs/{run['id']}").status_code in (202, 409)
    stopped = served.wait_for(run["id"], "stopped", "failed", "lost")
    assert stopped["state"] == "stopped"
    assert 2 <= stopped["done"] < 60
    wait_until(lambda: not group_members(pid))
    again = served.begin()
    assert served.wait_for(again["id"], "finished", "failed")["state"] == "finished"
    lines = [
        line
        for path in (served.folder / "results/runs/plain/journal").glob("*.jsonl")
        for line in path.read_text().splitlines()
        if line.startswith('{"key"')
    ]
    assert len(lines) == 60


def test_a_run_that_is_stopped_before_it_has_begun_is_stopping_at_once(served: Served) -> None:
    run = served.begin()
    with served.client as client:
        assert client.delete(f"/v1/runs/{run['id']}").json()["state"] == "stopping"
    assert served.wait_for(run["id"], "stopped", "failed", "lost")["state"] == "stopped"
    assert not (served.folder / "results/runs/plain/generations.jsonl").exists()


def test_a_service_that_ignores_sigint_still_stops_its_runs_by_it(tmp_path: Path) -> None:
    served = Served(tmp_path / "study")
    served.write_project(LASTING)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does to what it starts in the background
    try:
        served.start()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        run = served.begin()
        served.wait_for_rows(run["id"])
        with served.client as client:
            client.delete(f"/v1/runs/{run['id']}")
        assert served.wait_for(run["id"], "stopped", "failed", "lost")["state"] == "stopped"
        stop = json.loads((served.state / "runs" / run["id"] / "stop.json").read_text())
        assert stop["interrupted"] is not None
        assert stop["terminated"] is None
    finally:
        assert served.process is not None
        served.process.terminate()
        served.process.wait(60)
        served.process = None
        served.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_ends_leaves_its_run_alone_and_finds_it_again(served: Served, number: signal.Signals) -> None:
    served.write_rows(100)
    run = served.begin()
    before = served.wait_for_rows(run["id"])
    served.stop(number)
    pid = json.loads((served.state / "runs" / run["id"] / "process.json").read_text())["pid"]
    assert is_alive(pid)
    served.start()
    found = served.run(run["id"])
    assert found["state"] == "running"
    assert found["done"] >= before["done"]
    with served.client as client:
        assert client.post("/v1/runs", json={"config": "plain.yaml"}).status_code == 409
    assert served.wait_for(run["id"], "finished", "failed", "lost")["state"] == "finished"


def test_a_run_that_ended_while_no_service_was_there_is_known_with_its_exit_status(served: Served) -> None:
    good, bad = served.begin(), served.begin(config="wrong.yaml", workspace="other")
    served.wait_for_rows(good["id"])
    served.stop()
    for run in (good, bad):
        wait_until((served.state / "runs" / run["id"] / "ended.json").exists)
    served.start()
    assert (served.run(good["id"])["state"], served.run(good["id"])["done"]) == ("finished", 12)
    failed = served.run(bad["id"])
    assert (failed["state"], failed["exit_code"]) == ("failed", 2)
    assert "config error: nonsense" in failed["log_tail"]


def test_a_run_whose_launcher_is_killed_is_followed_and_stopped_and_then_lost_with_what_it_did(served: Served) -> None:
    served.write_rows(LASTING)
    run = served.begin()
    served.wait_for_rows(run["id"])
    pid = json.loads((served.state / "runs" / run["id"] / "process.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    done = served.run(run["id"])["done"]
    wait_until(lambda: served.run(run["id"])["done"] > done)
    assert served.run(run["id"])["state"] == "running"
    with served.client as client:
        assert client.post("/v1/runs", json={"config": "plain.yaml"}).status_code == 409
        assert client.delete(f"/v1/runs/{run['id']}").status_code == 202
    last = served.wait_for(run["id"], "lost", "stopped", "failed")
    assert last["state"] == "lost"
    assert not locks.is_held(served.folder / "results/.gristmill/lock")
    served.stop()
    shutil.rmtree(served.folder / "results")
    served.start()
    found = served.run(run["id"])
    assert (found["state"], found["done"], found["rows"]) == ("lost", last["done"], LASTING)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run.json", {"created": "yesterday"}),
        ("run.json", {"config": 5}),
        ("run.json", {"kinds": ["cooking"]}),
        ("run.json", {"results": 7}),
        ("run.json", {"created": 1e999}),
        ("process.json", {"pid": -1, "started": "x"}),
        ("ended.json", {"exit_code": 0}),
        ("ended.json", {"exit_code": "x", "ended": "y"}),
        ("ended.json", {"exit_code": 0, "ended": 1.0, "units": [{"unit": "?"}]}),
        ("ended.json", [1]),
    ],
)
def test_a_record_with_anything_else_in_it_is_no_run_and_hides_no_other(
    tmp_path: Path, name: str, value: dict[str, Any]
) -> None:
    settings = Settings(tmp_path, tmp_path, tmp_path / "state", tmp_path / "token")
    whole = {"config": "a.yaml", "directory": "/d", "results": "/r", "created": 1.0, "command": ["x"]}
    for number in (1, 2):
        folder = settings.runs / f"20260101T00000{number}Z-abcdef"
        write_json(folder / "run.json", whole)
        write_json(folder / "ended.json", {"exit_code": 0, "ended": 2.0, "units": []})
    written = value if name != "run.json" else whole | value
    (settings.runs / "20260101T000001Z-abcdef" / name).write_text(json.dumps(written))
    said: list[str] = []
    runs = Runs(settings, said.append)
    assert [RunView.of(seen).id for seen in runs.all()] == ["20260101T000002Z-abcdef"]
    assert "20260101T000001Z-abcdef is no run: " in said[0]
    runs.refresh()
    assert len(said) == 1


def test_whatever_is_wrong_with_one_run_the_others_are_looked_at_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(tmp_path, tmp_path, tmp_path / "state", tmp_path / "token")
    me = identify(os.getpid())
    assert me is not None
    names = [f"20260101T00000{number}Z-abcdef" for number in (1, 2)]
    for name in names:
        whole = {"config": "a.yaml", "directory": "/d", "results": str(tmp_path / name), "created": 1.0, "command": []}
        write_json(settings.runs / name / "run.json", whole)
        write_json(settings.runs / name / "process.json", {"pid": me.pid, "started": me.started})
        (settings.runs / name / "stop.json").write_text("{}")
        live = tmp_path / name / "runs" / "plain" / "live" / "1-of-1.jsonl"
        live.parent.mkdir(parents=True)
        many = "1" + "0" * 400
        live.write_text(f'{{"gristmill_live":1,"total":{many}}}\n{{"at":{many},"phase":"running","tokens":{many}}}\n')
    said: list[str] = []
    runs = Runs(settings, said.append)
    assert [seen.state for seen in runs.all()] == ["running", "running"]
    looked: list[str] = []

    def escalate(_: Runs, seen: Any) -> None:
        looked.append(seen.record.id)
        assert seen.record.id != names[0], "of the first"

    monkeypatch.setattr(Runs, "_escalate", escalate)
    runs.refresh()
    runs.refresh()
    assert looked == names * 2
    assert len(said) == 1
    assert said[0].startswith(f"run {names[0]} cannot be looked at: AssertionError: of the first")


def test_another_process_of_the_same_pid_is_not_the_run(served: Served) -> None:
    run = served.begin()
    served.wait_for(run["id"], "finished", "failed")
    folder = served.state / "runs" / run["id"]
    served.stop()
    (folder / "ended.json").unlink()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        me = identify(other.pid)
        assert me is not None
        assert me.is_alive()
        (folder / "process.json").write_text(json.dumps({"pid": other.pid, "started": "before"}))
        served.start()
        assert served.run(run["id"])["state"] == "lost"
        with served.client as client:
            assert client.delete(f"/v1/runs/{run['id']}").status_code == 409
        assert not Identity(other.pid, "before").signal_group(signal.SIGKILL)
        assert other.poll() is None
        other.communicate(b"\n")


def test_torn_files_of_a_run_do_not_keep_the_service_from_starting(served: Served) -> None:
    served.stop()
    broken = served.state / "runs" / "20260101T000000Z-abcdef"
    broken.mkdir()
    (broken / "run.json").write_text('{"config": ')
    (served.state / "runs" / "something else").mkdir()
    served.start()
    with served.client as client:
        assert client.get("/v1/runs").json() == []
        assert client.get(f"/v1/runs/{broken.name}").status_code == 404
    assert f"{broken} is no run" in served.said()


def test_a_run_of_a_version_before_is_found_with_its_rows_and_one_with_units_of_another_kind_is_left_out(
    tmp_path: Path,
) -> None:
    units = {"20260101T000000Z-aaaaaa": [{"unit": "runs/a", "rows": 12, "done": 7, "failed": 2}]}
    units["20260101T000000Z-bbbbbb"] = [{"unit": "elsewhere", "rows": 1, "done": 1, "failed": 0}]
    for name, known in units.items():
        folder = tmp_path / "state" / "runs" / name
        folder.mkdir(parents=True)
        run = dict.fromkeys(("config", "directory", "results"), "a") | {"created": 0, "command": []}
        (folder / "run.json").write_text(json.dumps(run))
        (folder / "ended.json").write_text(json.dumps({"exit_code": 1, "ended": 5.0, "units": known}))
    [found] = Runs(Settings(tmp_path, tmp_path, tmp_path / "state", tmp_path / "token"), print).all()
    view = RunView.of(found)
    assert (view.state, view.rows, view.done, view.failed) == ("failed", 12, 7, 2)
    assert [(unit.unit, unit.state, unit.tokens) for unit in view.units] == [("runs/a", "stopped", None)]


def test_a_second_service_of_one_folder_is_refused_in_one_line(served: Served) -> None:
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--directory", str(served.folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {served.state} is in use by pid ")
    assert done.stderr.count("\n") == 1


def test_a_hundred_event_streams_that_vanish_leave_no_file_and_no_thread(served: Served) -> None:
    served.write_rows(LASTING)
    run = served.begin()
    served.wait_for_rows(run["id"])
    assert served.process is not None
    proc = Path(f"/proc/{served.process.pid}")

    def used() -> tuple[int, int]:
        return len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir()))

    def open_streams() -> float:
        with served.client as client:
            text = client.get("/metrics").text
        [line] = [line for line in text.splitlines() if line.startswith("gristmill_service_event_streams ")]
        return float(line.split()[1])

    served.run(run["id"])
    before = used()
    clients = []
    for _ in range(100):
        client = socket.create_connection(("127.0.0.1", served.port))
        head = f"GET /v1/runs/{run['id']}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        client.sendall(f"{head}Authorization: Bearer {served.token}\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        clients.append(client)
    wait_until(lambda: open_streams() == 100)
    assert used()[1] <= before[1]
    for n, client in enumerate(clients):
        if n % 2:  # a reset, as a client that is killed with data unread sends it
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    wait_until(lambda: open_streams() == 0)
    wait_until(lambda: used()[0] <= before[0] + 1)
    assert used()[1] <= before[1]
    with served.client as client:
        client.delete(f"/v1/runs/{run['id']}")


def test_gpus_come_from_the_inventory_and_what_no_driver_says_is_null(served: Served) -> None:
    with served.client as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        gpus = client.get("/v1/gpus").json()["gpus"]
        assert [(gpu["index"], gpu["memory_used_bytes"], gpu["utilization_ratio"]) for gpu in gpus] == [
            (0, 1000 * 2**20, None),
            (1, 1000 * 2**20, None),
        ]
        stats = client.get(f"/v1/gpus/{gpus[1]['uuid']}/stats").json()
        assert stats["gpu"]["index"] == 1
        assert stats["samples"][-1]["memory_used_bytes"] == 1000 * 2**20
        assert stats["samples"][-1]["power_watts"] is None
        assert client.get("/v1/gpus/7/stats").status_code == 404
        assert [each["verdict"] for each in client.post("/v1/gpus/test").json()] == ["unknown", "unknown"]


def test_a_driver_that_fails_is_503_and_no_traceback(tmp_path: Path) -> None:
    served = Served(tmp_path / "study")
    served.write_project()
    (served.folder / "inventory.json").write_text("[{]")
    served.start()
    try:
        with served.client as client:
            wait_until(lambda: client.get("/v1/gpus").status_code == 503)
            answer = client.get("/v1/gpus")
            assert answer.headers["content-type"] == "application/problem+json"
            assert "is no inventory of GPUs" in answer.json()["detail"]
            assert client.post("/v1/gpus/test").status_code == 503
            assert client.get("/metrics").status_code == 200
    finally:
        served.close()
    assert "Traceback" not in served.said()


def test_gpus_of_a_driver_have_samples_a_holder_and_a_self_test(tmp_path: Path) -> None:
    served = Served(tmp_path / "study")
    served.write_project()
    gpus = [{"name": "Fake", "memory_total_mib": 81920, "uuid": f"GPU-{n}", "index": n} for n in range(2)]
    (served.folder / "inventory.json").write_text(json.dumps(gpus))
    cards = {"GPU-0": {"reasons": 0x20}, "GPU-1": {"remapped": [[0, 1, 1, 0]]}}
    served.extra = {"PYTHONPATH": str(ROOT / "tests/fake_nvml"), "FAKE_NVML": json.dumps(cards)}
    served.start()
    lock = locks.try_lock(served.folder / "leases" / "GPU-0.lock", "generate plain 1-of-1")
    assert lock is not None
    try:
        with served.client as client:
            wait_until(lambda: client.get("/v1/gpus").json()["gpus"][0]["held_by"] == "generate plain 1-of-1")
            first = client.get("/v1/gpus").json()["gpus"][0]
            assert (first["utilization_ratio"], first["power_watts"], first["temperature_celsius"]) == (0.9, 300.0, 50)
            sample = client.get("/v1/gpus/0/stats").json()["samples"][0]
            assert sample["sm_clock_hertz"] == 1_980_000_000
            assert sample["throttle_reasons"] == ["sw_thermal_slowdown"]
            good, bad = client.post("/v1/gpus/test").json()
            assert (good["verdict"], bad["verdict"]) == ("passed", "failed")
            assert bad["detail"].startswith("a row of its memory waits to be remapped")
            wait_until(lambda: "throttled_by_heat" in client.get("/v1/recommendations").text)
            text = client.get("/metrics").text
            assert 'gristmill_gpu_power_watts{index="0",name="Fake",uuid="GPU-0"} 300.0' in text
            assert 'gristmill_gpu_held{index="0",name="Fake",uuid="GPU-0"} 1.0' in text
    finally:
        locks.release(lock)
        served.close()


def test_another_process_that_listens_on_the_port_is_one_line(served: Served, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--directory", str(other), "--port", str(served.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"error: 127.0.0.1:{served.port} cannot be used: Address already in use" in done.stderr


def test_health_needs_no_token_and_the_page_holds_no_data(served: Served) -> None:
    assert httpx2.get(f"{served.url}/health").json() == {"status": "ok"}
    page = httpx2.get(f"{served.url}/")
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert served.token not in page.text
    assert "plain.yaml" not in page.text


def test_what_sigint_does_not_end_gets_sigterm_after_the_grace_time_and_not_before(tmp_path: Path) -> None:
    program = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: print('int', flush=True)); "
    program += "print('up', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    folder = tmp_path / "state" / "runs" / "20260101T000000Z-abcdef"
    folder.mkdir(parents=True)
    with subprocess.Popen(words, text=True, start_new_session=True, **pipe) as stubborn:  # type: ignore[call-overload]
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == "up\n"
        me = identify(stubborn.pid)
        assert me is not None
        named = dict.fromkeys(("config", "directory", "results"), str(tmp_path / "results"))
        (folder / "run.json").write_text(json.dumps({**named, "created": 0, "command": []}))
        (folder / "process.json").write_text(json.dumps({"pid": me.pid, "started": me.started}))
        settings = Settings(tmp_path, tmp_path, tmp_path / "state", tmp_path / "token", grace_s=1e6)
        assert Runs(settings, print).stop(folder.name).state == "stopping"
        assert stubborn.stdout.readline() == "int\n"
        Runs(settings, print).refresh()  # a service that was started anew
        assert stubborn.poll() is None
        assert json.loads((folder / "stop.json").read_text())["terminated"] is None
        Runs(replace(settings, grace_s=0.0), print).refresh()
        assert stubborn.wait(60) == -signal.SIGTERM
        assert json.loads((folder / "stop.json").read_text())["terminated"] is not None
        assert Runs(settings, print).all()[0].state == "lost"


def test_an_open_event_stream_does_not_hold_up_the_end_of_the_service(served: Served) -> None:
    served.write_rows(LASTING)
    run = served.begin()
    served.wait_for_rows(run["id"])
    with served.client as client, client.stream("GET", f"/v1/runs/{run['id']}/events", timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 2000"
        served.stop(signal.SIGTERM)
        assert list(lines)[-1] == ""  # whole events to the end, and no error of a connection that was cut
    assert "Traceback" not in served.said()
