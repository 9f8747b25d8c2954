"""The `judges` and `juries` sections: what a judge is shown, what it may say, and the bars it is held to."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gristmill.config.runs import SamplingConfig
from gristmill.config.section import Section, Text


def number_text(number: float | Decimal) -> str:
    """A number as a judge writes it: 7, 0.5, never 7.0 or 5E-1."""
    exact = number if isinstance(number, Decimal) else Decimal(repr(number))
    text = f"{exact:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


class ReliabilityBar(Section):
    """Below any of these a judge is marked unreliable wherever its numbers appear."""

    max_unreadable_ratio: float = Field(0.1, ge=0, le=1, description="Share of verdicts that could not be read.")
    max_label_share: float = Field(0.95, gt=0, le=1, description="Largest share that one label may have.")
    min_consistency: float = Field(0.6, ge=0, le=1, description="Pairwise: share of pairs judged alike in both orders.")
    min_kappa: float = Field(0.2, ge=-1, le=1, description="Pointwise: Cohen's kappa with the run's first metric.")


JudgeKind = Literal["pointwise", "pairwise", "score", "classification"]
#: What a label can mean, and of these what a judge's labels must mean; a classification's classes are the user's.
MEANINGS: dict[str, tuple[str, ...]] = {
    "pointwise": ("correct", "incorrect", "partial"),
    "pairwise": ("first", "second", "tie", "much_first", "much_second"),
}
NEEDED_MEANINGS: dict[str, set[str]] = {"pointwise": {"correct", "incorrect"}, "pairwise": {"first", "second"}}
#: More scores than these are no scale that a judge could tell apart.
MAX_SCORES = 1001
#: A JSON answer holds an explanation; with less room than this it would always be cut.
MIN_JSON_TOKENS = 64


class JudgeConfig(Section):
    """model × judge prompt × kind, applied to runs or, if pairwise, to pairs of runs."""

    kind: JudgeKind
    model: str
    prompt: str
    runs: list[str] = Field([], description="The runs to judge; pairwise: those to compare with `baseline`.")
    pairs: list[tuple[str, str]] = Field([], description="pairwise: the pairs of runs to compare.")
    baseline: str | None = Field(None, description="pairwise: short for pairs of each of `runs` with this run.")
    labels: dict[Text, Text] = Field(
        {},
        description="What each label the judge may write means. Default: A, B (and C for a tie in a pair). "
        "classification: the class it stands for.",
    )
    range: tuple[float, float] | None = Field(None, description="score: the lowest and the highest score.")
    step: float = Field(1.0, gt=0, description="score: what lies between two scores.")
    rubric: str | None = Field(None, description="score: what the scores stand for; `rubric` in the prompt.")
    readout: Literal["text", "json", "likelihood"] = Field(
        "text",
        description="text: read from the judge's words; json: the judge answers by a JSON Schema; likelihood: how "
        "likely each label is, without words.",
    )
    several_labels: Literal["last", "unreadable"] = Field(
        "last", description="text: what it means when the strongest pattern finds different labels."
    )
    human: str | None = Field(None, description="Column with what a person said, to compare the judge with.")
    human_labels: dict[Text, Text] = Field(
        {}, description="What the column's values mean where they are no labels or meanings: {1: first, 2: second}."
    )
    human_unreadable: Literal["wrong", "tie", "dropped"] = Field(
        "wrong", description="What an unreadable verdict counts as beside a person's."
    )
    max_failed_ratio: float = Field(
        0.0, ge=0, le=1, description="Share of rows that may fail (out of memory, timeout …) before the run stops."
    )
    both_orders: bool = Field(True, description="pairwise: ask twice, with the answers swapped.")
    retries: int = Field(0, ge=0, le=10, description="How often an answer that cannot be read is asked again.")
    retry_temperature: float = Field(
        0.7,
        gt=0.0,
        le=2.0,
        description="temperature of a greedy judge that is asked again: greedy would repeat itself.",
    )
    stop_after_unreadable: int | None = Field(
        20, ge=1, description="End the job when so many verdicts in a row cannot be read. null: never."
    )
    sampling: SamplingConfig = SamplingConfig.model_validate({"max_new_tokens": 16})
    reliability: ReliabilityBar = ReliabilityBar.model_validate({})

    @field_validator("human_labels", mode="before")
    @classmethod
    def _values_are_text(cls, value: Any) -> Any:
        """YAML gives numbers as numbers."""
        return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="before")
    @classmethod
    def _baseline_is_short_for_pairs(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("kind") != "pairwise" or value.get("baseline") is None:
            return value
        runs, pairs = value.get("runs"), value.get("pairs") or []
        if not isinstance(runs, list) or not runs or not isinstance(pairs, list):
            raise ValueError("baseline needs runs; list the runs to compare with it")
        return {**value, "pairs": [*pairs, *([run, value["baseline"]] for run in runs)], "runs": [], "baseline": None}

    @model_validator(mode="after")
    def _kind_fits(self) -> JudgeConfig:
        wanted, other = ("pairs", "runs") if self.kind == "pairwise" else ("runs", "pairs")
        if not getattr(self, wanted):
            how = "list pairs, or runs and a baseline" if wanted == "pairs" else "list at least one"
            raise ValueError(f"kind {self.kind} needs {wanted}; {how}")
        if getattr(self, other):
            raise ValueError(f"kind {self.kind} takes {wanted}, not {other}; remove {other}")
        if self.baseline is not None:
            raise ValueError(f"baseline is for kind pairwise, and this is {self.kind}; remove it")
        if self.sampling.samples > 1:
            raise ValueError(f"sampling.samples is {self.sampling.samples}; a judge answers once, leave it at 1")
        if any(first == second for first, second in self.pairs):
            raise ValueError("pairs: a run cannot be compared with itself; name two runs")
        twice = [target for target, count in Counter(self.targets()).items() if count > 1]
        if twice:
            raise ValueError(f"{wanted}: {twice[0]} is there twice; remove one")
        return self

    @model_validator(mode="after")
    def _labels_fit(self) -> JudgeConfig:
        if self.kind == "score":
            if self.labels:
                raise ValueError("labels: a judge of kind score writes numbers; remove labels and give range")
            return self
        if self.kind == "classification":
            if len(set(self.labels.values())) < 2:
                raise ValueError("labels: kind classification needs two classes or more; write label: class")
            return self
        allowed, needed = MEANINGS[self.kind], NEEDED_MEANINGS[self.kind]
        wrong = sorted(set(self.labels.values()) - set(allowed))
        if wrong:
            raise ValueError(f"labels: {wrong[0]!r} is no meaning for kind {self.kind}; use {', '.join(allowed)}")
        if self.labels and not needed <= set(self.labels.values()):
            raise ValueError(f"labels: kind {self.kind} needs a label for each of {', '.join(sorted(needed))}; add it")
        return self

    @model_validator(mode="after")
    def _scale_fits(self) -> JudgeConfig:
        if self.kind != "score":
            given = [name for name in ("range", "rubric") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} is for kind score, and this is {self.kind}; remove it")
            return self
        if self.range is None:
            raise ValueError("kind score needs range, for example [1, 10]")
        low, high = (Decimal(repr(end)) for end in self.range)
        steps = (high - low) / Decimal(repr(self.step))
        if low >= high:
            raise ValueError(f"range: {number_text(low)} is not below {number_text(high)}; write [lowest, highest]")
        if steps != int(steps) or steps >= MAX_SCORES:
            raise ValueError(
                f"step {number_text(self.step)} does not cut the range {number_text(low)} to {number_text(high)} "
                f"into at most {MAX_SCORES - 1} equal steps; choose another"
            )
        return self

    @model_validator(mode="after")
    def _readout_fits(self) -> JudgeConfig:
        if self.readout == "json" and self.sampling.max_new_tokens < MIN_JSON_TOKENS:
            raise ValueError(
                f"sampling.max_new_tokens is {self.sampling.max_new_tokens}, and readout json writes an explanation "
                f"before the verdict; give it {MIN_JSON_TOKENS} or more"
            )
        if self.readout == "json" and self.sampling.stop:
            raise ValueError(f"sampling.stop {self.sampling.stop[0]!r} would cut the JSON of readout json; remove it")
        if self.retries and self.readout == "likelihood":
            raise ValueError(f"retries is {self.retries}, and a likelihood is the same each time; remove it")
        if self.human is not None and len(self.pairs) > 1:
            raise ValueError(
                f"human is {self.human!r}, and a column holds what people said of one pair, not of {len(self.pairs)}; "
                "give each pair a judge of its own"
            )
        sayable = {*self.meanings(), *self.meanings().values()}
        sayable |= {"first", "second", "tie"} if self.kind == "pairwise" else set()
        for value, meaning in self.human_labels.items():
            if meaning not in sayable:
                known = ", ".join(sorted(sayable))
                raise ValueError(
                    f"human_labels: {value} is {meaning!r}, which this judge cannot say; use one of: {known}"
                )
        if self.human_unreadable == "tie" and self.kind != "pairwise":
            raise ValueError(f"human_unreadable tie is for pairs, and kind is {self.kind}; use wrong or dropped")
        return self

    def meanings(self) -> dict[str, str]:
        """Label → meaning, with the defaults filled in; a score means itself."""
        if self.kind == "score":
            return {text: text for text in self.scores()}
        if self.labels:
            return dict(self.labels)
        if self.kind == "pointwise":
            return {"A": "correct", "B": "incorrect"}
        return {"A": "first", "B": "second", "C": "tie"}

    def scores(self) -> dict[str, float]:
        """How each score is written → the score, ascending; empty for other kinds."""
        if self.range is None:
            return {}
        low, high, step = (Decimal(repr(number)) for number in (*self.range, self.step))
        values = [low + step * index for index in range(int((high - low) / step) + 1)]
        return {number_text(value): float(value) for value in values}

    def targets(self) -> list[str]:
        """Folder names of what is judged: `run`, or `run_vs_run`."""
        return [f"{first}_vs_{second}" for first, second in self.pairs] if self.kind == "pairwise" else list(self.runs)


class JuryConfig(Section):
    """Judges of one kind and the same targets, joined to one verdict."""

    judges: list[str] = Field(min_length=2, description="The judges, by name.")
    combine: Literal["majority", "mean"] = Field("majority", description="What they decide; mean is for scores.")
