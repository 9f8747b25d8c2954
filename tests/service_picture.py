"""Draws docs/service.png: the service's page with a run at work, on GPUs that are not there.

    PYTHONPATH=scripts python tests/service_picture.py docs/service.png

It needs chromium, and the extra `service`. Two units of the echo engine are at work; one of them has rows that fail.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import yaml
from conftest import ROOT, echo_config, wait_until
from service_project import Served
from test_report_browser import Browser

WIDTH = 1180
GPUS = [{"index": n, "uuid": f"GPU-{n}", "name": "NVIDIA H100", "memory_total_mib": 81559} for n in range(4)]
CARDS = {
    f"GPU-{n}": {"utilization_percent": use, "memory_mib": mib, "milliwatts": watts * 1000, "celsius": celsius}
    for n, (use, mib, watts, celsius) in enumerate(
        [(93, 71200, 612, 61), (91, 70900, 604, 63), (88, 75400, 655, 66), (95, 75300, 662, 67)]
    )
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        served = Served(Path(name) / "study")
        write_study(served)
        served.extra = {
            **{"PYTHONPATH": str(ROOT / "tests/fake_nvml"), "FAKE_NVML": json.dumps(CARDS)},
            **{"GRISTMILL_ECHO_SECONDS": "0.4", "GRISTMILL_ECHO_FAILS": "r4"},
        }
        served.start()
        browser = Browser(Path(name) / "profile")
        try:
            draw(browser, served, Path(sys.argv[1]))
        finally:
            browser.close()
            served.close()


def write_study(served: Served) -> None:
    """Two runs, of a model on one GPU and of one on two."""
    served.write_project(rows=200)
    paths = {
        "datasets": {"rows": {"path": str(served.folder / "rows.jsonl")}},
        "prompts": {"ask": {"file": str(served.folder / "ask.jinja")}},
    }
    models = {
        "small": {"engine": "echo", "shards_per_worker": 2},
        "large": {"engine": "echo", "shards_per_worker": 2, "gpus_per_model": 2},
    }
    run = {"dataset": "rows", "prompt": "ask", "metrics": ["contains"], "max_failed_ratio": 0.1}
    config = echo_config(**paths, models=models, runs={name: {**run, "model": name} for name in models})
    (served.folder / "config" / "study.yaml").write_text(yaml.safe_dump(config))
    (served.folder / "config" / "wrong.yaml").unlink()
    (served.folder / "inventory.json").write_text(json.dumps(GPUS))


def draw(browser: Browser, served: Served, picture: Path) -> None:
    """Start the study, wait until both units are at work, take the picture."""
    browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=f"{served.url}/")
    browser.wait("document.getElementById('login')?.hidden === false")
    browser.run(f"document.getElementById('token').value = {json.dumps(served.token)}")
    browser.run("document.querySelector('#login button').click()")
    browser.wait("!document.getElementById('main').hidden")
    run = served.begin(config="study.yaml", cores=8)

    def at_work() -> bool:
        units = served.run(run["id"])["units"]
        return len(units) == 2 and all(unit["worker_states"].get("running") and unit["done"] > 9 for unit in units)

    wait_until(at_work)
    browser.wait("document.querySelector('#runs .errors li') !== null", seconds=60)
    browser.screenshot(picture, full=True)


if __name__ == "__main__":
    main()
