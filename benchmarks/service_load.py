"""How the monitoring service answers under load: requests at a fixed rate, errors, and the time each took.

    python benchmarks/service_load.py                          # 200 requests a second for 30 s, reads, loopback
    python benchmarks/service_load.py --rate 100 --seconds 10

It starts a service in a folder of its own, with an inventory of eight GPUs, and, unless --idle, a run of the echo
engine whose rows move meanwhile. Requests leave at their time whether or not earlier ones were answered, so that a
pause of the service shows in all of them; a request's time runs from when it was due. It needs aiohttp beside the extra
`service`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PATHS: tuple[str, ...] = (
    "/v1/gpus",
    "/v1/runs",
    "/v1/gpus/0/stats",
    "/metrics",
    "/ready",
    "/v1/recommendations",
    "/health",
    "/v1/history",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--idle", action="store_true", help="without a run beside")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process, url = start(folder)
        try:
            token = (folder / ".gristmill-service" / "token").read_text().strip()
            run = None if args.idle else begin(url, token)
            load, before = os.getloadavg(), psutil.cpu_times()
            took, errors = asyncio.run(fire(url, token, args.rate, args.seconds))
            stolen = stolen_ratio(before, psutil.cpu_times())
            done = None if run is None else json.loads(ask(url, token, f"/v1/runs/{run}"))["done"]
            if run is not None:
                ask(url, token, f"/v1/runs/{run}", method="DELETE")
                while json.loads(ask(url, token, f"/v1/runs/{run}"))["ended_unix_seconds"] is None:
                    time.sleep(0.5)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    took.sort()
    found = {
        f"p{share * 100:g}_ms": round(took[int(share * (len(took) - 1))] * 1000, 2) for share in (0.5, 0.9, 0.99, 1)
    }
    found |= {"requests": len(took) + len(errors), "errors": len(errors), "rate": args.rate, "seconds": args.seconds}
    found |= {"rows_of_the_run_beside": done, "load_before": round(load[0], 2), "cores": os.cpu_count()}
    found |= {"stolen_cpu_ratio": stolen}
    print(json.dumps(found, indent=1))
    print(*errors[:3], sep="\n", end="\n" if errors else "")


def stolen_ratio(before: Any, after: Any) -> float | None:
    """The share of the cores' time that a virtual machine's host gave to others; None where it is not told."""
    if not hasattr(after, "steal"):
        return None
    return round((after.steal - before.steal) / ((sum(after) - sum(before)) or 1), 3)


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A service in `folder`, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gpus = [{"name": "H100", "memory_total_mib": 81559, "count": 8}]
    (folder / "inventory.json").write_text(json.dumps(gpus))
    more = {"GRISTMILL_INVENTORY": str(folder / "inventory.json"), "GRISTMILL_LEASES": str(folder / "leases")}
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--directory", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, **more, "GRISTMILL_ECHO_SECONDS": "2"}, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return process, url
        except OSError:
            time.sleep(0.1)
    raise SystemExit("error: the service did not start within 20 s")


def begin(url: str, token: str) -> str:
    """Start the echo example and wait until its first row is there."""
    run = json.loads(ask(url, token, "/v1/runs", "POST", {"config": "examples/echo.yaml", "cores": 1}))["id"]
    while json.loads(ask(url, token, f"/v1/runs/{run}"))["done"] == 0:
        time.sleep(0.5)
    return str(run)


def ask(url: str, token: str, path: str, method: str = "GET", body: object = None) -> bytes:
    """One request outside the measurement."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


async def fire(url: str, token: str, rate: float, seconds: float) -> tuple[list[float], list[str]]:
    """Seconds of each answer from when its request was due, and what went wrong."""
    import aiohttp

    took: list[float] = []
    errors: list[str] = []
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=100)) as session:

        async def one(path: str, due: float) -> None:
            try:
                async with session.get(url + path) as answer:
                    await answer.read()
                    if answer.status != 200:
                        raise ValueError(f"{path}: {answer.status}")
                took.append(time.perf_counter() - due)
            except (aiohttp.ClientError, ValueError, TimeoutError) as error:
                errors.append(f"{type(error).__name__}: {error}")

        began = time.perf_counter()
        tasks = []
        for n in range(int(rate * seconds)):
            due = began + n / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(PATHS[n % len(PATHS)], due)))
        await asyncio.gather(*tasks)
    return took, errors


if __name__ == "__main__":
    main()
