"""What juries decided: juries/<jury>/<target>/metrics.json, beside how far their members may be believed.

- A jury is only as good as its judges: one with an unreliable member is marked, its numbers are muted, and no winner
  is named for it.
- A member that is not in the report is said to be, since nobody knows here whether it is reliable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import UserError
from gristmill.report.inputs import Bounds, InputFile, JudgeMetrics, read_file


class JuryAgreement(InputFile):
    """Two members on what both were read on."""

    judges: tuple[str, str]
    n: int
    percent: float | None = None


class JuryMetrics(InputFile):
    """juries/<jury>/<target>/metrics.json."""

    jury: str
    kind: str
    judges: list[str]
    combine: str
    target: str
    runs: list[str]
    n: int
    undecided: int
    undecided_reasons: dict[str, int] = {}
    decided: dict[str, int] = {}
    accuracy: float | None = None
    win_rate: float | None = None
    mean: float | None = None
    ci95: Bounds = None
    agreement: list[JuryAgreement] = []
    fleiss_kappa: float | None = None
    krippendorff_alpha: float | None = None


@dataclass(frozen=True, slots=True)
class Jury:
    """A jury target as the report shows it; `unknown` are members that are not in the report."""

    metrics: JuryMetrics
    unreliable: dict[str, list[str]]
    unknown: list[str]

    @property
    def reliable(self) -> bool:
        """Whether all its members that are known here are."""
        return not self.unreliable

    @property
    def value(self) -> float | None:
        """The share that its interval is of; None of scores and classes."""
        return self.metrics.accuracy if self.metrics.kind == "pointwise" else self.metrics.win_rate

    @property
    def says(self) -> str | None:
        """What follows from a pair's win rate; nothing from unreliable members."""
        metrics = self.metrics
        if metrics.kind != "pairwise" or not self.reliable or metrics.win_rate is None or metrics.ci95 is None:
            return None
        if metrics.ci95[0] <= 0.5 <= metrics.ci95[1]:
            return "No clear winner: the interval includes 50\u00a0%."
        better = metrics.runs[0] if metrics.win_rate > 0.5 else metrics.runs[1]
        return f"The jury prefers {better}: the interval lies clear of 50\u00a0%."


def read_juries(folders: Mapping[str, Path], judges: Mapping[str, JudgeMetrics]) -> list[Jury]:
    """The juries in the order of the folders.

    Args:
        folders: <jury>/<target> → its folder.
        judges: <judge>/<target> → its metrics.

    Raises:
        UserError: a file is missing or broken, or is of another jury.
    """
    return [_jury(name, folder / "metrics.json", judges) for name, folder in folders.items()]


def _jury(name: str, path: Path, judges: Mapping[str, JudgeMetrics]) -> Jury:
    metrics = read_file(JuryMetrics, path)
    if name != f"{metrics.jury}/{metrics.target}":
        raise UserError(
            f"{path} is of {metrics.jury}/{metrics.target}, not {name!r}; check --jury {name}={path.parent}"
        )
    known = {judge: judges.get(f"{judge}/{metrics.target}") for judge in metrics.judges}
    unreliable = {judge: found.unreliable_because for judge, found in known.items() if found and not found.reliable}
    return Jury(metrics, unreliable, _missing(known))


def _missing(known: Mapping[str, JudgeMetrics | None]) -> list[str]:
    return [judge for judge, found in known.items() if found is None]
