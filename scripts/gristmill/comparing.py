"""Runs of one dataset compared row by row: results/comparisons.json.

- A row's score is the mean of its graded samples; a row without a grade in a run is not scored there, and counted.
- Only the rows that both runs have are compared, so that no run wins by having answered easier ones.
- The p values of one dataset and metric are a family: whoever looks for the best run looks at all of them.
- One number a row and metric is held for every run that is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gristmill.config.specs import CompareSpec, Comparison
from gristmill.errors import UserError
from gristmill.stats.intervals import LEVEL
from gristmill.stats.paired import Difference, compare, holm
from gristmill.types import JsonDict

ABOUT = (
    "Two runs on the rows they share. difference is values[0] - values[1]; ci95 is the t interval of the rows' "
    "differences and bootstrap_ci95 the percentile interval over rows drawn again. p is of no difference "
    "(mcnemar_exact, mcnemar_chi2: one 0/1 score a row; paired_t: others); p_holm is p adjusted for all comparisons of "
    "the same dataset and metric. Null with a note where the rows do not tell."
)


@dataclass(slots=True)
class RowMeans:
    """A run's scores by one metric: row id → sum and number of its grades."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    ungraded: int = 0
    invalid: int = 0
    #: Row → what it is counted under, where the run has a cluster column.
    clusters: dict[str, str] = field(default_factory=dict)

    def add(self, line: JsonDict, metric: str) -> None:
        """Count a line of grades.jsonl."""
        grade, row = line["grades"][metric], line["id"]
        self.invalid += line["invalid"] is not None
        if grade is None:
            self.ungraded += 1
            return
        self.sums[row] = self.sums.get(row, 0.0) + float(grade)
        self.counts[row] = self.counts.get(row, 0) + 1
        if "cluster" in line:
            self.clusters[row] = line["cluster"]

    @property
    def most_samples(self) -> int:
        """The most graded answers that a row has."""
        return max(self.counts.values(), default=0)

    def mean(self, row: str) -> float:
        """The score of a row."""
        return self.sums[row] / self.counts[row]


def row_means(lines: Iterable[JsonDict], metrics: Iterable[str], run: str) -> dict[str, RowMeans]:
    """A run's scores by each metric, from the lines of its grades.jsonl.

    Raises:
        UserError: a metric is not among the grades.
    """
    found = {metric: RowMeans() for metric in metrics}
    for line in lines:
        for metric, means in found.items():
            if metric not in line["grades"]:
                graded = ", ".join(line["grades"]) or "none"
                raise UserError(f"{run} has no grades by {metric} (it has: {graded}); make its grades.jsonl again")
            means.add(line, metric)
    return found


def comparisons(spec: CompareSpec, grades: Mapping[str, Iterable[JsonDict]]) -> JsonDict:
    """The content of comparisons.json.

    Args:
        spec: what to compare.
        grades: the lines of each run's grades.jsonl.

    Raises:
        UserError: a run's grades are not given, or lack the metric.
    """
    scores = {run: row_means(grades[run], metrics, run) for run, metrics in _wanted(spec, grades).items()}
    entries = [_entry(each, scores, spec) for each in spec.comparisons]
    _adjust(entries)
    return {
        "about": ABOUT,
        "level": LEVEL,
        "seed": spec.seed,
        "resamples": spec.resamples,
        "comparisons": entries,
    }


def _wanted(spec: CompareSpec, grades: Mapping[str, Iterable[JsonDict]]) -> dict[str, list[str]]:
    """Run → the metrics it is compared by."""
    found: dict[str, list[str]] = {}
    for each in spec.comparisons:
        for run in each.runs:
            if run not in grades:
                raise UserError(f"the grades of {run} are not given; add --grades {run}=FILE")
            metrics = found.setdefault(run, [])
            metrics += [each.metric] if each.metric not in metrics else []
    return found


def _entry(each: Comparison, scores: Mapping[str, Mapping[str, RowMeans]], spec: CompareSpec) -> JsonDict:
    one, other = (scores[run][each.metric] for run in each.runs)
    common = [row for row in one.sums if row in other.sums]
    single = max(one.most_samples, other.most_samples) <= 1
    found = compare(
        [one.mean(row) for row in common],
        [other.mean(row) for row in common],
        common if each.cluster is None else [one.clusters[row] for row in common],
        single=single,
        seed=spec.seed,
        resamples=spec.resamples,
    )
    return {
        "dataset": each.dataset,
        "metric": each.metric,
        "runs": list(each.runs),
        "cluster": each.cluster,
        "n_common": len(common),
        "n_only_first": len(one.sums) - len(common),
        "n_only_second": len(other.sums) - len(common),
        "samples": [one.most_samples, other.most_samples],
        "ungraded": [one.ungraded, other.ungraded],
        "invalid": [one.invalid, other.invalid],
        **_numbers(found),
        "p_holm": None,
        "family_size": 0,
        "note": _note(found, one, other, len(common)),
    }


def _numbers(found: Difference) -> JsonDict:
    return {
        "values": [found.first, found.second],
        "difference": found.difference,
        "standard_error": found.standard_error,
        "ci95": found.ci95 and list(found.ci95),
        "bootstrap_ci95": found.bootstrap_ci95 and list(found.bootstrap_ci95),
        "discordant": found.discordant and found.discordant._asdict(),
        "test": found.test,
        "p": found.p,
    }


def _note(found: Difference, one: RowMeans, other: RowMeans, common: int) -> str | None:
    """What a reader must know before the numbers, or None."""
    notes = [found.reason] if found.reason else []
    left_out = len(one.sums) + len(other.sums) - 2 * common
    if left_out:
        notes.append(f"{left_out} rows have a score in one of the two runs only and are left out")
    return "; ".join(notes) or None


def _adjust(entries: list[JsonDict]) -> None:
    """Fill in p_holm and family_size: a family is a dataset and a metric."""
    families: dict[tuple[str, str], list[JsonDict]] = {}
    for entry in entries:
        families.setdefault((entry["dataset"], entry["metric"]), []).append(entry)
    for family in families.values():
        tested = sum(entry["p"] is not None for entry in family)
        for entry, p in zip(family, holm([entry["p"] for entry in family]), strict=True):
            entry.update(p_holm=p, family_size=tested)
