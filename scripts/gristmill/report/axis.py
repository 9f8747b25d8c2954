"""The report's axis of time: wall-clock time without the pauses, one for all that is drawn over time.

Where no job ran for long, CUT of the working time stands for the pause.
"""

from __future__ import annotations

from collections.abc import Iterable

#: What a pause is drawn as, in shares of the working time; shorter ones are drawn as they were.
CUT = 0.03
Stretch = tuple[float, float]


class Axis:
    """Wall-clock seconds since 1970 → seconds on the axis."""

    def __init__(self, spans: Iterable[Stretch]) -> None:
        """Take the stretches in which there was work, in any order; they may overlap."""
        self._stretches = _union(spans)
        cut = CUT * sum(end - start for start, end in self._stretches)
        self._offsets: list[float] = []
        #: Places on the axis where a pause was shortened.
        self.cuts: list[float] = []
        place = 0.0
        for number, (start, end) in enumerate(self._stretches):
            pause = start - self._stretches[number - 1][1] if number else 0.0
            if pause > cut:
                self.cuts.append(place + cut / 2)
            place += min(pause, cut)
            self._offsets.append(place - start)
            place += end - start
        self.seconds = place

    def at(self, time: float) -> float:
        """The place of a time within a stretch."""
        for (_, end), offset in zip(self._stretches, self._offsets, strict=True):
            if time <= end:
                return time + offset
        return self.seconds


def _union(spans: Iterable[Stretch]) -> list[Stretch]:
    """The stretches of time that are in any span."""
    found: list[Stretch] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
