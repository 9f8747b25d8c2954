"""The report's GPU section and timeline, from samples written by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_report import always_a, generation, page_of, row, small, spec, words_of, write_judge, write_run
from test_report_trainings import taught, trained

from gristmill.files import read_json, write_json
from gristmill.gpu.usage import usage_of
from gristmill.report import words
from gristmill.report.axis import Axis
from gristmill.report.charts import INK, PALETTE, SLATE, draw_timeline
from gristmill.report.charts.over_time import BUSY_PX, MAX_FULL_LANES, STRIP_PX
from gristmill.report.data import Beside, gather
from gristmill.report.render import render
from gristmill.report.timeline import BLOCKS, Lane, Timeline, read_held, timeline_of

DEVICES = [{"index": n, "uuid": f"GPU-{n}", "name": "Fake H100", "memory_total_mib": 4096} for n in range(2)]


def write_samples(
    folder: Path, start: int, seconds: int, uuids: tuple[str, ...] = ("GPU-0",), session: str = "a", **fields: Any
) -> None:
    """One job's samples, a second apart."""
    folder.mkdir(parents=True, exist_ok=True)
    base = {"memory_used_mib": 2048, "power_watts": 500.0, "utilization_ratio": 0.8, "throttle_reasons": []}
    lines: list[dict[str, Any]] = [{"gristmill_gpu": 1, "session": session, "host": "node1", "devices": DEVICES}]
    lines += [
        {"session": session, "uuid": uuid, "time_unix_s": 1e9 + second, "monotonic_s": second, "phase": "generate"}
        | {"completion_tokens": 100 * (second - start), "energy_joules": 500.0 * second, **base, **fields}
        for second in range(start, start + seconds + 1)
        for uuid in uuids
    ]
    with open(folder / f"{session}.jsonl", "a") as handle:
        handle.writelines(json.dumps(line) + "\n" for line in lines)


def sum_up(folder: Path) -> None:
    metrics = folder / "metrics.json"
    write_json(metrics, {**read_json(metrics), "gpu": usage_of(folder / "gpu")})


def timeline(folders: dict[str, Path]) -> Timeline:
    held = read_held(folders)
    found = timeline_of(held, Axis(held.spans))
    assert found is not None
    return found


def test_the_section_shows_each_units_numbers_and_says_what_busy_means(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "plain", [generation(row(n), str(2 * n)) for n in range(4)])
    judges = write_judge(tmp_path, "grader", runs, always_a)
    write_samples(runs["plain"] / "gpu", 0, 20, ("GPU-0", "GPU-1"), throttle_reasons=["sw_power_cap"])
    write_samples(judges["grader/plain"] / "gpu", 40, 10)
    for folder in (*runs.values(), *judges.values()):
        sum_up(folder)
    page = page_of(runs, judges)
    text = words_of(page)
    assert "plain 1 40.0 s 80.0 % 80.0 % 2,048 MiB 500 W 20.0 kJ 0.100 40.0 s held back: sw power cap" in text
    assert "grader/plain 1 10.0 s 80.0 % 80.0 % 2,048 MiB 500 W 5.0 kJ 0.200" in text
    assert "Busy is the share of time in which any kernel ran, not how much of the GPU it used" in text
    assert '<a href="#gpus">' in page


def test_a_report_of_runs_without_a_gpu_has_no_gpu_section(tmp_path: Path) -> None:
    page = page_of(*small(tmp_path))
    assert 'id="gpus"' not in page
    assert '"#gpus"' not in page


def test_numbers_that_a_card_does_not_report_are_dashes(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "plain", [generation(row(n), str(n)) for n in range(4)])
    nothing = {"memory_used_mib": None, "power_watts": None, "utilization_ratio": None, "energy_joules": None}
    write_samples(runs["plain"] / "gpu", 0, 20, **nothing)
    sum_up(runs["plain"])
    assert "plain 1 20.0 s – – – – – –" in words_of(page_of(runs))


def test_a_lane_is_a_gpu_and_a_span_a_job_on_it(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 10, ("GPU-0", "GPU-1"))
    write_samples(tmp_path / "plain", 10, 10, ("GPU-1",), session="b")
    found = timeline({"plain": tmp_path / "plain"})
    assert found.lanes == [Lane("node1 · GPU 0 · Fake H100", 4096), Lane("node1 · GPU 1 · Fake H100", 4096)]
    assert [(job.lane, job.start, job.end) for job in found.jobs] == [(0, 0, 10), (1, 0, 10), (1, 10, 20)]
    assert (found.seconds, found.cuts) == (20, [])


