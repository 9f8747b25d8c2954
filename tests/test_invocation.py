"""Facts about what a report knows of the Snakemake that made it: its command, its config and the checkout's commit."""

import subprocess
from pathlib import Path

import pytest
from conftest import Project, echo_config
from test_report import HOSTILE, small, spec, words_of
from test_report_results import section

from gristmill import checkout, invocation
from gristmill.errors import UserError
from gristmill.files import read_json
from gristmill.report.data import Beside, gather
from gristmill.report.render import render


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_the_checkouts_own_and_says_that_files_were_edited(tmp_path: Path) -> None:
    assert checkout.commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert checkout.commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    git(tmp_path, "tag", "v1")
    assert checkout.commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert checkout.commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD") + "-dirty"
    (tmp_path / "inner").mkdir()
    assert checkout.commit(tmp_path / "inner") is None


def test_the_page_has_the_command_and_the_config_as_text(tmp_path: Path) -> None:
    path = tmp_path / "invocation.json"
    invocation.write(["/usr/bin/snakemake", "--cores", "2", "--config", f"title={HOSTILE}"], {"title": HOSTILE}, path)
    page = render(gather(spec(), *small(tmp_path), Beside(invocation=path)))
    text = words_of(section(page, "provenance"))
    assert "How it was called snakemake --cores 2 --config" in text
    assert "\\u003c" not in page
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_a_page_without_a_record_of_its_command_is_made_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "invocation.json"
    runs, judges = small(tmp_path)
    assert "How it was called" not in render(gather(spec(), runs, judges, Beside(invocation=path)))
    for text, why in (("{}", "started is missing"), ("{", "is not JSON"), ("[1]", "Input should be")):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"invocation.json.*{why}.*; remove it") as found:
            gather(spec(), runs, judges, Beside(invocation=path))
        assert "\n" not in str(found.value)


def test_a_run_leaves_its_command_and_config_and_a_dry_run_and_a_plan_leave_none(project: Project) -> None:
    project.write_rows([{"id": "a", "question": "b", "reference": "c"}])
    project.write_config(echo_config())
    path = project.folder / invocation.PATH
    project.run("-n")
    project.run("plan")
    assert not path.exists()
    project.done()
    found = read_json(path)
    assert found["command"].startswith("snakemake ")
    assert found["config"]["runs"] == echo_config()["runs"]
    page = (project.folder / "results/report.html").read_text()
    assert "How it was called" in page
    assert found["command"].split()[1] in words_of(section(page, "provenance"))
