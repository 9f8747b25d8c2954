"""What each rule hands its script on the command line: the narrow part of the config that the step depends on.

A spec travels as one JSON argument and is a Snakemake param at the same time, so a step runs again when, and only
when, its own part of the config has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, TypeVar

from pydantic import ValidationError

from gristmill.config.schema import (
    Config,
    DatasetConfig,
    JudgeConfig,
    JudgeKind,
    LogitsConfig,
    Metric,
    ModelConfig,
    PromptConfig,
    ReliabilityBar,
    SamplingConfig,
    Section,
    TrainingConfig,
)
from gristmill.config.trainings import made_by
from gristmill.errors import UserError

#: What of a model says where and how fast it runs and changes no answer: it travels beside the spec, so that an edit of
#: it runs nothing again.
PLACEMENT = frozenset(
    {
        *("gpus_per_model", "shards_per_worker", "parallel", "device_map", "max_memory", "attention"),
        *("max_batch_rows", "allow_offload", "resources", "cache_dir", "local_copy"),
    }
)
#: The same of a training.
TRAINING_PLACEMENT = frozenset(
    {
        *("gpus", "nodes", "processes", "micro_batch_rows", "gradient_checkpointing", "sharding", "timeout_minutes"),
        *("checkpoint_every_steps", "keep_checkpoints", "resources"),
    }
)
#: What of a model's section a training reads: where its weights and its tokenizer come from.
_OF_TRAINED = {"source", "revision", "trust_remote_code", "allow_pickle", "chat_template"}
#: One command-line argument may hold 128 KiB on Linux (MAX_ARG_STRLEN); stay clear of it.
MAX_SPEC_BYTES = 100_000


class RequestsSpec(Section):
    """Rows → requests."""

    dataset: DatasetConfig
    prompt: PromptConfig
    sampling: SamplingConfig
    #: The answers whose likelihoods are asked for, in this order; none: text is.
    labels: list[str] = []
    #: The dataset of the prompt's few_shot_from.
    examples: DatasetConfig | None = None


class ModelSpec(Section):
    """Requests → completions: what of the model's config can change an answer, and with `placed` where it runs."""

    name: str
    model: ModelConfig

    @classmethod
    def unplaced(cls, name: str, model: ModelConfig) -> ModelSpec:
        """The spec without the placement, as a rule's params carry it."""
        bare = model.model_dump(exclude=set(PLACEMENT))
        if model.endpoint is not None:
            bare["endpoint"] = model.endpoint.unplaced().model_dump()
        return cls(name=name, model=ModelConfig.model_validate(bare))

    def placed(self, placements: str) -> ModelSpec:
        """The spec with its model's part of `encode_placements`."""
        placement = json.loads(placements).get(self.name, {})
        return self.model_copy(update={"model": ModelConfig.model_validate(self.model.model_dump() | placement)})


class JudgeSpec(Section):
    """Completions of one run, or of a pair, → judge requests."""

    kind: JudgeKind
    target: list[str]
    prompt: PromptConfig
    labels: dict[str, str]
    both_orders: bool
    sampling: SamplingConfig
    readout: Literal["text", "json", "likelihood"] = "text"
    rubric: str | None = None

    @classmethod
    def of(cls, judge: JudgeConfig, target: list[str], prompt: PromptConfig) -> JudgeSpec:
        """The part of a judge that its questions depend on."""
        return cls(
            kind=judge.kind,
            target=target,
            prompt=prompt,
            labels=judge.meanings(),
            both_orders=judge.both_orders,
            sampling=judge.sampling,
            readout=judge.readout,
            rubric=judge.rubric,
        )


class VerdictSpec(Section):
    """Judge completions → verdicts and the judge's metrics."""

    name: str
    judge: JudgeConfig
    target: list[str]
    #: The model of each judged run; a judge may prefer its own.
    run_models: dict[str, str] = {}
    #: The column whose values the judged runs count as clusters.
    cluster: str | None = None


class JurySpec(Section):
    """Verdicts of several judges → a jury's."""

    name: str
    kind: JudgeKind
    judges: list[str]
    combine: Literal["majority", "mean"]
    target: list[str]
    range: tuple[float, float] | None = None
    cluster: str | None = None


