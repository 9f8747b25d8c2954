"""Facts about units as the service gives them: from what was read, in lists, and from records of ended runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="the extra service is not installed")

from gristmill.live import Device, UnitProgress, WorkerProgress
from gristmill.live.snapshot import WorkerState
from gristmill.service.units import MOST_WORKERS, UnitView, cut, recorded, rows_of

DEVICE = Device(3, "GPU-x", "H100", 81920, 1024, 0.5, 300.0, 50.0)
WORKER = WorkerProgress("1-of-2", "node1", "running", 4, 10, 1, 50, 5.0, 4.0, 8, 2, "static", (DEVICE,), 12.0)
UNIT = UnitProgress("runs/a", "run", 4, 10, 1, 50, 5.0, 4.0, 12.0, (WORKER,), ("too late",), "running")


def unit(*states: WorkerState) -> UnitView:
    workers = tuple(replace(WORKER, shard=f"{n}-of-{len(states)}", state=state) for n, state in enumerate(states, 1))
    return UnitView.of(replace(UNIT, workers=workers))


def test_a_unit_is_what_was_read_of_it_in_base_units() -> None:
    found = UnitView.of(UNIT).model_dump()
    assert {name: value for name, value in found.items() if name != "workers"} == {
        **{"unit": "runs/a", "kind": "run", "state": "running", "rows": 10, "done": 4, "failed": 1, "tokens": 50},
        **{"tokens_per_second_now": 5.0, "tokens_per_second_overall": 4.0, "seconds_left": 12.0},
        **{"errors": ["too late"], "worker_states": {"running": 1}},
    }
    assert found["workers"] == [
        {
            **{"shard": "1-of-2", "host": "node1", "state": "running", "rows": 10, "done": 4, "failed": 1},
            **{"tokens": 50, "tokens_per_second_now": 5.0, "tokens_per_second_overall": 4.0, "seconds_left": 12.0},
            **{"batch_rows": 8, "retries": 2, "engine": "static"},
            "devices": [
                {
                    **{"index": 3, "uuid": "GPU-x", "name": "H100", "memory_total_bytes": 81920 * 2**20},
                    **{"memory_used_bytes": 2**30, "utilization_ratio": 0.5},
                    **{"power_watts": 300.0, "temperature_celsius": 50.0},
                }
            ],
        }
    ]


def test_texts_of_others_are_cleaned_and_can_be_written_as_json() -> None:
    device = replace(DEVICE, name="\x1b[2J")
    worker = replace(WORKER, host="\ud800", shard="\u202e1", engine="e\n", devices=(device,))
    found = UnitView.of(replace(UNIT, unit="runs/\udcff", workers=(worker,), errors=("a\nb" * 999,)))
    assert json.loads(found.model_dump_json())["unit"] == "runs/\\udcff"
    shown = found.workers[0]
    assert (shown.host, shown.shard, shown.engine) == ("\\ud800", "\\u202e1", "e\\n")
    assert shown.devices[0].name == "\\x1b[2J"
    assert len(found.errors[0]) <= 300
    assert "\n" not in found.errors[0]


def test_what_all_units_are_asked_for_is_not_known_before_it_is_of_each() -> None:
    known = UnitView.of(UNIT)
    assert rows_of([]) is None
    assert rows_of([known, known]) == 20
    assert rows_of([known, UnitView.of(replace(UNIT, total=None))]) is None


def test_of_a_thousand_workers_those_that_are_looked_at_first_are_shown_and_all_are_counted() -> None:
    many = unit(*["done"] * 500, *["waiting"] * 300, *["running"] * 200)
    troubled = unit("running", "lost", "done")
    shown = cut([many, troubled])
    assert [worker.state for worker in shown[1].workers] == ["lost"]
    assert [worker.shard for worker in shown[0].workers] == [f"{n}-of-1000" for n in range(801, 800 + MOST_WORKERS)]
    assert shown[0].worker_states == {"done": 500, "waiting": 300, "running": 200}
    assert len(many.workers) == 1000
    assert len(shown[0].model_dump_json()) < 40_000


def test_a_unit_comes_back_from_its_record() -> None:
    kept = cut([unit("done", "failed")])[0]
    assert recorded(json.loads(json.dumps(kept.model_dump(mode="json"))), succeeded=False) == kept


@pytest.mark.parametrize(
    ("name", "rows", "done", "succeeded", "read"),
    [
        ("runs/a", 12, 12, True, ("run", "done", 12)),
        ("runs/a", 12, 7, False, ("run", "stopped", 12)),
        ("judges/j/a", 12, 12, False, ("judge", "done", 12)),
        ("logits/t", 0, 0, False, ("logits", "stopped", 0)),
        ("trainings/t", 30, 30, False, ("training", "stopped", None)),
        ("trainings/t", 30, 30, True, ("training", "done", 30)),
    ],
)
def test_a_record_of_the_version_before_has_its_rows_and_what_it_did_not_keep_is_null(
    name: str, rows: int, done: int, succeeded: bool, read: tuple[str, str, int | None]
) -> None:
    found = recorded({"unit": name, "rows": rows, "done": done, "failed": 1}, succeeded)
    assert (found.kind, found.state, found.rows, found.done, found.failed) == (*read, done, 1)
    assert (found.tokens, found.tokens_per_second_overall, found.workers) == (None, None, [])


@pytest.mark.parametrize("unit", [{}, {"unit": "elsewhere/a"}, {"unit": "runs/a"}, {"state": "done"}])
def test_what_is_no_unit_is_refused(unit: dict[str, str]) -> None:
    with pytest.raises((KeyError, ValueError)):
        recorded(unit, succeeded=True)
