"""What may stand in config.yaml, typed once: keys, types, limits and defaults.

- Unknown keys are refused, so a misspelt key never passes in silence.
- config/config.schema.json is generated from these classes (scripts/schema.py); a test keeps the two in step.
- A rule is given only the sections it uses, so that an edit invalidates only what depends on it.
- Names of runs, judges, models, prompts and datasets become folder names: letters, digits, `.`, `_` and `-`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from gristmill.config.endpoint import EndpointConfig
from gristmill.config.section import Section as Section
from gristmill.types import Sampling

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=80)]
MetricName = Literal["exact", "exact_match", "contains", "number", "choice", "label"]
#: A stop text or a label: an empty one would be found everywhere.
Text = Annotated[str, StringConstraints(min_length=1)]
#: A metric by name, or {regex: pattern} or {python: package.module:function}.
Metric = MetricName | dict[Literal["regex", "python"], Text]
FUNCTION_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
#: A size of memory, for example 70GiB or 512 MB.
Memory = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)? ?[KMGT]i?B$")]

#: What engine: endpoint reads of a model's section.
_OF_ENDPOINTS = {"engine", "endpoint", "on_overflow", "shards_per_worker"}
_IN_ENDPOINT = {"source": "model", "timeout_seconds": "timeout_seconds", "max_batch_rows": "max_concurrent"}


def number_text(number: float | Decimal) -> str:
    """A number as a judge writes it: 7, 0.5, never 7.0 or 5E-1."""
    exact = number if isinstance(number, Decimal) else Decimal(repr(number))
    text = f"{exact:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


class DatasetConfig(Section):
    """A file of rows: .json, .jsonl, .csv, .tsv or .parquet, each also with .gz."""

    path: str = Field(description="The file, relative to the working directory or to the folder of the Snakefile.")
    id_field: str | None = Field("id", description="The column with each row's id; null derives ids from the content.")
    fields: dict[str, str] = Field({}, description="New name: column. `reference` is the name the metrics look for.")
    max_rows: int | None = Field(None, ge=1, description="Use only the first rows.")
    delimiter: str | None = Field(
        None, description="One character between the cells; null: a comma in .csv, a tab in .tsv."
    )

    @field_validator("delimiter")
    @classmethod
    def _delimiter_separates(cls, value: str | None) -> str | None:
        if value is not None and (len(value) != 1 or value.isalnum() or value in '"\r\n\0'):
            raise ValueError(f"one character that is no letter, digit, quote or line end; correct {value!r}")
        return value


class ModelConfig(Section):
    """A model, where its weights come from and how it is placed on the GPUs of a group."""

    source: str | None = Field(
        None, description="Hub id, local folder, or package:<module>/<file>.gguf. Not for engine: echo or endpoint."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto: the checkpoint's own on a GPU, float32 on a CPU."
    )
    quantization: Literal["8bit", "4bit"] | dict[str, Any] | None = Field(
        None,
        description="8bit or 4bit (bitsandbytes at load), or any quantization_config of transformers with its "
        "quant_method.",
    )
    gpus_per_model: int = Field(
        1, ge=1, description="GPUs that hold one copy of the model; a group of gpus.groups may ask for more."
    )
    parallel: Literal["auto", "layers", "tensor"] = Field(
        "auto",
        description="How a model uses several GPUs. layers: each holds some layers, and one works at a time; tensor: "
        "each holds a part of every layer, and all work at once; auto: tensor where the model and its engine can.",
    )
    shards_per_worker: int = Field(
        1, ge=1, description="Jobs that a worker's requests are cut into. Each loads the model; a lost one costs less."
    )
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | str] = Field(
        "auto",
        description="How layers are laid over the worker's GPUs, or a map: module: position in the group, cpu or disk.",
    )
    max_memory: dict[str, Memory] = Field(
        {}, description="Most memory for the weights on each of the worker's GPUs: {0: 70GiB, 1: 70GiB, cpu: 200GiB}."
    )
    engine: Literal["auto", "static", "continuous", "vllm", "echo", "endpoint"] = Field(
        "auto", description="What generates; auto picks one that runs here and logs why."
    )
    endpoint: EndpointConfig | None = Field(None, description="engine: endpoint: the server that answers.")
    attention: str | None = Field(None, description="attn_implementation of transformers; null lets it choose.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the weights.")
    allow_pickle: bool = Field(False, description="Accept .bin weights, which can run code when loaded.")
    allow_offload: bool = Field(False, description="Let layers that do not fit spill to CPU memory or disk.")
    context_tokens: int | None = Field(None, ge=1, description="Longest prompt plus answer; null: the model's own.")
    on_overflow: Literal["error", "truncate_left", "truncate_middle", "skip"] = Field(
        "error", description="What to do with a prompt that leaves no room for max_new_tokens."
    )
    timeout_seconds: float | None = Field(
        None, gt=0, description="A row whose answer takes longer fails, from when it joins a batch. null: no limit."
    )
    max_batch_rows: int | None = Field(None, ge=1, description="Most rows in a batch; null: from the memory left.")
    chat_template: str | None = Field(None, description="A Jinja2 file used instead of the tokenizer's template.")

    @field_validator("max_memory", mode="before")
    @classmethod
    def _devices_are_text(cls, value: Any) -> Any:
        """YAML gives the GPUs' positions as numbers, JSON as text."""
        return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _source_is_there(self) -> ModelConfig:
        if self.source is None and self.engine not in ("echo", "endpoint"):
            raise ValueError("source is missing; give a hub id, a folder or package:<module>/<file>.gguf")
        return self

    @model_validator(mode="after")
    def _endpoint_is_served(self) -> ModelConfig:
        if self.engine != "endpoint":
            if self.endpoint is not None:
                raise ValueError(f"endpoint is given, but engine is {self.engine}; set engine: endpoint, or remove it")
            return self
        if self.endpoint is None:
            raise ValueError("engine is endpoint, but endpoint is missing; add endpoint: {base_url: …, model: …}")
        for name, field in ModelConfig.model_fields.items():
            if name not in _OF_ENDPOINTS and getattr(self, name) != field.default:
                instead = f", set endpoint.{_IN_ENDPOINT[name]}" if name in _IN_ENDPOINT else ""
                raise ValueError(f"{name} means nothing to a model that is served elsewhere; remove it{instead}")
        if self.on_overflow.startswith("truncate"):
            raise ValueError(f"on_overflow is {self.on_overflow}, which needs the tokenizer; use error or skip")
        return self

    @model_validator(mode="after")
    def _engine_fits(self) -> ModelConfig:
        if self.parallel == "tensor" and self.engine == "static":
            raise ValueError("parallel: tensor needs engine: continuous or auto; static lays whole layers out")
        if self.parallel == "tensor" and self.device_map != "auto":
            raise ValueError("parallel: tensor cuts every layer, so device_map places nothing; leave it out")
        return self

    @model_validator(mode="after")
    def _placement_fits(self) -> ModelConfig:
        for device in self.max_memory:
            if not device.isdecimal() and device != "cpu":
                raise ValueError(f"max_memory names {device!r}; use a position in the group (0, 1, …) or cpu")
        if isinstance(self.quantization, dict) and not isinstance(self.quantization.get("quant_method"), str):
            raise ValueError("quantization has no quant_method; add it, for example quant_method: bitsandbytes")
        return self


