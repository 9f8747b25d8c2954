"""A real service over a real port: scripts/serve.py in a folder with echo configs, and a client that has its token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml
from conftest import ROOT, echo_config, wait_until

from gristmill.service.records import ACTIVE

#: Rows of a run that lasts longer than any test: a minute, at 0.3 s a row on two workers.
LASTING = 400
INVENTORY = [{"name": "Fake H100", "memory_total_mib": 81920, "memory_used_mib": 1000, "count": 2}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Served:
    """A folder with config/ and a service in it."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.folder / ".gristmill-service"

    @property
    def token(self) -> str:
        return (self.state / "token").read_text().strip()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        # Plain http needs none of the certificates, which take longer to read than a request.
        return httpx2.Client(base_url=self.url, headers=headers, timeout=30, verify=False)

    def write_project(self, rows: int = 12) -> None:
        (self.folder / "config").mkdir(parents=True)
        self.write_rows(rows)
        (self.folder / "ask.jinja").write_text("{{ question }}")
        paths = {
            "datasets": {"rows": {"path": str(self.folder / "rows.jsonl")}},
            "prompts": {"ask": {"file": str(self.folder / "ask.jinja")}},
        }
        (self.folder / "config" / "plain.yaml").write_text(yaml.safe_dump(echo_config(**paths)))
        (self.folder / "config" / "wrong.yaml").write_text(yaml.safe_dump(echo_config(**paths, nonsense={"a": 1})))
        (self.folder / "inventory.json").write_text(json.dumps(INVENTORY))

    def write_rows(self, count: int) -> None:
        """So many rows, for runs that begin from now on."""
        lines = [json.dumps({"id": f"r{n}", "question": f"say {n}", "reference": n}) for n in range(count)]
        (self.folder / "rows.jsonl").write_text("\n".join(lines) + "\n")

    def start(self, *arguments: str) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}},
            "OMP_NUM_THREADS": "1",
            "GRISTMILL_LEASES": str(self.folder / "leases"),
            "GRISTMILL_ECHO_SECONDS": "0.3",
            "GRISTMILL_INVENTORY": str(self.folder / "inventory.json"),
            **self.extra,
        }
        command = [sys.executable, str(ROOT / "scripts" / "serve.py"), "--directory", str(self.folder)]
        with open(self.folder / "serve.log", "a") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *arguments],
                cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
            )  # fmt: skip
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        try:
            return httpx2.get(f"{self.url}/health").status_code == 200
        except httpx2.TransportError:
            return False

    def said(self) -> str:
        return (self.folder / "serve.log").read_text()

    def stop(self, number: int = signal.SIGINT) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def close(self) -> None:
        """End the service and what it started."""
        for path in self.state.glob("runs/*/process.json"):
            pid = json.loads(path.read_text())["pid"]
            if not (path.parent / "ended.json").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self.stop()

    def begin(self, **more: Any) -> dict[str, Any]:
        """Start plain.yaml."""
        with self.client as client:
            answer = client.post("/v1/runs", json={"config": "plain.yaml", "cores": 2, **more})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def run(self, run_id: str) -> dict[str, Any]:
        with self.client as client:
            found: dict[str, Any] = client.get(f"/v1/runs/{run_id}").json()
        return found

    def wait_for(self, run_id: str, *states: str) -> dict[str, Any]:
        """Wait until a run is in one of these states, or has ended in another, which then is what comes back."""
        wait_until(lambda: (state := self.run(run_id)["state"]) in states or state not in ACTIVE)
        return self.run(run_id)

    def wait_for_rows(self, run_id: str, least: int = 1) -> dict[str, Any]:
        """Wait until a run that goes on has some answers."""

        def moved() -> bool:
            run = self.run(run_id)
            assert run["state"] in ("starting", "running"), run
            return int(run["done"]) >= least

        wait_until(moved)
        return self.run(run_id)

    def events(self, run_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """A run's events, to the end of the stream."""
        with self.client as client, client.stream("GET", f"/v1/runs/{run_id}/events", timeout=240) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def group_members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text("latin-1").rpartition(")")[2].split()[:3]
            if state not in "ZX" and int(pgrp) == group:
                found.append(int(path.parent.name))
    return found
