"""What changes over time or over steps: speeds, GPUs, and trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.report.charts.drawing import (
    DESK,
    GRID,
    INK,
    MUTED,
    PALETTE,
    PHONE,
    SLATE,
    TIE,
    Chart,
    Drawing,
    Size,
    clean,
    plot,
    svg,
)
from gristmill.report.throughput import BLOCKS, Lane, Throughput
from gristmill.report.timeline import Span, Timeline
from gristmill.report.trainings import PANELS, Point

LANE_PX, CURVE_PX, PANEL_PX = 46, 140, 44
#: Jobs of a unit that are drawn as a line each; of more, how far apart they are and their mean.
MAX_LINES = 8
MAX_PANELS = 12
#: Shorter than this: in units of so many seconds, called so.
TIME_UNITS = ((180, 1, "s"), (3 * 3600, 60, "min"), (float("inf"), 3600, "h"))


def draw_timeline(timeline: Timeline, colours: Sequence[int | None]) -> Drawing:
    """How busy each GPU was, in the colour of the run it worked for; a line where a job began, a gap for a pause.

    Args:
        timeline: what to draw.
        colours: each unit's colour; None for a judge, which is grey.
    """
    return Drawing(*(svg(_timeline_chart(timeline, colours, size)) for size in (DESK, PHONE)))


def draw_throughput(throughput: Throughput, colours: Sequence[int | None]) -> Drawing:
    """Tokens a second of each job over time, a panel for each of the first MAX_PANELS units, all on one axis of time.

    Args:
        throughput: what to draw.
        colours: the colour of each lane; None for what is no run, which is grey.
    """
    return Drawing(*(svg(_throughput_chart(throughput, colours, size)) for size in (DESK, PHONE)))


def draw_curve(curve: Mapping[str, Sequence[Point]]) -> Drawing:
    """A training over its steps, a panel for each of PANELS that has points, all on one axis of steps."""
    return Drawing(*(svg(_curve_chart(curve, size)) for size in (DESK, PHONE)))


def _timeline_chart(timeline: Timeline, colours: Sequence[int | None], size: Size) -> Chart:
    import altair as alt

    width, names = _time_width(size), timeline.lanes
    every, _ = _time_unit(timeline.seconds)
    x = _time_axis("start:Q", timeline.seconds, width)
    y = alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[0, len(names)], range=[0, LANE_PX * len(names)]))
    held, busy = ([_timeline_row(span, colours, every) for span in part] for part in (timeline.jobs, timeline.blocks))
    cuts = [{"start": place / every, "top": 0, "bottom": len(names)} for place in timeline.cuts]
    lanes = [{"top": lane + 0.18, "text": clean(name)} for lane, name in enumerate(names)]
    colour = alt.Color("colour:N", scale=None, legend=None)
    layers = alt.layer(
        plot(held).mark_rect(color=TIE, opacity=0.3).encode(x=x, x2="end:Q", y=y, y2="bottom:Q"),
        plot(busy).mark_rect().encode(x=x, x2="end:Q", y=y, y2="bottom:Q", color=colour),
        plot(held).mark_rule(color=INK).encode(x=x, y=y, y2="bottom:Q"),
        plot(cuts).mark_rule(color=GRID, strokeDash=[3, 3]).encode(x=x, y=y, y2="bottom:Q"),
        plot(lanes)
        .mark_text(align="left", fontSize=11, color=MUTED, limit=width)
        .encode(x=alt.value(0), y=y, text="text:N"),
    )
    return layers.properties(width=width, height=LANE_PX * len(names))


def _time_width(size: Size) -> int:
    return size.labels + size.plot + size.numbers + (400 if size.full else 0)


def _time_unit(seconds: float) -> tuple[int, str]:
    return next((every, name) for limit, every, name in TIME_UNITS if seconds < limit)


def _time_axis(field: str, seconds: float, width: int, labels: bool = True) -> Chart:
    import altair as alt

    every, unit = _time_unit(seconds)
    text = f"format(datum.value, '~g') + ' {unit}'"
    axis = alt.Axis(title=None, grid=False, tickCount=6, labels=labels, labelExpr=text)
    scale = alt.Scale(domain=[0, max(seconds / every, 1e-9)], range=[0, width], nice=False)
    return alt.X(field, axis=axis, scale=scale)


def _throughput_chart(throughput: Throughput, colours: Sequence[int | None], size: Size) -> Chart:
    import altair as alt

    lanes = throughput.lanes[:MAX_PANELS]
    every, _ = _time_unit(throughput.seconds)
    cuts = plot([{"at": place / every} for place in throughput.cuts]).mark_rule(color=GRID, strokeDash=[3, 3])
    made = []
    for place, (lane, colour) in enumerate(zip(lanes, colours, strict=False)):
        x = _time_axis("at:Q", throughput.seconds, _time_width(size), labels=place == len(lanes) - 1)
        paint = SLATE if colour is None else PALETTE[colour]
        parts = _lines(lane, every, paint, x) if len(lane.jobs) <= MAX_LINES else _band(lane, throughput, paint, x)
        jobs = f"{len(lane.jobs)} job{'' if len(lane.jobs) == 1 else 's'}"
        title = _panel_title(f"{clean(lane.unit)} · {jobs}")
        panel = alt.layer(cuts.encode(x=x), *parts)
        made.append(panel.properties(width=_time_width(size), height=LANE_PX, title=title))
    return alt.vconcat(*made, spacing=10)


def _lines(lane: Lane, every: int, colour: str, x: Chart) -> list[Chart]:
    """A line a job; one that has a single speed is a bar from its begin to its end."""
    return [
        plot([{"at": speed.at / every, "speed": speed.per_second} for speed in speeds])
        .mark_line(color=colour, strokeWidth=1.5, point=len(speeds) == 1 and {"color": colour, "size": 26})
        .encode(x=x, y=_speed_axis("speed:Q"))
        for speeds in lane.speeds
    ]


def _band(lane: Lane, throughput: Throughput, colour: str, x: Chart) -> list[Chart]:
    """The slowest and the fastest job of each moment, and their mean."""
    every, width = _time_unit(throughput.seconds)[0], throughput.seconds / BLOCKS
    blocks: dict[int, list[float]] = {}
    for speed in (speed for speeds in lane.speeds for speed in speeds):
        blocks.setdefault(min(int(speed.at / width), BLOCKS - 1), []).append(speed.per_second)
    rows = [
        {"at": (block + 0.5) * width / every, "low": min(found), "high": max(found), "mean": sum(found) / len(found)}
        for block, found in sorted(blocks.items())
    ]
    base = plot(rows).encode(x=x)
    return [
        base.mark_area(color=colour, opacity=0.25).encode(y=_speed_axis("low:Q"), y2="high:Q"),
        base.mark_line(color=colour, strokeWidth=1.5).encode(y=_speed_axis("mean:Q")),
    ]


def _speed_axis(field: str) -> Chart:
    import altair as alt

    text = "format(datum.value, '~s')"  # each by itself: 500 beside 1k, not 0.5k
    axis = alt.Axis(title=None, tickCount=2, labelExpr=text, minExtent=44, maxExtent=44)
    return alt.Y(field, axis=axis, scale=alt.Scale(zero=True))


def _timeline_row(span: Span, colours: Sequence[int | None], every: float) -> dict[str, Any]:
    """A bar that stands on the bottom of its lane; a job's own bar is as high as 100 %."""
    colour = colours[span.unit]
    height = 0.6 * (1.0 if span.busy is None else span.busy)
    times = {"start": span.start / every, "end": span.end / every}
    place = {"top": span.lane + 0.95 - height, "bottom": span.lane + 0.95}
    return {**times, **place, "colour": SLATE if colour is None else PALETTE[colour]}


