"""Facts about prompts that do not fit: found and named before anything runs, shortened only when asked for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.config.schema import ModelConfig
from gristmill.engines import context_limit, open_engine
from gristmill.engines.echo import EchoEngine
from gristmill.engines.overflow import overflows, refuse_overflow, shorten
from gristmill.errors import UserError
from gristmill.types import Completion, Request, Sampling

POLICIES = ["truncate_left", "truncate_middle"]


def request(name: str = "r1", max_new_tokens: int = 10, text: str = "x") -> Request:
    return Request(name, 0, "", ({"role": "user", "content": text},), Sampling(max_new_tokens))


def model(policy: str = "error", context_tokens: int | None = None) -> ModelConfig:
    return ModelConfig.model_validate({"engine": "echo", "on_overflow": policy, "context_tokens": context_tokens})


def refusal(requests: list[tuple[Request, int]], limit: int, policy: str = "error") -> str:
    with pytest.raises(UserError) as caught:
        refuse_overflow(requests, limit, model(policy))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("prompt", "limit", "too_long"), [(90, 100, False), (91, 100, True), (10**6, None, False)])
def test_a_prompt_fits_when_it_and_its_answer_stay_within_the_context(
    prompt: int, limit: int | None, too_long: bool
) -> None:
    assert overflows(request(), prompt, limit) is too_long


@pytest.mark.parametrize(
    ("ours", "models", "limit"), [(None, None, None), (50, None, 50), (None, 80, 80), (50, 80, 50), (90, 80, 80)]
)
def test_the_smaller_of_both_contexts_counts(ours: int | None, models: int | None, limit: int | None) -> None:
    assert context_limit(model(context_tokens=ours), {"context_tokens": models}) == limit


def test_a_refusal_names_the_rows_the_lengths_and_the_choices() -> None:
    message = refusal([(request("fits"), 90), (request("long"), 95), (request("longer"), 120)], 100)
    for part in ("2 prompts", "120 tokens", "max_new_tokens=10", "context of 100", "leaves 90", "long#0, longer#0"):
        assert part in message
    for choice in ("truncate_left", "truncate_middle", "skip", "lower max_new_tokens"):
        assert choice in message
    assert "fits#0" not in message


def test_a_refusal_of_many_rows_names_a_few_and_counts_the_rest() -> None:
    message = refusal([(request(f"r{number}"), 95) for number in range(100)], 100)
    assert "100 prompts do" in message
    assert "r4#0 and 95 more" in message
    assert "1 prompt does" in refusal([(request(), 95)], 100)


@pytest.mark.parametrize("policy", [*POLICIES, "skip"])
def test_other_policies_let_a_long_prompt_pass(policy: str) -> None:
    refuse_overflow([(request(), 95)], 100, model(policy))


@pytest.mark.parametrize("policy", ["error", *POLICIES])
def test_an_answer_as_long_as_the_context_leaves_nothing_to_shorten_to(policy: str) -> None:
    message = refusal([(request(max_new_tokens=100), 5)], 100, policy)
    assert "max_new_tokens=100 leaves no room" in message
    refuse_overflow([(request(max_new_tokens=100), 5)], 100, model("skip"))


def test_nothing_is_refused_without_a_known_limit_or_when_all_fits() -> None:
    refuse_overflow([(request(), 10**9)], None, model())
    refuse_overflow([(request(), 90)], 100, model())
    refuse_overflow([], 100, model())


def test_truncate_left_keeps_the_end() -> None:
    assert shorten([1, 2, 3, 4, 5], 3, "truncate_left") == [3, 4, 5]


def test_truncate_middle_keeps_head_and_tail() -> None:
    assert shorten([1, 2, 3, 4, 5, 6], 4, "truncate_middle") == [1, 2, 5, 6]
    assert shorten([1, 2, 3, 4, 5, 6], 3, "truncate_middle") == [1, 5, 6]


@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(0, 40), st.sampled_from(POLICIES))
def test_a_shortened_prompt_has_exactly_the_room_and_keeps_its_order(ids: list[int], room: int, policy: str) -> None:
    kept = shorten(ids, room, policy)
    assert len(kept) == min(room, len(ids))
    assert kept == [token for token in ids if token in kept]


# ---- the echo engine follows the policy too


def echo(text: str, policy: str, context_tokens: int = 8) -> Completion:
    engine = EchoEngine(context_tokens, policy)
    (found,) = engine.generate([request(max_new_tokens=5, text=text)])
    assert isinstance(found, Completion)
    return found


def test_echo_skips_a_long_prompt_and_says_how_long_it_was() -> None:
    found = echo("one two three four", "skip")
    assert (found.text, found.finish_reason) == (None, "skipped")
    assert (found.prompt_tokens, found.completion_tokens, found.prompt_cut_tokens) == (4, 0, 0)


@pytest.mark.parametrize(
    ("policy", "kept"), [("truncate_left", " two three four"), ("truncate_middle", "one three four")]
)
def test_echo_shortens_a_long_prompt_and_counts_what_it_cut(policy: str, kept: str) -> None:
    found = echo("one two three four", policy)
    assert (found.text, found.prompt_tokens, found.prompt_cut_tokens) == (kept, 3, 1)


def test_the_echo_engine_of_a_config_has_the_configs_policy_and_context() -> None:
    engine, why = open_engine(model("skip", context_tokens=8), {"context_tokens": None}, False, print)
    (found,) = engine.generate([request(max_new_tokens=5, text="one two three four")])
    assert isinstance(found, Completion)
    assert (engine.name, why, found.finish_reason) == ("echo", "the config says engine: echo", "skipped")


def test_echo_refuses_a_long_prompt_by_default() -> None:
    with pytest.raises(UserError, match="r1#0: 4 words, but 3 fit"):
        echo("one two three four", "error")


def test_echo_gives_back_a_prompt_that_fits_as_it_is() -> None:
    found = echo(" one\n\ttwo  three ", "error")
    assert (found.text, found.finish_reason) == (" one\n\ttwo  three ", "stop")
    assert (found.prompt_tokens, found.completion_tokens) == (3, 3)


def test_echo_stops_at_max_new_tokens() -> None:
    (found,) = EchoEngine().generate([replace(request(text="a b\nc d"), sampling=Sampling(3))])
    assert isinstance(found, Completion)
    assert (found.text, found.finish_reason, found.completion_tokens) == ("a b\nc", "length", 3)
