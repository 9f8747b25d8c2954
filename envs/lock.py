"""Rewrite the locked sets beside this file from the CPU environment that runs it.

    .venv/bin/python envs/lock.py

To move to newer versions: upgrade them in .venv, run `make test`, run this, commit what changed.

- What belongs to which set follows from pyproject.toml: cpu.txt and gpu.txt hold the dependencies and the slurm extra,
  dev.txt what the dev extra adds, each with everything it needs in turn.
- gpu.txt differs from cpu.txt by the torch build and the CUDA libraries, which only a resolver knows on a CPU machine.
- The conda twins repeat the pins: Snakemake copies an environment file elsewhere before use, so `-r cpu.txt` would not
  be found there, and a changed pin would not make Snakemake rebuild the environment.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENVS = Path(__file__).resolve().parent
WRITTEN_BY = "# Written by `.venv/bin/python envs/lock.py`, whose docstring says how to upgrade; do not edit by hand.\n"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LINUX, ELSEWHERE = 'sys_platform == "linux"', 'sys_platform != "linux"'


def main() -> None:
    """Read pyproject.toml, follow the dependencies, write the sets."""
    project = tomllib.loads((ENVS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    runtime = closure([*project["dependencies"], *extras["slurm"]])
    dev = closure(extras["dev"]) - runtime
    shared = pins(runtime - {"torch"})
    torch = installed("torch").version.partition("+")[0]
    cpu = [*shared, f"torch=={torch}+cpu ; {LINUX}", f"torch=={torch} ; {ELSEWHERE}"]
    gpu = [*shared, f"torch=={torch}", *(f"{pin} ; {LINUX}" for pin in cuda_pins(torch, shared))]

    write("cpu.txt", "What gristmill runs on without a GPU.", cpu)
    write("gpu.txt", "What gristmill runs on with NVIDIA GPUs: PyPI's torch is the CUDA build.", gpu)
    write("dev.txt", "What `make test` needs beside cpu.txt or gpu.txt.", pins(dev))
    write_conda("cpu", [f"--extra-index-url {CPU_INDEX}", *cpu])
    write_conda("gpu", gpu)


def closure(requirements: Iterable[str]) -> set[str]:
    """The canonical names of these requirements and of all that they need, as installed here."""
    seen: set[tuple[str, str]] = set()  # (name, extra); the extra "" is the package itself
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, under_extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": under_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(text), extra) for text in installed(name).requires or []]
    return {name for name, _ in seen}


def installed(name: str) -> Distribution:
    """The installed distribution, or one line that says it is missing."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        sys.exit(f"error: {name} is not installed in {sys.prefix}; run `python3 scripts/setup_env.py --dev`")


def pins(names: Iterable[str]) -> list[str]:
    """`name==version` for each, sorted."""
    return [f"{name}=={installed(name).version}" for name in sorted(names)]


def cuda_pins(torch: str, shared: list[str]) -> list[str]:
    """What the CUDA build of torch needs beyond the shared pins; uv reads it from the index and downloads no wheel."""
    command = [
        str(Path(sys.executable).with_name("uv")),
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--python-platform=linux",
        "-",
    ]
    known = {pin.partition("==")[0] for pin in shared} | {"torch"}
    try:
        resolved = subprocess.run(
            command, input="\n".join([f"torch==={torch}", *shared]), text=True, capture_output=True, check=True
        )
    except FileNotFoundError:
        sys.exit("error: gpu.txt needs the resolver of uv, which is not in .venv; run `make env-dev`")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: uv could not resolve torch {torch}: {error.stderr.strip()}")
    return [pin for pin in resolved.stdout.split() if pin.partition("==")[0] not in known]


def write(name: str, what: str, lines: list[str]) -> None:
    """One pip set."""
    (ENVS / name).write_text(f"# {what}\n{WRITTEN_BY}" + "".join(f"{line}\n" for line in lines))


def write_conda(name: str, lines: list[str]) -> None:
    """The conda twin: Python and pip from conda-forge, all else the same wheels as in the pip set."""
    head = (
        f"# {name}.txt for `conda:` in the rules (snakemake --sdm conda); {name}.post-deploy.sh adds the demo model.\n"
    )
    body = "channels:\n  - conda-forge\n  - nodefaults\ndependencies:\n  - python=3.11\n  - pip\n  - pip:\n"
    (ENVS / f"{name}.yaml").write_text(head + WRITTEN_BY + body + "".join(f"      - '{line}'\n" for line in lines))


if __name__ == "__main__":
    main()