def _curve_chart(curve: Mapping[str, Sequence[Point]], size: Size) -> Chart:
    import altair as alt

    panels = {title: keys for title, keys in PANELS.items() if any(curve.get(key) for key in keys)}
    steps = [point.step for points in curve.values() for point in points]
    width, last = size.plot + size.numbers, len(panels) - 1
    made = []
    for place, (title, keys) in enumerate(panels.items()):
        axis = alt.Axis(title=None, grid=False, tickCount=5, tickMinStep=1, labels=place == last, format="~s")
        x = alt.X("step:Q", axis=axis, scale=alt.Scale(domain=[0, max(steps)], range=[0, width], nice=False))
        layers = alt.layer(*(_curve_line(curve.get(key, ()), key, x, size) for key in keys))
        height = CURVE_PX if place == 0 else PANEL_PX
        said = _panel_title(f"{title}, by step" if place == last else title)
        made.append(layers.properties(width=width, height=height, title=said))
    return alt.vconcat(*made, spacing=10)


def _curve_line(points: Sequence[Point], key: str, x: Chart, size: Size) -> Chart:
    """What is measured on texts kept from the training has dots, and stands in another colour."""
    import altair as alt

    rows = [{"step": point.step, "value": point.value} for point in points]
    measured = key.startswith("evaluation")
    form = "~g" if key == "learning_rate" else "~s"
    axis = alt.Axis(title=None, tickCount=3, format=form, minExtent=44, maxExtent=44)
    y = alt.Y("value:Q", axis=axis, scale=alt.Scale(zero=not key.endswith("loss")))
    colour = PALETTE[1] if measured else PALETTE[0]
    dots = {"filled": True, "size": 26, "color": colour} if measured or len(points) == 1 else False
    return plot(rows).mark_line(color=colour, strokeWidth=1.5, point=dots).encode(x=x, y=y)


def _panel_title(text: str) -> dict[str, Any]:
    return {"text": text, "anchor": "start", "color": MUTED, "fontSize": 11, "fontWeight": "normal", "offset": 2}