class LogitsSpec(Section):
    """Rows or completions → the token ids that a teacher reads."""

    teacher: ModelSpec
    texts: LogitsConfig
    dataset: DatasetConfig | None = None
    prompt: PromptConfig | None = None
    #: The dataset of the prompt's few_shot_from.
    examples: DatasetConfig | None = None
    #: Whether an answer of the run that ended by itself ended with a token, not with one of its stop texts.
    ends_with_token: bool = True

    @classmethod
    def of(cls, config: Config, name: str) -> LogitsSpec:
        """The part of a config that the texts depend on."""
        logits = config.logits[name]
        prompt = config.prompts[logits.prompt] if logits.prompt is not None else None
        shown = prompt.few_shot_from if prompt is not None else None
        return cls(
            teacher=ModelSpec.unplaced(logits.model, config.models[logits.model]),
            texts=logits.model_copy(update={"max_failed_ratio": 0.0, "top_k": 1}),
            dataset=config.datasets[logits.dataset] if logits.dataset is not None else None,
            prompt=prompt,
            examples=config.datasets[shown.dataset] if shown is not None else None,
            ends_with_token=logits.run is None or not config.runs[logits.run].sampling.stop,
        )


class TrainingDataSpec(Section):
    """Rows → the token ids that a training reads."""

    texts: LogitsSpec
    #: The evaluation's, where it has a dataset of its own.
    evaluation: LogitsSpec | None = None
    #: Whether the model is made from scratch: then the context of the tokenizer's model means nothing.
    from_scratch: bool

    @classmethod
    def of(cls, config: Config, name: str) -> TrainingDataSpec:
        """The part of a config that the token ids depend on; not for a training on logits."""
        training = config.trainings[name]
        apart = training.evaluation.dataset if training.evaluation is not None else None
        return cls(
            texts=_training_texts(config, training, training.dataset or ""),
            evaluation=_training_texts(config, training, apart) if apart is not None else None,
            from_scratch=training.architecture is not None,
        )

    def context(self) -> dict[str, None]:
        """What to change in the description of the tokenizer's model."""
        return {"context_tokens": None} if self.from_scratch else {}


def _training_texts(config: Config, training: TrainingConfig, dataset: str) -> LogitsSpec:
    """A dataset's rows as a teacher would read them: the same token ids."""
    prompt = config.prompts[training.prompt] if training.prompt is not None else None
    shown = prompt.few_shot_from if prompt is not None else None
    texts: dict[str, object] = {"model": training.tokenizer_of(), "dataset": dataset, "prompt": training.prompt}
    texts |= {"text_field": training.text_field, "max_tokens": training.sequence_tokens}
    texts |= {"on_overflow": "cut" if prompt is not None else "split"}
    return LogitsSpec(
        teacher=trained_from(config, training),
        texts=LogitsConfig.model_validate(texts),
        dataset=config.datasets[dataset],
        prompt=prompt,
        examples=config.datasets[shown.dataset] if shown is not None else None,
    )


def trained_from(config: Config, training: TrainingConfig) -> ModelSpec:
    """The base of a training, or the model whose tokenizer it takes, without what only generating reads."""
    name = training.tokenizer_of()
    bare = config.models[name].model_dump(include=_OF_TRAINED)
    return ModelSpec(name=name, model=ModelConfig.model_validate(bare))


class TrainingSpec(Section):
    """Token ids or logits → a model."""

    name: str
    training: TrainingConfig
    #: The base, or the model whose tokenizer it takes.
    model: ModelSpec

    @classmethod
    def of(cls, config: Config, name: str) -> TrainingSpec:
        """The part of a config that the model depends on, without where it is trained."""
        training = config.trainings[name]
        return cls.unplaced_of(cls(name=name, training=training, model=trained_from(config, training)))

    @classmethod
    def unplaced_of(cls, spec: TrainingSpec) -> TrainingSpec:
        """The same training, as any machine would run it."""
        bare = spec.training.model_dump(exclude=set(TRAINING_PLACEMENT))
        return spec.model_copy(update={"training": TrainingConfig.model_validate(bare)})

    def placed(self, placements: str) -> TrainingSpec:
        """The spec with its training's part of `encode_training_placements`."""
        placement = json.loads(placements).get(self.name, {})
        placed = TrainingConfig.model_validate(self.training.model_dump() | placement)
        return self.model_copy(update={"training": placed})


def encode_training_placements(trainings: Mapping[str, TrainingConfig]) -> str:
    """The placement of every training as one JSON argument."""
    return json.dumps({name: one.model_dump(include=set(TRAINING_PLACEMENT)) for name, one in trainings.items()})


class MetricsSpec(Section):
    """Completions → grades and metrics."""

    run: str
    dataset: str
    model: str
    prompt: str
    metrics: list[Metric]
    slices: list[str]
    labels: dict[str, list[str]] = {}
    readout: Literal["text", "likelihood"] = "text"
    cluster: str | None = None
    samples: int = 1


