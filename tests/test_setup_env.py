"""The set-up: which build of torch, what pip and uv are asked, when an environment counts as finished."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import setup_env
from setup_env import Attempt, Installer, SetupError, Stamp

ENVS = setup_env.ENVS
PIP = Installer("pip", ("python", "-m", "pip", "install"))
UV = Installer("uv", ("uv", "pip", "install"), ("--find-links", "/wheels"))
STAMP = Stamp("/repo/.venv", "3.11", "cpu", {"cpu.txt": "a", "model-demo.txt": "b"}, complete=True)


def yes() -> bool:
    return True


def no() -> bool:
    return False


# Which device


def test_auto_takes_the_cuda_build_only_where_a_gpu_is_found():
    assert setup_env.decide_device("auto", "linux", None, yes) == "gpu"
    assert setup_env.decide_device("auto", "linux", None, no) == "cpu"
    assert setup_env.decide_device("auto", "darwin", None, yes) == "cpu"


def test_auto_keeps_the_device_that_was_chosen_before():
    assert setup_env.decide_device("auto", "linux", replace(STAMP, device="gpu"), no) == "gpu"
    assert setup_env.decide_device("auto", "linux", replace(STAMP, complete=False), yes) == "cpu"


def test_a_named_device_wins_over_what_stands_and_what_is_found():
    assert setup_env.decide_device("cpu", "linux", replace(STAMP, device="gpu"), yes) == "cpu"
    assert setup_env.decide_device("gpu", "linux", STAMP, no) == "gpu"


def test_gpu_is_refused_where_cuda_does_not_exist():
    with pytest.raises(SetupError, match="needs Linux and this is darwin; use --device cpu"):
        setup_env.decide_device("gpu", "darwin", None, yes)


def test_a_python_that_is_too_old_is_refused_with_both_versions():
    setup_env.check_python((3, 11))
    with pytest.raises(SetupError, match=r"Python 3\.9 and gristmill needs 3\.11"):
        setup_env.check_python((3, 9))


# What pip and uv are asked


@pytest.mark.parametrize("installer", [PIP, UV])
def test_cpu_torch_on_linux_is_asked_for_by_its_local_version_in_every_attempt(installer):
    configured, official = setup_env.torch_attempts("2.13.0", "cpu", "linux", installer)
    for attempt in (configured, official):
        assert attempt.command[-1] == "torch==2.13.0+cpu"
        assert "--no-deps" in attempt.command
    assert setup_env.CPU_INDEX not in configured.command
    assert official.command[official.command.index("--index-url") + 1] == setup_env.CPU_INDEX


def test_the_official_index_is_not_waited_for_long():
    _, pip = setup_env.torch_attempts("2.13.0", "cpu", "linux", PIP)
    _, uv = setup_env.torch_attempts("2.13.0", "cpu", "linux", UV)
    assert pip.command[pip.command.index("--timeout") :][:4] == ("--timeout", "15", "--retries", "1")
    assert uv.env == {"UV_HTTP_TIMEOUT": "15", "UV_HTTP_RETRIES": "1"}


def test_macos_takes_the_plain_version():
    (attempt,) = setup_env.torch_attempts("2.13.0", "cpu", "darwin", PIP)
    assert attempt.command[-1] == "torch==2.13.0"


def test_gpu_torch_is_not_content_with_a_cpu_wheel_of_the_same_version():
    (attempt,) = setup_env.torch_attempts("2.13.0", "gpu", "linux", PIP)
    specifier = SpecifierSet(attempt.command[-1].removeprefix("torch"))
    assert "2.13.0" in specifier
    assert "2.13.0+cpu" not in specifier


def test_pip_settings_prefer_a_variable_to_install_to_global():
    listed = ":env:.find-links='/env'\nglobal.cert='/ca.pem'\nglobal.find-links='/global'\n"
    listed += "global.index-url='https://mirror/simple'\ninstall.index-url='https://install/simple'\n"
    assert setup_env.pip_settings(listed) == {
        "find-links": "/env",
        "cert": "/ca.pem",
        "index-url": "https://install/simple",
    }


def test_uv_is_given_the_sources_that_pip_would_use():
    settings = {"find-links": "/a /b", "index-url": "https://mirror/simple", "cert": "/ca.pem", "no-index": "1"}
    installer = setup_env.uv_installer("/bin/uv", settings, {})
    assert installer.sources == (
        *("--find-links", "/a", "--find-links", "/b"),
        *("--index-url", "https://mirror/simple"),
        "--no-index",
    )
    assert installer.env == {"SSL_CERT_FILE": "/ca.pem"}


def test_uv_takes_the_best_version_of_all_indexes_as_pip_does():
    settings = {"extra-index-url": "https://one/simple https://two/simple"}
    both = ("--extra-index-url", "https://one/simple", "--extra-index-url", "https://two/simple")
    strategy = ("--index-strategy", "unsafe-best-match")
    assert setup_env.uv_installer("/bin/uv", settings, {}).sources == (*both, *strategy)
    assert setup_env.uv_installer("/bin/uv", settings, {"UV_INDEX_STRATEGY": "first-index"}).sources == both
    assert setup_env.uv_installer("/bin/uv", settings, {"UV_EXTRA_INDEX_URL": "https://own/simple"}).sources == ()


def test_the_uv_of_the_environment_itself_does_not_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_env, "VENV", tmp_path / "real" / ".venv")
    (tmp_path / "real" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "real" / ".venv" / "bin" / "uv").touch(mode=0o755)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    for path in (tmp_path / "real" / ".venv" / "bin", tmp_path / "link" / ".venv" / "bin", Path(".venv/bin")):
        monkeypatch.setenv("PATH", str(path))
        assert setup_env.choose_installer().name == "pip"
    monkeypatch.setattr(setup_env, "VENV", tmp_path / "other")
    assert setup_env.choose_installer().name == "uv"


def test_uvs_own_variables_win_over_pips_settings():
    environ = {"UV_INDEX_URL": "https://uv/simple", "SSL_CERT_FILE": "/own.pem"}
    installer = setup_env.uv_installer("/bin/uv", {"index-url": "https://mirror/simple", "cert": "/ca.pem"}, environ)
    assert installer.sources == ()
    assert installer.env == {}


# When it is finished


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with small locked sets and no environment."""
    venv, envs = tmp_path / "a b" / ".venv", tmp_path / "a b" / "envs"
    envs.mkdir(parents=True)
    for name in ("cpu.txt", "gpu.txt", "dev.txt", "model-demo.txt"):
        (envs / name).write_text("torch==2.13.0\n" if name == "gpu.txt" else f"# {name}\n")
    paths = {"VENV": venv, "ENVS": envs, "PYTHON": venv / "bin" / "python"}
    paths |= {"STAMP": venv / "gristmill-setup.json", "LOG": venv / "setup.log"}
    for name, path in paths.items():
        monkeypatch.setattr(setup_env, name, path)
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--device", "cpu"])
    return tmp_path / "a b"


