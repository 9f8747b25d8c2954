"""Counts of the service's own requests, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class RequestMetrics:
    """Requests by route (the pattern, never the path: it would be a label without end), and open event streams."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge more for every counter
        self._requests = Counter(
            "gristmill_service_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "gristmill_service_request_duration_seconds",
            "Time from a request to the end of its answer; event streams are left out.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.streams = Gauge("gristmill_service_event_streams", "Open event streams.", registry=registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        if not route.endswith("/events"):
            self._seconds.labels(route).observe(seconds)