def test_blocks_hold_the_mean_of_their_samples_and_stay_within_their_job(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 999, utilization_ratio=0.25)
    write_samples(tmp_path / "plain", 0, 999, utilization_ratio=0.75)
    found = timeline({"plain": tmp_path / "plain"})
    assert {round(block.busy or 0, 6) for block in found.blocks} == {0.5}
    assert len(found.blocks) == BLOCKS
    assert all(0 <= block.start <= block.end <= found.seconds for block in found.blocks)


def test_a_block_has_the_most_memory_and_the_mean_power_of_its_samples(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 999, memory_used_mib=1024, power_watts=200.0)
    write_samples(tmp_path / "plain", 0, 999, memory_used_mib=3072, power_watts=400.0)
    blocks = timeline({"plain": tmp_path / "plain"}).blocks
    assert {(block.memory_mib, round(block.watts or 0, 6)) for block in blocks} == {(3072, 300)}


def test_what_a_card_does_not_tell_has_no_strip(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 50, power_watts=None)
    drawn = draw_timeline(timeline({"plain": tmp_path / "plain"}), [0])
    assert "memory, of 4 GiB" in drawn.desk
    assert "power" not in drawn.desk


def test_a_memory_strip_of_a_card_without_a_known_size_ends_at_the_most_that_was_used(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 50)
    path = tmp_path / "plain" / "a.jsonl"
    path.write_text(path.read_text().replace('"memory_total_mib"', '"other"'))
    assert "memory, up to 2 GiB" in draw_timeline(timeline({"plain": tmp_path / "plain"}), [0]).desk


def test_keys_that_a_sample_lacks_are_not_told(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "plain", [generation(row(n), str(n)) for n in range(4)])
    write_samples(runs["plain"] / "gpu", 0, 20)
    path = runs["plain"] / "gpu" / "a.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = ("gristmill_gpu", "session", "host", "devices", "uuid", "time_unix_s", "monotonic_s", "completion_tokens")
    path.write_text("".join(json.dumps({key: line[key] for key in kept if key in line}) + "\n" for line in lines))
    sum_up(runs["plain"])
    page = page_of(runs)
    assert "plain 1 20.0 s – – – – – –" in words_of(page)
    assert "How busy each GPU was. A line marks" in words_of(page)


def test_the_caption_names_what_is_drawn(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "plain", [generation(row(n), str(n)) for n in range(4)])
    write_samples(runs["plain"] / "gpu", 0, 20, power_watts=0.2, memory_used_mib=300)
    sum_up(runs["plain"])
    assert "How busy each GPU was, its memory. A line marks" in words_of(page_of(runs))


@pytest.mark.parametrize(("mib", "said"), [(300, "memory, of 300 MiB"), (9856, "memory, of 10 GiB")])
def test_the_size_of_a_memory_is_said_in_a_unit_of_its_size(tmp_path: Path, mib: int, said: str) -> None:
    write_samples(tmp_path / "plain", 0, 5)
    path = tmp_path / "plain" / "a.jsonl"
    path.write_text(path.read_text().replace('"memory_total_mib": 4096', f'"memory_total_mib": {mib}'))
    assert said in draw_timeline(timeline({"plain": tmp_path / "plain"}), [0]).desk


def bars(svg: str, colour: str) -> list[float]:
    """The heights of the bars of a colour."""
    paths = re.findall(rf'd="M[\d.]+,[\d.-]+h[\d.-]+v([\d.]+)[^"]*"[^>]*fill="{colour}"', svg)
    return sorted({round(float(height), 3) for height in paths})


def test_bars_are_as_high_as_their_share_of_the_strip(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 50)
    write_samples(tmp_path / "plain", 50, 50, session="b", power_watts=250.0)
    svg = draw_timeline(timeline({"plain": tmp_path / "plain"}), [0]).desk
    assert bars(svg, PALETTE[0]) == [
        round(share * px, 3) for share, px in ((0.5, STRIP_PX), (1.0, STRIP_PX), (0.8, BUSY_PX))
    ]


@pytest.mark.parametrize(("gpus", "strips"), [(MAX_FULL_LANES, 3), (MAX_FULL_LANES + 1, 1)])
def test_of_many_gpus_only_how_busy_they_were_is_drawn(tmp_path: Path, gpus: int, strips: int) -> None:
    write_samples(tmp_path / "plain", 0, 20, tuple(f"GPU-{n}" for n in range(gpus)))
    svg = draw_timeline(timeline({"plain": tmp_path / "plain"}), [0]).desk
    assert svg.count("memory, ") + svg.count("power, ") == gpus * (strips - 1)


