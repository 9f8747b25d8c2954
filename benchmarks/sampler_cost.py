"""What one sample of one GPU costs the worker: microseconds to ask, write and examine.

    python benchmarks/sampler_cost.py            this machine's first GPU, through the real NVML
    python benchmarks/sampler_cost.py --fake     an NVML that answers at once: what gristmill itself takes

A sample is taken once a second and GPU in a thread; 100 µs are 0.01 % of a core.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from gristmill.gpu import gpus  # noqa: E402
from gristmill.gpu.cards import open_nvml  # noqa: E402
from gristmill.gpu.health import Doctor  # noqa: E402
from gristmill.gpu.monitor import SampleFile, sample  # noqa: E402
from gristmill.types import Gpu  # noqa: E402

SAMPLES = 2000
FAKE_GPU = Gpu(0, "GPU-fake", "Fake GPU", 81920, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true")
    nvml, gpu = _fake() if parser.parse_args().fake else (open_nvml(print), next(iter(gpus.inventory()), None))
    if nvml is None or gpu is None:
        sys.exit("no GPU here; use --fake")
    doctor = Doctor(nvml)
    if fault := doctor.admit(gpu):
        sys.exit(fault.reason)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        file, card = SampleFile(path, {"unit": "runs/cost", "shard": "1-of-1"}), doctor.cards[0]
        start = time.perf_counter()
        for _ in range(SAMPLES):
            file.write({"phase": "generate", "completion_tokens": 0, **sample(card)})
            doctor.examine(card)
        micros = (time.perf_counter() - start) / SAMPLES * 1e6
        print(f"{gpu.name}: {micros:.0f} µs a sample, {path.stat().st_size / SAMPLES:.0f} bytes")


def _fake() -> tuple[Any, Gpu]:
    spec = importlib.util.spec_from_file_location("fake_pynvml", ROOT / "tests" / "fake_nvml" / "pynvml.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CARDS[FAKE_GPU.uuid], module.SAMPLES[FAKE_GPU.uuid] = {}, 0
    return module, FAKE_GPU


if __name__ == "__main__":
    main()
