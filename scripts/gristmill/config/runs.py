"""The `runs` section: how answers are drawn, and how they are graded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gristmill.config.section import Section, Text
from gristmill.types import Sampling

MetricName = Literal["exact", "exact_match", "contains", "number", "choice", "label"]
#: A metric by name, or {regex: pattern} or {python: package.module:function}.
Metric = MetricName | dict[Literal["regex", "python"], Text]
FUNCTION_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class SamplingConfig(Section):
    """How answers are drawn. temperature 0 is greedy."""

    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, description="0: no limit.")
    repetition_penalty: float = Field(1.0, gt=0.0)
    stop: list[Text] = Field([], description="Texts that end an answer; they are not part of it.")
    seed: int = Field(0, ge=0, description="Each row and sample derives its own seed from this one.")
    samples: int = Field(1, ge=1, description="Answers per row.")
    json_schema: dict[str, Any] | None = Field(
        None, description="A JSON Schema of type object that every answer follows, its properties in this order."
    )

    @field_validator("json_schema")
    @classmethod
    def _schema_is_of_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        if value.get("type") != "object":
            raise ValueError(f"type is {value.get('type')!r}, and answers are objects; write type: object")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"it is no JSON ({error}); correct it") from error
        return value

    @model_validator(mode="after")
    def _schema_has_no_stop(self) -> SamplingConfig:
        if self.json_schema is not None and self.stop:
            raise ValueError(f"stop {self.stop[0]!r} would cut the document of json_schema, which ends itself; drop it")
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> SamplingConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples is {self.samples} but temperature 0 gives the same answer every time; raise it")
        return self

    def for_requests(self) -> Sampling:
        """The part that travels with every request."""
        values = self.model_dump(exclude={"samples", "stop", "json_schema"})
        # Not sorted: an answer's properties come in the schema's order.
        schema = "" if self.json_schema is None else json.dumps(self.json_schema, separators=(",", ":"))
        return Sampling(**values, stop=tuple(self.stop), json_schema=schema)


class RunConfig(Section):
    """dataset × model × prompt × sampling, and how the answers are graded."""

    dataset: str
    model: str
    prompt: str
    sampling: SamplingConfig = SamplingConfig.model_validate({})
    metrics: list[Metric] = Field(
        [],
        description="Grades against `reference`; the first is the headline. A name, {regex: pattern} or "
        "{python: package.module:function}.",
    )
    labels: dict[Text, list[Text]] | list[Text] = Field(
        [], description="The classes of a classification, each with other spellings: {hateful: [], neutral: [none]}."
    )
    readout: Literal["text", "likelihood"] = Field(
        "text", description="text: the label is read from the answer; likelihood: the most likely one of the labels."
    )
    cluster: str | None = Field(
        None, description="Column whose equal values belong together (a document, a template): intervals respect it."
    )
    slices: list[str] = Field([], description="Columns whose values get a score of their own.")
    max_failed_ratio: float = Field(
        0.0, ge=0, le=1, description="Share of rows that may fail (out of memory, timeout …) before the run stops."
    )
    formats: list[Literal["csv", "parquet"]] = Field([], description="Copies of generations.jsonl to write beside it.")

    @field_validator("metrics")
    @classmethod
    def _metrics_can_be_read(cls, metrics: list[Metric]) -> list[Metric]:
        for metric in metrics:
            if isinstance(metric, dict):
                _check_own_metric(metric)
        return metrics

    @model_validator(mode="after")
    def _labels_fit(self) -> RunConfig:
        labels, graded = self.label_names(), "label" in self.metrics
        if graded and not labels:
            raise ValueError("metrics has label, but there are no labels; list them in labels")
        if labels and not graded and self.readout == "text":
            raise ValueError("labels are read by the metric label; add it to metrics, or remove labels")
        if self.readout == "likelihood" and not labels:
            raise ValueError("readout is likelihood, but there are no labels; list them in labels")
        if self.readout == "likelihood" and self.sampling.samples > 1:
            raise ValueError(
                f"sampling.samples is {self.sampling.samples}, but a likelihood is the same each time; leave it at 1"
            )
        _check_labels(labels)
        return self

    def label_names(self) -> dict[str, list[str]]:
        """Label → its other spellings."""
        return dict(self.labels) if isinstance(self.labels, dict) else {label: [] for label in self.labels}


def metric_name(metric: Metric) -> str:
    """The name under which a metric's numbers stand: `number`, `regex: \\d+`, `python: mine:passes`."""
    return metric if isinstance(metric, str) else next(f"{kind}: {value}" for kind, value in metric.items())


def _check_own_metric(metric: Mapping[Literal["regex", "python"], str]) -> None:
    from gristmill.grading.custom import compiled

    if len(metric) != 1:
        raise ValueError(f"a metric of your own has one key, and this has {len(metric)}; write regex or python")
    if "regex" in metric:
        compiled(metric["regex"])
    elif not FUNCTION_PATTERN.fullmatch(metric["python"]):
        raise ValueError(f"{metric['python']!r} names no function; write package.module:function")


def _check_labels(labels: Mapping[str, list[str]]) -> None:
    from gristmill.grading.labels import label_key

    if len(labels) == 1:
        raise ValueError(f"labels has only {next(iter(labels))!r}; name two or more")
    owners: dict[str, str] = {}
    for label, aliases in labels.items():
        for name in (label, *aliases):
            if not label_key(name):
                raise ValueError(f"labels: {name!r} of {label!r} is blank; write a word")
            owner = owners.setdefault(label_key(name), label)
            if owner != label:
                raise ValueError(f"labels: {name!r} stands for {owner!r} and for {label!r}; a spelling has one label")
