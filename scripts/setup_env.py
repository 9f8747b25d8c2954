"""Make .venv, the Python environment that gristmill runs in. `make env`, `make demo` and `make test` call this.

    python3 scripts/setup_env.py                  # what the pipeline needs, for the GPU if there is one
    python3 scripts/setup_env.py --dev            # and what `make test` needs
    python3 scripts/setup_env.py --device gpu     # on a login node, for compute nodes with NVIDIA GPUs

Needs only Python 3.11+ with pip. Where uv is on PATH it is used instead, with pip's own index and wheel folders.

- PyPI's torch for Linux is the CUDA build (3 GB). Without a GPU the CPU build is looked for in pip's wheel folders and
  index, then at download.pytorch.org; where neither has it this stops, and never takes the CUDA build unasked.
- A stamp in .venv says what it holds. It is marked incomplete before the first change and complete after the last, so
  that an interrupted install is made anew and a finished one costs milliseconds.
- A .venv without a stamp is somebody's own: the pinned versions are installed into it and nothing is deleted.
- One set-up runs at a time. The installer inherits the lock, so that one orphaned by kill -9 is waited for.
- What pip or uv print goes to .venv/setup.log; an error here is one line.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV, ENVS = ROOT / ".venv", ROOT / "envs"
PYTHON, STAMP, LOG = VENV / "bin" / "python", VENV / "gristmill-setup.json", VENV / "setup.log"
OLDEST_PYTHON = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_TIMEOUT_S = 15


class SetupError(Exception):
    """What stopped the set-up, as one line: the value, the limit and the next step."""


@dataclass(frozen=True)
class Stamp:
    """What an environment holds. `locks` maps the file name of each installed set to its hash."""

    path: str  # programs in .venv/bin name their interpreter by absolute path: a moved checkout needs a new .venv
    python: str
    device: str
    locks: Mapping[str, str]
    complete: bool


@dataclass(frozen=True)
class Installer:
    """pip or uv: the command up to `install`, where it shall look for packages, and variables it needs."""

    name: str
    install: tuple[str, ...]
    sources: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """One command line and the variables to run it with."""

    command: tuple[str, ...]
    env: Mapping[str, str]


def main() -> None:
    """Decide what the environment shall hold, compare with its stamp, install what is missing."""
    arguments = parse_arguments()
    check_python(sys.version_info[:2])
    with one_at_a_time():
        stamp = read_stamp(STAMP)
        device = decide_device(arguments.device, sys.platform, stamp, nvidia_gpu_present)
        wanted = wanted_stamp(device, arguments.dev, stamp)
        if stamp != wanted or not PYTHON.exists():
            check_venv(stamp, wanted, venv_python_version(VENV))
            write_stamp(replace(wanted, complete=False))
            installer = choose_installer()
            make_venv(stamp, wanted, installer)
            install(installer, wanted)
            write_stamp(wanted)
    say(f"environment: .venv is ready ({device}, Python {wanted.python})")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="which build of torch; auto keeps what stands, else takes gpu where there is an NVIDIA GPU",
    )
    parser.add_argument("--dev", action="store_true", help="install the test and lint tools too")
    return parser.parse_args()


# What to do: decisions, without I/O


def check_python(version: Sequence[int]) -> None:
    """Refuse a Python that the pinned versions do not run on."""
    if tuple(version) < OLDEST_PYTHON:
        have, need = (".".join(map(str, part)) for part in (version, OLDEST_PYTHON))
        raise SetupError(f"this is Python {have} and gristmill needs {need} or newer; use make PYTHON=python3.12 demo")


def decide_device(asked: str, system: str, stamp: Stamp | None, gpu_present: Callable[[], bool]) -> str:
    """`cpu` or `gpu`. auto keeps what was chosen before: a login node shares its .venv with the GPU nodes."""
    if asked == "gpu" and system != "linux":
        raise SetupError(f"--device gpu needs Linux and this is {system}; use --device cpu")
    if asked != "auto":
        return asked
    if stamp and stamp.device:
        return stamp.device
    return "gpu" if system == "linux" and gpu_present() else "cpu"


def check_venv(stamp: Stamp | None, wanted: Stamp, standing_python: str | None) -> None:
    """Refuse to install into somebody's own .venv of another Python version, which would be neither theirs nor ours."""
    if stamp is None and standing_python not in (None, wanted.python):
        raise SetupError(
            f".venv is an environment of Python {standing_python} that was not made here, and this is Python "
            f"{wanted.python}; remove .venv, or use make PYTHON=python{standing_python} demo"
        )


def must_remake(stamp: Stamp | None, wanted: Stamp) -> bool:
    """Whether what stands in .venv is ours and of no use: interrupted, moved, or for another device or Python."""
    if stamp is None:
        return False
    useful = (stamp.path, stamp.python, stamp.device) == (wanted.path, wanted.python, wanted.device)
    return not (stamp.complete and useful)


