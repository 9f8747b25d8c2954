"""NVML of a machine that is not there, with the functions gristmill uses.

FAKE_NVML holds JSON: UUID → what is special about that GPU. A field that is null is not supported; a list is answered
one by one, its last value for ever. `lost_after` and `xids_after` count samples (questions for the utilization).
"""

import json
import os
from types import SimpleNamespace


class NVMLError(Exception):
    """Any error."""


class NVMLError_NotSupported(NVMLError): ...


class NVMLError_NotFound(NVMLError): ...


class NVMLError_GpuIsLost(NVMLError): ...


class NVMLError_Timeout(NVMLError): ...


class NVMLError_DriverNotLoaded(NVMLError): ...


class NVMLError_LibraryNotFound(NVMLError): ...


nvmlEventTypeXidCriticalError = 8
nvmlMemory_v2 = 0x02000028
CARDS = json.loads(os.environ.get("FAKE_NVML", "{}"))
SAMPLES = dict.fromkeys(CARDS, 0)


def nvmlInit():
    if not CARDS:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")


def nvmlShutdown(): ...


def nvmlDeviceGetHandleByUUID(uuid):
    if uuid not in CARDS:
        raise NVMLError_NotFound("Not Found")
    return uuid


def _answer(uuid, field, usual):
    card = CARDS[uuid]
    if SAMPLES[uuid] >= card.get("lost_after", 10**9):
        raise NVMLError_GpuIsLost("GPU is lost")
    value = card.get(field, usual)
    if isinstance(value, list):
        value = value.pop(0) if len(value) > 1 else value[0]
    if value is None:
        raise NVMLError_NotSupported("Not Supported")
    return value


def nvmlDeviceGetUtilizationRates(uuid):
    SAMPLES[uuid] += 1
    return SimpleNamespace(gpu=_answer(uuid, "utilization_percent", 90), memory=40)


def nvmlDeviceGetMemoryInfo(uuid, version=None):
    assert version in (None, nvmlMemory_v2)
    if version is not None and CARDS[uuid].get("old_driver"):
        raise NVMLError_NotSupported("Not Supported")
    return SimpleNamespace(used=_answer(uuid, "memory_mib", 1024) * 2**20, total=80 * 2**30)


def nvmlDeviceGetPowerUsage(uuid):
    return _answer(uuid, "milliwatts", 300_000)


def nvmlDeviceGetTemperature(uuid, sensor):
    return _answer(uuid, "celsius", 50)


def nvmlDeviceGetClockInfo(uuid, clock):
    return _answer(uuid, f"clock_{clock}", 1980)


def nvmlDeviceGetCurrentClocksEventReasons(uuid):
    return _answer(uuid, "reasons", 0)


def nvmlDeviceGetTotalEnergyConsumption(uuid):
    return _answer(uuid, "millijoules", 1_000_000 + 5_000 * SAMPLES[uuid])


def nvmlDeviceGetTotalEccErrors(uuid, error_type, counter_type):
    assert (error_type, counter_type) == (1, 0), "uncorrected, volatile"
    return _answer(uuid, "ecc", 0)


def nvmlDeviceGetRemappedRows(uuid):
    return tuple(_answer(uuid, "remapped", [[0, 0, 0, 0]]))


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(uuid):
    return _answer(uuid, "parent", None)


def nvmlDeviceGetGpuInstanceId(uuid):
    return _answer(uuid, "instance", None)


def nvmlEventSetCreate():
    return []


def nvmlDeviceRegisterEvents(uuid, event_types, events):
    assert event_types == nvmlEventTypeXidCriticalError
    events.append(uuid)


def nvmlEventSetWait_v2(events, timeout_ms):
    assert timeout_ms == 0, "a longer wait would hold up the samples"
    card = CARDS[events[0]]
    if not card.get("xids") or SAMPLES[events[0]] < card.get("xids_after", 0):
        raise NVMLError_Timeout("Timeout")
    return SimpleNamespace(eventData=card["xids"].pop(0), gpuInstanceId=card.get("event_instance", 0xFFFFFFFF))


def nvmlEventSetFree(events):
    events.clear()
