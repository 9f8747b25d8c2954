"""The application: routes over what was last read. Whatever touches a disk or starts a process runs in a thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gristmill import __version__
from gristmill.service import models, problems
from gristmill.service.auth import Gate, known_hosts
from gristmill.service.configs import list_configs
from gristmill.service.events import stream
from gristmill.service.guard import Guard
from gristmill.service.metrics import MachineCollector
from gristmill.service.page import read_page
from gristmill.service.problems import Problem, responses
from gristmill.service.readings import GpuReader, Reading, self_test
from gristmill.service.recommendations import recommend
from gristmill.service.requests import RequestMetrics
from gristmill.service.runs import Runs, Seen
from gristmill.service.settings import Settings
from gristmill.service.watcher import Watcher

#: Readings older than this, in looks, are no readings any more.
STALE_LOOKS = 20
#: A report shows what models wrote: it runs apart from this service's origin and its token.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; font-src data:; frame-ancestors 'none'"
)
#: The page, the metrics and a report are no JSON.
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_HTML: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


class Service:
    """What the routes work with."""

    def __init__(self, settings: Settings, log: Callable[[str], None], gpus: GpuReader | None = None) -> None:
        """Read the runs that are there; nothing is watched yet."""
        self.settings, self.log = settings, log
        self.runs = Runs(settings, log)
        self.watcher = Watcher(self.runs, gpus or GpuReader(log), settings.every_s, log)
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        MachineCollector.register(self.registry, lambda: self.watcher.readings, self.runs.all)
        info = Gauge("gristmill_service_info", "1, with the version.", ["version"], registry=self.registry)
        info.labels(__version__).set(1)
        #: Set when the server is about to end: event streams would hold it up.
        self.ending = False
        self.open_streams = 0

    def readings(self) -> tuple[Reading, ...]:
        """The GPUs as last read.

        Raises:
            Problem: 503, the driver does not answer.
        """
        if self.watcher.readings.error is not None:
            raise Problem(503, self.watcher.readings.error)
        return self.watcher.readings.gpus

    def reading(self, gpu_id: str) -> Reading:
        """One GPU, by index or UUID.

        Raises:
            Problem: 404, there is none.
        """
        for each in self.readings():
            if gpu_id in (str(each.gpu.index), each.gpu.uuid):
                return each
        raise Problem(404, "there is no such GPU; GET /v1/gpus lists them")

    def report(self, seen: Seen) -> Path:
        """A run's report.

        Raises:
            Problem: 404, the run has made none yet, or a link stands in its place: it could lead anywhere.
        """
        path = Path(seen.record.run["results"]) / "report.html"
        if path.is_symlink():
            raise Problem(404, "report.html is a link, and no run leaves one; remove it and run again")
        newer = path.is_file() and path.stat().st_mtime >= seen.record.run["created"]
        if seen.state != "finished" and not newer:
            raise Problem(404, f"the run ({seen.state}) has made no report; it comes last")
        if not path.is_file():
            raise Problem(404, "the run has left no report, or it was removed")
        return path


def make_app(service: Service, token: str) -> FastAPI:
    """The application with its guard; starting it starts the watcher."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.watcher.start()
        yield
        service.ending = True
        service.watcher.stop()

    app = FastAPI(
        title="gristmill", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False, openapi_url="/openapi.json",
    )  # fmt: skip
    problems.install(app)
    _add_page_and_health(app, service)
    _add_gpus(app, service)
    _add_runs(app, service)
    _describe(app)
    hosts = known_hosts(service.settings.host, service.settings.allowed_hosts)
    gate = Gate(token, service.settings.requests_per_second)
    app.add_middleware(
        Guard, gate=gate, hosts=hosts, max_body_bytes=service.settings.max_body_bytes, metrics=service.requests
    )
    return app


