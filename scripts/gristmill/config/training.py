"""The `trainings` section: what is trained, on what, by which recipe, and where it runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gristmill.config.resources import Resources
from gristmill.config.section import Section, Text

Objective = Literal["sft", "distill", "pretrain"]
#: The source of a model that a training makes: `source: training:<name>`.
TRAINED = "training:"


class EvaluationConfig(Section):
    """What is kept from the training to measure it."""

    dataset: str | None = Field(None, description="sft and pretrain: a dataset of its own.")
    held_out_ratio: float = Field(0.0, ge=0, lt=1, description="Instead: share of the texts that is not trained on.")
    every_steps: int | None = Field(None, ge=1, description="How often; null: before the first step and at the end.")

    @model_validator(mode="after")
    def _texts_are_named(self) -> EvaluationConfig:
        if (self.dataset is None) == (self.held_out_ratio == 0):
            raise ValueError("give either dataset or held_out_ratio; what is measured on comes from one of them")
        return self


class EarlyStoppingConfig(Section):
    """When to stop because the evaluation no longer improves; the best step's model is kept."""

    patience: int = Field(ge=1, description="Evaluations in a row without an improvement after which it stops.")
    min_improvement: float = Field(0.0, ge=0, description="A loss must fall by more than this to count as better.")


class LoraConfig(Section):
    """Low-rank adapters through peft, merged into the weights at the end."""

    r: int = Field(16, ge=1, description="Rank.")
    alpha: float = Field(32.0, gt=0, description="Scale: the adapter's output is multiplied by alpha / r.")
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[Text] = Field(
        "all-linear", description="Names of the modules, or all linear ones but the head."
    )


