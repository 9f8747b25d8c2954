"""Agreement and win rates of public annotations, computed elsewhere: ../shared/data beside the checkout.

expected.json also has a Fleiss' kappa of all 3,901 cases of HateCheck; the files here hold the 3,728 that were kept, so
it cannot be derived from them and is not compared.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.rows import read_rows
from gristmill.stats.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha
from gristmill.stats.intervals import clustered_mean

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
EXPECTED: dict[str, Any] = (
    json.loads((DATA / "expected.json").read_text(encoding="utf-8")) if DATA.is_dir() else {"alpaca_eval": {}}
)
DAVIDSON = ("hate_speech", "offensive_language", "neither")

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")


def fields(name: str) -> Iterator[dict[str, Any]]:
    return (dict(row.fields) for row in read_rows(DATA / name, id_field=None))


def test_fleiss_kappa_of_davidsons_tweets_with_three_raters() -> None:
    rows = [row for row in fields("hate_davidson/labeled_data.csv") if row["count"] == "3"]
    found = fleiss_kappa([[int(row[label]) for label in DAVIDSON] for row in rows])
    assert found.n == EXPECTED["davidson"]["n_count3"]
    assert found.value == pytest.approx(EXPECTED["davidson"]["fleiss_count3"], abs=1e-12)


def test_davidsons_tweets_with_unlike_numbers_of_raters_have_an_alpha_and_no_fleiss_kappa() -> None:
    table = [[int(row[label]) for label in DAVIDSON] for row in fields("hate_davidson/labeled_data.csv")]
    refused = fleiss_kappa(table)
    assert refused.value is None
    assert "ratings" in str(refused.reason)
    ratings = [[label for label, count in enumerate(row) for _ in range(count)] for row in table]
    alpha = krippendorff_alpha(ratings)
    assert alpha.value is not None
    assert (alpha.n, 0.5 < alpha.value < 0.65) == (EXPECTED["davidson"]["n"], True)


def test_fleiss_kappa_of_hatecheck_with_five_raters() -> None:
    counts = []
    for row in fields("hatecheck/test_suite_annotations.csv"):
        labels = Counter(row[f"label_{rater}"] for rater in range(1, 11))
        counts.append([labels["hateful"], labels["non-hateful"]])
        assert (sum(counts[-1]), labels[""]) == (5, 5), row["case_id"]
    found = fleiss_kappa(counts)
    assert found.n == EXPECTED["hatecheck"]["n_5raters"]
    assert found.value == pytest.approx(EXPECTED["hatecheck"]["fleiss_5raters"], abs=1e-12)


@pytest.mark.parametrize("pair", list(itertools.combinations("123", 2)), ids="".join)
def test_cohens_kappa_of_two_annotators_of_pandalm(pair: tuple[str, str]) -> None:
    rows = list(fields("pandalm/testset-v1.json"))
    found = cohen_kappa(*([row[f"annotator{one}"] for row in rows] for one in pair))
    assert found.n == 999
    assert found.value == pytest.approx(EXPECTED["pandalm"][f"kappa_{''.join(pair)}"], abs=1e-12)


@pytest.mark.parametrize("name", EXPECTED["alpaca_eval"])
def test_the_win_rate_of_alpaca_eval_and_its_standard_error(name: str) -> None:
    preferences = [row["preference"] for row in fields(f"alpaca_eval/results/{name}/annotations.json")]
    found = clustered_mean([100 * (preference - 1) for preference in preferences])
    wanted = EXPECTED["alpaca_eval"][name]
    assert found.n == wanted["n_rows"]
    assert found.value == pytest.approx(wanted["win_rate"], abs=1e-9)
    assert found.standard_error == pytest.approx(wanted["standard_error"], abs=1e-9)