def _add_page_and_health(app: FastAPI, service: Service) -> None:
    page, policy = read_page()

    @app.get("/", responses=_HTML, response_class=HTMLResponse, include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @app.get("/health", responses={429: responses()[429], 421: responses()[421], 413: responses()[413]})
    async def health() -> models.Health:
        """Whether the process answers; needs no token."""
        return models.Health()

    @app.get("/ready", responses=responses(503))
    async def ready() -> models.Ready:
        """Whether it can be worked with: GPUs and runs were looked at lately, and its folder can be written."""
        age_s = service.watcher.age_s()
        if age_s > STALE_LOOKS * service.settings.every_s:
            raise Problem(503, f"GPUs and runs were last looked at {min(age_s, 1e9):.0f} s ago; see the service's log")
        if not os.access(service.settings.runs, os.W_OK):
            raise Problem(503, f"{service.settings.runs} cannot be written; no run can be started")
        return models.Ready(readings_age_seconds=round(age_s, 3))

    @app.get("/metrics", responses={**responses(), **_TEXT}, response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _add_gpus(app: FastAPI, service: Service) -> None:
    @app.get("/v1/gpus", responses=responses(503))
    async def gpus() -> models.GpuList:
        """All GPUs of this machine."""
        found = [models.GpuView.of(reading) for reading in service.readings()]
        return models.GpuList(read_unix_seconds=service.watcher.readings.time, gpus=found)

    @app.get("/v1/gpus/{gpu_id}/stats", responses=responses(404, 422, 503))
    async def gpu_stats(gpu_id: str) -> models.GpuStats:
        """One GPU, by index or UUID, with its samples of the last minutes."""
        return models.GpuStats.of(service.reading(gpu_id))

    @app.post("/v1/gpus/test", responses=responses(503))
    def test_gpus() -> list[models.GpuTest]:
        """The self-test that every job makes before it starts, of all GPUs; nothing is computed on them."""
        return [models.GpuTest.of(result) for result in self_test(service.log)]

    @app.get("/v1/recommendations", responses=responses())
    async def recommendations() -> list[models.RecommendationView]:
        """What to change, with the numbers it rests on."""
        return [models.RecommendationView.of(each) for each in recommend(service.watcher.seen())]


def _add_runs(app: FastAPI, service: Service) -> None:
    @app.get("/v1/configs", responses=responses())
    def configs() -> list[models.ConfigView]:
        """The configs that can be started."""
        return [models.ConfigView.of(each) for each in list_configs(service.settings.configs).values()]

    @app.get("/v1/runs", responses=responses(422))
    async def runs(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> list[models.RunView]:
        """The runs, the newest first."""
        return [models.RunView.of(seen) for seen in service.runs.all()[:limit]]

    @app.post("/v1/runs", status_code=201, responses=responses(400, 404, 408, 409, 422, 503))
    def start(wanted: models.StartRun, response: Response) -> models.RunView:
        """Start a config."""
        seen = service.runs.start(wanted.order())
        response.headers["Location"] = f"/v1/runs/{seen.record.id}"
        return models.RunView.of(seen)

    @app.get("/v1/runs/{run_id}", responses=responses(404, 422))
    def run(run_id: models.RunId) -> models.RunDetail:
        """One run, its progress with all its workers, and the end of its log."""
        return models.RunDetail.of(service.runs.get(run_id))

    @app.delete("/v1/runs/{run_id}", status_code=202, responses=responses(404, 409, 422))
    def stop(run_id: models.RunId) -> models.RunView:
        """Stop a run: SIGINT, and SIGTERM after the grace time. Finished rows stay."""
        return models.RunView.of(service.runs.stop(run_id))

    @app.get("/v1/runs/{run_id}/events", responses={**responses(404, 422), **_EVENTS}, response_class=StreamingResponse)
    async def events(run_id: models.RunId) -> StreamingResponse:
        """A run's progress as server-sent events, `progress` and at the end `end`."""
        service.runs.get(run_id)
        if service.open_streams >= service.settings.max_streams:
            raise Problem(429, f"{service.open_streams} event streams are open, the most there may be", _LATER)
        return StreamingResponse(_counted(service, run_id), media_type="text/event-stream")

    @app.get("/v1/runs/{run_id}/report", responses={**responses(404, 422), **_HTML}, response_class=FileResponse)
    def report(run_id: models.RunId) -> FileResponse:
        """A run's report, one HTML file."""
        path = service.report(service.runs.get(run_id))
        return FileResponse(path, media_type="text/html", headers={"content-security-policy": REPORT_POLICY})

    @app.get("/v1/history", responses=responses(422))
    async def history(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: Annotated[str | None, Query(pattern=r"^\d{8}T\d{6}Z-[0-9a-f]{6}$")] = None,
    ) -> list[models.HistoryEntry]:
        """Runs that have ended, the newest first; `before` is the last id of the page before."""
        ended = [seen for seen in service.runs.all() if not seen.is_active and (not before or seen.record.id < before)]
        return [_entry(models.RunView.of(seen)) for seen in ended[:limit]]


_LATER = {"Retry-After": "5"}


async def _counted(service: Service, run_id: str) -> AsyncIterator[bytes]:
    service.open_streams += 1
    service.requests.streams.set(service.open_streams)
    try:
        async with contextlib.aclosing(stream(lambda: service.runs.get(run_id), lambda: service.ending)) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield part
    finally:
        service.open_streams -= 1
        service.requests.streams.set(service.open_streams)


def _entry(run: models.RunView) -> models.HistoryEntry:
    ended = run.ended_unix_seconds
    seconds = None if ended is None else max(0.0, ended - run.created_unix_seconds)
    return models.HistoryEntry(run=run, seconds=seconds, rows_per_second=run.done / seconds if seconds else None)


def _describe(app: FastAPI) -> None:
    """Add to the OpenAPI document what FastAPI does not know: the token, and the shape of problems."""
    make = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = make()
            parts = found.setdefault("components", {})
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            problem = problems.ProblemBody.model_json_schema()
            parts.setdefault("schemas", {})["ProblemBody"] = problem
            problem_content = {"schema": {"$ref": "#/components/schemas/ProblemBody"}}
            for path, operations in found["paths"].items():
                for operation in operations.values():
                    if path != "/health":
                        operation["security"] = [{"token": []}]
                    if "422" in operation["responses"]:
                        operation["responses"]["422"]["content"] = {"application/problem+json": problem_content}
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
