"""When the next request may go: evenly spaced by requests_per_minute, and held back by what Retry-After says."""

from __future__ import annotations


class Pace:
    """Times on one monotonic clock, in seconds."""

    def __init__(self, requests_per_minute: int | None) -> None:
        """No request has gone yet."""
        self._every_s = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next_at = self._held_until = 0.0

    def reserve(self, now: float) -> float:
        """Take the next place; seconds until it."""
        start = max(now, self._next_at)
        self._next_at = start + self._every_s
        return start - now

    def hold(self, until: float) -> None:
        """Let no request go before then."""
        self._held_until = max(self._held_until, until)

    def held_s(self, now: float) -> float:
        """Seconds for which requests are held back; 0 or less: none."""
        return self._held_until - now
