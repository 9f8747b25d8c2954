"""Requests asked in waves: what can be asked now, then what became askable by its answers, until nothing is left."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.followups import Followups
from gristmill.gpu.watch import Watch
from gristmill.journal import Segment
from gristmill.judging.asking import UnreadableStreak
from gristmill.progress import Progress
from gristmill.types import Completion, Engine, Failure, Request, RequestId


@dataclass(frozen=True, slots=True)
class Waves:
    """An engine, and who hears of each of its answers."""

    engine: Engine
    segment: Segment
    watch: Watch
    progress: Progress
    streak: UnreadableStreak

    def answer(self, requests: Followups, known: dict[str, Completion]) -> tuple[dict[str, Failure], list[RequestId]]:
        """Ask until nothing is left; completions go to the journal and into `known`.

        Returns:
            The failures by key, and what an engine that was stopped, or that is broken, left over.
        """
        failures: dict[str, Failure] = {}
        while asked := self.streak.first(requests.open(known, failures)):
            self.progress.total = self.progress.done + requests.left
            failures |= self._wave(asked, known)
            if left := [request.rid for key, request in asked.items() if key not in known and key not in failures]:
                return failures, left
        return failures, []

    def _wave(self, asked: dict[str, Request], known: dict[str, Completion]) -> dict[str, Failure]:
        """Write each outcome to the journal before anything else is done with it; gives the failures by key."""
        waiting = {request.rid: key for key, request in asked.items()}
        failures: dict[str, Failure] = {}
        for outcome in self.engine.generate(list(asked.values())):
            key = waiting.pop(outcome.rid, None)
            if key is None:
                raise RuntimeError(
                    f"engine {self.engine.name} answered {outcome.rid}, which does not wait for an answer"
                )
            self.segment.append(key, outcome)
            self.watch.add(outcome)
            self.progress.add(outcome)
            self.progress.retries += asked[key].attempt > 1
            if isinstance(outcome, Completion):
                known[key] = outcome
                self.streak.add(asked[key], outcome)
            else:
                failures[key] = outcome
        return failures
