"""Facts about prompt templates: what they may use, and that a row's text is never run."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.config.schema import PromptConfig
from gristmill.errors import UserError
from gristmill.prompts import (
    JUDGE_NAMES,
    PromptRenderer,
    check_placeholders,
    judge_variables,
    placeholders,
    run_variables,
)

INTERNALS = "{{ ''.__class__.__mro__ }}"


def prompt(folder: Path, text: str, **settings: Any) -> PromptConfig:
    file = folder / "prompt.jinja"
    file.write_text(text, encoding="utf-8")
    return PromptConfig(file=str(file), **settings)


def user_message(folder: Path, text: str, row: dict[str, Any]) -> str:
    return PromptRenderer(prompt(folder, text)).render(run_variables(row))[-1]["content"]


def refusal(folder: Path, text: str, row: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        user_message(folder, text, row)
    assert "prompt.jinja" in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_chat_is_system_then_examples_then_the_question(tmp_path: Path) -> None:
    turns = [{"user": "{{ literal }}", "assistant": "{% yes %}"}]
    config = prompt(tmp_path, "Q: {{ question }}\n", system="About {{ topic }}.", few_shot=turns)
    assert PromptRenderer(config).render(run_variables({"question": "2 < 3?", "topic": "numbers"})) == (
        {"role": "system", "content": "About numbers."},
        {"role": "user", "content": "{{ literal }}"},
        {"role": "assistant", "content": "{% yes %}"},
        {"role": "user", "content": "Q: 2 < 3?"},
    )


def test_only_one_newline_at_the_end_of_the_file_is_dropped(tmp_path: Path) -> None:
    assert user_message(tmp_path, "a\n\n", {}) == "a\n"


def test_a_byte_order_mark_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    assert user_message(tmp_path, "\ufeffa", {}) == "a"


@pytest.mark.parametrize(
    "text", ["{{ 1 + 1 }}", "{% raw %}", "{# gone #}", INTERNALS, "<b>&amp;</b>", "{{ question }}"]
)
def test_text_in_a_row_is_copied_and_never_evaluated(tmp_path: Path, text: str) -> None:
    assert user_message(tmp_path, "[{{ question }}|{{ row.question }}]", {"question": text}) == f"[{text}|{text}]"


@settings(deadline=None)
@given(text=st.text())
def test_any_text_in_a_row_reaches_the_prompt_unchanged(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert user_message(folder, "[{{ q }}]", {"q": text}) == f"[{text}]"


@pytest.mark.parametrize(
    "attack",
    [
        INTERNALS,
        "{{ row.__class__ }}",
        "{{ row.update({'question': 1}) }}",
        "{{ question.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_prompt_cannot_leave_the_sandbox(tmp_path: Path, attack: str) -> None:
    assert "line 1" in refusal(tmp_path, attack, {"question": "x"})


def test_a_syntax_error_is_refused_with_its_line_when_the_prompt_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompt\.jinja, line 2: .*end of print statement"):
        PromptRenderer(prompt(tmp_path, "a\n{{ b"))


def test_an_unknown_filter_is_refused_when_the_prompt_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No filter named 'shout'"):
        PromptRenderer(prompt(tmp_path, "{{ b | shout }}"))


def test_a_missing_prompt_file_and_one_in_latin_1_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jinja cannot be read"):
        PromptRenderer(PromptConfig(file=str(tmp_path / "nowhere.jinja")))
    (tmp_path / "latin.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.jinja is not UTF-8"):
        PromptRenderer(PromptConfig(file=str(tmp_path / "latin.jinja")))


def test_an_undefined_name_is_refused_with_its_line_and_the_names_there_are(tmp_path: Path) -> None:
    message = refusal(tmp_path, "a\n{{ qestion }}", {"question": "x", "topic": "y"})
    assert "line 2: 'qestion' is undefined" in message
    assert message.endswith("the names here are: question, row, topic")


def test_an_error_in_the_system_message_says_so(tmp_path: Path) -> None:
    renderer = PromptRenderer(prompt(tmp_path, "a", system="{{ b }}"))
    with pytest.raises(UserError, match=r"the system message of .*'b' is undefined"):
        renderer.render({})


@pytest.mark.parametrize(
    "text", ["{{ 1 // (n - n) }}", "{{ word | round }}", "{{ n.x.y }}", "{{ word() }}", "{{ 'a' * row }}"]
)
def test_any_failure_in_a_template_names_the_prompt(tmp_path: Path, text: str) -> None:
    refusal(tmp_path, text, {"n": 1, "word": "x"})


def test_a_column_wins_over_a_method_of_the_same_name(tmp_path: Path) -> None:
    assert user_message(tmp_path, "{{ row.items }} {{ row.keys }}", {"items": "a", "keys": 2}) == "a 2"


def test_a_column_that_is_no_identifier_is_reached_through_row(tmp_path: Path) -> None:
    assert user_message(tmp_path, "{{ row['answer key'] }} {{ row.row }}", {"answer key": "a", "row": "r"}) == "a r"


def test_judge_names_win_over_columns_which_stay_reachable() -> None:
    variables = judge_variables({"answer": "column", "q": 1}, ["given"], None, ("A", "B"))
    assert (variables["answer"], variables["row"]["answer"]) == ("given", "column")
    assert (variables["reference"], variables["labels"], variables["q"]) == (None, ["A", "B"], 1)


def test_a_pair_is_answer_a_and_answer_b() -> None:
    variables = judge_variables({}, ["one", "two"], "r", ["A"])
    assert (variables["answer_a"], variables["answer_b"]) == ("one", "two")
    assert "answer" not in variables
    assert JUDGE_NAMES["pairwise"] | {"row"} == variables.keys()
    assert JUDGE_NAMES["pointwise"] | {"row"} == judge_variables({}, ["one"], "r", ["A"]).keys()


def test_placeholders_are_those_of_the_file_and_the_system_message(tmp_path: Path) -> None:
    text = "{% for c in choices %}{{ loop.index }}{{ c }}{{ range(2) }}{% endfor %}{% set x = q %}{{ x }}"
    assert placeholders(prompt(tmp_path, text, system="{{ topic }}")) == {"choices", "q", "topic"}


def test_a_misspelt_placeholder_is_named_with_the_nearest_column(tmp_path: Path) -> None:
    config = prompt(tmp_path, "{{ qestion }} {{ row.anything }}")
    assert check_placeholders("direct", config, {"question", "id"}, set()) == [
        f"prompts.direct: {{{{ qestion }}}} in {config.file} is not a column of the dataset; "
        "did you mean question? columns: id, question"
    ]


def test_every_unknown_placeholder_gets_a_line(tmp_path: Path) -> None:
    config = prompt(tmp_path, "{{ zzz }} {{ answer_key }}", system="{{ yyy }}")
    lines = check_placeholders("p", config, {"answer key"}, {"labels"})
    assert ["{{ yyy }} in the system" in lines[0], "row['answer key']?" in lines[1], "{{ zzz }}" in lines[2]] == [
        True
    ] * 3
    assert all(line.endswith("columns: answer key; also labels") for line in lines)


def test_extra_names_and_names_the_template_guards_itself_are_fine(tmp_path: Path) -> None:
    text = "{{ answer }}{% if hint is defined %}{{ hint }}{% endif %}{{ style | default('plain') }}"
    assert check_placeholders("p", prompt(tmp_path, text), {"q"}, {"answer"}) == []


def test_checking_a_broken_template_gives_a_line_instead_of_raising(tmp_path: Path) -> None:
    (line,) = check_placeholders("p", prompt(tmp_path, "{% for %}"), set(), set())
    assert line.startswith("prompts.p: ")
    assert "line 1" in line


def test_a_judge_sees_several_accepted_references_as_one_text() -> None:
    variables = judge_variables({"q": 1}, ["x"], ["H2O", "water"], ["A", "B"])
    assert variables["reference"] == "H2O or water"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{{ word.upper }}", "builtin_function_or_method"),
        ("{{ words | map('upper') }}", "generator"),
        ("{{ self }}", "TemplateReference"),
        ("{{ range }}", "function"),
        ("a{{ cycler }}", "type"),
        ("{{ row.keys() }}", "dict_keys"),
    ],
)
def test_a_prompt_never_shows_a_python_object(tmp_path: Path, text: str, kind: str) -> None:
    message = refusal(tmp_path, text, {"word": "x", "words": ["a"], "self": "column"})
    assert f"line 1: this prints a {kind}, not a value; call it with (), make it a list with | list" in message


def test_what_a_prompt_shows_may_be_any_value_or_what_filters_make_of_it(tmp_path: Path) -> None:
    row = {"word": "x", "words": ["a", "b"], "n": 1, "f": 0.5, "t": True, "none": None, "o": {"k": [1]}, "self": "s"}
    text = (
        "{{ word.upper() }} {{ words | map('upper') | list }} {{ n }} {{ f }} {{ t }} {{ none }} {{ o }} {{ row.self }}"
    )
    assert user_message(tmp_path, text, row) == "X ['A', 'B'] 1 0.5 True None {'k': [1]} s"
    more = "{{ o | tojson }} {{ word | e }} {{ words | join('-') }} {{ o.items() | list }} {{ words | unique | list }}"
    assert user_message(tmp_path, more, row) == "{\"k\": [1]} x a-b [('k', [1])] ['a', 'b']"
    macro = "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(n) }}{{ range(2) | list }}"
    assert user_message(tmp_path, macro, row) == "<1>[0, 1]"
