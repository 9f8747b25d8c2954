"""Which runs are compared: the config's `comparisons` section, or every two runs that can be.

A comparison needs two runs of one dataset and a metric that both have: one of `comparisons.metrics`, or the headline
(first) metric where it is the same for both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from gristmill.config.schema import Config, metric_name
from gristmill.config.specs import CompareSpec, Comparison

#: More pairs than this nobody asked for by name: the adjusted p values of so large a family find little.
MAX_AUTO_PAIRS = 45


def compare_spec(config: Config) -> CompareSpec:
    """All comparisons of a checked config; none where there is nothing to compare."""
    named = config.comparisons.pairs
    pairs = itertools.combinations(config.runs, 2) if named == "auto" else named
    wanted = [
        Comparison(
            dataset=config.runs[pair[0]].dataset, metric=metric, runs=pair, cluster=_shared_cluster(config, pair)
        )
        for pair in pairs
        if config.runs[pair[0]].dataset == config.runs[pair[1]].dataset
        for metric in shared_metrics(config, pair)
    ]
    return CompareSpec(comparisons=wanted, seed=config.comparisons.seed, resamples=config.comparisons.resamples)


def _shared_cluster(config: Config, pair: tuple[str, str]) -> str | None:
    """The cluster column, where it is the same for both runs."""
    one, other = (config.runs[name].cluster for name in pair)
    return one if one == other else None


def shared_metrics(config: Config, pair: tuple[str, str]) -> list[str]:
    """The metrics by which two runs are compared."""
    one, other = ([metric_name(metric) for metric in config.runs[name].metrics] for name in pair)
    wanted = list(dict.fromkeys(config.comparisons.metrics))
    if wanted:
        return [metric for metric in wanted if metric in one and metric in other]
    return one[:1] if one[:1] == other[:1] else []


def comparison_problems(config: Config) -> Iterable[str]:
    """One line for each mistake in `comparisons` and `rankings`."""
    known = list(dict.fromkeys(metric_name(metric) for run in config.runs.values() for metric in run.metrics))
    for metric in config.comparisons.metrics:
        if metric not in known:
            yield f"comparisons.metrics: no run has the metric {metric!r}; name one of: {', '.join(known) or 'none'}"
    if config.comparisons.pairs == "auto":
        yield from _too_many(config)
    else:
        for pair in config.comparisons.pairs:
            yield from _pair_problems(config, pair)
    baseline = config.rankings.baseline
    if baseline is not None and baseline not in _ranked(config):
        ranked = ", ".join(_ranked(config)) or "none"
        yield f"rankings.baseline: {baseline!r} is in no pair of a pairwise judge; name one of those, or none: {ranked}"


def _too_many(config: Config) -> Iterable[str]:
    if any(run.dataset not in config.datasets for run in config.runs.values()):
        return
    pairs = {comparison.runs for comparison in compare_spec(config).comparisons}
    if len(pairs) > MAX_AUTO_PAIRS:
        yield (
            f"comparisons.pairs is auto, and {len(pairs)} pairs of runs share a metric, over the limit of "
            f"{MAX_AUTO_PAIRS}; name the pairs to compare, [[run, run], …], or [] for none"
        )


def _pair_problems(config: Config, pair: tuple[str, str]) -> Iterable[str]:
    unknown = [name for name in pair if name not in config.runs]
    if unknown:
        yield f"comparisons.pairs: {unknown[0]!r} is not a run; the runs are: {', '.join(config.runs)}"
        return
    first, second = pair
    named = [set(other) for other in config.comparisons.pairs if isinstance(other, tuple)]
    if first == second:
        yield f"comparisons.pairs: {first} cannot be compared with itself; name two runs"
    elif named.count(set(pair)) > 1:
        yield f"comparisons.pairs: {first} and {second} are there twice; remove one"
    elif config.runs[first].dataset != config.runs[second].dataset:
        sets = f"{config.runs[first].dataset}, {config.runs[second].dataset}"
        yield f"comparisons.pairs: {first} and {second} answer different datasets ({sets}); pair runs of one dataset"
    elif not shared_metrics(config, pair):
        yield (
            f"comparisons.pairs: {first} and {second} share no metric to compare by; give both one, and name it in "
            "comparisons.metrics"
        )


def _ranked(config: Config) -> list[str]:
    return list(dict.fromkeys(run for judge in config.judges.values() for pair in judge.pairs for run in pair))
