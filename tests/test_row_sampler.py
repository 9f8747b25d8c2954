"""Facts about drawing tokens: a row's draw is its own, follows the softmax, and keeps to top-k and top-p."""

from typing import Any

import pytest
from scipy.stats import chi2

torch = pytest.importorskip("torch")

from gristmill.engines.row_sampler import RowSampler  # noqa: E402

LOGITS = [2.0, 0.5, -1.0, 1.0, 0.0, -3.0]


def draws(seeds: list[int], logits: Any, steps: int = 1, **settings: Any) -> list[list[int]]:
    """The drawn tokens of each row over some steps: (B, steps)."""
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    sampler = RowSampler(seeds, **options)
    scores = torch.tensor(logits, dtype=torch.float32)
    scores = scores.expand(len(seeds), -1) if scores.dim() == 1 else scores  # (B, V)
    found = [sampler(torch.zeros(len(seeds), 1), scores).argmax(dim=-1) for _ in range(steps)]
    return [list(row) for row in torch.stack(found, dim=1).tolist()]


def test_only_the_drawn_token_is_left_possible() -> None:
    left = RowSampler([1, 2, 3], 1.0, 0, 1.0)(torch.zeros(3, 1), torch.tensor([LOGITS] * 3))
    assert left.shape == (3, len(LOGITS))
    assert torch.isfinite(left).sum(dim=-1).tolist() == [1, 1, 1]


def test_scores_are_left_as_they_were() -> None:
    scores = torch.tensor([LOGITS])
    RowSampler([1], 0.7, 2, 0.5)(torch.zeros(1, 1), scores)
    assert scores.tolist() == torch.tensor([LOGITS]).tolist()


def test_a_seed_draws_alike_alone_and_in_any_place_of_any_batch() -> None:
    alone = draws([7], LOGITS, steps=30)[0]
    first = draws([7, 1, 2], LOGITS, steps=30)[0]
    last = draws([5, 6, 8, 9, 7], LOGITS, steps=30)[-1]
    assert alone == first == last
    assert len(set(alone)) > 1


def test_a_rows_neighbours_logits_do_not_matter() -> None:
    torch.manual_seed(0)
    noise = (torch.randn(4, len(LOGITS)) * 5).tolist()
    batch = [*noise[:2], LOGITS, *noise[2:]]
    assert draws([1, 2, 7, 3, 4], batch, steps=30)[2] == draws([7], LOGITS, steps=30)[0]


def test_equal_logits_draw_alike_in_any_batch() -> None:
    flat = [0.0] * 1000
    assert draws([7], flat, steps=20)[0] == draws([*range(40), 7], flat, steps=20)[-1]


def test_two_seeds_draw_differently() -> None:
    one, other = draws([1, 2], LOGITS, steps=40)
    assert one != other


def test_a_pinned_draw() -> None:
    assert draws([12345], LOGITS, steps=12)[0] == [0, 3, 0, 0, 3, 0, 0, 0, 0, 1, 3, 3]


def frequencies(logits: list[float], count: int, **settings: Any) -> list[int]:
    """How often each token is drawn by `count` rows, each with a seed of its own."""
    tokens = [row[0] for row in draws(list(range(count)), logits, **settings)]
    return [tokens.count(token) for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 20,000 draws stays below its 99.9 % point; the seeds are fixed, so this never flickers."""
    count = 20_000
    observed = frequencies(LOGITS, count, temperature=temperature)
    expected = (torch.softmax(torch.tensor(LOGITS).double() / temperature, dim=-1) * count).tolist()
    statistic = sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True))
    assert statistic < chi2.ppf(0.999, len(LOGITS) - 1)


def test_top_k_leaves_the_k_largest() -> None:
    seen = frequencies(LOGITS, 2000, top_k=2, temperature=5.0)
    assert [count > 0 for count in seen] == [True, False, False, True, False, False]
    assert frequencies(LOGITS, 200, top_k=1, temperature=5.0)[0] == 200


def test_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    assert draws([1, 2], LOGITS, steps=10, top_k=99) == draws([1, 2], LOGITS, steps=10)


def test_top_p_leaves_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3])).tolist()
    assert [count > 0 for count in frequencies(logits, 2000, top_p=0.75)] == [False, True, False, True]
    assert [count > 0 for count in frequencies(logits, 2000, top_p=0.85)] == [False, True, True, True]
    assert frequencies(logits, 200, top_p=0.01)[1] == 200  # the most likely token always stays


def test_frequencies_within_top_p_keep_their_proportions() -> None:
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3])).tolist()
    seen = frequencies(logits, 20_000, top_p=0.75)
    statistic = sum((count - due) ** 2 / due for count, due in ((seen[1], 12_500), (seen[3], 7_500)))
    assert statistic < chi2.ppf(0.999, 1)


def test_top_p_counts_what_top_k_has_left() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1])).tolist()
    seen = frequencies(logits, 2000, top_k=2, top_p=0.5)  # of 4/7 and 3/7 the first reaches a half
    assert [count > 0 for count in seen] == [True, False, False, False]


def test_an_excluded_token_is_never_drawn() -> None:
    excluded = [-float("inf"), 0.0, -float("inf"), -20.0]
    seen = frequencies(excluded, 5000, temperature=10.0)
    assert (seen[0], seen[2]) == (0, 0)
    assert min(seen[1], seen[3]) > 0


def test_a_single_possible_token_is_drawn_whatever_the_number() -> None:
    assert frequencies([-float("inf"), -float("inf"), 3.0], 1000)[2] == 1000


class Fixed:
    """A stream whose numbers are given."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("value", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_a_possible_token(value: float) -> None:
    sampler = RowSampler([0], 1.0, 0, 1.0)
    sampler._streams = [Fixed(value)]
    scores = torch.tensor([[-float("inf"), 0.1, 0.2, 0.3, -float("inf")]])
    assert sampler(torch.zeros(1, 1), scores).argmax().item() == (3 if value == 0.0 else 1)


@pytest.mark.parametrize(("value", "token"), [(0.0, 0), (0.4999, 0), (0.5, 1), (0.9999, 1)])
def test_each_token_has_the_half_open_span_of_its_probability(value: float, token: int) -> None:
    sampler = RowSampler([0], 1.0, 0, 1.0)
    sampler._streams = [Fixed(value)]
    assert sampler(torch.zeros(1, 1), torch.tensor([[3.0, 3.0]])).argmax().item() == token


@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 1e-320])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert frequencies([1000.0, 999.0, -1000.0], 100, temperature=temperature) == [100, 0, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_scores_are_drawn_from_and_keep_their_type(dtype: str) -> None:
    scores = torch.tensor([LOGITS] * 2, dtype=getattr(torch, dtype))
    left = RowSampler([1, 2], 1.0, 0, 1.0)(torch.zeros(2, 1), scores)
    assert left.dtype == scores.dtype
    assert torch.isfinite(left).sum().item() == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_not_a_token(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        draws([1, 2], [LOGITS, [bad, *LOGITS[1:]]])
    with pytest.raises(FloatingPointError, match="not finite"):
        draws([1], [-float("inf")] * 3)
