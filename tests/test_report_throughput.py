"""Facts about the report's throughput and axis of time, from live files written by hand and by the writer."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_report import page_of, small, spec, words_of
from test_report_gpus import write_samples
from test_report_results import section
from test_report_trainings import taught, trained

from gristmill.live import writing
from gristmill.live.files import Ends
from gristmill.live.writing import EARLIER, Live
from gristmill.report.axis import Axis
from gristmill.report.charts import MAX_LINES, MAX_PANELS, PALETTE, SLATE, draw_throughput
from gristmill.report.data import Beside, gather
from gristmill.report.throughput import BLOCKS, Throughput, read_jobs, throughput_of

BEGIN = 1_700_000_000.0


def lines(moments: Sequence[tuple[float, int]], begun: float = BEGIN) -> list[dict[str, Any]]:
    """What a job says whose tokens are known so many seconds after its model was loaded."""
    return [{"at": begun + after, "phase": "running", "seconds": after, "tokens": n} for after, n in moments]


def write_live(folder: Path, said: Sequence[dict[str, Any]], shard: str = "1-of-2") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = {"gristmill_live": 1, "unit": "runs/terse", "shard": shard, "begun_unix_s": BEGIN - 9}
    (folder / f"{shard}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [head, *said]))


def of(folders: dict[str, Path]) -> Throughput:
    jobs = read_jobs(folders)
    found = throughput_of(jobs, Axis(job.span for job in jobs))
    assert found is not None
    return found


def test_a_jobs_speed_over_time_is_that_of_its_moments(tmp_path: Path) -> None:
    write_live(tmp_path, [{"at": BEGIN - 5, "phase": "loading"}, *lines([(2, 0), (50, 480), (100, 5480)])])
    (lane,) = of({"terse": tmp_path}).lanes
    (speeds,) = lane.speeds
    assert len(speeds) == BLOCKS
    assert {round(speed.per_second, 6) for speed in speeds if speed.at < 2} == {0}
    assert {round(speed.per_second, 6) for speed in speeds if 2 < speed.at < 50} == {10}
    assert {round(speed.per_second, 6) for speed in speeds if speed.at > 50} == {100}
    assert sum(speed.per_second for speed in speeds) == pytest.approx(5480)
    assert (lane.jobs[0].tokens, lane.jobs[0].per_second) == (5480, 54.8)


def test_a_job_that_is_shorter_than_a_block_has_its_mean(tmp_path: Path) -> None:
    write_live(tmp_path, lines([(1000, 1000)]))
    write_live(tmp_path, lines([(0.5, 20), (1.5, 30)], BEGIN + 600.2), "2-of-2")
    (lane,) = of({"terse": tmp_path}).lanes
    assert [[round(speed.per_second, 6) for speed in speeds] for speeds in lane.speeds[1:]] == [[20]]


def test_a_count_that_falls_a_clock_that_was_set_back_and_torn_lines_are_no_speed(tmp_path: Path) -> None:
    odd = [{"at": "noon"}, {"tokens": -1}, {"at": 10**400, "seconds": 1, "tokens": 10**400}]
    write_live(tmp_path, [*lines([(10, 100), (9, 110), (20, 50), (30, 300)]), *odd])
    with open(tmp_path / "1-of-2.jsonl", "a") as handle:
        handle.write('[1]\n{"at": 17000')
    (lane,) = of({"terse": tmp_path}).lanes
    assert [(at - BEGIN, n) for at, n in lane.jobs[0].moments] == [(0, 0), (10, 100), (30, 300)]


@pytest.mark.parametrize("text", ["", "\n\n", "{}\n", '{"gristmill_live": 9}\n{"at": 5}\n', "\x00\xff\n", "[]\n1\n"])
def test_a_file_with_anything_else_in_it_is_no_job(tmp_path: Path, text: str) -> None:
    (tmp_path / "1-of-2.jsonl").write_bytes(text.encode("latin-1"))
    write_live(tmp_path, [*lines([(10, 0)])], "2-of-2")
    assert read_jobs({"terse": tmp_path, "wordy": tmp_path / "not there"}) == []
    assert throughput_of([], Axis([])) is None


def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1-of-2.jsonl")
    assert read_jobs({"terse": tmp_path}) == []
    ends = Ends(tmp_path / "1-of-2.jsonl")
    ends.look()
    assert (ends.first, ends.last) == (b"", ())


def test_teachers_and_trainings_have_their_lanes(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    beside = Beside(trainings=trained(tmp_path), logits=taught(tmp_path))
    for number, folder in enumerate([*beside.trainings.values(), *beside.logits.values()]):
        write_live(folder / "live", lines([(10, 10)], 1e9 + 20 * number))
        write_samples(folder / "gpu", 20 * number, 10, session=str(number))
    report = gather(spec(), runs, judges, beside)
    assert report.throughput is not None
    assert report.timeline is not None
    assert [lane.unit for lane in report.throughput.lanes] == ["teacher taught", "training tuned"]
    assert {report.timeline.units[job.unit] for job in report.timeline.jobs} == {"teacher taught", "training tuned"}


def test_an_attempt_that_made_tokens_is_kept_when_the_next_begins_and_one_that_made_none_is_not(tmp_path: Path) -> None:
    path = tmp_path / "live" / "1-of-1.jsonl"
    for tokens in (40, 0, 60):
        with Live(path, "runs/terse", "1-of-1") as live:
            live.tell("running", total=3)
            live.count(lambda tokens=tokens: {"done": 1, "tokens": tokens, "seconds": 2.0})
    jobs = read_jobs({"terse": path.parent})
    assert [job.tokens for job in jobs] == [40, 60]
    assert len(list((path.parent / EARLIER).iterdir())) == 1


def test_a_long_job_keeps_its_beginning_in_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MOST_BYTES", 5000)
    clock = iter(range(10**6))
    monkeypatch.setattr(writing.time, "time", lambda: BEGIN + next(clock))
    path = tmp_path / "1-of-1.jsonl"
    with Live(path, "runs/terse", "1-of-1") as live:
        for number in range(1, 1001):
            live.count(lambda number=number: {"tokens": 5 * number, "seconds": float(number)})
            live.tell("running")
    assert path.stat().st_size < 5200
    (job,) = read_jobs({"terse": tmp_path})
    assert len(job.moments) > 20
    assert job.tokens == 5000
    assert job.moments[1][1] < 500
    assert {round(n / (at - job.span[0]), 1) for at, n in job.moments[1:]} == {5.0}


def test_the_axis_leaves_out_the_time_in_which_nothing_worked() -> None:
    axis = Axis([(1000, 1010), (100, 150), (140, 190)])
    cut = 0.03 * 100
    assert axis.seconds == pytest.approx(100 + cut)
    assert axis.cuts == [pytest.approx(90 + cut / 2)]
    assert [axis.at(time) for time in (100, 190, 1000, 1010)] == pytest.approx([0, 90, 90 + cut, 100 + cut])
    assert Axis([(0, 10), (10.1, 20)]).cuts == []


def test_the_page_shows_each_units_jobs_in_its_colour_and_its_numbers(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    write_live(runs["terse"] / "live", lines([(10, 1000)]))
    write_live(runs["terse"] / "live", lines([(20, 1000)]), "2-of-2")
    write_live(judges["arena/terse_vs_wordy"] / "live", lines([(10, 30)], BEGIN + 90_000), "1-of-1")
    page = page_of(runs, judges)
    text = words_of(section(page, "throughput"))
    assert "terse 2 2,000 50.0–100.0" in text
    assert "arena/terse_vs_wordy 1 30 3.0" in text
    assert "pauses are cut short" in text
    assert "terse · 2 jobs" in section(page, "throughput")
    assert page.index('id="samples"') < page.index('id="throughput"') < page.index('id="provenance"')
    assert page_of(runs, judges) == page


def test_a_page_of_results_without_live_files_has_no_throughput(tmp_path: Path) -> None:
    assert "throughput" not in page_of(*small(tmp_path))


def test_gpus_and_throughput_stand_on_one_axis(tmp_path: Path) -> None:
    runs, judges = small(tmp_path)
    write_live(runs["terse"] / "live", lines([(100, 1000)], 1e9 + 50))
    write_samples(runs["wordy"] / "gpu", 0, 100)
    report = gather(spec(), runs, judges)
    assert report.timeline is not None
    assert report.throughput is not None
    assert (report.timeline.seconds, report.throughput.seconds) == (150, 150)
    assert report.throughput.lanes[0].speeds[0][0].at == pytest.approx(50.5, abs=1)


def test_of_many_jobs_the_mean_and_the_spread_are_drawn(tmp_path: Path) -> None:
    for number in range(1, MAX_LINES + 2):
        write_live(tmp_path, lines([(50, 50 * number), (100, 100 * number)]), f"{number}-of-9")
    for svg in (
        draw_throughput(of({"terse": tmp_path}), [3]).desk,
        draw_throughput(of({"terse": tmp_path}), [3]).phone,
    ):
        assert len(re.findall(rf'<path[^>]*stroke="{PALETTE[3]}"', svg)) == 1
        assert len(re.findall(rf'<path[^>]*fill="{PALETTE[3]}"', svg)) == 1
        assert f"terse · {MAX_LINES + 1} jobs" in svg


def test_no_more_panels_are_drawn_than_a_page_has_room_for(tmp_path: Path) -> None:
    folders = {f"unit {number}": tmp_path / str(number) for number in range(MAX_PANELS + 3)}
    for folder in folders.values():
        write_live(folder, lines([(10, 10)]))
    svg = draw_throughput(of(folders), [None] * len(folders)).desk
    assert f"unit {MAX_PANELS - 1} ·" in svg
    assert f"unit {MAX_PANELS} ·" not in svg
    assert SLATE in svg