def torch_attempts(version: str, device: str, system: str, installer: Installer) -> list[Attempt]:
    """How to get torch, without its dependencies; the first that works is taken."""
    command = (*installer.install, "--no-deps")
    configured = (*command, *installer.sources)
    if device == "gpu":  # `==` would be content with a CPU build (2.13.0+cpu) in a wheel folder
        return [Attempt((*configured, f"torch==={version}"), installer.env)]
    if system != "linux":  # PyPI's wheels for macOS are the CPU build
        return [Attempt((*configured, f"torch=={version}"), installer.env)]
    wheel = f"torch=={version}+cpu"
    impatient = ("--timeout", str(CPU_INDEX_TIMEOUT_S), "--retries", "1") if installer.name == "pip" else ()
    impatient_env = {"UV_HTTP_TIMEOUT": str(CPU_INDEX_TIMEOUT_S), "UV_HTTP_RETRIES": "1"}
    return [
        Attempt((*configured, wheel), installer.env),
        Attempt((*command, *impatient, "--index-url", CPU_INDEX, wheel), {**installer.env, **impatient_env}),
    ]


def pip_settings(config_list: str) -> dict[str, str]:
    """What `pip config list` prints, by name: a variable (`:env:.`) wins over `install.`, which wins over `global.`."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in config_list.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                found[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return found


def uv_installer(uv: str, settings: Mapping[str, str], environ: Mapping[str, str]) -> Installer:
    """Uv with pip's settings, which it does not read by itself; its own variables (UV_…) win."""
    sources: list[str] = []
    for folder in settings.get("find-links", "").split():
        sources += ["--find-links", folder]
    if "index-url" in settings and not environ.keys() & {"UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX"}:
        sources += ["--index-url", settings["index-url"]]
    extra = settings.get("extra-index-url", "").split()
    if extra and not environ.keys() & {"UV_EXTRA_INDEX_URL", "UV_INDEX"}:
        for url in extra:
            sources += ["--extra-index-url", url]
        if "UV_INDEX_STRATEGY" not in environ:
            sources += ["--index-strategy", "unsafe-best-match"]  # as pip does: the best version of all indexes
    if settings.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
        sources += ["--no-index"]
    env = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings and "SSL_CERT_FILE" not in environ else {}
    return Installer("uv", (uv, "pip", "install", "--python", str(PYTHON)), tuple(sources), env)


def explain(output: str) -> str:
    """Why pip or uv failed, in a few words and with the next step, from what it printed."""
    if "No space left on device" in output:
        return "the disk is full; free some GiB and run this again"
    missing = re.search(r"No matching distribution found for (.+)|there is no version of (\S+)", output)
    network = (
        r"ConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Network is unreachable|Connection refused"
    )
    network += r"|Failed to fetch|dns error|error sending request|ProxyError|SSLError"
    if re.search(network, output):
        return "the package index cannot be reached; check the network, or set PIP_INDEX_URL to one that can"
    if missing:
        return f"there is no {missing[1] or missing[2]} for Python {here()} in the package index"
    errors = [line for line in output.splitlines() if re.match(r"(ERROR|error|×|Error)\b", line)]
    return (errors or output.strip().splitlines() or ["no message"])[-1]


def here() -> str:
    """`3.11 on linux x86_64`."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} on {sys.platform} {platform.machine()}"


# Looking around


def nvidia_gpu_present() -> bool:
    """Whether this machine has an NVIDIA GPU to use (a container sees /proc/driver/nvidia of its host even without)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout


def read_stamp(path: Path) -> Stamp | None:
    """The stamp; None where there is none. A damaged one counts as incomplete."""
    try:
        return Stamp(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return Stamp(path="", python="", device="", locks={}, complete=False)


def write_stamp(stamp: Stamp) -> None:
    """Put the stamp in place, whole."""
    VENV.mkdir(exist_ok=True)
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(stamp), indent=2) + "\n")
    temporary.replace(STAMP)


def wanted_stamp(device: str, dev: bool, stamp: Stamp | None) -> Stamp:
    """What a finished environment's stamp will say. The dev set, once installed, stays wanted."""
    names = [f"{device}.txt", "model-demo.txt"]
    if dev or (stamp and "dev.txt" in stamp.locks):
        names.append("dev.txt")
    locks = {name: hashlib.sha256((ENVS / name).read_bytes()).hexdigest() for name in names}
    return Stamp(str(VENV), "{}.{}".format(*sys.version_info), device, locks, complete=True)


def venv_python_version(venv: Path) -> str | None:
    """The Python of an environment as `3.11`; None where there is no environment."""
    try:
        match = re.search(r"^version(?:_info)? *= *(\d+\.\d+)", (venv / "pyvenv.cfg").read_text(), re.MULTILINE)
    except FileNotFoundError:
        return None
    return match[1] if match else None