class Comparison(Section):
    """Two runs of one dataset and the metric to compare them by."""

    dataset: str
    metric: str
    runs: tuple[str, str]
    #: The column that both runs count as clusters; null: the rows.
    cluster: str | None = None


class CompareSpec(Section):
    """Grades of all runs → comparisons.json."""

    comparisons: list[Comparison]
    seed: int
    resamples: int


class RankedPair(Section):
    """Two runs that a pairwise judge compared."""

    judge: str
    dataset: str
    runs: tuple[str, str]


class RankSpec(Section):
    """Verdicts of all pairwise judges → rankings.json."""

    pairs: list[RankedPair]
    baseline: str | None
    seed: int
    resamples: int

    @classmethod
    def from_config(cls, config: Config) -> RankSpec:
        """All pairs of all pairwise judges."""
        pairs = [
            RankedPair(judge=name, dataset=config.runs[pair[0]].dataset, runs=pair)
            for name, judge in config.judges.items()
            for pair in judge.pairs
        ]
        return cls(pairs=pairs, **config.rankings.model_dump())


class ReportJudge(Section):
    """What the report says about a judge beyond its numbers: what its labels mean and the bars it is held to."""

    labels: dict[str, str] = {}
    reliability: ReliabilityBar = ReliabilityBar.model_validate({})


class ReportTraining(Section):
    """The models that a training has to do with: where it began, who taught it, and the names of what it made."""

    base: str | None = None
    teacher: str | None = None
    models: list[str] = []

    @classmethod
    def of(cls, config: Config, name: str) -> ReportTraining:
        """Of one training of a config."""
        training = config.trainings[name]
        teacher = config.logits[training.logits].model if training.logits is not None else None
        made = [model for model, each in config.models.items() if made_by(each.source) == name]
        return cls(base=training.base, teacher=teacher, models=made)


class ReportSpec(Section):
    """Metrics, answers and verdicts of all runs → the report. A run or judge that is not listed is shown without."""

    title: str
    max_rows: int
    sampling: dict[str, SamplingConfig] = {}
    judges: dict[str, ReportJudge] = {}
    trainings: dict[str, ReportTraining] = {}

    @classmethod
    def from_config(cls, config: Config) -> ReportSpec:
        """The part of a config that the report shows."""
        return cls(
            title=config.report.title,
            max_rows=config.report.max_rows,
            sampling={name: run.sampling for name, run in config.runs.items()},
            judges={
                name: ReportJudge(labels=judge.meanings(), reliability=judge.reliability)
                for name, judge in config.judges.items()
            },
            trainings={name: ReportTraining.of(config, name) for name in config.trainings},
        )


def encode_placements(models: Mapping[str, ModelConfig]) -> str:
    """The placement of every model as one JSON argument."""
    placed = {name: model.model_dump(include=set(PLACEMENT)) for name, model in models.items()}
    placed |= {n: placed[n] | {"endpoint": m.endpoint.model_dump()} for n, m in models.items() if m.endpoint}
    return json.dumps(placed)


#: What of a judge says what it is asked, where, and what is made of its verdicts, but not whether it is asked again.
_NOT_ABOUT_ASKING_AGAIN = frozenset(
    {
        *("model", "prompt", "runs", "pairs", "both_orders", "sampling"),
        *("reliability", "max_failed_ratio", "stop_after_unreadable"),
    }
)


def encode_judges(judges: Mapping[str, JudgeConfig]) -> str:
    """All judges as one JSON argument."""
    return json.dumps({name: judge.model_dump() for name, judge in judges.items()})


def asked_again(judge: JudgeConfig) -> str:
    """What decides which of a judge's answers are asked again, and how, as JSON."""
    return judge.model_dump_json(exclude=set(_NOT_ABOUT_ASKING_AGAIN))


S = TypeVar("S", bound=Section)


def encode(spec: Section) -> str:
    """A spec as one JSON argument; equal specs give equal text."""
    text = spec.model_dump_json()
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise UserError(
            f"the settings of one step take {len(text.encode())} bytes, over the {MAX_SPEC_BYTES} that fit on a "
            "command line; move long texts (few_shot, system) into the prompt file"
        )
    return text


def decode(kind: type[S], text: str) -> S:
    """Read a spec back; raises UserError when the text is not one."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"--spec is not a {kind.__name__}: {error.errors()[0]['msg']}") from error
