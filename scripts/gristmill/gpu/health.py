"""Whether a GPU may be trusted, and what happens to one that may not.

- Before a job: the device answers, no row of its memory waits for a repair that needs a reset. During it: no new
  uncorrectable ECC error, no critical Xid, and it still answers.
- Xids that an application causes (13, 31, 43, 45, 68, 109) are the job's own failure and say nothing about the GPU. The
  list is the one of NVIDIA's k8s-device-plugin (internal/rm/health.go); every Xid is explained in NVIDIA's catalogue,
  docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
- A GPU with a fault is set aside: <lease folder>/<uuid>.sick says why and until when, and leases leave it out, so that
  a retry takes another group. Removing the file ends it; an empty one, made by hand, holds until it is removed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import UserError
from gristmill.files import dumps, loads
from gristmill.gpu.cards import Card, Lost, Nvml
from gristmill.types import Gpu

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
#: The Xids that an operator meets most, in NVIDIA's words.
XIDS = {
    48: "double-bit ECC error",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP RPC timeout",
    120: "GSP error",
}
#: How long a GPU is set aside: for an error of its own, and for a hang, which may be the fault of a disk or a network.
FAULT_HOURS, HANG_HOURS = 24.0, 1.0
RESET = "reset it (nvidia-smi --gpu-reset, or a reboot)"

#: NVML's numbers for what nvmlDeviceGetTotalEccErrors counts.
_UNCORRECTED, _SINCE_DRIVER_LOAD = 1, 0


class SickGpu(UserError):
    """A GPU failed its check before anything was loaded."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a job has to leave its GPUs."""

    gpus: tuple[Gpu, ...]
    reason: str
    next_step: str = RESET
    hours: float = FAULT_HOURS

    def message(self, folder: Path) -> str:
        """One line: which GPU, what happened, and what to do."""
        names = ", ".join(f"GPU {gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in self.gpus)
        files = " ".join(str(sick_file(folder, gpu.uuid)) for gpu in self.gpus)
        return (
            f"{names}: {self.reason}; set aside for {self.hours:g} h, so that a retry takes another; "
            f"{self.next_step}, then rm {files}"
        )


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the driver counts of a card; None where it does not."""

    uncorrected_errors: int | None
    remap_pending: bool | None
    remap_failed: bool | None


def vitals(card: Card) -> Vitals:
    """The card's counters now; raises nvml.Lost."""
    remapped = card.ask_card("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    return Vitals(
        uncorrected_errors=card.ask_card("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_DRIVER_LOAD),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
    )


def unfit(now: Vitals) -> str | None:
    """Why a card should not start a job; None when nothing speaks against it."""
    if now.remap_failed:
        return "a broken row of its memory could not be remapped"
    if now.remap_pending:
        return "a row of its memory waits to be remapped"
    return None


def worsened(before: Vitals, now: Vitals) -> str | None:
    """What went wrong since the job began, and was not so before (gpus.health: false lets such a GPU in); or None."""
    if before.uncorrected_errors is not None and now.uncorrected_errors is not None:
        new = now.uncorrected_errors - before.uncorrected_errors
        if new > 0:
            return f"{new} uncorrectable ECC error{'' if new == 1 else 's'} during the job"
    return unfit(now) if unfit(before) is None else None


def fatal_xid(xids: Sequence[int]) -> str | None:
    """The first Xid that the application did not cause; None when there is none."""
    xid = next((xid for xid in xids if xid not in APPLICATION_XIDS), None)
    if xid is None:
        return None
    return f"Xid {xid} ({XIDS[xid]})" if xid in XIDS else f"Xid {xid}"


class Doctor:
    """Looks at the GPUs of one job, before and during it."""

    def __init__(self, nvml: Nvml) -> None:
        """Keep the NVML to ask."""
        self._nvml = nvml
        self._before: dict[str, Vitals] = {}
        self.cards: list[Card] = []

    def admit(self, gpu: Gpu) -> Fault | None:
        """Find a device and look at it; from then on it is one of `cards`."""
        try:
            card = Card(self._nvml, gpu)
            self._before[gpu.uuid] = vitals(card)
        except (Lost, self._nvml.NVMLError) as error:
            return Fault((gpu,), f"the driver does not find it ({error})")
        self.cards.append(card)
        reason = unfit(self._before[gpu.uuid])
        return None if reason is None else Fault((gpu,), reason)

    def examine(self, card: Card) -> Fault | None:
        """What has gone wrong with a card since it was admitted."""
        try:
            reason = fatal_xid(card.xids()) or worsened(self._before[card.gpu.uuid], vitals(card))
        except Lost as error:
            reason = f"it was lost during the job ({error})"
        return None if reason is None else Fault((card.gpu,), reason)

    def close(self) -> None:
        """Let go of the cards."""
        for card in self.cards:
            card.close()


def sick_file(folder: Path, uuid: str) -> Path:
    """Where it is noted that a GPU is set aside."""
    return folder / f"{uuid.replace('/', '_')}.sick"


def set_aside(folder: Path, fault: Fault, now: float | None = None) -> None:
    """Note the fault's GPUs in the lease folder; a note that cannot be written must not hide the fault."""
    since = time.time() if now is None else now
    for gpu in fault.gpus:
        note = {"uuid": gpu.uuid, "reason": fault.reason, "since": since, "until": since + fault.hours * 3600}
        with contextlib.suppress(OSError):
            _write_shared(sick_file(folder, gpu.uuid), dumps({**note, "host": socket.gethostname()}))


def quarantined(folder: Path, now: float) -> dict[str, str]:
    """UUID → why it is set aside, for the GPUs that still are at `now` (seconds since 1970)."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.sick")):
        try:
            note = loads(path.read_bytes() or b"{}")
            uuid, until, reason = (
                note.get("uuid", path.stem),
                note.get("until"),
                note.get("reason", "set aside by hand"),
            )
        except (OSError, ValueError, AttributeError):
            uuid, until, reason = path.stem, None, "set aside by a note that cannot be read"
        if until is None or now < until:
            found[uuid] = f"{reason}; rm {path} to use it"
    return found


def refuse_sick(gpus: Sequence[Gpu], count: int, folder: Path) -> None:
    """Check that `count` of the GPUs are not set aside.

    Raises:
        UserError: there are fewer; to wait for a repair would be in vain.
    """
    sick = quarantined(folder, time.time())
    fit = [gpu for gpu in gpus if gpu.uuid not in sick]
    if len(fit) < count:
        why = "; ".join(f"GPU {gpu.index}: {sick[gpu.uuid]}" for gpu in gpus if gpu.uuid in sick)
        raise UserError(f"gpus_per_model={count} but {len(fit)} of {len(gpus)} GPUs are fit; {why}")


def _write_shared(path: Path, data: bytes) -> None:
    """Write a file that every user of the host can read and overwrite, without following links (as in locks.py)."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(fd, 0o666)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, data)
    finally:
        os.close(fd)