def fake_python(checkout: Path, status: int = 0) -> Path:
    """An environment whose Python writes its arguments down and exits with `status`."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> "{checkout}/calls"\nexit {status}\n')
    python.chmod(0o755)
    (checkout / ".venv" / "pyvenv.cfg").write_text("version = {}.{}.1\n".format(*sys.version_info))
    return checkout / "calls"


@pytest.fixture
def no_uv(monkeypatch):
    monkeypatch.setattr(setup_env.shutil, "which", lambda _: None)


def test_a_stamp_reads_back_as_it_was_written(checkout):
    setup_env.write_stamp(STAMP)
    assert setup_env.read_stamp(setup_env.STAMP) == STAMP


def test_a_missing_stamp_is_none_and_a_damaged_one_is_incomplete(checkout):
    assert setup_env.read_stamp(setup_env.STAMP) is None
    setup_env.STAMP.parent.mkdir()
    for damaged in ("", "[]", '{"path": 1}'):
        setup_env.STAMP.write_text(damaged)
        assert setup_env.read_stamp(setup_env.STAMP).complete is False


def test_a_changed_lock_is_wanted_anew_and_the_dev_set_stays_wanted(checkout):
    before = setup_env.wanted_stamp("cpu", True, None)
    assert setup_env.wanted_stamp("cpu", False, before) == before
    (checkout / "envs" / "cpu.txt").write_text("snakemake==9.27.1\n")
    assert setup_env.wanted_stamp("cpu", False, before) != before


@pytest.mark.parametrize(
    ("change", "remade"),
    [
        ({}, False),
        ({"locks": {"cpu.txt": "older"}}, False),
        ({"complete": False}, True),
        ({"device": "gpu"}, True),
        ({"python": "3.12"}, True),
        ({"path": "/elsewhere/.venv"}, True),
    ],
)
def test_an_environment_is_remade_when_interrupted_moved_or_of_another_kind(change, remade):
    assert setup_env.must_remake(replace(STAMP, **change), STAMP) is remade


def test_somebodys_own_environment_is_never_remade_and_refused_when_of_another_python():
    assert setup_env.must_remake(None, STAMP) is False
    setup_env.check_venv(None, STAMP, "3.11")
    with pytest.raises(SetupError, match=r"Python 3\.13 that was not made here.*remove \.venv"):
        setup_env.check_venv(None, STAMP, "3.13")


def test_the_stamp_is_complete_only_after_every_step(checkout, no_uv, capsys):
    calls = fake_python(checkout)
    setup_env.main()
    assert setup_env.read_stamp(setup_env.STAMP).complete
    torch, locked, model = calls.read_text().splitlines()
    assert torch.endswith("--no-deps torch==2.13.0+cpu" if sys.platform == "linux" else "--no-deps torch==2.13.0")
    assert locked.endswith(f"-r {checkout}/envs/cpu.txt")
    assert model.endswith(f"--no-deps -r {checkout}/envs/model-demo.txt")
    calls.unlink()
    setup_env.main()
    assert not calls.exists(), "a finished environment is left alone"
    assert capsys.readouterr().out.count(".venv is ready (cpu, Python") == 2


def test_a_failed_step_is_one_line_and_leaves_the_stamp_incomplete(checkout, no_uv, capsys):
    fake_python(checkout, status=1)
    assert setup_env.run() == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: torch 2\.13\.0.*\n", error)
    assert setup_env.read_stamp(setup_env.STAMP).complete is False


def test_a_python_without_venv_is_told_which_package_to_install(checkout, no_uv, monkeypatch, capsys):
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda _: None)
    assert setup_env.run() == 2
    assert capsys.readouterr().err.endswith("on Debian or Ubuntu: apt install python3-venv\n")


def test_an_interrupted_environment_is_emptied_before_it_is_made_anew(checkout, no_uv, monkeypatch):
    fake_python(checkout)
    left_over = checkout / ".venv" / "half-installed"
    left_over.mkdir()
    setup_env.write_stamp(replace(setup_env.wanted_stamp("cpu", False, None), complete=False))
    steps = []
    monkeypatch.setattr(setup_env, "run_step", lambda title, *_: steps.append(title))
    setup_env.main()
    assert not left_over.exists()
    assert steps[0] == "a new .venv, with pip"


def test_the_second_attempt_is_made_when_the_first_fails_and_all_output_is_logged(checkout, capsys):
    setup_env.VENV.mkdir()
    setup_env.run_step(
        "torch", [Attempt(("sh", "-c", "echo one; exit 1"), {}), Attempt(("sh", "-c", "echo $N"), {"N": "two"})]
    )
    assert re.search(r"^one\n\$ sh -c echo \$N\ntwo\n", setup_env.LOG.read_text(), re.MULTILINE)


def test_a_full_disk_ends_the_attempts_and_is_named(checkout):
    setup_env.VENV.mkdir()
    full = Attempt(("sh", "-c", "echo 'OSError: [Errno 28] No space left on device'; exit 1"), {})
    with pytest.raises(SetupError, match="torch: the disk is full"):
        setup_env.run_step("torch", [full, Attempt(("true",), {})], cannot="not found anywhere")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "WARNING: Retrying ... NewConnectionError(...)\nERROR: No matching distribution found for x==1",
            "cannot be reached",
        ),
        ("error: Request failed\n  cause: Failed to fetch: https://x/\n  cause: dns error", "cannot be reached"),
        ("ERROR: No matching distribution found for x==1", "there is no x==1 for Python"),
        (
            "ok\nerror: Failed to resolve `--find-links` entry\n  cause: No such file",
            "Failed to resolve `--find-links`",
        ),
        ("Traceback\nSomethingOdd: 7\n", "SomethingOdd: 7"),
        ("", "no message"),
    ],
)
def test_a_failure_is_explained_from_what_the_installer_printed(output, reason):
    assert reason in setup_env.explain(output)


# The locked sets


def locked(name: str) -> list[str]:
    return [line for line in (ENVS / name).read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt", "dev.txt", "model-demo.txt"])
def test_every_line_of_a_locked_set_is_one_exact_version(name):
    assert [
        line
        for line in locked(name)
        if not re.fullmatch(r"[a-z0-9.-]+==[^ *@/]+( ; sys_platform [!=]= \"linux\")?", line)
    ] == []


def test_the_gpu_set_differs_from_the_cpu_set_by_torch_and_the_cuda_libraries_only():
    assert [line for line in locked("cpu.txt") if line not in locked("gpu.txt")] == [
        f'torch=={setup_env.pinned_torch()}+cpu ; sys_platform == "linux"',
        f'torch=={setup_env.pinned_torch()} ; sys_platform != "linux"',
    ]
    added = {line.partition("==")[0] for line in locked("gpu.txt") if line not in locked("cpu.txt")}
    assert {name for name in added if not name.startswith(("nvidia-", "cuda-"))} == {"torch", "triton"}


def test_the_conda_twins_repeat_the_pip_sets():
    for name in ("cpu", "gpu"):
        (pip,) = (
            d["pip"] for d in yaml.safe_load((ENVS / f"{name}.yaml").read_text())["dependencies"] if isinstance(d, dict)
        )
        assert [line for line in pip if not line.startswith("--")] == locked(f"{name}.txt")
        assert locked("model-demo.txt")[0] in (ENVS / f"{name}.post-deploy.sh").read_text()


def test_every_pin_lies_in_the_range_that_pyproject_allows():
    project = tomllib.loads((ENVS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = dict(line.partition(" ;")[0].split("==") for line in locked("gpu.txt") + locked("dev.txt"))
    for text in project["dependencies"] + extras["slurm"] + extras["dev"]:
        requirement = Requirement(text)
        assert pins[requirement.name.lower()] in requirement.specifier, text