class Turn(Section):
    """One worked example of a few-shot prompt."""

    user: str
    assistant: str


class PromptConfig(Section):
    """A prompt: a Jinja2 file for the user message, and what stands before it."""

    file: str = Field(description="Jinja2 template of the user message; a row's columns are its variables.")
    system: str | None = Field(None, description="System message; may use the same variables.")
    few_shot: list[Turn] = Field([], description="Example turns placed before the question, taken literally.")
    turns: str | None = Field(
        None,
        description="Column with a list of user messages; each turn is asked after the answers before it. The template "
        "is rendered once for each turn with `turn` = that text and `turn_number` 1, 2, …",
    )


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
            raise ValueError(f"kind {self.kind} needs {wanted}; list at least one")
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


class GroupConfig(Section):
    """GPUs that are alike, on a machine where not all are."""

    devices: list[int | str] = Field(min_length=1, description="Indices (nvidia-smi's) or UUIDs.")
    gpus_per_model: int = Field(
        1, ge=1, description="GPUs of one worker here; a model that asks for more gets what it asks for."
    )
    speed: float = Field(1.0, gt=0, description="Of one worker here, compared with the others'; shards follow it.")


class GpusConfig(Section):
    """Which devices may be used, and how long to wait for them."""

    devices: Literal["auto"] | list[int | str] = Field("auto", description="auto, or indices or UUIDs.")
    groups: list[GroupConfig] = Field([], description="Unlike GPUs: what is alike stands together. Replaces devices.")
    wait_minutes: float = Field(60.0, ge=0, description="How long a job waits for a group that others hold.")
    busy_memory_mib: int = Field(
        1024,
        ge=0,
        description="A GPU with more MiB than this in use by others is not taken; a desktop needs a few 100.",
    )
    total: int | None = Field(
        None, ge=1, description="Tokens when --resources gpu is not given, on a machine without GPUs or a cluster."
    )
    load_minutes: float | None = Field(
        60.0, gt=0, description="A model that takes longer to load counts as hung; the job ends. null: never."
    )
    stall_minutes: float | None = Field(
        120.0, gt=0, description="A job with no answer for longer counts as hung; it ends. null: never."
    )
    health: bool = Field(True, description="End a job on a GPU error and set the GPU aside; false: go on.")
    prometheus: str | None = Field(None, description="Folder for node_exporter textfiles of the GPUs at work.")

    @model_validator(mode="after")
    def _groups_are_the_devices(self) -> GpusConfig:
        if self.groups and self.devices != "auto":
            raise ValueError("both devices and groups are given; groups name their devices, remove devices")
        names = [str(device) for group in self.groups for device in group.devices]
        if twice := next((name for name, count in Counter(names).items() if count > 1), None):
            raise ValueError(f"groups name device {twice} twice; a GPU belongs to one group")
        return self

    def wanted(self) -> Literal["auto"] | list[int | str]:
        """All devices that the config names."""
        return [device for group in self.groups for device in group.devices] if self.groups else self.devices


