"""The service's page in a real browser: the token, runs that start, move, stop; hostile text, widths, colours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra service is not installed")
pytest.importorskip("prometheus_client", reason="the extra service is not installed")

import yaml
from service_project import LASTING, Served
from test_report_browser import CHROMIUM, Browser

from gristmill.live import Device, UnitProgress, WorkerProgress, words
from gristmill.service.units import DeviceView, UnitView, cut

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium runs these tests")

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("study") / "here")
    made.write_project(rows=LASTING)
    plain = (made.folder / "config" / "plain.yaml").read_text()
    write_short(made, yaml.safe_load(plain))
    (made.folder / "config" / f"{HOSTILE.replace('/', '')}.yaml").write_text(plain)
    inventory = [{"name": HOSTILE, "memory_total_mib": 81920, "memory_used_mib": used} for used in (10, 5000)]
    (made.folder / "inventory.json").write_text(json.dumps(inventory))
    made.extra = {"GRISTMILL_ECHO_FAILS": "<img.*"}
    made.start()
    yield made
    made.close()


def write_short(served: Served, config: dict[str, Any]) -> None:
    """A run of twelve seconds and more; the row that fails has markup for an id."""
    rows = [{"id": HOSTILE if n == 3 else f"r{n}", "question": "say it", "reference": n} for n in range(40)]
    (served.folder / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["datasets"]["rows"]["path"] = str(served.folder / "short.jsonl")
    config["runs"]["plain"]["max_failed_ratio"] = 0.5
    (served.folder / "config" / "short.yaml").write_text(yaml.safe_dump(config))


def visit(browser: Browser, served: Served, width: int = 1280, scheme: str = "light") -> None:
    browser.requests, browser.errors = [], []
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=f"{served.url}/")
    browser.wait("document.readyState === 'complete' && document.getElementById('login') !== null")


def enter(browser: Browser, token: str) -> None:
    browser.wait("!document.getElementById('login').hidden")
    browser.run(
        f"document.getElementById('token').value = {json.dumps(token)};document.querySelector('#login button').click()"
    )


def sign_in(browser: Browser, served: Served, width: int = 1280, scheme: str = "light") -> None:
    visit(browser, served, width, scheme)
    if browser.run("sessionStorage.getItem('gristmill-token') === null"):
        enter(browser, served.token)
    browser.wait("!document.getElementById('main').hidden && document.querySelector('#gpus tbody tr') !== null")


def begin(browser: Browser, config: str) -> None:
    """Choose a config and press Start."""
    browser.run(
        f"document.getElementById('config').value = {json.dumps(config)};"
        "document.querySelector('#start button').click()"
    )


def test_the_page_asks_for_the_token_once_and_a_wrong_one_is_said(browser: Browser, served: Served) -> None:
    visit(browser, served)
    enter(browser, "wrong")
    browser.wait("document.getElementById('message').innerText === 'The token is not right.'")
    assert browser.run("sessionStorage.length") == 0
    enter(browser, served.token)
    browser.wait("!document.getElementById('main').hidden")
    assert browser.run("document.getElementById('login').hidden")
    visit(browser, served)
    browser.wait("!document.getElementById('main').hidden")
    assert browser.run("localStorage.length + document.cookie.length") == 0


def test_a_run_is_followed_to_its_end_and_an_error_is_text(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    browser.run(
        "(() => { window.drawn = []; const draw = show; show = (run) => { draw(run);"
        "drawn.push(Object.fromEntries(['units', 'workers', 'errors'].map((kind) =>"
        "[kind, document.querySelector(`#runs .${kind}`).innerText]))); }; })()"
    )
    browser.run("document.getElementById('workspace').value = 'short';document.getElementById('gpus-wanted').value = 1")
    begin(browser, "short.yaml")
    browser.wait("document.querySelector('#runs .state')?.innerText === 'finished'", seconds=240)
    drawn = browser.run("drawn")
    done = [int(found[1]) for each in drawn if (found := re.search(r"running\s+(\d+)/40 rows", each["units"]))]
    assert done == sorted(done)
    assert len({*done}) >= 3
    assert any(
        re.search(r"runs/plain 1-of-1\s+running\s+\d+/40\s.*GPU 0", each["workers"], re.DOTALL) for each in drawn
    )
    assert browser.run("document.querySelector('#runs .toggle').getAttribute('aria-expanded')") == "false"
    browser.run("document.querySelector('#runs .toggle').click()")
    assert re.search(r"runs/plain\s+done\s+39/40 rows\s+1\s", browser.text("#runs .units"))
    assert any(f"row {HOSTILE}#0 failed: out_of_memory" in each["errors"] for each in drawn)
    assert browser.run("document.images.length") == 0
    assert browser.errors == []


def test_a_run_is_stopped_while_its_log_is_open_and_the_focus_stays(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    begin(browser, "plain.yaml")
    card = "[...document.querySelectorAll('#runs article')].find((each) => each.innerText.startsWith('plain.yaml'))"
    browser.wait(f"{card}?.querySelector('progress')?.value > 0", seconds=240)
    assert browser.run(f"{card}.querySelector('progress').max") == LASTING
    browser.run(f"{card}.querySelector('.buttons').lastChild.focus();document.activeElement.click()")
    browser.wait(f"{card}.querySelector('pre').innerText.includes('rule generate')")
    first = browser.run(f"{card}.querySelector('progress').value")
    browser.wait(f"{card}.querySelector('progress').value > {first}", seconds=60)
    assert browser.run("document.activeElement.textContent") == "Log"
    assert browser.run(f"{card}.querySelector('.workers').getAttribute('role')") == "table"
    browser.run(f"{card}.querySelector('.buttons').firstChild.focus();document.activeElement.click()")
    browser.wait(f"{card}.querySelector('.state').innerText === 'stopped'", seconds=120)
    assert browser.run(f"document.activeElement === {card}.querySelector('.toggle')")
    browser.wait(f"!{card}.querySelector('pre').innerText.includes('Nothing was said')")
    assert browser.run(f"{card}.querySelector('pre').offsetParent !== null")
    browser.wait("document.getElementById('summary').innerText === 'No run is at work.'")
    visit(browser, served)
    browser.wait(f"{card} !== undefined")
    assert browser.run("document.querySelector('.toggle[aria-expanded=true]') === null")
    urls = {url.split("?")[0] for url in browser.requests if not url.startswith(served.url)}
    assert urls <= {"about:blank", "data:,"}
    assert browser.errors == []


def ended_run(*units: UnitProgress) -> dict[str, Any]:
    """A run that failed, as GET /v1/runs gives it."""
    shown = [unit.model_dump(mode="json") for unit in cut([UnitView.of(unit) for unit in units])]
    times = {"created_unix_seconds": 1.0, "ended_unix_seconds": 62.0}
    counts = {"rows": None, "done": 4, "failed": 0, "exit_code": 1}
    about = {"id": "20260101T000000Z-abcdef", "config": HOSTILE, "kinds": [], "workspace": "w" * 80}
    return {**about, **times, **counts, "state": "failed", "units": shown}


@pytest.mark.parametrize("width", [390, 700, 1280])
def test_a_thousand_workers_with_names_like_markup_fit_the_page(browser: Browser, served: Served, width: int) -> None:
    sign_in(browser, served, width=width)
    device = Device(None, HOSTILE, HOSTILE, 81920, 40960, 0.5)
    worker = WorkerProgress(HOSTILE, "h" * 200, "lost", 4, None, 7, 50, 5.0, None, 8, 2, None, (device,) * 4)
    workers = tuple(replace(worker, shard=f"{HOSTILE} {n}") for n in range(1000))
    counts = (None, 3, 0, None, None, None)
    unit = UnitProgress("runs/" + "u" * 200, "run", 4, *counts, workers, ("x" * 299, HOSTILE), "failed")
    browser.run(f"show({json.dumps(ended_run(unit))})")
    card = "document.querySelector('[data-run=\"20260101T000000Z-abcdef\"]')"
    browser.run(f"{card}.querySelector('.toggle').click()")
    assert browser.run(f"{card}.querySelector('.errors').lastChild.innerText").endswith(f": {HOSTILE}")
    assert "… and more workers: 936 lost" in browser.run(f"{card}.innerText")
    assert browser.run(f"{card}.querySelector('progress').hasAttribute('value')") is False
    assert "4/? rows" in browser.run(f"{card}.querySelector('progress').getAttribute('aria-label')")
    assert browser.run("document.images.length") == 0
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.errors == []


def test_numbers_are_written_as_watch_writes_them(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    for value in (None, 0.0, 3.14, 999.94, 1000.0, 1234567.8):
        assert browser.run(f"rate({json.dumps(value)})") == words.rate(value)
    for seconds in (None, 0.0, 59.7, 61.2, 3600.0, 360_000.0):
        assert browser.run(f"duration({json.dumps(seconds)})") == words.duration(seconds)
    assert browser.run("[rows(3, null), rows(3, 12345)]") == [words.rows(3, None), words.rows(3, 12345)]
    for device in (
        Device(2, "GPU-x", "H100", 81559, 70900, 0.93),
        Device(None, "GPU-0123", "H100", None, 1024, None),
        Device(0, "GPU-x", "H100", 81559, None, 0.5),
    ):
        assert browser.run(f"gpu({DeviceView.of(device).model_dump_json()})") == words.gpu(device)
    for kind, noun in (("run", "rows"), ("training", "steps"), ("logits", "windows")):
        assert browser.run(f"noun({{kind: {json.dumps(kind)}}})") == noun


def test_a_start_that_is_refused_is_said_in_words(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    (served.folder / "config" / "gone.yaml").write_text((served.folder / "config" / "plain.yaml").read_text())
    visit(browser, served)
    browser.wait("[...document.getElementById('config').options].some((each) => each.value === 'gone.yaml')")
    (served.folder / "config" / "gone.yaml").unlink()
    begin(browser, "gone.yaml")
    browser.wait("document.getElementById('message').innerText.includes('there is no config of that name')")


def test_hostile_names_are_text(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    assert HOSTILE in browser.run("document.getElementById('gpus').innerText")
    assert browser.run("[...document.getElementById('config').options].some((each) => each.text.includes('<img'))")
    assert browser.run("document.images.length") == 0
    browser.wait("document.getElementById('advice').innerText.includes('filled by processes without a lease')")


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    browser.run(
        "(() => { const made = document.createElement('script'); made.textContent = 'window.owned = 1';"
        "document.body.append(made); })()"
    )
    assert browser.run("window.owned === undefined")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_in_light_and_dark(browser: Browser, served: Served, scheme: str) -> None:
    sign_in(browser, served, width=390, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") == 390
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(18, 22, 29)") is (scheme == "dark")
    assert browser.errors == []


def test_every_control_has_a_name(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    nameless = browser.run(
        "[...document.querySelectorAll('input, select, button, progress')].filter((each) =>"
        "!(each.labels?.[0]?.textContent || each.getAttribute('aria-label') || each.textContent).trim()).length"
    )
    assert nameless == 0


def test_the_page_asks_nobody_else(served: Served) -> None:
    text = (Path(__file__).parents[1] / "scripts/gristmill/service/page/index.html").read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert "innerHTML" not in text
