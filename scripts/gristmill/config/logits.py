"""The `logits` section: of which texts a teacher's log-probabilities are kept, and how many a position."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gristmill.config.section import Section

#: The full distribution of a larger vocabulary would take more bytes a token than the text's hidden states.
MAX_FULL_VOCABULARY = 65_536


class LogitsConfig(Section):
    """A teacher's log-probabilities over given texts or a run's answers."""

    model: str = Field(description="The teacher: a model that is loaded here, by transformers or vllm.")
    run: str | None = Field(None, description="Its prompts and answers are the texts; positions are the answers'.")
    dataset: str | None = Field(None, description="Instead of run: its rows are the texts.")
    text_field: str | None = Field(None, description="With dataset: the column of plain texts; every token counts.")
    prompt: str | None = Field(
        None, description="With dataset: the rows as chat prompts, and `reference` as the answer; positions are its."
    )
    top_k: int = Field(64, ge=1, description="Log-probabilities kept a position, the most likely ones.")
    full: bool = Field(False, description="Keep all of them; for vocabularies of at most 65,536 tokens.")
    max_samples: int | None = Field(None, ge=1, description="Use only the first texts; null: all.")
    max_tokens: int | None = Field(
        None, ge=2, description="Longest text, the prompt included; null: the model's context, or 4,096 without one."
    )
    on_overflow: Literal["cut", "split"] = Field(
        "cut", description="A longer text: its end is cut off, or it is split into windows (text_field only)."
    )
    max_failed_ratio: float = Field(
        0.0, ge=0, le=1, description="Share of texts that may fail (out of memory, logits not finite) before it stops."
    )

    @model_validator(mode="after")
    def _texts_are_named(self) -> LogitsConfig:
        if (self.run is None) == (self.dataset is None):
            raise ValueError("give either run or dataset; the texts come from one of them")
        if self.run is not None and (self.text_field is not None or self.prompt is not None):
            raise ValueError("text_field and prompt belong to dataset, and run has texts of its own; remove them")
        if self.dataset is not None and (self.text_field is None) == (self.prompt is None):
            raise ValueError("dataset needs text_field (plain texts) or prompt (chats with a reference); give one")
        if self.on_overflow == "split" and self.text_field is None:
            raise ValueError("on_overflow is split, which would part answers from their prompts; use cut")
        return self
