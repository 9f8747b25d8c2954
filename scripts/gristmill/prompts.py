"""Prompt templates to chat messages, and a check of their placeholders before anything runs.

- Templates run in Jinja2's immutable sandbox without a loader: no imports, no file access, no Python internals.
- A row's values are data. `{{ … }}` inside a row's text is copied, never evaluated, and nothing is escaped.
- Every column whose name is an identifier is a variable; `row` is the whole row and wins over a column named `row`.
- In a judge's prompt `answer`, `answer_a`, `answer_b`, `reference`, `labels` and `rubric` win over columns.
- `row.items` is the column `items` where the row has one: a column wins over Python's method of the same name.
- What a template prints is a value: text, a number, a list. A method that was not called, or a generator, is refused.
- Values print as Jinja2 prints them (null is `None`, true is `True`); use `{% if x is none %}` or `| tojson` to differ.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gristmill.config.schema import PromptConfig
from gristmill.errors import UserError, some
from gristmill.types import JsonDict, Message

#: What a prompt with `turns` may use beside the columns; `extra` for check_placeholders.
TURN_NAMES = {"turn", "turn_number"}
#: What a judge's prompt may use beside the columns where the judged rows have turns.
JUDGED_TURN_NAMES = {
    "pointwise": {"question", "conversation"},
    "score": {"question", "conversation"},
    "classification": {"question", "conversation"},
    "pairwise": {"question", "conversation_a", "conversation_b"},
}
#: What a judge's prompt may use beside the columns; `extra` for check_placeholders.
JUDGE_NAMES = {
    "pointwise": {"answer", "reference", "labels"},
    "pairwise": {"answer_a", "answer_b", "reference", "labels"},
    "score": {"answer", "reference", "labels", "rubric"},
    "classification": {"answer", "reference", "labels"},
}
MAX_NAMES_SHOWN = 20
#: Tests and filters that say what to do when a name is absent, so a row may lack it.
_ABSENCE_TESTS = {"defined", "undefined"}
_ABSENCE_FILTERS = {"default", "d"}
#: The file name that Jinja2 gives to a template made from text, in tracebacks.
_TEMPLATE_FRAME = "<template>"


class PromptRenderer:
    """One prompt, compiled once and rendered for every row."""

    def __init__(self, prompt: PromptConfig) -> None:
        self._system: _Template | None = None
        for role, source in _sources(prompt):
            if role == "system":
                self._system = _Template(source, _where(prompt, role))
            else:
                self._user = _Template(source, _where(prompt, role))
        self._turns: list[Message] = []
        for turn in prompt.few_shot:
            self._turns.append({"role": "user", "content": turn.user})
            self._turns.append({"role": "assistant", "content": turn.assistant})

    def render(self, variables: Mapping[str, Any], examples: Sequence[Message] = ()) -> tuple[Message, ...]:
        """The chat for one row: the system message if any, few-shot turns as they stand, examples, the user message.

        Raises:
            UserError: a name the row does not have, or anything else that fails in the template.
        """
        return (*self.head(variables), *examples, self.question(variables))

    def question(self, variables: Mapping[str, Any]) -> Message:
        """The user message of one row."""
        return {"role": "user", "content": self._user.render(variables)}

    def turns(self, variables: Mapping[str, Any], turns: Sequence[str]) -> Iterator[tuple[JsonDict, ...]]:
        """The chat of each turn of a row, with content None where the answers of the turns before it go.

        What stands before the conversation is rendered for the first turn, and is the same for all.
        """
        asked = [{**variables, "turn": turn, "turn_number": number} for number, turn in enumerate(turns, start=1)]
        chat: list[JsonDict] = [dict(message) for message in self.head(asked[0])]
        for each in asked:
            chat.append({"role": "user", "content": self._user.render(each)})
            yield tuple(chat)
            chat.append({"role": "assistant", "content": None})

    def head(self, variables: Mapping[str, Any]) -> list[Message]:
        """What stands before the question."""
        system: list[Message] = []
        if self._system is not None:
            system.append({"role": "system", "content": self._system.render(variables)})
        return [*system, *self._turns]


def placeholders(prompt: PromptConfig) -> set[str]:
    """Every name the prompt looks up, from its file and its system message; Jinja2's own (range, loop) left out."""
    names: set[str] = set()
    for role, source in _sources(prompt):
        names |= _names(source, _where(prompt, role))
    return names


