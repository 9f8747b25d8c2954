"""Facts about scripts/watch.py: in a pipe, and on a real terminal (tmux) beside a run of the real workflow."""

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Project, echo_config, wait_until

from gristmill.files import dumps
from gristmill.live.words import clean

WATCH = ROOT / "scripts" / "watch.py"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31m[bold red]loud[/bold red] [/nothing] \r\n\u202egnp \x9b5A \udc80 end"
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Screen:
    """A terminal of its own size with a shell in it."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self._server = f"gristmill-{uuid.uuid4().hex[:8]}"
        size = ["-x", str(columns), "-y", str(rows)]
        plain = ["env", "-u", "TMUX", "-u", "COLUMNS", "-u", "LINES", "PS1=$ ", "sh"]
        self._tmux("-f", os.devnull, "new-session", "-d", *size, "-c", str(folder), *plain)
        self._tmux("set-option", "-g", "status", "off")
        self.resize(columns, rows)

    def _tmux(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", "-L", self._server, *words], capture_output=True, text=True, timeout=30, check=True
        ).stdout

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)
        self._tmux("send-keys", "Enter")

    def key(self, name: str) -> None:
        self._tmux("send-keys", name)

    def watch(self, results: Path, before: str = "", every: str = "0.2") -> None:
        self.type(f"{before} '{sys.executable}' '{WATCH}' --results '{results}' --every {every}; echo left:$?".strip())

    def lines(self) -> list[str]:
        return self._tmux("capture-pane", "-p").splitlines()

    def text(self) -> str:
        return "\n".join(self.lines())

    def raw(self) -> str:
        """With colours."""
        return self._tmux("capture-pane", "-p", "-e")

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def is_alternate(self) -> bool:
        return self._tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    def title(self) -> str:
        return self._tmux("display-message", "-p", "#{pane_title}").strip()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text())

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._server, "kill-server"], capture_output=True, timeout=30, check=False)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    made = Screen(tmp_path, 120, 30)
    yield made
    made.close()


def watch(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(WATCH), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def worker(results: Path, unit: str, shard: str, lives: bool = True, **line: Any) -> None:
    """What a worker of this host leaves; `lives`: this process stands for it."""
    folder = results / unit
    (folder / "live").mkdir(parents=True, exist_ok=True)
    (folder / "journal").mkdir(exist_ok=True)
    if not (folder / "requests.jsonl").exists():
        (folder / "requests.jsonl").write_text("{}\n" * 100)
    host, now = socket.gethostname(), time.time()
    about = {"gristmill_live": 1, "unit": unit, "shard": shard, "host": host, "begun_unix_s": now, "total": 50}
    said = {"at": now, "phase": "running", "done": 10, "tokens": 100, "seconds": 5.0, "batch_rows": 8, **line}
    (folder / "live" / f"{shard}.jsonl").write_bytes(dumps(about) + b"\n" + dumps(said) + b"\n")
    note = {"pid": os.getpid() if lives else 2**30, "host": host, "since": now - 1}
    (folder / "journal" / f"{shard}.lock").write_text(json.dumps(note))


def start(project: Project, seconds: str) -> subprocess.Popen[bytes]:
    words = project.command("results/runs/plain/generations.jsonl", gpu=2)
    slow = project.environment(GRISTMILL_ECHO_SECONDS=seconds)
    return subprocess.Popen(words, cwd="/", env=slow, start_new_session=True, stderr=subprocess.DEVNULL)


def end(running: subprocess.Popen[bytes]) -> None:
    if running.poll() is None:
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


# Texts.


def test_nothing_that_a_terminal_obeys_is_left_in_a_text() -> None:
    shown = clean(HOSTILE)
    assert all(character.isprintable() for character in shown)
    assert shown.startswith("\\x1b]0;owned\\x07\\x1b[2J")
    assert "[bold red]loud[/bold red]" in shown
    assert len(clean("x" * 10_000)) == 300


# In a pipe.


def test_a_pipe_gets_a_line_for_each_change_and_ends_with_the_run(project: Project) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n}", "reference": n} for n in range(12))
    results = project.folder / "results"
    words = [sys.executable, str(WATCH), "--results", str(results), "--every", "0.3"]
    watching = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running = start(project, "0.4")
    try:
        out, err = watching.communicate(timeout=200)
    finally:
        end(running)
        watching.kill()
    lines = out.splitlines()
    assert (watching.returncode, err) == (0, "")
    assert lines[0].endswith("no results yet; waiting for a run to begin")
    assert any("runs/plain: running, " in line and "/12 rows" in line and "tokens/s" in line for line in lines)
    assert any(line.endswith("runs/plain: done, 12/12 rows, 24 tokens") for line in lines)
    assert lines[-1].endswith("finished: 1 of 1 done")
    assert all(before[9:] != after[9:] for before, after in itertools.pairwise(lines))
    assert "\x1b" not in out


def test_once_says_all_and_hostile_texts_are_escaped(tmp_path: Path) -> None:
    results = tmp_path / "results"
    worker(results, "runs/[red]plain", "1-of-2", error=HOSTILE, failed=1)
    worker(results, "runs/[red]plain", "2-of-2", lives=False)
    said = watch("--results", str(results), "--once")
    assert said.returncode == 0
    assert all(character.isprintable() or character == "\n" for character in said.stdout)
    first, unit, *rest = said.stdout.splitlines()
    assert first == "1 running"
    assert unit.startswith("runs/[red]plain: running, 20/100 rows, 1 failed, ")
    assert any(line.startswith("  1-of-2 on ") and "running, 10/50, 1 failed" in line for line in rest)
    assert any(line.startswith("  2-of-2 on ") and "lost, 10/50" in line for line in rest)
    assert f"  error: {clean(HOSTILE)}" in rest


def test_json_is_the_snapshot_in_ascii(tmp_path: Path) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-2", error=HOSTILE)
    said = watch("--results", str(results), "--json")
    assert said.stdout.isascii()
    (unit,) = json.loads(said.stdout)["units"]
    assert (unit["unit"], unit["done"], unit["total"], unit["state"]) == ("runs/plain", 10, 100, "running")
    assert unit["errors"] == [HOSTILE]


@pytest.mark.parametrize("shape", ["--once", "--json"])
def test_a_snapshot_of_no_folder_is_an_error_of_one_line(tmp_path: Path, shape: str) -> None:
    said = watch("--results", str(tmp_path / "results"), shape)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("error: there is no folder ")
    assert said.stderr.count("\n") == 1


def test_a_file_in_the_folders_place_and_an_interval_of_nothing_are_errors_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (["--results", str(tmp_path / "file")], ["--every", "0"], ["--every", "nan"]):
        said = watch(*words)
        assert (said.returncode, said.stderr.count("\n")) == (2, 1), words


def test_stopped_results_say_how_to_go_on_and_a_pipe_ends(tmp_path: Path) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-1", lives=False)
    said = watch("--results", str(results))
    assert said.returncode == 0
    assert "nothing is at work here: 1 failed; run Snakemake again to go on" in said.stdout


def test_a_reader_of_the_pipe_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-1")
    words = f"'{sys.executable}' '{WATCH}' --results '{results}' --every 0.1 | head -n 1"
    process = subprocess.Popen(["bash", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for number in range(100):
        if process.poll() is not None:
            break
        worker(results, "runs/plain", "1-of-1", done=number)
        time.sleep(0.2)
    out, err = process.communicate(timeout=60)
    assert (out.count("\n"), err) == (1, "")


# On a terminal.


@needs_tmux
def test_a_run_is_watched_from_before_its_begin_through_a_kill_to_its_end(project: Project, screen: Screen) -> None:
    project.write_rows({"id": f"r{n}", "question": f"say {n} again", "reference": n} for n in range(24))
    project.write_config(echo_config())
    screen.watch(project.folder / "results")
    screen.wait_for("no results yet; waiting for a run to begin")
    running = start(project, "0.5")
    try:
        wait_until(lambda: "1 running" in screen.text() and screen.text().count("batch 1") == 2)
        shown = screen.text()
        assert "runs/plain" in shown
        assert "/24 rows" in shown
        assert "tok/s" in shown
        assert "left" in shown
        screen.resize(44, 12)
        wait_until(lambda: len(screen.lines()) == 12 and "tok/s" not in screen.text() and "/24" in screen.text())
        assert all(len(line) <= 44 for line in screen.lines())
        screen.resize(120, 30)
        screen.wait_for("tok/s")
        end(running)
        screen.wait_for("nothing is at work here: 1 failed")
        assert "is gone" in screen.text()
        running = start(project, "0.1")
        screen.wait_for("1 running")
        screen.wait_for("finished: 1 of 1 done")
        assert running.wait(timeout=120) == 0
    finally:
        end(running)
    screen.key("q")
    screen.wait_for("left:0")
    assert not screen.is_alternate()


@needs_tmux
@pytest.mark.parametrize("how", ["q", "C-c", "SIGTERM"])
def test_leaving_gives_the_terminal_back_as_it_was(tmp_path: Path, screen: Screen, how: str) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-1")
    screen.type("before=$(stty -g); echo here it was")
    screen.watch(results, before="echo $$ >shell; exec 9>&1; ")
    screen.wait_for("1 running")
    assert screen.is_alternate()
    assert "here it was" not in screen.text()
    if how == "SIGTERM":
        shell = (tmp_path / "shell").read_text().strip()
        children = subprocess.run(["pgrep", "-P", shell], capture_output=True, text=True, check=True)
        os.kill(int(children.stdout), signal.SIGTERM)
    else:
        screen.key(how)
    screen.wait_for("left:0")
    assert not screen.is_alternate()
    screen.type('[ "$(stty -g)" = "$before" ] && echo same | tr a-z A-Z')
    screen.wait_for("SAME")
    assert "here it was" in screen.text()


@needs_tmux
def test_it_goes_on_after_a_suspend(tmp_path: Path, screen: Screen) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-1")
    screen.type("set -m")
    screen.watch(results)
    screen.wait_for("1 running")
    screen.key("C-z")
    wait_until(lambda: not screen.is_alternate())
    screen.type("echo between | tr a-z A-Z")
    screen.wait_for("BETWEEN")
    screen.type("fg")
    wait_until(screen.is_alternate)
    screen.wait_for("1 running")
    screen.key("q")
    wait_until(lambda: not screen.is_alternate())


@needs_tmux
def test_hostile_texts_neither_move_the_cursor_nor_name_the_window_nor_become_markup(
    tmp_path: Path, screen: Screen
) -> None:
    results = tmp_path / "results"
    worker(results, "runs/[red]plain", "1-of-1", error=HOSTILE, failed=1)
    title = screen.title()
    screen.watch(results)
    screen.wait_for("[bold red]loud[/bold red]")
    lines = screen.lines()
    assert lines[0].startswith("1 running")
    assert any("runs/[red]plain" in line for line in lines)
    assert any(line.startswith("error runs/[red]plain: \\x1b]0;owned\\x07\\x1b[2J") for line in lines)
    assert screen.title() == title


@needs_tmux
def test_without_colours_the_words_say_it(tmp_path: Path, screen: Screen) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-2", error="no room", failed=1)
    worker(results, "runs/plain", "2-of-2", lives=False)
    screen.watch(results, before="NO_COLOR=1")
    screen.wait_for("lost")
    assert "failed" in screen.text()
    assert not any(f"\x1b[{code}m" in screen.raw() for code in (*range(31, 38), *range(91, 98)))


@needs_tmux
def test_a_small_window_shows_what_matters_and_says_what_it_leaves_out(tmp_path: Path, screen: Screen) -> None:
    results = tmp_path / "results"
    for number in range(1, 41):
        worker(results, "runs/plain", f"{number}-of-40", lives=number != 33)
    for number in range(20):
        worker(results, f"runs/other{number}", "1-of-1")
    screen.resize(38, 12)
    screen.watch(results, before="COLUMNS=200 LINES=50")
    screen.wait_for("more workers")
    lines = screen.lines()
    assert len(lines) == 12
    assert all(len(line) <= 38 for line in lines)
    assert any("more units" in line for line in lines)
    assert any(line.startswith("lost") and "33-of-40" in line for line in lines)
    assert "q leaves" in screen.text()


@needs_tmux
def test_results_that_are_removed_and_come_back_are_waited_for(tmp_path: Path, screen: Screen) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-1")
    screen.watch(results)
    screen.wait_for("runs/plain")
    shutil.rmtree(results)
    screen.wait_for("no results yet")
    assert not results.exists()
    worker(results, "runs/again", "1-of-1")
    screen.wait_for("runs/again")


@needs_tmux
def test_a_terminal_without_utf_8_keeps_its_lines(tmp_path: Path, screen: Screen) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-1", error="café ☃ " + "é" * 200)
    screen.watch(results, before="LC_ALL=POSIX PYTHONCOERCECLOCALE=0 PYTHONUTF8=0")
    screen.wait_for("caf? ? ??")
    lines = screen.lines()
    assert lines[0] == "1 running"
    assert [line.split()[0] for line in lines if line] == ["1", "running", "running", "error", "q"]


@needs_tmux
def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, screen: Screen) -> None:
    results = tmp_path / "results"
    worker(results, "runs/plain", "1-of-1")
    screen.watch(results, before="TERM=dumb")
    screen.wait_for("runs/plain: running")
    assert not screen.is_alternate()
    screen.key("C-c")
    screen.wait_for("left:0")
