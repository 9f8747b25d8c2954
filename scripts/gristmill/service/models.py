"""What requests and answers look like; the OpenAPI document follows from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gristmill.gpu.monitor import MIB
from gristmill.service.configs import NamedConfig
from gristmill.service.readings import Reading, TestResult
from gristmill.service.recommendations import Recommendation
from gristmill.service.records import Kind, State
from gristmill.service.runs import Order, Seen
from gristmill.service.units import UnitView, cut, rows_of

RunId = Annotated[str, Field(pattern=r"^\d{8}T\d{6}Z-[0-9a-f]{6}$", examples=["20260301T120000Z-0a1b2c"])]


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """It can be worked with."""

    status: Literal["ready"] = "ready"
    readings_age_seconds: float = Field(description="since GPUs and runs were last looked at")


class ConfigView(BaseModel):
    """A config that can be started."""

    name: str
    kinds: list[Kind]

    @classmethod
    def of(cls, config: NamedConfig) -> ConfigView:
        """Make the answer."""
        return cls.model_validate({"name": config.name, "kinds": config.kinds})


class StartRun(BaseModel):
    """What to start."""

    model_config = ConfigDict(extra="forbid")

    config: str = Field(min_length=1, max_length=300, description="a name of GET /v1/configs")
    workspace: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$",
        description="a folder below workspaces/ with results of its own; null: the service's folder",
    )
    cores: int | None = Field(None, ge=1, le=4096, description="--cores; null: all")
    gpus: int | None = Field(None, ge=1, le=4096, description="--resources gpu=; null: all that there are")

    def order(self) -> Order:
        """The same for runs.py."""
        return Order(self.config, self.workspace, self.cores, self.gpus)


class RunView(BaseModel):
    """A run and its progress; of its workers those that are looked at first."""

    id: RunId
    config: str
    kinds: list[Kind]
    workspace: str | None
    state: State
    created_unix_seconds: float
    ended_unix_seconds: float | None
    exit_code: int | None
    rows: int | None = Field(description="of all units; null while it is not known of each")
    done: int
    failed: int
    units: list[UnitView]

    @classmethod
    def of(cls, seen: Seen) -> RunView:
        """Make the answer."""
        return cls(**_run(seen), units=cut(seen.units))


class RunDetail(RunView):
    """A run with all its workers and the end of its log."""

    log_tail: str = Field(description="the last 4 KiB that Snakemake said")

    @classmethod
    def of(cls, seen: Seen) -> RunDetail:
        """Make the answer; it reads the log."""
        return cls(**_run(seen), units=list(seen.units), log_tail=seen.record.log_tail())


def _run(seen: Seen) -> dict[str, Any]:
    run, ended = seen.record.run, seen.record.ended
    return {
        "id": seen.record.id,
        "config": run["config"],
        "kinds": run.get("kinds", []),
        "workspace": run.get("workspace"),
        "state": seen.state,
        "created_unix_seconds": run["created"],
        "ended_unix_seconds": None if ended is None else ended["ended"],
        "exit_code": None if ended is None else ended["exit_code"],
        "rows": rows_of(seen.units),
        "done": sum(unit.done for unit in seen.units),
        "failed": sum(unit.failed for unit in seen.units),
    }


class HistoryEntry(BaseModel):
    """A run that has ended."""

    run: RunView
    seconds: float | None = Field(description="from start to end; null where the end is not known")
    rows_per_second: float | None


class GpuView(BaseModel):
    """A GPU now."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int | None
    utilization_ratio: float | None
    temperature_celsius: float | None
    power_watts: float | None
    held_by: str | None = Field(description="the job with a lease on it")
    set_aside: str | None = Field(description="why jobs leave it out")
    lost: bool = Field(description="it no longer answers")

    @classmethod
    def of(cls, reading: Reading) -> GpuView:
        """Make the answer."""
        used, gpu, last = reading.memory_used_mib, reading.gpu, reading.last
        return cls(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            memory_total_bytes=gpu.memory_total_mib * MIB,
            memory_used_bytes=None if used is None else used * MIB,
            utilization_ratio=last.get("utilization_ratio"),
            temperature_celsius=last.get("temperature_celsius"),
            power_watts=last.get("power_watts"),
            held_by=None if reading.holder is None else reading.holder.purpose,
            set_aside=reading.set_aside,
            lost=reading.lost,
        )


class GpuList(BaseModel):
    """All GPUs of this machine."""

    read_unix_seconds: float
    gpus: list[GpuView]


class Sample(BaseModel):
    """One second of a GPU; null where it is not known."""

    time_unix_seconds: float
    utilization_ratio: float | None
    memory_used_bytes: int | None
    power_watts: float | None
    temperature_celsius: float | None
    sm_clock_hertz: int | None
    memory_clock_hertz: int | None
    throttle_reasons: list[str] | None
    energy_joules: float | None


class GpuStats(BaseModel):
    """A GPU and its samples, the oldest first."""

    gpu: GpuView
    samples: list[Sample]

    @classmethod
    def of(cls, reading: Reading) -> GpuStats:
        """Make the answer."""
        return cls(gpu=GpuView.of(reading), samples=[_sample(line) for line in reading.samples])


def _sample(line: dict[str, object]) -> Sample:
    def scaled(key: str, factor: int) -> int | None:
        value = line[key]
        return None if value is None else int(value) * factor  # type: ignore[call-overload]

    return Sample.model_validate(
        {
            **line,
            "time_unix_seconds": line["time_unix_s"],
            "memory_used_bytes": scaled("memory_used_mib", MIB),
            "sm_clock_hertz": scaled("sm_clock_mhz", 1_000_000),
            "memory_clock_hertz": scaled("memory_clock_mhz", 1_000_000),
        }
    )


class GpuTest(BaseModel):
    """What the self-test found."""

    index: int
    uuid: str
    verdict: Literal["passed", "failed", "unknown"]
    detail: str

    @classmethod
    def of(cls, result: TestResult) -> GpuTest:
        """Make the answer."""
        found = {"index": result.gpu.index, "uuid": result.gpu.uuid}
        return cls.model_validate({**found, "verdict": result.verdict, "detail": result.detail})


class EvidenceView(BaseModel):
    """A number that a recommendation rests on."""

    subject: str
    measure: str
    value: float | str
    unit: str
    limit: float | str


class RecommendationView(BaseModel):
    """What to change, and why."""

    kind: str
    severity: Literal["info", "warning", "critical"]
    advice: str
    evidence: list[EvidenceView]

    @classmethod
    def of(cls, recommendation: Recommendation) -> RecommendationView:
        """Make the answer."""
        return cls.model_validate(asdict(recommendation))