def run_variables(row_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a run's prompt: each column with an identifier for a name, and `row` with all of them."""
    columns = {name: value for name, value in row_fields.items() if name.isidentifier()}
    return {**columns, "row": dict(row_fields)}


def judge_variables(
    row_fields: Mapping[str, Any],
    answers: Sequence[str],
    reference: Any,
    labels: Sequence[str],
    conversations: Sequence[Sequence[Message]] = (),
) -> dict[str, Any]:
    """The variables of a judge's prompt: those of a run, `reference`, `labels`, and the answers.

    One answer is `answer`; two are `answer_a` (shown first) and `answer_b`. They win over columns of the same name,
    which stay reachable as `row.answer`. Several accepted references are shown as one text: `H2O or water`.
    Of rows with turns also `question`, the user's text of this turn, and for each answer the `conversation` that it
    ends: the turns before it and the question.
    """
    ends = ("",) if len(answers) == 1 else ("_a", "_b")
    shown: dict[str, Any] = {f"answer{end}": answer for end, answer in zip(ends, answers, strict=True)}
    if conversations:
        shown |= {f"conversation{end}": list(chat) for end, chat in zip(ends, conversations, strict=True)}
        questions = {chat[-1]["content"] for chat in conversations}
        shown |= {"question": questions.pop()} if len(questions) == 1 else {}
    return {**run_variables(row_fields), **shown, "reference": _shown(reference), "labels": list(labels)}


def _shown(reference: Any) -> Any:
    return " or ".join(str(item) for item in reference) if isinstance(reference, list) else reference


def check_placeholders(prompt_name: str, prompt: PromptConfig, columns: set[str], extra: set[str]) -> list[str]:
    """One line for each placeholder that is neither a column nor one of the `extra` names.

    A name the template guards itself (`x is defined`, `x | default(…)`) may be absent.
    """
    known = {column for column in columns if column.isidentifier()} | extra | {"row"}
    problems: list[str] = []
    for role, source in _sources(prompt):
        where = _where(prompt, role)
        try:
            unknown = _names(source, where) - _guarded_names(source, where) - known
        except UserError as error:
            problems.append(f"prompts.{prompt_name}: {error}")
            continue
        problems += [f"prompts.{prompt_name}: {_unknown(name, where, columns, extra)}" for name in sorted(unknown)]
    return problems


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a mapping's keys before its methods."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _value(printed: Any) -> Any:
    """Refuse to print what is no value: `<built-in method upper of str object at 0x7f…>` would go to the model."""
    if isinstance(printed, _PRINTABLE):
        return printed
    kind = type(printed).__name__
    advice = "call it with (), make it a list with | list, or write row.name for a column"
    raise jinja2.TemplateRuntimeError(f"this prints a {kind}, not a value; {advice}")


#: The values of JSON, what filters make of them, and undefined names, which raise as they are printed.
_PRINTABLE = (str, int, float, list, tuple, dict, set, type(None), jinja2.Undefined)
_ENVIRONMENT = _Environment(undefined=jinja2.StrictUndefined, autoescape=False, finalize=_value)


class _Template:
    """One compiled template and what to call it in a message."""

    def __init__(self, source: str, where: str) -> None:
        self._where = where
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            _refuse_syntax(where, error)

    def render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is a program: whatever it raises is its author's to mend
            names = some(sorted(variables), MAX_NAMES_SHOWN)
            place = f"{self._where}, line {_failing_line(error)}"
            raise UserError(f"{place}: {_reason(error)}; the names here are: {names}") from error


def _sources(prompt: PromptConfig) -> Iterator[tuple[str, str]]:
    """(role, template text) of the system message, if any, and of the file."""
    if prompt.system is not None:
        yield "system", prompt.system
    yield "user", _read(prompt.file)


def _where(prompt: PromptConfig, role: str) -> str:
    return prompt.file if role == "user" else f"the system message of {prompt.file}"


def _read(file: str) -> str:
    try:
        return Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; correct the prompt's file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def _names(source: str, where: str) -> set[str]:
    try:
        return meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
    except jinja2.TemplateSyntaxError as error:
        _refuse_syntax(where, error)


def _guarded_names(source: str, where: str) -> set[str]:
    """Names that the template tests for presence, or gives a default."""
    try:
        tree = _ENVIRONMENT.parse(source)
    except jinja2.TemplateSyntaxError as error:
        _refuse_syntax(where, error)
    guards: list[nodes.Test | nodes.Filter] = [
        test for test in tree.find_all(nodes.Test) if test.name in _ABSENCE_TESTS
    ]
    guards += [filter_ for filter_ in tree.find_all(nodes.Filter) if filter_.name in _ABSENCE_FILTERS]
    return {guard.node.name for guard in guards if isinstance(guard.node, nodes.Name)}


def _refuse_syntax(where: str, error: jinja2.TemplateSyntaxError) -> NoReturn:
    raise UserError(f"{where}, line {error.lineno}: {error.message}; correct the template") from error


def _failing_line(error: Exception) -> int:
    """The template's line that raised; Jinja2 puts it into the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if frame.filename == _TEMPLATE_FRAME), 1)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or "failed"
    return text if isinstance(error, jinja2.TemplateError) else f"{text} ({type(error).__name__})"


def _unknown(name: str, where: str, columns: set[str], extra: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(columns | extra), n=1)
    hint = f"did you mean {_spelt(near[0])}? " if near else ""
    more = f"; also {', '.join(sorted(extra))}" if extra else ""
    shown = some(sorted(columns), MAX_NAMES_SHOWN) or "none"
    return f"{{{{ {name} }}}} in {where} is not a column of the dataset; {hint}columns: {shown}{more}"


def _spelt(column: str) -> str:
    """How a template writes a column: by name, or through `row` when the name is no identifier."""
    return column if column.isidentifier() else f"row[{column!r}]"