def pinned_torch() -> str:
    """The version of torch in the locked sets."""
    for line in (ENVS / "gpu.txt").read_text().splitlines():
        if line.startswith("torch=="):
            return line.removeprefix("torch==")
    raise SetupError(f"{ENVS / 'gpu.txt'} pins no torch; run .venv/bin/python envs/lock.py")


def choose_installer() -> Installer:
    """Uv where it is on PATH (the one of .venv itself may have to go), else the environment's own pip."""
    uv = shutil.which("uv")
    if uv is None or Path(uv).parent.resolve() == (VENV / "bin").resolve():
        return Installer("pip", (str(PYTHON), "-m", "pip", "install", "--no-input"), env={"PIP_USER": "0"})
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    return uv_installer(uv, pip_settings(listed.stdout), os.environ)


# Doing it


def make_venv(stamp: Stamp | None, wanted: Stamp, installer: Installer) -> None:
    """Have an environment in .venv: the one that stands there if it is of use, else a new one."""
    if must_remake(stamp, wanted):
        if Path(sys.prefix) == VENV:
            raise SetupError(".venv must be made anew and this is its own Python; run this with the system's python3")
        for entry in VENV.iterdir():  # .venv itself stays: it may be a link to a larger disk
            if entry != STAMP:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if PYTHON.exists():
        return
    if installer.name == "uv":
        command = (*installer.install[:1], "venv", "--allow-existing", "--seed", "--python", sys.executable, str(VENV))
        run_step("a new .venv, with uv", [Attempt((*command, *installer.sources), installer.env)])
    elif importlib.util.find_spec("ensurepip") is None:
        raise SetupError(f"{sys.executable} has no venv module; on Debian or Ubuntu: apt install python3-venv")
    else:
        run_step("a new .venv, with pip", [Attempt((sys.executable, "-m", "venv", str(VENV)), {})])


def install(installer: Installer, wanted: Stamp) -> None:
    """Torch first, so that nothing else decides which build it is; then the locked sets; then the demo model."""
    torch = pinned_torch()
    attempts = torch_attempts(torch, wanted.device, sys.platform, installer)
    cannot = None
    if len(attempts) > 1:
        cannot = (
            f"torch {torch}+cpu for Python {here()} is neither in pip's wheel folders and index nor at {CPU_INDEX}; "
            "set PIP_FIND_LINKS to a folder with that wheel, or take the 3 GB CUDA build with make env DEVICE=gpu"
        )
    run_step(f"torch {torch} ({wanted.device} build)", attempts, cannot)
    command = (*installer.install, *installer.sources)
    locked = [name for name in wanted.locks if name != "model-demo.txt"]
    sets = [part for name in locked for part in ("-r", str(ENVS / name))]
    run_step(" and ".join(f"envs/{name}" for name in locked), [Attempt((*command, *sets), installer.env)])
    model = (*command, "--no-deps", "-r", str(ENVS / "model-demo.txt"))
    run_step("the demo model", [Attempt(model, installer.env)])


def run_step(title: str, attempts: Sequence[Attempt], cannot: str | None = None) -> None:
    """Run the first attempt that works. `cannot` is the error when all failed to find what they look for."""
    say(f"environment: {title} ...", end=" ")
    started_s = time.monotonic()
    for attempt in attempts:
        returncode, output = run_logged(attempt)
        if returncode == 0:
            say(f"{time.monotonic() - started_s:.0f} s")
            return
        if "No space left on device" in output:
            break
    say("failed")
    reason = f"{title}: {explain(output)}" if cannot is None or "No space left on device" in output else cannot
    raise SetupError(f"{reason} (all output: {LOG})")


def run_logged(attempt: Attempt) -> tuple[int, str]:
    """Run one command with its output in the log; returns its exit status and that output."""
    with LOG.open("a+") as log:
        print("$", *attempt.command, file=log, flush=True)
        begin = log.tell()
        done = subprocess.run(
            attempt.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **attempt.env},
            close_fds=False,  # hands the lock on
            check=False,
        )
        log.seek(begin)
        return done.returncode, log.read()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock on this file, which the installers inherit; wait for another set-up that has it."""
    with open(__file__, "a") as handle:  # for writing: NFS gives no exclusive lock otherwise
        os.set_inheritable(handle.fileno(), True)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("environment: waiting for another set-up of this .venv to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def say(text: str, end: str = "\n") -> None:
    """One line for the user, at once."""
    print(text, end=end, flush=True)


def run() -> int:
    """`main` with every foreseeable failure as one line and exit status 2."""
    try:
        main()
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; run this again to finish .venv", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that subprocess.run ends the installer
    sys.exit(run())
