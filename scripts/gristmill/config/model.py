"""The `models` section: where weights come from, what generates, and how a model is placed on GPUs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from gristmill.config.endpoint import EndpointConfig
from gristmill.config.resources import Resources
from gristmill.config.section import Section

#: A size of memory, for example 70GiB or 512 MB.
Memory = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)? ?[KMGT]i?B$")]

#: What engine: endpoint reads of a model's section.
_OF_ENDPOINTS = {"engine", "endpoint", "on_overflow", "shards_per_worker", "resources"}
_IN_ENDPOINT = {"source": "model", "timeout_seconds": "timeout_seconds", "max_batch_rows": "max_concurrent"}


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
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="Where prepare_model keeps fetched and converted weights; null: the hub's own cache. $VAR and ~.",
    )
    local_copy: str | None = Field(
        None,
        min_length=1,
        description="A folder on a node's own disk, to which its first worker copies the weights. $VAR and ~ work.",
    )
    resources: Resources = Field(
        {},
        description="What the model's jobs ask of a cluster, by Snakemake's names: {runtime: 240, mem_mb: 64000, "
        "slurm_partition: long, constraint: a100_80g}. A list has a value for each attempt.",
    )
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