class TrainingConfig(Section):
    """One training; models.<name>.source names its result as training:<name>."""

    objective: Objective = Field(
        description="sft: answers only, through the chat template. distill: a teacher's stored logits. pretrain: every "
        "token of plain texts."
    )
    base: str | None = Field(None, description="The model to start from, a name of models.")
    architecture: dict[str, Any] | None = Field(
        None,
        description="Instead of base, from scratch: model_type and the keys of its transformers config "
        "({model_type: gpt2, n_embd: 128, n_layer: 4, n_head: 4}).",
    )
    tokenizer: str | None = Field(None, description="With architecture: the model whose tokenizer it takes.")
    dataset: str | None = Field(None, description="sft and pretrain: the rows.")
    prompt: str | None = Field(None, description="sft: the rows' chat; `reference` is the answer.")
    text_field: str | None = Field(None, description="pretrain: the column of texts.")
    logits: str | None = Field(None, description="distill: a name of logits.")
    evaluation: EvaluationConfig | None = Field(None, description="Measuring during the training.")
    steps: int | None = Field(None, ge=1, description="How many updates; or epochs.")
    epochs: float | None = Field(None, gt=0, description="Passes over the rows; the last step is filled from the next.")
    sequence_tokens: int = Field(1024, ge=2, description="Longest row; with packing, every row.")
    packing: bool = Field(True, description="Put several texts into a row, each blind to the others.")
    batch_rows: int = Field(32, ge=1, description="Rows of one update, over all devices: the effective batch.")
    micro_batch_rows: int = Field(1, ge=1, description="Rows that one device takes at a time.")
    learning_rate: float = Field(gt=0, le=1000, description="The highest.")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="How it falls after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which it rises from 0.")
    final_learning_rate_ratio: float = Field(0.0, ge=0, le=1, description="What is left of it at the last step.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW, on matrices only.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Of AdamW.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="Longer gradients are shortened to it; null: never.")
    alpha: float = Field(0.5, ge=0, le=1, description="distill: weight of the cross-entropy; 1: no teacher.")
    temperature: float = Field(1.0, gt=0, description="distill: T of the softened distributions.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the weights while they are trained.")
    saved_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of the result; auto: that of mixed_precision, else dtype."
    )
    mixed_precision: Literal["none", "bf16", "fp16"] = Field("none", description="What the products are computed in.")
    gradient_checkpointing: bool = Field(False, description="Compute activations again instead of keeping them.")
    attention: str | None = Field(None, description="attn_implementation of transformers; null lets it choose.")
    lora: LoraConfig | None = Field(None, description="Train adapters only.")
    seed: int = Field(0, ge=0, description="Of the weights, the order of rows and dropout.")
    deterministic: bool = Field(False, description="Only kernels that give the same bits each time; slower.")
    checkpoint_every_steps: int = Field(500, ge=1, description="How often all that a restart needs is written.")
    keep_checkpoints: int = Field(2, ge=1, description="How many of them stay.")
    early_stopping: EarlyStoppingConfig | None = None
    gpus: int = Field(1, ge=1, description="Processes of a node, each with a GPU of its own.")
    nodes: int = Field(1, ge=1, description="Machines, under SLURM.")
    processes: int = Field(1, ge=1, description="Processes where there is no GPU.")
    sharding: Literal["none", "fsdp"] = Field(
        "none", description="fsdp: parameters, gradients and optimizer are cut over the GPUs, for what does not fit."
    )
    resources: Resources = Field(
        {}, description="What its job asks of a cluster, by Snakemake's names: {runtime: 2880, mem_mb: 200000}."
    )
    timeout_minutes: float = Field(30.0, gt=0, description="How long processes wait for each other before it ends.")

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _no_is_none(cls, value: Any) -> Any:
        """YAML reads a bare `no` as false; accelerate's name for it is meant."""
        return "none" if value is False or value == "no" else value

    @model_validator(mode="after")
    def _start_is_named(self) -> TrainingConfig:
        if (self.base is None) == (self.architecture is None):
            raise ValueError("give either base (a model to start from) or architecture (from scratch)")
        if (self.tokenizer is None) != (self.architecture is None):
            raise ValueError("tokenizer belongs to architecture, and base has its own; give it with architecture only")
        if self.architecture is not None and not isinstance(self.architecture.get("model_type"), str):
            raise ValueError("architecture has no model_type; name one of transformers', for example llama or gpt2")
        if self.lora is not None and self.base is None:
            raise ValueError("lora adapts a base, and architecture starts from scratch; remove one")
        return self

    @model_validator(mode="after")
    def _texts_are_named(self) -> TrainingConfig:
        wanted = {"sft": {"dataset", "prompt"}, "distill": {"logits"}, "pretrain": {"dataset", "text_field"}}
        keys = ("dataset", "prompt", "text_field", "logits")
        given = {key for key in keys if getattr(self, key) is not None}
        needed = wanted[self.objective]
        if given != needed:
            raise ValueError(
                f"objective {self.objective} reads {' and '.join(sorted(needed))}, and "
                f"{', '.join(sorted(given)) or 'none'} is given; give just those"
            )
        if self.objective == "distill" and self.evaluation is not None and self.evaluation.dataset is not None:
            raise ValueError("evaluation.dataset has no teacher's logits; use evaluation.held_out_ratio")
        return self

    @model_validator(mode="after")
    def _recipe_fits(self) -> TrainingConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs; one of them says how long it trains")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} of {self.steps} steps: learning_rate is never reached; lower it"
            )
        every = self.evaluation.every_steps if self.evaluation is not None else None
        if self.early_stopping is not None and every is None:
            raise ValueError("early_stopping needs evaluation.every_steps; add it")
        if self.sharding == "fsdp" and self.mixed_precision == "fp16":
            raise ValueError("sharding fsdp goes with bf16 or none, not with fp16's loss scaling; use bf16")
        if self.dtype == "bfloat16" and self.mixed_precision == "fp16":
            raise ValueError("mixed_precision fp16 scales float32 gradients, and dtype is bfloat16; use bf16")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}, and each lies in [0, 1); correct them")
        return self

    def tokenizer_of(self) -> str:
        """The model whose tokenizer, and with `base` whose weights, it takes."""
        return self.tokenizer or self.base or ""
