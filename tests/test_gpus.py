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
from gristmill.gpu.gpus import inventory, links, read_inventory, usable, use
from gristmill.gpu.nvml import NVLINK, Use
from gristmill.types import Gpu

SCRIPTS = Path(__file__).parents[1] / "scripts"
GPUS = [Gpu(index, f"GPU-{name}-0000", "H100", 81559, 12) for index, name in enumerate(("aa", "ab", "cc", "dd"))]

GPUS_01 = [Gpu(index, f"GPU-{index}", "NVIDIA H100", 81559, 7) for index in range(2)]


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

    class NVMLError_NoPermission(NVMLError):
        pass

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_TOPOLOGY_SYSTEM = 2, 0, 50

    def __init__(self, failure: str | None = None) -> None:
        self.failure, self.open = failure, False
        self.hidden: set[int] = set()
        self.mig = False

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
        if index in self.hidden:
            raise self.NVMLError_NoPermission("no permission")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if not self.mig:
            raise self.NVMLError("not supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, slot: int) -> str:
        if slot > 1:
            raise self.NVMLError("not found")
        return f"{handle}/{slot}"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=2**30, usedGpuMemory=3 * 2**30), SimpleNamespace(pid=2**30 + 1, usedGpuMemory=None)]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetUUID(self, handle: int | str) -> str:
        return f"MIG-{handle}" if isinstance(handle, str) else f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(total=81559 * 2**20 + 1, used=7 * 2**20)


def test_the_driver_is_asked_and_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert inventory({}) == [Gpu(index, f"GPU-{index}", "NVIDIA H100", 81559, 7) for index in range(2)]
    assert not nvml.open


def test_a_card_that_a_cgroup_hides_is_left_out_and_a_mask_counts_those_that_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml()
    nvml.hidden = {0}
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (seen,) = inventory({})
    assert seen.index == 1
    assert usable([seen], {"CUDA_VISIBLE_DEVICES": "0"}) == [seen]


def test_a_card_in_mig_mode_is_its_mig_devices_and_a_mask_may_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    nvml.mig = True
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = inventory({})
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(0, "MIG-0/0"), (0, "MIG-0/1"), (1, "MIG-1/0"), (1, "MIG-1/1")]
    assert usable(found, {"CUDA_VISIBLE_DEVICES": "MIG-1/0"}) == [found[2]]
    with pytest.raises(UserError, match=r"gpus\.devices names GPU '0', which fits more than one GPU"):
        usable(found, {}, [0])


def test_what_runs_on_a_gpu_is_told_with_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert use(GPUS_01, {}) == {gpu.uuid: Use(7, (f"pid {2**30} (3072 MiB)", f"pid {2**30 + 1}")) for gpu in GPUS_01}


def test_nvlink_counts_where_the_driver_tells_nothing_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert links(GPUS_01, {}) == {frozenset({"GPU-0", "GPU-1"}): NVLINK}


def test_without_a_driver_nothing_runs_and_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (use(GPUS_01, {}), links(GPUS_01, {})) == ({}, {})


def test_an_inventory_may_count_alike_gpus_and_leave_out_their_names(tmp_path: Path) -> None:
    path = tmp_path / "a100.json"
    path.write_text(
        '[{"name": "A100", "memory_total_mib": 81920, "count": 2}, {"name": "L4", "memory_total_mib": 23034}]'
    )
    found = read_inventory(path)
    assert [(gpu.index, gpu.name) for gpu in found] == [(0, "A100"), (1, "A100"), (2, "L4")]
    assert len({gpu.uuid for gpu in found}) == 3


@pytest.mark.parametrize("text", ["{", "3", "[3]", '[{"name": "A100"}]', '[{"name": "A", "memory_gb": 80}]'])
def test_a_broken_inventory_is_one_line_that_shows_a_right_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a100.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r'a100\.json is no inventory.*write \[{"name": "H100"'):
        read_inventory(path)


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
    assert (use([], {}), links([], {})) == ({}, {})


def test_looking_for_gpus_does_not_import_torch() -> None:
    look = "from gristmill.gpu import gpus; gpus.usable(gpus.inventory(), {})"
    program = f"import sys; {look}; assert 'torch' not in sys.modules"
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
    with pytest.raises(UserError, match=r"gpus\.devices names GPU '9', which is not here"):
        allowed(None, [0, 9])
    with pytest.raises(UserError, match=r"gpus.devices names GPU '0'.*indices here: none"):
        allowed(None, [0], gpus=[])
