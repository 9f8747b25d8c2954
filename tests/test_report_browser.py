"""The report in a real browser: Debian's chromium, driven over its own pipe (DevTools protocol), with no other package.

Skipped where no chromium is installed (`apt-get install chromium`). One browser serves all tests of the file.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, echo_config
from test_report import HOSTILE, Folders, generation, payload, row, small, spec, write_demo, write_judge, write_run
from test_report_results import compared, jury, labelled, ranked, sums, takes_the_right

from gristmill.report.data import Beside
from gristmill.report.render import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium runs these tests")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """A chromium and one page of it. Commands go to its fd 3, answers come from fd 4, each ended by a zero byte."""

    def __init__(self, profile: Path) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        high = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (to_child, from_child)
        ]  # out of the way of 3 and 4

        def wire() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (to_child, from_child, *high):
            os.close(fd)
        self._buffer, self._number, self.session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._attach()

    def _attach(self) -> None:
        pages = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60)[0], "chromium said nothing for 60 s"
            part = os.read(self._read, 1 << 20)
            assert part, "chromium ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def open(self, page: Path, fragment: str = "", **sizes: Any) -> None:
        """Load a report and wait until its script has run."""
        self.load(page, fragment, **sizes)
        self.wait("document.getElementById('browser')?.hidden === false")

    def load(self, page: Path, fragment: str = "", width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a file."""
        self.requests, self.errors = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.absolute().as_uri() + fragment)
        self.wait("document.readyState === 'complete'")

    def enter_frame(self) -> int:
        """The page's only frame, for `run`."""
        (child,) = self.call("Page.getFrameTree")["frameTree"]["childFrames"]
        context: int = self.call("Page.createIsolatedWorld", frameId=child["frame"]["id"])["executionContextId"]
        return context

    def run(self, script: str, **where: Any) -> Any:
        """The value of a JavaScript expression in the page, or in a frame with its contextId."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, **where)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0, **where: Any) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition, **where):
            assert time.monotonic() < end, f"never true: {condition}; {self.errors}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")

    def text(self, selector: str) -> str:
        value: str = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return value

    def choose(self, label: str, option: str) -> None:
        """Pick the option of a labelled <select> whose text begins with `option`."""
        self.run(
            "(([label, option]) => { const select = [...document.querySelectorAll('#selects label')]"
            ".find((each) => each.firstChild.data === label).querySelector('select');"
            "select.value = [...select.options].find((each) => each.text.startsWith(option)).value;"
            f"select.dispatchEvent(new Event('input', {{bubbles: true}})); }})({json.dumps([label, option])})"
        )

    def check(self, flag: str) -> None:
        self.run(
            "((flag) => [...document.querySelectorAll('#flags label')].find((each) => each.innerText.startsWith(flag))"
            f".querySelector('input').click())({json.dumps(flag)})"
        )

    def search(self, words: str) -> None:
        self.run(
            "((words) => { const box = document.getElementById('search'); box.value = words;"
            f"box.dispatchEvent(new Event('input', {{bubbles: true}})); }})({json.dumps(words)})"
        )

    def screenshot(self, path: Path, full: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small report with hostile rows."""
    root = tmp_path_factory.mktemp("small")
    runs, judges = small(root)
    judges |= write_judge(
        root, "grader", {"terse": runs["terse"]}, lambda rid, _: "A" if "1" in rid.id else "hard to say"
    )
    return written(root, runs, judges, title=f"Small {HOSTILE}")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with comparisons, rankings, a jury, a labelled run and rows of turns."""
    root = tmp_path_factory.mktemp("full")
    two = sums(root, "good", [n % 10 != 3 for n in range(40)]) | sums(root, "bad", [n % 3 == 0 for n in range(40)])
    judges = write_judge(root, "arena", two, takes_the_right) | write_judge(root, "stuck", two, lambda *_: "A")
    beside = Beside(
        juries=jury(root, judges, ["good", "bad"]),
        comparisons=compared(root, two, ("good", "bad")),
        rankings=ranked(root, two, judges),
    )
    said = [(HOSTILE, HOSTILE), ("ham", "ham"), ("ham", HOSTILE)]
    logprobs = [-0.2, -2.0]
    runs = two | labelled(root, "likely", said, (HOSTILE, "ham"), label_logprobs=logprobs)
    talks = [generation(row(n), f"{HOSTILE} {t}", variant=f"turn_{t}") for n in range(3) for t in (1, 2)]
    runs |= write_run(root, "talk", talks, dataset="talks")
    judges |= write_judge(
        root, "grader", {"talk": runs["talk"]}, lambda rid, _: "A" if rid.variant == "turn_1" else "B"
    )
    write_report(spec(), runs, judges, root / "report.html", beside)
    return root / "report.html"


def written(root: Path, runs: Folders, judges: Folders, **kwargs: Any) -> Path:
    write_report(spec(**kwargs), runs, judges, root / "report.html")
    return root / "report.html"


def found(browser: Browser) -> str:
    return browser.text("#found")


def listed(browser: Browser) -> list[str]:
    ids: list[str] = browser.run("[...document.querySelectorAll('#rows .id')].map((each) => each.textContent)")
    return ids


def address_of(row_id: str) -> str:
    return "#row=" + urllib.parse.quote(row_id, safe="")


def test_no_text_of_a_row_is_run_or_becomes_an_element(browser: Browser, page: Path) -> None:
    browser.open(page, address_of(HOSTILE))
    assert browser.run("document.title") == f"Small {HOSTILE}"
    assert browser.run("document.images.length") == 0
    assert browser.run("document.scripts.length") == 2
    assert HOSTILE.replace("\u2028", "") in browser.text("#row").replace("\u2028", "").replace("\n", "")
    browser.run(f"location.hash = {json.dumps(address_of('q-005'))}")
    browser.wait("document.querySelector('#row-title').innerText === 'q-005'")
    assert "onerror=" in browser.text("#row .answers")
    assert "\ufffd" in browser.run("document.querySelector('#row .answers').textContent.toWellFormed()")
    assert browser.run("document.title").startswith("Small </script>")


def test_the_page_asks_for_nothing_but_itself_and_logs_no_error(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("j")
    browser.search("believe")
    urls = {url for url in browser.requests if not url.startswith(("about:", "data:"))}
    assert urls == {page.as_uri()}
    assert browser.errors == []


def test_the_policy_blocks_a_script_and_a_style_that_are_added_later(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run(
        "for (const [tag, code] of [['script', \"document.title = 'owned'\"], ['style', 'body { display: none }']]) {"
        "const node = document.createElement(tag); node.textContent = code; document.head.append(node); }"
    )
    assert browser.run("document.title") != "owned"
    assert browser.run("getComputedStyle(document.body).display") == "block"


def test_a_deep_link_opens_its_row_and_shows_every_answer(browser: Browser, page: Path) -> None:
    browser.open(page, "#row=q-001")
    text = browser.text("#row")
    assert "It is, let me think," in text
    assert "truncated" in text
    assert browser.run("document.querySelectorAll('#row .answer').length") == 4  # two runs, two judges
    assert browser.run("document.querySelector('#rows [aria-current]').innerText").startswith("q-001")
    assert browser.run("document.getElementById('samples').getBoundingClientRect().top") < 900


def test_a_deep_link_to_a_row_that_is_not_embedded_says_so(browser: Browser, page: Path) -> None:
    browser.open(page, "#row=nowhere")
    assert "Row “nowhere” is not among the rows on this page." in browser.text("#row")


def test_a_deep_link_out_of_the_filters_clears_them(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.check("truncated")
    assert listed(browser) == ["q-001"]
    browser.run("location.hash = '#row=q-007'")
    browser.wait("document.querySelector('#row-title').innerText === 'q-007'")
    browser.wait("document.getElementById('found').innerText.startsWith('12 of 12')")


def test_a_row_whose_id_has_half_a_surrogate_pair_can_be_linked_to(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelectorAll('#rows a')[9].click()")
    browser.wait("location.hash === '#row=lone%EF%BF%BD'")
    assert browser.run("document.getElementById('row-title').innerText.toWellFormed()") == "lone\ufffd"


def test_search_looks_in_answers_and_says_how_many_rows_fit(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert found(browser) == "12 of 12 rows"
    browser.search("let me THINK")
    assert found(browser) == "1 of 12 rows"
    assert listed(browser) == ["q-001"]
    browser.search("no such words")
    assert browser.text("#rows") == "No row fits these filters."
    assert browser.run("document.getElementById('found').getAttribute('aria-live')") == "polite"


def test_each_filter_keeps_the_rows_it_names(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.check("invalid")
    assert listed(browser) == ["q-002", "q-004"]
    browser.choose("Run", "terse")
    assert listed(browser) == []
    browser.run("document.querySelector('#filters [type=reset]').click()")
    browser.wait("document.getElementById('found').innerText === '12 of 12 rows'")
    browser.check("wrong")
    browser.choose("kind", "easy")
    assert listed(browser) == ["q-000", "q-002", "q-004", "q-006", "q-008", "q-010"]


def test_rows_are_found_by_verdict_by_disagreement_and_by_unreadable_words(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.check("orders disagree")
    assert found(browser) == "11 of 12 rows"  # the skipped answer was not judged
    browser.check("orders disagree")
    browser.check("unreadable")
    assert listed(browser)[:2] == ["q-000", "q-002"]
    browser.check("unreadable")
    browser.choose("Verdict", "correct")
    assert listed(browser) == ["q-001", "q-010", "q-011"]
    groups = browser.run("[...document.querySelectorAll('optgroup')].map((each) => each.label)")
    assert groups == ["arena/terse_vs_wordy (unreliable)", "grader/terse (unreliable)"]


def test_j_and_k_move_through_the_rows_but_not_while_typing(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("j")
    browser.press("j")
    assert browser.text("#row-title") == "q-002"
    assert browser.run("location.hash") == "#row=q-002"
    browser.press("k")
    assert browser.text("#row-title") == "q-001"
    browser.run("document.getElementById('search').focus()")
    browser.press("j")
    assert browser.text("#row-title") == "q-001"
    assert browser.run("document.getElementById('search').value") == "j"


def test_the_keyboard_reaches_a_row_and_stays_on_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelectorAll('#rows a')[6].focus()")
    browser.run("document.activeElement.click()")
    browser.wait("document.querySelector('#row-title').innerText === 'q-006'")
    assert browser.run("document.activeElement.innerText").startswith("q-006")


def test_an_unreliable_judge_is_marked_beside_its_words(browser: Browser, page: Path) -> None:
    browser.open(page, "#row=q-000")
    cards = browser.run("[...document.querySelectorAll('#row .answer.doubtful')].map((each) => each.innerText)")
    assert len(cards) == 2
    assert all("unreliable" in card for card in cards)
    assert "The orders disagree: counted as a tie." in cards[0]
    assert "terse shown first, wordy second" in cards[0]
    assert "nothing read" in cards[1]
    assert "hard to say" in cards[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(browser: Browser, page: Path, scheme: str) -> None:
    browser.open(page, "#row=q-005", width=390, height=844, scheme=scheme)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") == 390
    wide = "[...document.querySelectorAll('.chart .desk')].some((each) => getComputedStyle(each).display !== 'none')"
    assert browser.run(wide) is False


def test_dark_mode_recolours_text_and_bars(browser: Browser, page: Path) -> None:
    seen = []
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme)
        seen.append(browser.run(
            "[...new Set([...document.querySelectorAll('.chart .desk text, .chart .desk path[fill]')]"
            ".map((each) => getComputedStyle(each).fill))]"
        ))  # fmt: skip
    assert seen[0] != seen[1]
    assert not set(seen[0]) & set(seen[1])


def test_every_control_and_region_has_a_name(browser: Browser, page: Path) -> None:
    browser.open(page)
    nameless = browser.run(
        "[...document.querySelectorAll('input, select, button, a, [role=region], [role=img]')].filter((each) =>"
        "!(each.labels?.[0]?.textContent || each.getAttribute('aria-label') || each.textContent).trim()).length"
    )
    assert nameless == 0
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3')].map((each) => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_the_page_works_as_it_is_within_snakemakes_own_report(browser: Browser, project: Project) -> None:
    project.write_rows({"id": f"q{n}", "question": f"say {n}", "reference": n} for n in range(6))
    project.write_config(echo_config())
    project.done()
    whole = project.folder / "whole.html"
    assert "Report created" in project.run("--report", str(whole)).stdout
    browser.load(whole)
    for click in ("[...document.querySelectorAll('a')].find((each) => each.innerText.trim() === 'Results')",
                  "document.querySelector('td [iconname=eye]')"):  # fmt: skip
        browser.wait(f"Boolean({click})")
        browser.run(f"{click}.click()")
    browser.wait("document.querySelector('iframe')?.src.startsWith('data:text/html')")
    frame = browser.enter_frame()
    browser.wait("document.getElementById('browser')?.hidden === false", contextId=frame)
    browser.run("document.querySelectorAll('#rows a')[3].click()", contextId=frame)
    browser.wait("document.getElementById('row-title').innerText === 'q3'", contextId=frame)
    assert browser.run("location.hash", contextId=frame) == "#row=q3"
    urls = {url for url in browser.requests if not url.startswith(("about:", "data:"))}
    assert urls == {whole.as_uri()}
    assert browser.errors == []


def test_rows_of_several_datasets_and_samples_are_told_apart(browser: Browser, tmp_path: Path) -> None:
    sums = [generation(row(n), f"sum {sample}", sample=sample) for n in range(2) for sample in range(2)]
    runs = write_run(tmp_path, "a", sums)
    runs |= write_run(tmp_path, "b", [generation(row(n), "a fact") for n in range(2)], dataset="facts")
    browser.open(written(tmp_path, runs, {}), "#row=q-001&dataset=sums&sample=1")
    assert "sum 1" in browser.text("#row")
    browser.choose("Dataset", "facts")
    assert found(browser) == "2 of 6 rows"
    browser.run("document.querySelector('#rows a').click()")
    browser.wait("document.querySelector('#row').innerText.includes('a fact')")


@pytest.mark.parametrize("count", [5_000, 50_000])
def test_many_rows_are_searched_paged_and_linked_to_with_a_page_of_them_in_the_document(
    browser: Browser, tmp_path: Path, count: int
) -> None:
    path = written(tmp_path, *write_demo(tmp_path, count), max_rows=count)
    assert path.stat().st_size < 3_000_000
    rows = payload(path.read_text())["rows"]
    embedded = len(rows)
    assert 5_000 <= embedded <= count
    browser.open(path)
    assert found(browser) == f"{embedded:,} of {embedded:,} rows"
    assert browser.run("document.querySelectorAll('#rows li').length") == 50
    assert (f"Showing the first {embedded:,} of {count:,} rows" in browser.text("#samples")) is (embedded < count)
    browser.run("document.getElementById('page-on').click()")
    assert browser.text("#page") == f"Page 2 of {-(-embedded // 50):,}"
    for _ in range(3):
        browser.press("j")
    assert found(browser) == f"Row spe-01, 4 of {embedded:,}"
    browser.search("digit")
    kept = int(found(browser).split()[0].replace(",", ""))
    assert 0 < kept < embedded
    browser.search("")
    browser.open(path, address_of(rows[-1]["id"]))
    assert f"{embedded:,} of {embedded:,}" in browser.text("#row")
    assert browser.run("document.querySelectorAll('#rows li').length") == 50 - (-embedded) % 50
    assert browser.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_comparisons_rankings_juries_and_labels_fit_a_phone(browser: Browser, full: Path, scheme: str) -> None:
    browser.open(full, "#row=q-001&dataset=talks", width=390, height=844, scheme=scheme)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.errors == []


def test_the_new_sections_have_names_and_headings_in_order(browser: Browser, full: Path) -> None:
    browser.open(full)
    regions = browser.run(
        "[...document.querySelectorAll('[role=region]')].filter((r) => !r.ariaLabel || r.tabIndex).length"
    )
    assert regions == 0
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3, h4')].map((each) => Number(each.tagName[1]))")
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    heads = browser.run("[...document.querySelectorAll('main table thead th')].every((th) => th.scope === 'col')")
    assert heads is True


def test_a_row_of_turns_shows_each_turn_with_its_answers_and_judges(browser: Browser, full: Path) -> None:
    browser.open(full, "#row=q-001&dataset=talks")
    titles = browser.run("[...document.querySelectorAll('#row h4')].map((each) => each.textContent)")
    assert titles == ["Turn 1", "Reference", "Judges of turn 1", "Turn 2", "Reference", "Judges of turn 2"]
    cards = browser.run("[...document.querySelectorAll('#row .answer')].map((each) => each.innerText)")
    assert ["Judged correct." in cards[1], "Judged incorrect." in cards[3]] == [True, True]
    assert cards[2].replace("\u2028", "").replace("\n", "").find(f"{HOSTILE} 2".replace("\u2028", "")) > 0
    browser.choose("Dataset", "talks")
    assert found(browser) == "3 of 43 rows"
    assert browser.run("document.querySelectorAll('#rows li:first-child .sign-of').length") == 2


def test_what_was_read_and_the_labels_probabilities_stand_under_the_answer(browser: Browser, full: Path) -> None:
    browser.open(full, "#row=q-001&dataset=sums")
    card = browser.run(
        "[...document.querySelectorAll('#row .answer')].find((each) => each.innerText.startsWith('likely')).innerText"
    )
    assert "Read: label </script>" in card
    assert "81.9 %, ham 13.5 %" in card
    assert browser.run("document.images.length") == 0
