"""What a journal says where its workers say nothing themselves: results of an earlier version.

Answers count once by key, whoever gave them; a row that failed and has an answer by now has not failed. A record has no
time, so speeds come from how the count grows between two looks. Answers to an earlier prompt count too.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.journal.lines import HEADER, Line, line_of
from gristmill.journal.reading import segments
from gristmill.live.files import Growing, mtime
from gristmill.types import JsonDict

#: Within a JSON text a quote has a backslash before it, so no answer can look like this.
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
ERRORS = 5


@dataclass(slots=True)
class Job:
    """One section of a segment."""

    about: JsonDict = field(default_factory=dict)
    answers: int = 0
    failed: int = 0
    tokens: int = 0
    ended: bool = False


@dataclass(slots=True)
class Segment:
    """What was read of one segment so far."""

    file: Growing
    answered: set[int] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    mtime: float = 0.0

    def look(self) -> None:
        """Take the lines that came since; raises FileNotFoundError."""
        anew, lines = self.file.lines()
        if anew:
            self.answered, self.failures, self.jobs = set(), {}, []
        for raw in lines:
            if raw != HEADER:
                self._take(line_of(0, raw))
        self.mtime = mtime(self.file.path) or 0.0

    def _take(self, line: Line) -> None:
        if line.kind == "worker":
            self.jobs.append(Job(line.value()))
        elif line.kind == "summary" and self.jobs:
            self.jobs[-1].ended = True
        elif line.kind in ("completion", "failure") and line.is_whole():
            if not self.jobs:
                self.jobs.append(Job())
            self._record(line, self.jobs[-1])

    def _record(self, line: Line, job: Job) -> None:
        key = int(line.key, 16) if all(digit in "0123456789abcdef" for digit in line.key) else hash(line.key)
        if line.kind == "completion":
            self.answered.add(key)
            found = _TOKENS.findall(line.raw)
            job.answers, job.tokens = job.answers + 1, job.tokens + (int(found[-1]) if found else 0)
            return
        failure = line.value()
        job.failed += 1
        self.failures[key] = f"row {failure['id']}#{failure['sample']} failed: {failure['reason']}: {failure['detail']}"


@dataclass(slots=True)
class Journal:
    """The segments of one journal."""

    folder: Path
    _segments: dict[Path, Segment] = field(default_factory=dict)

    def look(self) -> None:
        """Read what is new; segments that are gone no longer count."""
        there = set(segments(self.folder))
        for path in [*self._segments]:
            if path not in there:
                del self._segments[path]
        for path in sorted(there):
            try:
                self._segments.setdefault(path, Segment(Growing(path))).look()
            except OSError:  # compacted meanwhile, or not readable
                self._segments.pop(path, None)

    @property
    def answered(self) -> set[int]:
        """The keys with an answer."""
        found: set[int] = set()
        return found.union(*(segment.answered for segment in self._segments.values()))

    def failures(self, answered: set[int]) -> list[str]:
        """What failed and has no answer, the newest last."""
        found: dict[int, str] = {}
        for segment in self._segments.values():
            found |= segment.failures
        return [text for key, text in found.items() if key not in answered]

    def jobs(self) -> list[tuple[Job, float]]:
        """Each segment's last job, and when it was last written to; one a shard, the newest."""
        found: dict[str, tuple[Job, float]] = {}
        for segment in sorted(self._segments.values(), key=lambda one: one.mtime):
            for job in segment.jobs[-1:]:
                found[str(job.about.get("shard", segment.file.path.stem))] = job, segment.mtime
        return list(found.values())


@dataclass(slots=True)
class Speed:
    """Tokens a second from how a count grows, for what has no times of its own."""

    window_s: float
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, at: float, count: int) -> float | None:
        """Take a count; the speed over the window, None for the first look."""
        if self._seen and (count < self._seen[-1][1] or at < self._seen[-1][0]):
            self._seen.clear()
        self._seen.append((at, count))
        while len(self._seen) > 2 and self._seen[1][0] <= at - self.window_s:
            self._seen.popleft()
        then, before = self._seen[0]
        return (count - before) / (at - then) if at > then else None
