"""Facts about finding GPUs: what the driver, the mask and the config allow, and what they may not say."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.errors import UserError
from gristmill.gpus import inventory, usable
from gristmill.types import Gpu

SCRIPTS = Path(__file__).parents[1] / "scripts"
GPUS = [Gpu(index, f"GPU-{name}-0000", "H100", 81559, 12) for index, name in enumerate(("aa", "ab", "cc", "dd"))]


def allowed(mask: str | None, devices: Any = "auto", gpus: list[Gpu] = GPUS) -> list[int]:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return [gpu.index for gpu in usable(gpus, environ, devices)]


# ---- inventory


def test_an_inventory_file_stands_in_for_the_driver(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps([asdict(gpu) for gpu in GPUS]))
    assert inventory({"GRISTMILL_INVENTORY": str(path)}) == GPUS
    path.write_text("[]")
    assert inventory({"GRISTMILL_INVENTORY": str(path)}) == []


class FakeNvml:
    """nvidia-ml-py with two cards, or with a driver that fails."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    def __init__(self, failure: str | None = None) -> None:
        self.failure, self.open = failure, False

    def nvmlInit(self) -> None:
        if self.failure:
            raise getattr(self, self.failure)("Driver/library version mismatch")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.open
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=81559 * 2**20 + 1, used=7 * 2**20)


def test_the_driver_is_asked_and_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert inventory({}) == [Gpu(index, f"GPU-{index}", "NVIDIA H100", 81559, 7) for index in range(2)]
    assert not nvml.open


@pytest.mark.parametrize("failure", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"])
def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(failure))
    assert inventory({}) == []


def test_a_machine_without_the_package_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert inventory({}) == []


def test_a_driver_that_fails_is_an_error_and_not_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("NVMLError"))
    with pytest.raises(UserError, match=r"version mismatch; see nvidia-smi, or set CUDA_VISIBLE_DEVICES=-1"):
        inventory({})
    assert inventory({"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_looking_for_gpus_does_not_import_torch() -> None:
    program = (
        "import sys; from gristmill import gpus; gpus.usable(gpus.inventory(), {}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(SCRIPTS)}, check=True)


# ---- the mask


def test_all_gpus_may_be_used_without_a_mask() -> None:
    assert allowed(None) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("mask", "indices"),
    [
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("GPU-cc-0000", [2]),
        ("GPU-cc", [2]),
        ("GPU-ab,0,GPU-dd-0000", [1, 0, 3]),
    ],
)
def test_a_mask_of_indices_uuids_or_their_beginnings_is_kept_in_its_order(mask: str, indices: list[int]) -> None:
    assert allowed(mask) == indices


@pytest.mark.parametrize("mask", ["", "-1", "NoDevFiles", " "])
def test_an_empty_mask_or_one_that_hides_all_leaves_none(mask: str) -> None:
    assert allowed(mask) == []


def test_a_mask_ends_at_minus_one_as_in_cuda() -> None:
    assert allowed("2,-1,3") == [2]


def test_a_gpu_named_twice_counts_once() -> None:
    assert allowed("1,1,GPU-ab") == [1]
    assert allowed(None, [1, "1", "GPU-ab-0000"]) == [1]


@pytest.mark.parametrize("mask", ["4", "0,7", "GPU-zz", "two", "cc", "-2", "MIG-aa"])
def test_a_mask_that_names_a_gpu_that_is_not_here_is_refused(mask: str) -> None:
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES names GPU .* is not here \(indices here: 0, 1, 2, 3\)"):
        allowed(mask)


def test_a_beginning_that_fits_two_gpus_is_refused() -> None:
    with pytest.raises(UserError, match="'GPU-a', which fits more than one GPU"):
        allowed("GPU-a")


def test_a_mask_means_nothing_on_a_machine_without_gpus() -> None:
    assert allowed("0,1", gpus=[]) == []


# ---- gpus.devices


@pytest.mark.parametrize(
    ("devices", "indices"), [([2], [2]), ([3, 0], [3, 0]), (["GPU-dd", 1], [3, 1]), (["2"], [2]), ([], [])]
)
def test_the_configs_devices_are_taken_in_their_order(devices: list[Any], indices: list[int]) -> None:
    assert allowed(None, devices) == indices


def test_the_mask_and_the_config_must_both_allow_a_gpu() -> None:
    assert allowed("2,1,0", [0, 1, 3]) == [0, 1]
    assert allowed("", [0]) == []


def test_a_device_in_the_config_that_is_not_here_is_refused() -> None:
    with pytest.raises(UserError, match=r"gpus.devices names GPU '9', which is not here"):
        allowed(None, [0, 9])
    with pytest.raises(UserError, match=r"gpus.devices names GPU '0'.*indices here: none"):
        allowed(None, [0], gpus=[])
