"""What changes over time or over steps: speeds, GPUs, and trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from gristmill.report.timeline import Block, Span, Timeline
from gristmill.report.trainings import PANELS, Point

LANE_PX, CURVE_PX, PANEL_PX = 46, 140, 44
#: The strips of a GPU on the timeline: a line of text, and below it bars, the highest of which take so much.
TEXT_PX, BUSY_PX, STRIP_PX, GAP_PX = 17, 28, 14, 6
#: Jobs of a unit that are drawn as a line each; of more, how far apart they are and their mean.
MAX_LINES = 8
MAX_PANELS = 12
#: GPUs of which memory and power are drawn too; of more, how busy each was.
MAX_FULL_LANES = 16
#: Shorter than this: in units of so many seconds, called so.
TIME_UNITS = ((180, 1, "s"), (3 * 3600, 60, "min"), (float("inf"), 3600, "h"))


def draw_timeline(timeline: Timeline, colours: Sequence[int | None]) -> Drawing:
    """How busy each GPU was, its memory and power, in the colour of the run it worked for; a line where a job began.

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


@dataclass(frozen=True, slots=True)
class _Strip:
    """A measure of a GPU, drawn as bars that stand on the bottom of the strip; pixels from the top of the chart."""

    lane: int
    #: A field of Block.
    measure: str
    #: What is as high as the strip.
    most: float
    text: str
    top: float
    bottom: float

    def share(self, block: Block) -> float | None:
        """How high the block's bar is, of the strip; None where it is not known."""
        value: float | None = getattr(block, self.measure)
        return None if value is None else min(value / self.most, 1.0)


def drawn_measures(timeline: Timeline) -> set[str]:
    """What is drawn of the GPUs: of Block's fields `busy`, `memory_mib` and `watts`."""
    return {strip.measure for strip in _strips(timeline)}


def _strips(timeline: Timeline) -> list[_Strip]:
    """How busy each GPU was, and of a few GPUs also memory and power."""
    full = len(timeline.lanes) <= MAX_FULL_LANES
    watts = max((block.watts for block in timeline.blocks if block.watts is not None), default=0.0)
    used = [0.0] * len(timeline.lanes)
    for block in timeline.blocks:
        used[block.lane] = max(used[block.lane], block.memory_mib or 0.0)
    found: list[_Strip] = []
    top = 0.0
    for number, lane in enumerate(timeline.lanes):
        parts = [("busy", 1.0, lane.name, BUSY_PX)]
        if full and used[number]:
            memory = lane.memory_mib or used[number]
            size = f"{memory / 1024:,.0f} GiB" if memory >= 1024 else f"{memory:.0f} MiB"
            parts.append(("memory_mib", memory, f"memory, {'of' if lane.memory_mib else 'up to'} {size}", STRIP_PX))
        if full and watts >= 1:
            parts.append(("watts", watts, f"power, up to {watts:,.0f} W", STRIP_PX))
        for measure, most, text, high in parts:
            found.append(_Strip(number, measure, most, text, top, top + TEXT_PX + high))
            top += TEXT_PX + high
        top += GAP_PX
    return found


def _timeline_chart(timeline: Timeline, colours: Sequence[int | None], size: Size) -> Chart:
    import altair as alt

    width, strips = _time_width(size), _strips(timeline)
    every, _ = _time_unit(timeline.seconds)
    high = strips[-1].bottom
    x = _time_axis("start:Q", timeline.seconds, width)
    y = alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[0, high], range=[0, high]))
    of_lane: list[list[_Strip]] = [[] for _ in timeline.lanes]
    for strip in strips:
        of_lane[strip.lane].append(strip)
    held = [_bar(span, strip, 1.0, colours, every) for span in timeline.jobs for strip in of_lane[span.lane]]
    bars = [
        _bar(block, strip, share, colours, every)
        for block in timeline.blocks
        for strip in of_lane[block.lane]
        if (share := strip.share(block)) is not None
    ]
    cuts = [{"start": place / every, "top": 0, "bottom": high} for place in timeline.cuts]
    names = [{"top": strip.top + 7, "text": clean(strip.text)} for strip in strips]
    colour = alt.Color("colour:N", scale=None, legend=None)
    layers = alt.layer(
        plot(held).mark_rect(color=TIE, opacity=0.3).encode(x=x, x2="end:Q", y=y, y2="bottom:Q"),
        plot(bars).mark_rect().encode(x=x, x2="end:Q", y=y, y2="bottom:Q", color=colour),
        plot(held).mark_rule(color=INK).encode(x=x, y=y, y2="bottom:Q"),
        plot(cuts).mark_rule(color=GRID, strokeDash=[3, 3]).encode(x=x, y=y, y2="bottom:Q"),
        plot(names)
        .mark_text(align="left", baseline="middle", fontSize=11, color=MUTED, limit=width)
        .encode(x=alt.value(0), y=y, text="text:N"),
    )
    return layers.properties(width=width, height=high)


def _bar(span: Span, strip: _Strip, share: float, colours: Sequence[int | None], every: float) -> dict[str, Any]:
    colour = colours[span.unit]
    times = {"start": span.start / every, "end": span.end / every}
    place = {"top": strip.bottom - share * (strip.bottom - strip.top - TEXT_PX), "bottom": strip.bottom}
    return {**times, **place, "colour": SLATE if colour is None else PALETTE[colour]}


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
