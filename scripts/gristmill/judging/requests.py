"""Answers to judge requests: what is asked, in the format of a run's requests.jsonl.

- One request per answer; for a pair one per order, `second_first` with the two answers swapped.
- What is not asked (no answer, identical answers) is decided in items.py and becomes a verdict without a question.
- `row` and `reference` pass through, so the judge's generations can be read on their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gristmill.codec import sampling_to_json
from gristmill.config.specs import JudgeSpec
from gristmill.errors import UserError
from gristmill.judging.items import Item, is_swapped, items
from gristmill.judging.reading import json_schema
from gristmill.prompts import PromptRenderer, judge_variables, placeholders
from gristmill.types import JsonDict, RequestId


def judge_requests(spec: JudgeSpec, generations: Sequence[Iterable[JsonDict]]) -> Iterator[JsonDict]:
    """The request lines of one judge target, in the runs' order and in constant memory.

    Args:
        spec: the judge's prompt, labels and sampling, and its target.
        generations: the parsed lines of each judged run's generations.jsonl, as many as spec.target has runs.

    Raises:
        UserError: the runs of a pair do not match, or the prompt cannot be rendered; the message names the row.
    """
    if spec.sampling.samples != 1:
        raise UserError(
            f"a judge is asked once per answer, but its sampling.samples is {spec.sampling.samples}; remove it"
        )
    renderer, names = PromptRenderer(spec.prompt), placeholders(spec.prompt)
    sampling = sampling_to_json(spec.sampling.for_requests())
    if spec.readout == "json":
        sampling["json_schema"] = json_schema(spec.kind, list(spec.labels))
    likelihood = {"labels": list(spec.labels)} if spec.readout == "likelihood" else {}
    for item in items(spec.target, generations):
        for rid in item.asked(spec.both_orders):
            yield {
                "id": rid.id,
                "sample": rid.sample,
                "variant": rid.variant,
                "messages": _messages(renderer, names, spec, item, rid),
                "sampling": sampling,
                **likelihood,
                "reference": item.reference,
                "row": item.row,
            }


def _messages(renderer: PromptRenderer, names: set[str], spec: JudgeSpec, item: Item, rid: RequestId) -> list[JsonDict]:
    answers = [answer for answer in item.answers if answer is not None]
    conversations = list(item.conversations)
    if is_swapped(rid.variant):
        answers.reverse()
        conversations.reverse()
    fields = {"id": item.id, **item.row, "reference": item.reference}
    rubric = {"rubric": spec.rubric or ""} if spec.kind == "score" else {}
    asked = {chat[-1]["content"] for chat in conversations}
    if len(asked) > 1 and "question" in names:
        raise UserError(
            f"row {item.id}: the two runs asked it in different words, so there is no one question; use conversation_a "
            f"and conversation_b in {spec.prompt.file}"
        )
    try:
        variables = judge_variables(fields, answers, item.reference, list(spec.labels), conversations)
        messages = renderer.render(variables | rubric)
    except UserError as error:
        raise UserError(f"row {item.id}: {error}") from error
    return [dict(message) for message in messages]
