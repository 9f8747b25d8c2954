"""Facts about the statistics: the numbers of textbooks, what must not change them, and when they are withheld."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gristmill.stats.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha, percent_agreement
from gristmill.stats.bradley_terry import Game, bradley_terry, win_matrix
from gristmill.stats.intervals import bootstrap_mean, clustered_mean, t_p_value, wilson
from gristmill.stats.length_control import length_controlled_win_rate
from gristmill.stats.paired import EXACT_BELOW, compare, holm, mcnemar

SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
PAIRED = st.lists(st.tuples(SCORES, SCORES, st.sampled_from("abcde")), min_size=1, max_size=30)
PERMUTED = PAIRED.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows)))
FEW = 200


def columns(rows: Sequence[tuple[float, float, str]]) -> tuple[list[float], list[float], list[str]]:
    first, second, clusters = map(list, zip(*rows, strict=True))
    return first, second, clusters  # type: ignore[return-value]


# ---- one mean


def test_wilson_gives_the_interval_of_the_textbook() -> None:
    assert wilson(1, 4) == pytest.approx((0.04559, 0.69936), abs=1e-5)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_share(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="is no share"):
        wilson(successes, n)


def test_clusters_of_one_give_students_interval() -> None:
    found = clustered_mean([1.0, 2.0, 4.0, 5.0])
    assert found.value == 3.0
    assert found.standard_error == pytest.approx(math.sqrt(10 / 3) / 2)
    assert found.ci95 == pytest.approx((3 - 3.18245 * 0.912871, 3 + 3.18245 * 0.912871), abs=1e-4)


def test_a_clustered_error_is_the_one_of_the_formula() -> None:
    values, clusters = [1.0, 1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "b", "c"]
    sums = [2 - 2 * 0.6, 0 - 2 * 0.6, 1 - 0.6]
    assert clustered_mean(values, clusters).standard_error == pytest.approx(
        math.sqrt(3 / 2 * sum(each**2 for each in sums)) / 5
    )


def test_statsmodels_finds_the_same_clustered_error() -> None:
    import statsmodels.api as sm

    rng = np.random.default_rng(5)
    clusters, values = rng.integers(0, 12, 90), rng.normal(size=90)
    fitted = sm.OLS(values, np.ones(90)).fit(cov_type="cluster", cov_kwds={"groups": clusters, "use_correction": False})
    count = len(set(clusters))
    assert clustered_mean(values, list(clusters)).standard_error == pytest.approx(
        fitted.bse[0] * math.sqrt(count / (count - 1))
    )


@pytest.mark.parametrize(
    ("values", "clusters", "word"),
    [([], None, "no score"), ([0.5], None, "at least two"), ([0.0, 1.0], ["a", "a"], "at least two"),
     ([0.1] * 3, None, "alike"), ([0.0, 1.0, 1.0, 0.0], ["a", "a", "b", "b"], "alike")],
)  # fmt: skip
def test_a_mean_whose_rows_do_not_differ_has_no_interval_and_says_why(
    values: list[float], clusters: list[str] | None, word: str
) -> None:
    for found in (clustered_mean(values, clusters), bootstrap_mean(values, clusters)):
        assert found.ci95 is None
        assert found.standard_error is None
        assert word in str(found.reason)


@pytest.mark.parametrize("values", [[float("nan"), 1.0], [float("inf"), 0.0]])
def test_a_score_that_is_no_number_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        clustered_mean(values)


def test_the_bootstrap_is_repeatable_and_near_the_t_interval() -> None:
    values = list(np.random.default_rng(0).normal(size=300))
    found, plain = bootstrap_mean(values, seed=3), clustered_mean(values)
    assert found == bootstrap_mean(values, seed=3)
    assert found != bootstrap_mean(values, seed=4)
    assert found.ci95 == pytest.approx(plain.ci95, abs=0.02)
    assert found.standard_error == pytest.approx(plain.standard_error, rel=0.1)


# ---- two runs


@given(PAIRED)
@settings(max_examples=FEW, deadline=None)
def test_swapping_two_runs_negates_their_difference(rows: list[tuple[float, float, str]]) -> None:
    first, second, clusters = columns(rows)
    one, other = (compare(*pair, clusters, resamples=100) for pair in ((first, second), (second, first)))
    assert one.difference == pytest.approx(-other.difference)  # type: ignore[operator]
    assert (one.p, one.standard_error, one.reason) == (other.p, other.standard_error, other.reason)
    for mine, theirs in ((one.ci95, other.ci95), (one.bootstrap_ci95, other.bootstrap_ci95)):
        assert (mine is None) == (theirs is None)
        if mine and theirs:
            assert mine == pytest.approx((-theirs.high, -theirs.low), abs=1e-12)
    if one.discordant and other.discordant:
        assert one.discordant == other.discordant[::-1]


@given(PERMUTED)
@settings(max_examples=FEW, deadline=None)
def test_the_order_of_the_rows_changes_nothing(rows: tuple[list[tuple[float, float, str]], ...]) -> None:
    one, other = (compare(*columns(each), resamples=100) for each in rows)
    assert one.difference == pytest.approx(other.difference)
    assert (one.discordant, one.test, one.reason) == (other.discordant, other.test, other.reason)
    assert one.bootstrap_ci95 == pytest.approx(other.bootstrap_ci95)
    assert one.ci95 == pytest.approx(other.ci95)


@given(PAIRED, st.sampled_from([-3.0, 0.5, 2.0]))
@settings(max_examples=FEW, deadline=None)
def test_points_that_both_runs_get_change_no_difference(rows: list[tuple[float, float, str]], shift: float) -> None:
    first, second, clusters = columns(rows)
    moved = [[score + shift for score in run] for run in (first, second)]
    one, other = compare(first, second, clusters, resamples=100), compare(*moved, clusters, resamples=100)
    assert one.difference == pytest.approx(other.difference)
    assert one.standard_error == pytest.approx(other.standard_error)
    assert one.bootstrap_ci95 == pytest.approx(other.bootstrap_ci95)


@given(st.lists(SCORES, min_size=1, max_size=20), st.sampled_from([0.0, 0.25]))
def test_runs_that_differ_alike_on_every_row_have_no_interval(scores: list[float], gap: float) -> None:
    found = compare(scores, [score - gap for score in scores])
    assert found.difference == pytest.approx(gap)
    assert (found.ci95, found.bootstrap_ci95) == (None, None)
    assert found.reason


def test_two_runs_without_a_common_row_have_no_number() -> None:
    found = compare([], [])
    assert (found.difference, found.p, found.ci95) == (None, None, None)
    assert found.reason == "no row has a score in both runs"


def test_mcnemar_is_exact_for_few_rows_and_corrected_chi2_for_many() -> None:
    exact, many = mcnemar(1, 9), mcnemar(10, 30)
    assert exact.test == "mcnemar_exact"
    assert exact.p == pytest.approx(2 * (1 + 10) / 1024)
    assert many.test == "mcnemar_chi2"
    assert many.p == pytest.approx(math.erfc(math.sqrt((20 - 1) ** 2 / 40 / 2)))
    assert mcnemar(0, 0).p == 1.0
    assert [mcnemar(1, EXACT_BELOW - 1 + more).test for more in (-1, 0)] == ["mcnemar_exact", "mcnemar_chi2"]


def test_mcnemar_stands_only_where_every_row_is_one_0_1_score_of_its_own() -> None:
    first, second = [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    assert compare(first, second).discordant == (1, 1)
    assert compare(first, second, list("abcd")).test == "mcnemar_exact"
    assert compare(first, second, list("aabc")).test == "paired_t"
    assert compare(first, second, single=False).test == "paired_t"
    assert compare([0.5, *first], [0.0, *second]).discordant is None


def test_an_interval_of_scores_in_0_to_1_does_not_leave_minus_1_to_1() -> None:
    assert compare([1.0, 1.0, 1.0], [0.0, 0.0, 1.0]).ci95 == pytest.approx((-0.76755, 1.0), abs=1e-4)


def test_p_and_interval_are_of_one_error() -> None:
    for values in ([0.3, -0.1, 0.4, 0.2, 0.5], [0.3, 0.1, 0.4, 0.2, 0.5]):
        found, p = clustered_mean(values), t_p_value(clustered_mean(values))
        assert found.ci95 is not None
        assert p is not None
        assert (found.ci95.low > 0) == (p < 0.05)
    assert t_p_value(clustered_mean([1.0, -1.0])) == 1.0
    assert t_p_value(clustered_mean([1.0])) is None
    from scipy.stats import ttest_1samp

    assert t_p_value(clustered_mean([0.3, 0.1, 0.4])) == pytest.approx(ttest_1samp([0.3, 0.1, 0.4], 0).pvalue)


def test_holm_multiplies_by_what_is_left_and_never_falls() -> None:
    assert holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([None]) == [None]
    assert holm([]) == []


# ---- raters


def test_kappa_gives_cohens_own_example_and_alpha_krippendorffs() -> None:
    yes_no = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    first, second = map(list, zip(*yes_no, strict=True))
    assert cohen_kappa(first, second).value == pytest.approx(0.4)
    assert percent_agreement(first, second).value == pytest.approx(0.7)
    # Hayes & Krippendorff's four observers of twelve units, as units of what was observed.
    units = [[1, 1, 1], [2, 2, 3, 2], [3, 3, 3, 3], [3, 3, 3, 3], [2, 2, 2, 2], [1, 2, 3, 4], [4, 4, 4, 4],
             [1, 1, 2, 1], [2, 2, 2, 2], [5, 5, 5], [1, 1], [3]]  # fmt: skip
    assert krippendorff_alpha(units).value == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha(units, "interval").value == pytest.approx(0.849, abs=5e-4)
    assert krippendorff_alpha(units).n == 11


def test_fleiss_kappa_gives_the_value_of_the_worked_example() -> None:
    counts = [[0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1], [7, 7, 0, 0, 0],
              [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7]]  # fmt: skip
    assert fleiss_kappa(counts).value == pytest.approx(0.20993, abs=1e-5)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (cohen_kappa("aaa", "aaa"), "0/0"),
        (cohen_kappa([], []), "no item"),
        (cohen_kappa(["a", None], [None, "a"]), "no item"),
        (percent_agreement([None], ["a"]), "no item"),
        (fleiss_kappa([[3, 0], [3, 0]]), "0/0"),
        (fleiss_kappa([[3, 0], [2, 0]]), "2 to 3 ratings"),
        (fleiss_kappa([[1, 0], [0, 1]]), "no item"),
        (fleiss_kappa([]), "no item"),
        (krippendorff_alpha([["a", "a"], ["a", "a"]]), "0/0"),
        (krippendorff_alpha([["a"], ["b", None]]), "no item"),
    ],
)
def test_agreement_that_is_not_defined_is_none_with_the_reason(found: object, word: str) -> None:
    assert getattr(found, "value") is None  # noqa: B009
    assert word in getattr(found, "reason")  # noqa: B009


def test_two_raters_that_are_constant_and_differ_have_a_kappa() -> None:
    assert cohen_kappa("aaa", "bbb").value == 0.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=2, max_size=40))
@settings(max_examples=FEW, deadline=None)
def test_kappa_is_symmetric_and_blind_to_what_labels_are_called(pairs: list[tuple[str, str]]) -> None:
    first, second = zip(*pairs, strict=True)
    renamed = [[{"a": 9, "b": "x", "c": (1, 2)}[label] for label in rater] for rater in (first, second)]
    kappas = [cohen_kappa(first, second), cohen_kappa(second, first), cohen_kappa(*renamed)]
    assert len({kappa.value is None for kappa in kappas}) == 1
    assume(kappas[0].value is not None)
    assert [kappa.value for kappa in kappas] == pytest.approx([kappas[0].value] * 3)


def test_alpha_as_interval_refuses_words() -> None:
    with pytest.raises(ValueError, match="no number"):
        krippendorff_alpha([["a", "b"]], "interval")


# ---- many runs


GAME = st.builds(
    lambda pair, score, row: Game(pair[0], pair[1], score, row),
    st.sampled_from([("x", "y"), ("y", "z"), ("x", "z")]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([f"r{n}" for n in range(9)]),
)
GAMES = st.lists(GAME, min_size=1, max_size=40)


def mirrored(game: Game) -> Game:
    return Game(game.first, game.second, 1 - game.score, game.row)


@given(GAMES)
@settings(max_examples=40, deadline=None)
def test_turning_every_result_around_mirrors_the_ratings(games: list[Game]) -> None:
    ratings = bradley_terry("xyz", games, resamples=20)
    turned = bradley_terry("xyz", list(map(mirrored, games)), resamples=20)
    places = {"above": "below", "below": "above"}
    assert [places.get(each.place, each.place) for each in ratings] == [each.place for each in turned]
    for one, other in zip(ratings, turned, strict=True):
        if one.rating is not None:
            assert one.rating - 1000 == pytest.approx(1000 - other.rating, abs=1e-5)  # type: ignore[operator]


@given(GAMES.flatmap(lambda games: st.tuples(st.just(games), st.permutations(games))))
@settings(max_examples=40, deadline=None)
def test_ratings_do_not_depend_on_the_order_of_games_or_on_who_is_named_first(games: tuple[list[Game], ...]) -> None:
    swapped = [Game(game.second, game.first, 1 - game.score, game.row) for game in games[1]]
    one, other = bradley_terry("xyz", games[0], resamples=20), bradley_terry("xyz", swapped, resamples=20)
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.place, mine.reason) == (theirs.place, theirs.reason)
        assert mine.rating == pytest.approx(theirs.rating, abs=1e-5)
        assert mine.ci95 == pytest.approx(theirs.ci95, abs=1e-4)


def test_two_runs_get_the_rating_of_the_closed_form() -> None:
    games = [Game("x", "y", float(n < 30), f"r{n}") for n in range(40)]
    one, other = bradley_terry("xy", games, resamples=50)
    assert one.rating - other.rating == pytest.approx(400 * math.log10(30 / 10))  # type: ignore[operator]
    assert one.rating + other.rating == pytest.approx(2000)  # type: ignore[operator]
    baseline = bradley_terry("xy", games, baseline="y", resamples=50)
    assert baseline[1].rating == pytest.approx(1000)
    assert baseline[1].ci95 == pytest.approx((1000, 1000))


def test_a_tie_is_half_a_win_on_both_sides() -> None:
    ties = [Game("x", "y", 0.5, "a"), Game("x", "y", 0.5, "b")]
    halves = [Game("x", "y", 1.0, "a"), Game("x", "y", 0.0, "b")]
    assert win_matrix("xy", ties).tolist() == win_matrix("xy", halves).tolist() == [[0, 1], [1, 0]]


def test_a_run_that_won_everything_is_above_and_the_others_keep_their_rating() -> None:
    games = [Game("x", "y", float(n < 3), f"r{n}") for n in range(5)]
    more = [*games, *(Game("best", run, 1.0, f"r{n}") for run in "xy" for n in range(5)), Game("y", "worst", 1.0, "r0")]
    found = {each.run: each for each in bradley_terry(["best", "x", "worst", "y", "alone"], more, resamples=50)}
    assert [found[run].place for run in ("best", "worst", "alone")] == ["above", "below", "unconnected"]
    assert [found[run].rating for run in ("best", "worst", "alone")] == [None] * 3
    assert "no upper bound" in str(found["best"].reason)
    assert "no lower bound" in str(found["worst"].reason)
    assert [found[run].rating for run in "xy"] == pytest.approx(
        [each.rating for each in bradley_terry("xy", games, resamples=50)]
    )


def test_two_runs_of_which_one_always_wins_have_no_rating() -> None:
    found = bradley_terry("xy", [Game("x", "y", 1.0, f"r{n}") for n in range(9)])
    assert [(each.rating, each.ci95, each.place) for each in found] == [(None, None, "above"), (None, None, "below")]
    assert all("no rating has a bound" in str(each.reason) for each in found)


def test_islands_of_runs_have_no_common_scale() -> None:
    games = [Game(*pair, float(n % 3 > 0), f"r{n}") for n in range(6) for pair in (("a", "b"), ("c", "d"))]
    found = bradley_terry("abcd", [*games, Game("a", "b", 0.0, "r7")], resamples=50)
    assert [each.place for each in found] == ["rated", "rated", "unconnected", "unconnected"]
    assert [each.rating is None for each in found] == [False, False, True, True]


def test_few_rows_give_a_rating_and_no_interval() -> None:
    found = bradley_terry("xy", [Game("x", "y", 1.0, "a"), Game("x", "y", 0.0, "b")])
    assert [each.rating for each in found] == pytest.approx([1000, 1000])
    assert [each.ci95 for each in found] == [None, None]
    assert "resamples" in str(found[0].reason)


def test_a_game_of_an_unknown_run_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown: \\['q'\\]"):
        bradley_terry("xy", [Game("x", "q", 1.0, "a")])


# ---- length


@pytest.mark.parametrize(
    ("won", "lengths", "word"),
    [
        ([], [], "no pair"),
        ([1, 1, 1], [1, 2, 3], "same run"),
        ([1, 0, 1], [4, 4, 4], "same for every pair"),
        ([1, 1, 0, 0], [3, 2, -1, -2], "decides every verdict"),
        ([0, 0, 1, 1], [3, 2, -1, -2], "decides every verdict"),
        ([1, 0.5, 0], [3, 0, -2], "decides every verdict"),
        ([1, 1, 0, 1], [37, 25, 35, 0], "hardly bound"),
        ([0, 0, 0.5, 0.5], [1, 7, 8, 9], "hardly bound"),
    ],
)
def test_a_length_controlled_rate_that_is_not_defined_is_none_with_the_reason(
    won: list[float], lengths: list[float], word: str
) -> None:
    found = length_controlled_win_rate(won, lengths)
    assert (found.value, found.ci95) == (None, None)
    assert word in str(found.reason)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(-50, 50)), min_size=4, max_size=40))
@settings(max_examples=FEW, deadline=None, derandomize=True)
def test_swapping_two_runs_mirrors_their_win_rate_at_equal_length(pairs: list[tuple[float, int]]) -> None:
    won, lengths = np.array(pairs).T
    one, other = length_controlled_win_rate(won, lengths), length_controlled_win_rate(1 - won, -lengths)
    assert one.reason == other.reason
    if one.value is not None and other.value is not None:
        assert one.value == pytest.approx(1 - other.value, abs=1e-6)


def test_where_all_is_tied_the_rate_is_a_half_without_an_interval() -> None:
    found = length_controlled_win_rate([0.5, 0.5, 0.5], [3, 0, -2])
    assert (found.value, found.ci95) == (0.5, None)
    assert "tie" in str(found.reason)


def test_a_controlled_rate_that_meets_every_row_has_no_interval() -> None:
    for swapped in (False, True):
        won, lengths = np.array([0.0, 0.5, 0.0, 0.5]), np.array([1, 1, 1, 0])
        found = length_controlled_win_rate(*((1 - won, -lengths) if swapped else (won, lengths)))
        assert found.value == pytest.approx(0.5)
        assert (found.ci95, "says nothing about the error" in str(found.reason)) == (None, True)


def test_a_rate_at_a_length_that_was_never_seen_says_so() -> None:
    won, lengths = [1, 0, 1, 0, 1, 0], [9, 3, 4, 5, 2, 6]
    assert not length_controlled_win_rate(won, lengths).overlap
    assert length_controlled_win_rate(won, [*lengths[:-1], -6]).overlap
