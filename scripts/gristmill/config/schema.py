"""What may stand in config.yaml, typed once: keys, types, limits and defaults.

- Unknown keys are refused, so a misspelt key never passes in silence.
- config/config.schema.json is generated from these classes (scripts/schema.py); a test keeps the two in step.
- A rule is given only the sections it uses, so that an edit invalidates only what depends on it.
- Names of runs, judges, models, prompts and datasets become folder names: letters, digits, `.`, `_` and `-`.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from gristmill.config.judges import JudgeConfig as JudgeConfig
from gristmill.config.judges import JudgeKind as JudgeKind
from gristmill.config.judges import JuryConfig as JuryConfig
from gristmill.config.judges import ReliabilityBar as ReliabilityBar
from gristmill.config.judges import number_text as number_text
from gristmill.config.logits import LogitsConfig as LogitsConfig
from gristmill.config.model import ModelConfig as ModelConfig
from gristmill.config.runs import Metric as Metric
from gristmill.config.runs import MetricName as MetricName
from gristmill.config.runs import RunConfig as RunConfig
from gristmill.config.runs import SamplingConfig as SamplingConfig
from gristmill.config.runs import metric_name as metric_name
from gristmill.config.section import Section as Section
from gristmill.config.section import Text as Text
from gristmill.config.training import TrainingConfig as TrainingConfig

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=80)]


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


class Turn(Section):
    """One worked example of a few-shot prompt."""

    user: str
    assistant: str


class FewShotRows(Section):
    """Rows of a dataset as the examples of a few-shot prompt."""

    dataset: str = Field(description="The dataset of the examples; it may be the run's own.")
    rows: list[Text] = Field(min_length=1, description="Ids of the rows, in the order in which they are shown.")

    @field_validator("rows", mode="before")
    @classmethod
    def _ids_are_text(cls, value: Any) -> Any:
        """YAML gives ids of digits as numbers."""
        whole = isinstance(value, list)
        return (
            [str(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in value]
            if whole
            else value
        )

    @field_validator("rows")
    @classmethod
    def _each_once(cls, value: list[str]) -> list[str]:
        if twice := next((row for row, count in Counter(value).items() if count > 1), None):
            raise ValueError(f"row {twice} is there twice; name each once")
        return value


class PromptConfig(Section):
    """A prompt: a Jinja2 file for the user message, and what stands before it."""

    file: str = Field(description="Jinja2 template of the user message; a row's columns are its variables.")
    system: str | None = Field(None, description="System message; may use the same variables.")
    few_shot: list[Turn] = Field([], description="Example turns placed before the question, taken literally.")
    few_shot_from: FewShotRows | None = Field(
        None,
        description="Example turns made of a dataset's rows: the file rendered for each, and its reference. A row is "
        "never its own example.",
    )
    turns: str | None = Field(
        None,
        description="Column with a list of user messages; each turn is asked after the answers before it. The template "
        "is rendered once for each turn with `turn` = that text and `turn_number` 1, 2, …",
    )

    @model_validator(mode="after")
    def _examples_are_of_one_turn(self) -> PromptConfig:
        if self.turns is not None and self.few_shot_from is not None:
            raise ValueError("few_shot_from and turns do not go together; write the examples into few_shot")
        return self


class GroupConfig(Section):
    """GPUs that are alike, on a machine where not all are."""

    devices: list[int | str] = Field(min_length=1, description="Indices (nvidia-smi's) or UUIDs.")
    gpus_per_model: int = Field(
        1, ge=1, description="GPUs of one worker here; a model that asks for more gets what it asks for."
    )
    speed: float = Field(1.0, gt=0, description="Of one worker here, compared with the others'; shards follow it.")


class GpusConfig(Section):
    """Which devices may be used, and how long to wait for them."""

    devices: Literal["auto", "none"] | list[int | str] = Field(
        "auto", description="auto; none: all models run on CPUs; or indices or UUIDs."
    )
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

    def wanted(self) -> Literal["auto", "none"] | list[int | str]:
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
    prompts: dict[Name, PromptConfig] = {}
    runs: dict[Name, RunConfig] = {}
    judges: dict[Name, JudgeConfig] = {}
    juries: dict[Name, JuryConfig] = {}
    logits: dict[Name, LogitsConfig] = {}
    trainings: dict[Name, TrainingConfig] = {}
    comparisons: ComparisonsConfig = ComparisonsConfig.model_validate({})
    rankings: RankingsConfig = RankingsConfig.model_validate({})
    gpus: GpusConfig = GpusConfig.model_validate({})
    report: ReportConfig = ReportConfig.model_validate({})


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file (config/config.schema.json)."""
    return Config.model_json_schema()