def test_a_judge_that_writes_nothing_has_no_tokens_per_joule(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "plain", [generation(row(n), str(n)) for n in range(4)])
    write_samples(runs["plain"] / "gpu", 0, 20, completion_tokens=0)
    sum_up(runs["plain"])
    assert "plain 1 20.0 s 80.0 % 80.0 % 2,048 MiB 500 W 10.0 kJ –" in words_of(page_of(runs))


def test_teachers_and_trainings_stand_in_the_table(tmp_path: Path) -> None:
    runs = write_run(tmp_path, "plain", [generation(row(n), str(n)) for n in range(4)])
    beside = Beside(trainings=trained(tmp_path), logits=taught(tmp_path))
    write_samples(beside.logits["taught"] / "gpu", 0, 10)
    write_samples(beside.trainings["tuned"] / "gpu", 20, 10, completion_tokens=0)
    text = words_of(render(gather(spec(), runs, {}, beside)))
    assert "teacher taught 1 10.0 s 80.0 % 80.0 % 2,048 MiB 500 W 5.0 kJ 0.200" in text
    assert "training tuned 1 10.0 s 80.0 % 80.0 % 2,048 MiB 500 W 5.0 kJ –" in text


def test_a_pause_of_a_night_is_cut_short_and_marked(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 100)
    write_samples(tmp_path / "plain", 40_000, 100, session="b")
    found = timeline({"plain": tmp_path / "plain"})
    assert found.seconds == pytest.approx(206)
    assert found.cuts == [pytest.approx(103)]
    assert [(job.start, job.end) for job in found.jobs] == [(0, 100), (pytest.approx(106), pytest.approx(206))]


def test_no_samples_make_no_timeline(tmp_path: Path) -> None:
    assert timeline_of(read_held({"plain": tmp_path / "not there"}), Axis([])) is None


def test_a_single_sample_can_be_drawn(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 5, 0)
    assert "<svg" in draw_timeline(timeline({"plain": tmp_path / "plain"}), [0]).desk


def test_the_chart_has_each_runs_colour_grey_for_a_judge_and_a_line_a_job(tmp_path: Path) -> None:
    write_samples(tmp_path / "plain", 0, 50)
    write_samples(tmp_path / "judge", 50, 50, session="b")
    drawn = draw_timeline(timeline({"plain": tmp_path / "plain", "judge": tmp_path / "judge"}), [0, None])
    for svg in (drawn.desk, drawn.phone):
        assert f'fill="{PALETTE[0]}"' in svg
        assert f'fill="{SLATE}"' in svg
        assert len(re.findall(rf'<line[^>]*stroke="{INK}"', svg)) == 2 * 3
        assert "GPU 0 · Fake H100" in svg


@pytest.mark.parametrize(
    ("joules", "text"), [(None, "–"), (850.4, "850 J"), (12_345.0, "12.3 kJ"), (4_500_000.0, "1.25 kWh")]
)
def test_energy_is_said_in_a_unit_of_its_size(joules: float | None, text: str) -> None:
    assert words.energy(joules) == text


@pytest.mark.parametrize(
    "line",
    [
        *("[1]", "5", "null", "{}", '{"session": 5}', '{"session": "a", "uuid": 7}'),
        *('{"session": "a", "uuid": "GPU-0"}', '{"session": "a", "uuid": "GPU-0", "time_unix_s": "x"}'),
        *('{"gristmill_gpu": 1, "session": "a", "devices": [{}]}', '{"gristmill_gpu": 1, "session": "a", "host": 1}'),
        '{"session": "a", "uuid": "GPU-0", "time_unix_s": 1, "monotonic_s": 1e999, "completion_tokens": 0}',
        *(
            f'{{"session": "a", "uuid": "GPU-0", "time_unix_s": 1e9, "monotonic_s": 5, "completion_tokens": 0, {odd}}}'
            for odd in (
                *('"utilization_ratio": 5', '"utilization_ratio": -1', '"power_watts": -500'),
                *('"memory_used_mib": -1', '"memory_used_mib": 100.5', '"energy_joules": -1'),
            )
        ),
    ],
)
def test_a_line_that_is_no_sample_is_left_out(tmp_path: Path, line: str) -> None:
    write_samples(tmp_path / "plain", 0, 10)
    usage, drawn = usage_of(tmp_path / "plain"), timeline({"plain": tmp_path / "plain"})
    with open(tmp_path / "plain" / "a.jsonl", "a") as handle:
        handle.write(f"{line}\n")
    assert usage_of(tmp_path / "plain") == usage
    assert timeline({"plain": tmp_path / "plain"}) == drawn
