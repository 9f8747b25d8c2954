"""What a judge's answer means: one reader, made from the judge's config, for whoever has an answer to read.

- text: patterns over the judge's words (readout.py, scores.py).
- json: one object with exactly `explanation` and `verdict`; anything else is unreadable, also where words would help.
- likelihood: nothing was written; the labels' log-probabilities decide. Equal ones go to the label that stands first.
- A reading that is None has a reason; a score is never clamped and a label never guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from gristmill import thinking
from gristmill.config.schema import JudgeConfig
from gristmill.judging.readout import Several, read_label, spoken
from gristmill.judging.scores import as_score, read_score
from gristmill.types import JsonDict, Reading

EXPLANATION, VERDICT = "explanation", "verdict"


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the answers of one judge."""

    labels: tuple[str, ...]
    #: A score judge's scores; empty for labels.
    scores: Mapping[str, float]
    readout: Literal["text", "json", "likelihood"] = "text"
    several: Several = "last"

    @classmethod
    def of(cls, judge: JudgeConfig) -> Reader:
        """The reader of a judge."""
        return cls(tuple(judge.meanings()), judge.scores(), judge.readout, judge.several_labels)

    def read(self, text: str | None, label_logprobs: Sequence[float] | None = None) -> Reading:
        """The verdict that an answer gives; its label is None, with the reason, for one that cannot be read.

        Args:
            text: the completion, never the prompt: words inside the judged answer cannot be taken for the judge's.
            label_logprobs: log P(label | prompt) in the order of the labels; only readout likelihood looks at them.
        """
        if self.readout == "likelihood":
            return self._likely(text or "", label_logprobs)
        if text is None:
            return Reading(None, "empty", "")
        if thinking.after_block(text) is None:
            return Reading(None, thinking.UNCLOSED, text)
        if self.readout == "json":
            return self._json(text)
        if self.scores:
            return read_score(text, self.scores, self.several)
        return read_label(text, self.labels, self.several)

    def _likely(self, raw: str, logprobs: Sequence[float] | None) -> Reading:
        if logprobs is None or len(logprobs) != len(self.labels) or any(math.isnan(each) for each in logprobs):
            return Reading(None, "no_likelihood", raw)
        top = max(logprobs)
        if not math.isfinite(top):
            return Reading(None, "no_likelihood", raw)
        # Relative to the likeliest, so that very unlikely labels do not all become 0.
        weights = [math.exp(each - top) for each in logprobs]
        whole = math.fsum(weights)
        shares = tuple(weight / whole for weight in weights)
        label = self.labels[logprobs.index(top)]
        pairs = zip(shares, self.scores.values(), strict=True) if self.scores else ()
        value = math.fsum(share * score for share, score in pairs) if self.scores else None
        mass = math.fsum(math.exp(each) for each in logprobs)
        return Reading(label, None, raw, value=value, probabilities=shares, label_mass=mass)

    def _json(self, text: str) -> Reading:
        if not text.strip():
            return Reading(None, "empty", text)
        document = _strict(spoken(text))
        if document is None:
            return Reading(None, "not_json", text)
        if document.keys() != {EXPLANATION, VERDICT} or not isinstance(document[EXPLANATION], str):
            return Reading(None, "other_keys", text)
        verdict = document[VERDICT]
        if self.scores:
            number = isinstance(verdict, int | float) and not isinstance(verdict, bool)
            return as_score(Decimal(repr(verdict)), self.scores, text) if number else Reading(None, "no_label", text)
        known = isinstance(verdict, str) and verdict in self.labels
        return Reading(verdict, None, text) if known else Reading(None, "no_label", text)


def json_schema(kind: str, labels: Sequence[str]) -> str:
    """The JSON Schema, as JSON text, that a judge with readout json answers by: first why, then the verdict."""
    values = [json.loads(label) for label in labels] if kind == "score" else list(labels)
    schema: JsonDict = {
        "type": "object",
        "properties": {EXPLANATION: {"type": "string"}, VERDICT: {"enum": values}},
        "required": [EXPLANATION, VERDICT],
        "additionalProperties": False,
    }
    return json.dumps(schema, separators=(",", ":"))


def _strict(text: str) -> dict[str, Any] | None:
    """A JSON object without a key that is there twice, or None."""
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
