"""The service's page in a real browser: the token, a run that starts, moves, stops; hostile text, widths, colours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra service is not installed")
pytest.importorskip("prometheus_client", reason="the extra service is not installed")

from service_project import LASTING, Served
from test_report_browser import CHROMIUM, Browser

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
    (made.folder / "config" / f"{HOSTILE.replace('/', '')}.yaml").write_text(plain)
    inventory = [{"name": HOSTILE, "memory_total_mib": 81920, "memory_used_mib": used} for used in (10, 5000)]
    (made.folder / "inventory.json").write_text(json.dumps(inventory))
    made.start()
    yield made
    made.close()


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
    browser.wait("!document.getElementById('main').hidden && document.querySelector('#gpus .card') !== null")


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


def test_a_run_is_started_its_rows_move_and_it_is_stopped(browser: Browser, served: Served) -> None:
    sign_in(browser, served)
    browser.run(
        "document.getElementById('config').value = 'plain.yaml';document.querySelector('#start button').click()"
    )
    browser.wait("document.querySelector('#runs article') !== null")
    rows = "[...document.querySelectorAll('#runs progress')].reduce((sum, bar) => sum + bar.value, 0)"
    browser.wait(f"{rows} > 0", seconds=120)
    first = browser.run(rows)
    browser.wait(f"{rows} > {first}", seconds=120)
    assert browser.run("document.querySelector('#runs progress').max") == LASTING
    browser.run("[...document.querySelectorAll('#runs button')].find((each) => each.innerText === 'Stop').click()")
    browser.wait("document.querySelector('#runs .state').innerText.startsWith('stopping')")
    browser.wait("document.querySelector('#runs .state').innerText.startsWith('stopped, ')", seconds=120)
    assert browser.run("[...document.querySelectorAll('#runs button')].filter((each) => each.offsetParent).length") == 1
    browser.run("[...document.querySelectorAll('#runs button')].find((each) => each.innerText === 'Log').click()")
    browser.wait("document.querySelector('#runs pre').innerText.includes('rule generate')")
    assert browser.errors == []
    assert {url.split("?")[0] for url in browser.requests if not url.startswith(served.url)} <= {
        "about:blank",
        "data:,",
    }


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
