"""Facts about who may call the service: the token, guesses, names, sizes, rates; and that every error is a problem."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra service is not installed")
pytest.importorskip("prometheus_client", reason="the extra service is not installed")

import httpx2
from conftest import ROOT
from service_project import LASTING, Served

from gristmill.errors import UserError
from gristmill.service.auth import Bucket, Gate, host_name, is_loopback, read_or_make_token, require_safe_address
from gristmill.service.configs import list_configs
from gristmill.service.server import listening
from gristmill.service.settings import Settings

TOKEN = "a" * 43


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("study") / "here")
    made.write_project()
    made.start()
    yield made
    made.close()


def require_problem(answer: httpx2.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert set(problem) == {"type", "title", "status", "detail"}
    assert problem["status"] == status
    assert "\n" not in problem["detail"]
    return problem


# ---- the token ------------------------------------------------------------------------------------------------------


def test_the_token_file_is_its_owners_alone_and_a_second_start_keeps_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        token = read_or_make_token(tmp_path / "state" / "token")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state" / "token").stat().st_mode) == 0o600
    assert len(token) >= 43
    assert read_or_make_token(tmp_path / "state" / "token") == token
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["token"]


def test_starts_at_the_same_time_make_one_token(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(read_or_make_token(tmp_path / "token"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert len(set(found)) == 1


def test_a_token_that_others_can_read_or_that_is_short_or_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"has mode 640, so others can read the token; chmod 600"):
        read_or_make_token(path)
    path.chmod(0o600)
    assert read_or_make_token(path) == TOKEN
    path.write_text("short")
    with pytest.raises(UserError, match="has 5 characters, but a token has 32 or more"):
        read_or_make_token(path)
    path.write_text("ä" * 40)
    with pytest.raises(UserError, match="a token has 32 or more letters and digits"):
        read_or_make_token(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_or_make_token(tmp_path / "link")


@pytest.mark.parametrize(
    ("header", "right"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer {TOKEN}", True),
        (f"Basic {TOKEN}", False),
        (TOKEN, False),
        (f"Bearer {TOKEN[:-1]}", False),
        (f"Bearer {TOKEN}a", False),
        (f"Bearer {TOKEN} {TOKEN}", False),
        ("Bearer ", False),
        ("", False),
        (None, False),
        ("Bearer \udcff", False),
    ],
)
def test_only_the_whole_token_under_its_scheme_is_right(header: str | None, right: bool) -> None:
    assert Gate(TOKEN, 1.0).knows(header) is right


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    now = [0.0]
    bucket = Bucket(2.0, 3.0, lambda: now[0])
    assert [bucket.take() for _ in range(4)] == [None, None, None, 0.5]
    now[0] = 0.5
    assert [bucket.take(), bucket.take()] == [None, 0.5]
    now[0] = 1e9
    assert [bucket.take() for _ in range(4)] == [None, None, None, 0.5]


def test_addresses_that_are_not_loopback_need_a_token_file_that_is_named() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        require_safe_address(host, token_named=False)
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", "127.0.0.1.example.org"):
        assert not is_loopback(host)
        with pytest.raises(UserError, match=r"can be reached from elsewhere.*ssh tunnel"):
            require_safe_address(host, token_named=False)
        require_safe_address(host, token_named=True)


def test_the_program_refuses_another_address_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--directory", str(tmp_path), "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: --host 0.0.0.0 can be reached from elsewhere")
    assert not list(tmp_path.iterdir())


def test_without_the_extra_the_program_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\", name='uvicorn')")
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--directory", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert re.match(
        r"error: the service needs uvicorn, which is not installed; pip install fastapi uvicorn", done.stderr
    )


# ---- over the wire --------------------------------------------------------------------------------------------------

PATHS = [
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/gpus"),
    ("GET", "/v1/gpus/0/stats"),
    ("POST", "/v1/gpus/test"),
    ("GET", "/v1/configs"),
    ("GET", "/v1/runs"),
    ("POST", "/v1/runs"),
    ("GET", "/v1/runs/20260101T000000Z-abcdef"),
    ("DELETE", "/v1/runs/20260101T000000Z-abcdef"),
    ("GET", "/v1/runs/20260101T000000Z-abcdef/events"),
    ("GET", "/v1/runs/20260101T000000Z-abcdef/report"),
    ("GET", "/v1/history"),
    ("GET", "/v1/recommendations"),
    ("GET", "/nothing"),
    ("GET", "//"),
    ("GET", "/health/"),
]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Served]:
    """A service of its own, whose buckets are full."""
    made = Served(tmp_path / "here")
    made.write_project()
    made.start()
    yield made
    made.close()


def test_every_path_but_health_and_the_page_needs_the_token(fresh: Served) -> None:
    for method, path in PATHS:
        answer = httpx2.request(method, f"{fresh.url}{path}")
        require_problem(answer, 401)
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert httpx2.get(f"{fresh.url}/").status_code == 200


def test_guesses_are_slowed_down_and_the_token_is_not(fresh: Served) -> None:
    codes = [
        httpx2.get(f"{fresh.url}/v1/runs", headers={"Authorization": f"Bearer {n:043}"}).status_code for n in range(60)
    ]
    assert set(codes) == {401, 429}
    assert codes[:20] == [401] * 20
    assert codes.count(429) >= 20
    answer = httpx2.get(f"{fresh.url}/v1/runs", headers={"Authorization": "Bearer wrong"})
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
    with fresh.client as client:
        assert client.get("/v1/runs").status_code == 200


def test_errors_of_all_kinds_are_problems(served: Served) -> None:
    with served.client as client:
        require_problem(client.get("/nothing"), 404)
        require_problem(client.get("/health/"), 404)
        require_problem(client.get("/v1/runs/20260101T000000Z-abcdef"), 404)
        require_problem(client.get("/v1/runs/20260101T000000Z-abcdef/events"), 404)
        require_problem(client.get("/v1/runs/20260101T000000Z-abcdef/report"), 404)
        require_problem(client.delete("/v1/runs/20260101T000000Z-abcdef"), 404)
        require_problem(client.get("/v1/gpus/none/stats"), 404)
        assert client.put("/v1/runs").headers["allow"]
        require_problem(client.put("/v1/runs"), 405)
        require_problem(client.get("/v1/runs/x"), 422)
        require_problem(client.get("/v1/runs", params={"limit": "many"}), 422)
        require_problem(client.get("/v1/history", params={"before": "x"}), 422)
        require_problem(client.post("/v1/runs", content=b"{", headers={"Content-Type": "application/json"}), 422)
        require_problem(client.post("/v1/runs", content=b"[" * 9000, headers={"Content-Type": "application/json"}), 400)
        require_problem(client.post("/v1/runs", content=b"\xff", headers={"Content-Type": "application/json"}), 400)
        require_problem(client.post("/v1/runs", json={"config": "plain.yaml", "more": 1}), 422)
        require_problem(client.post("/v1/runs", json={"config": "plain.yaml", "cores": 0}), 422)
        require_problem(client.post("/v1/runs", json={"config": "plain.yaml", "gpus": 10**30}), 422)


TRICKS = [
    "../config/plain.yaml",
    "../../etc/passwd",
    "/etc/passwd",
    "./plain.yaml",
    "sub/../plain.yaml",
    "plain.yaml\0",
    "plain.yaml\n",
    "plain.yaml --cores 1",
    "--configfile",
    "$(touch owned)",
    "; touch owned",
    "plain.yaml/",
    "PLAIN.YAML",
    "outside.yaml",
    "%2e%2e/plain.yaml",
    "..\\plain.yaml",
    "plain\u2024yaml",
]


@pytest.mark.parametrize("name", TRICKS)
def test_names_of_configs_are_looked_up_and_never_become_paths(served: Served, name: str) -> None:
    (served.folder / "elsewhere.yaml").write_text((served.folder / "config" / "plain.yaml").read_text())
    link = served.folder / "config" / "outside.yaml"
    if not link.is_symlink():
        link.symlink_to(served.folder / "elsewhere.yaml")
    with served.client as client:
        require_problem(client.post("/v1/runs", json={"config": name}), 404)
        assert client.get("/v1/runs").json() == []
    assert not list(served.folder.rglob("owned"))


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "-x", "a" * 81, ".hidden", "a b", "a\n", "a\0", "é"])
def test_names_of_workspaces_are_plain_names(served: Served, name: str) -> None:
    with served.client as client:
        require_problem(client.post("/v1/runs", json={"config": "plain.yaml", "workspace": name}), 422)


def test_a_workspace_that_is_a_link_to_elsewhere_is_refused(served: Served, tmp_path: Path) -> None:
    (served.folder / "workspaces").mkdir(exist_ok=True)
    (served.folder / "workspaces" / "out").symlink_to(tmp_path)
    with served.client as client:
        problem = require_problem(client.post("/v1/runs", json={"config": "plain.yaml", "workspace": "out"}), 422)
    assert "leads elsewhere" in problem["detail"]
    assert not list(tmp_path.iterdir())


def test_configs_are_yaml_with_something_to_run_and_links_out_and_loops_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "config"
    (root / "sub").mkdir(parents=True)
    (root / "a.yaml").write_text("runs: {x: {}}\njudges: {y: {}}")
    (root / "sub" / "b.yml").write_text("trainings: {x: {}}")
    (root / "inside.yaml").symlink_to("a.yaml")
    (root / "other.yaml").write_text("key: value")
    (root / "torn.yaml").write_text("runs: [")
    (root / "tagged.yaml").write_text("runs: !!python/object/apply:os.system [echo]")
    (root / "deep.yaml").write_text("[" * 5000)
    (root / "gone.yaml").symlink_to("nowhere")
    (root / "loop.yaml").symlink_to("loop.yaml")
    (root / "folder.yaml").mkdir()
    os.mkfifo(root / "pipe.yaml")
    (tmp_path / "secret.yaml").write_text("runs: {x: {}}")
    (root / "out.yaml").symlink_to("../secret.yaml")
    (root / "outer").symlink_to("..")
    found = list_configs(root)
    assert {name: config.kinds for name, config in found.items()} == {
        "a.yaml": ("generation", "judging"),
        "inside.yaml": ("generation", "judging"),
        "sub/b.yml": ("training",),
    }
    assert list_configs(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "localhost.", "[::2]"]
)
def test_a_name_that_is_not_this_services_is_refused(served: Served, host: str) -> None:
    answer = httpx2.get(f"{served.url}/health", headers={"Host": host})
    require_problem(answer, 421)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:1", "[::1]:8765"])
def test_its_own_names_are_taken_with_any_port(served: Served, host: str) -> None:
    assert httpx2.get(f"{served.url}/health", headers={"Host": host}).status_code == 200


def test_host_headers_are_read_without_their_port() -> None:
    seen = [host_name(text) for text in ("a", "A:80", "[::1]", "[::1]:80", "a:80:80", "")]
    assert seen == ["a", "a", "::1", "::1", "a:80", ""]


def test_huge_bodies_are_refused_before_they_are_read(served: Served) -> None:
    head = f"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.token}\r\n"
    for more in (f"Content-Length: {10**12}\r\n\r\n", "Content-Length: 16385\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall((head + more).encode())
            assert client.recv(12) == b"HTTP/1.1 413"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
        part = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        with pytest.raises(OSError, match=r"."):
            client.sendall(part * 10_000)
    with served.client as client:
        require_problem(client.post("/v1/runs", json={"config": "x" * 20_000}), 413)
        require_problem(client.post("/v1/runs", json={"config": "x" * 2_000}), 422)


def test_huge_heads_and_noise_do_not_end_the_service(served: Served) -> None:
    for junk in (b"\0" * 1000, b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 200_000, b"G" * 100_000 + b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.settimeout(20)
            try:
                client.sendall(junk + b"\r\n\r\n")
                assert client.recv(12).startswith(b"HTTP/1.1 4")
            except ConnectionError:
                pass
    assert httpx2.get(f"{served.url}/health").status_code == 200


def test_too_many_requests_are_429_with_a_time_to_wait(fresh: Served) -> None:
    codes: list[int] = []

    def ask() -> None:
        with fresh.client as client:
            codes.extend(client.get("/health").status_code for _ in range(400))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 2400
    assert codes.count(200) >= 1000
    assert set(codes) <= {200, 429}


def test_no_token_stands_in_the_log_or_in_what_a_run_is_told(fresh: Served) -> None:
    fresh.write_rows(LASTING)
    run = fresh.begin()
    fresh.wait_for_rows(run["id"])
    httpx2.get(f"{fresh.url}/v1/runs", headers={"Authorization": "Bearer guessed-secret"})
    with fresh.client as client:
        client.get(f"/v1/runs?token={fresh.token}")
        client.delete(f"/v1/runs/{run['id']}")
    assert fresh.wait_for(run["id"], "stopped")["state"] == "stopped"
    said = fresh.said() + "".join(path.read_text() for path in (fresh.state / "runs").rglob("*") if path.is_file())
    assert fresh.token not in said
    assert "guessed-secret" not in said


def test_what_the_service_keeps_is_its_owners_alone(served: Served) -> None:
    assert stat.S_IMODE(served.state.stat().st_mode) == 0o700
    assert stat.S_IMODE((served.state / "token").stat().st_mode) == 0o600


def test_the_listener_names_its_protocol_or_asyncio_would_delay_every_answer(tmp_path: Path) -> None:
    settings = Settings(tmp_path, tmp_path, tmp_path, tmp_path / "token", port=0)
    with listening(settings) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_connection_that_makes_no_request_or_half_of_one_is_closed(served: Served) -> None:
    said = [b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"\x16\x03\x01 no http"]
    sockets = [socket.create_connection(("127.0.0.1", served.port), 60) for _ in said]
    for connection, words in zip(sockets, said, strict=True):
        connection.sendall(words)
    heard = []
    for connection in sockets:
        with connection, connection.makefile("rb") as handle:
            heard.append(handle.read())  # to the end, which is the other side's
    assert heard[:2] == [b"", b""]
    assert heard[2].startswith(b"HTTP/1.1 400")
    assert httpx2.get(f"{served.url}/health").status_code == 200


def test_a_token_file_that_is_a_folder_or_no_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; name a file in it"):
        read_or_make_token(tmp_path)
    (tmp_path / "token").write_bytes(b"\xff\xfe" * 30)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(UserError, match=r"has no token in it .*; remove it, or name another --token-file"):
        read_or_make_token(tmp_path / "token")