class ComparisonsConfig(Section):
    """Which runs of one dataset are compared on the rows they share."""

    metrics: list[Text] = Field([], description="What to compare them by; empty: the headline that they share.")
    pairs: Literal["auto"] | list[tuple[str, str]] = Field(
        "auto", description="auto: every two runs of a dataset that share a metric; or pairs of runs, or [] for none."
    )
    seed: int = Field(0, ge=0, description="Of the bootstrap.")
    resamples: int = Field(2000, ge=100, le=100_000, description="Of the bootstrap.")


class RankingsConfig(Section):
    """How the runs that a pairwise judge compared are rated."""

    baseline: str | None = Field(None, description="The run whose rating is 1000; null: the mean of all is.")
    seed: int = Field(0, ge=0, description="Of the bootstrap.")
    resamples: int = Field(1000, ge=100, le=100_000, description="Of the bootstrap.")


class ReportConfig(Section):
    """The report's title and size."""

    title: str = "gristmill report"
    max_rows: int = Field(2000, ge=0, description="Rows embedded in the sample browser; the rest stay in the files.")


class Config(Section):
    """A whole config file."""

    datasets: dict[Name, DatasetConfig]
    models: dict[Name, ModelConfig]
    prompts: dict[Name, PromptConfig]
    runs: dict[Name, RunConfig] = Field(min_length=1)
    judges: dict[Name, JudgeConfig] = {}
    juries: dict[Name, JuryConfig] = {}
    comparisons: ComparisonsConfig = ComparisonsConfig.model_validate({})
    rankings: RankingsConfig = RankingsConfig.model_validate({})
    gpus: GpusConfig = GpusConfig.model_validate({})
    report: ReportConfig = ReportConfig.model_validate({})


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file (config/config.schema.json)."""
    return Config.model_json_schema()
