"""Row counts of public datasets, counted elsewhere: ../shared/data beside the checkout, skipped where it is absent."""

import json
from pathlib import Path

import pytest

from gristmill.errors import UserError
from gristmill.rows import count_up_to, read_rows

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
COUNTS: dict[str, int] = (
    json.loads((DATA / "expected.json").read_text(encoding="utf-8"))["row_counts"] if DATA.is_dir() else {}
)
#: Files that have an id of their own, unique in the file.
ID_FIELDS = {
    "arena_hard/arena-hard-v2.0/question.jsonl": "uid",
    "fastchat/mt_bench/question.jsonl": "question_id",
    "hatecheck/test_suite_cases.csv": "case_id",
    "humaneval/HumanEval.jsonl.gz": "task_id",
    "pandalm/testset-v1.json": "idx",
    "hate_davidson/labeled_data.csv": "column_1",
}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")


@pytest.mark.parametrize("name", COUNTS)
def test_every_file_has_as_many_rows_as_were_counted(name: str) -> None:
    ids = [row.id for row in read_rows(DATA / name, id_field=None)]
    assert len(ids) == COUNTS[name]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(("name", "field"), ID_FIELDS.items())
def test_a_files_own_ids_name_its_rows(name: str, field: str) -> None:
    rows = list(read_rows(DATA / name, rename={"id": field}))
    assert len(rows) == COUNTS[name]
    assert [row.id for row in rows if row.id != str(row.fields["id"])] == []


@pytest.mark.parametrize("name", COUNTS)
def test_counting_stops_at_the_limit(name: str) -> None:
    assert count_up_to(DATA / name, 5) == 5


def test_one_question_judged_in_several_turns_is_refused_as_an_id() -> None:
    with pytest.raises(UserError, match="is there twice"):
        list(read_rows(DATA / "mtbench_forks/dreaming-panda/gpt-4_single-origin.jsonl", id_field="question_id"))


def test_a_statistics_object_is_not_rows() -> None:
    with pytest.raises(UserError, match="not rows keyed by id"):
        list(read_rows(DATA / "llmbar/Natural/evaluators/GPT-4/CoT/statistics.json"))
