"""What a judge's words mean: one reader, made from the judge's config, for whoever has an answer to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.config.schema import JudgeConfig
from gristmill.judging.readout import read_label
from gristmill.types import Reading


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the answers of one judge."""

    labels: tuple[str, ...]

    @classmethod
    def of(cls, judge: JudgeConfig) -> Reader:
        """The reader of a judge."""
        return cls(tuple(judge.meanings()))

    def read(self, text: str, label_logprobs: Sequence[float] | None = None) -> Reading:
        """The label that a text gives; None, with the reason, for a text that cannot be read."""
        return read_label(text, self.labels)
