"""Draws the charts as SVG text at build time, so that the page needs no chart library and no network.

- Every chart is drawn twice, for a desk and for a phone; the style sheet shows the one that fits.
- Colours are written as the hex values below and re-coloured by report.css for dark mode (a test keeps them in step).
- Labels reach Vega as data only: it escapes markup in them, and none stands in an expression (so sort by `place`, not
  by a list of names). Control characters become U+FFFD.
- Colours repeat after eight runs; the numbers then carry the run's name instead of the interval.
- A chart shows at most MAX_VALUES values and the table beside it MAX_LISTED, those with the most answers; the page says
  so.
- altair and vl_convert are imported where they are used: reading the files needs neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.report.data import Judge, Slice
from gristmill.report.inputs import Score
from gristmill.report.timeline import Span, Timeline
from gristmill.report.trainings import PANELS, Point
from gristmill.report.words import count, estimate, percent

#: altair's generated classes are only partly typed.
Chart = Any

#: Okabe and Ito's colour-blind-safe set, its yellow and black replaced by an indigo and a grey that suit both themes.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#332288", "#777777")
INK, MUTED, GRID, HALO = "#1b1b1a", "#5f5f5b", "#e3e3df", "#fffffe"
SLATE, TIE = "#5b6b7f", "#c9c9c4"
MAX_VALUES, MAX_LISTED = 30, 500
BAR_PX, GAP_PX, LANE_PX = 13, 9, 46
CURVE_PX, PANEL_PX = 140, 44
#: Shorter than this: in units of so many seconds, called so.
TIME_UNITS = ((180, 1, "s"), (3 * 3600, 60, "min"), (float("inf"), 3600, "h"))

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Size:
    """How much room a chart has, in CSS pixels: labels left, the plot, and numbers right of it."""

    labels: int
    plot: int
    numbers: int
    full: bool


DESK = Size(labels=112, plot=190, numbers=190, full=True)
PHONE = Size(labels=92, plot=140, numbers=66, full=False)


@dataclass(frozen=True, slots=True)
class Drawing:
    """One chart at both sizes."""

    desk: str
    phone: str


def draw_slice(data: Slice) -> Drawing:
    """Bars with intervals: a group for each value of the column, a bar for each run in its colour."""
    return Drawing(_slice_svg(data, DESK), _slice_svg(data, PHONE))


def draw_labels(pairs: Sequence[tuple[str, int]]) -> str:
    """How often a judge wrote each label; small enough for any screen."""
    rows = [{"label": clean(label), "place": place, "n": n, "text": count(n)} for place, (label, n) in enumerate(pairs)]
    return _svg(_labels_chart(rows))


def draw_outcome(judge: Judge, colours: Sequence[int]) -> Drawing:
    """Win, tie and loss as one bar; `colours` are those of the pair's two runs."""
    return Drawing(*(_svg(_outcome_chart(judge, colours, size)) for size in (DESK, PHONE)))


def draw_timeline(timeline: Timeline, colours: Sequence[int | None]) -> Drawing:
    """How busy each GPU was, in the colour of the run it worked for; a line where a job began, a gap for a pause.

    Args:
        timeline: what to draw.
        colours: each unit's colour; None for a judge, which is grey.
    """
    return Drawing(*(_svg(_timeline_chart(timeline, colours, size)) for size in (DESK, PHONE)))


def draw_curve(curve: Mapping[str, Sequence[Point]]) -> Drawing:
    """A training over its steps, a panel for each of PANELS that has points, all on one axis of steps."""
    return Drawing(*(_svg(_curve_chart(curve, size)) for size in (DESK, PHONE)))


def largest(data: Slice, limit: int) -> list[str]:
    """The `limit` values with the most answers, in their own order."""
    total = {value: sum(score.n for score in scores) for value, scores in data.scores.items()}
    kept = set(sorted(total, key=lambda value: -total[value])[:limit])
    return [value for value in data.scores if value in kept]


def clean(text: str) -> str:
    """Text that an SVG can hold: no control characters and no halves of surrogate pairs."""
    return _CONTROL.sub("\ufffd", text) or "(empty)"


def _slice_svg(data: Slice, size: Size) -> str:
    import altair as alt

    values = largest(data, MAX_VALUES)
    rows = [row for place, value in enumerate(values) for row in _slice_rows(data, place, value, size)]
    y = _category_axis(size)
    offset = alt.YOffset("run:N", sort=[str(run.number) for run in data.runs], scale=alt.Scale(paddingInner=0.18))
    base = _chart(rows).encode(y=y, yOffset=offset)
    layers = alt.layer(_bars(base, data, size), _whisker(base, HALO, 3), _whisker(base, INK, 1.5), _numbers(base, size))
    height = len(values) * (len(data.runs) * BAR_PX + GAP_PX)
    return _svg(layers.properties(width=size.plot + size.numbers, height=height))


def _slice_rows(data: Slice, place: int, value: str, size: Size) -> list[dict[str, Any]]:
    return [
        {
            "value": clean(value),
            "place": place,
            "run": str(run.number),
            "share": score.value,
            "low": score.ci95[0] if score.ci95 else None,
            "high": score.ci95[1] if score.ci95 else None,
            "text": _number(score, size)
            if len(data.runs) <= len(PALETTE)
            else f"{percent(score.value)} {clean(run.name)}",
        }
        for run, score in zip(data.runs, data.scores[value], strict=True)
    ]


def _number(score: Score, size: Size) -> str:
    if score.value is None:
        return "no reference"
    return f"{estimate(score.value, score.ci95)}\u2002n\u00a0{count(score.n)}" if size.full else percent(score.value)


def _chart(rows: list[dict[str, Any]]) -> Chart:
    import altair as alt

    return alt.Chart(alt.InlineData(values=rows))


def _category_axis(size: Size) -> Chart:
    import altair as alt

    return alt.Y(
        "value:N", sort=_by_place(), axis=_label_axis(size), scale=alt.Scale(paddingInner=0.22, paddingOuter=0.1)
    )


def _share_axis(size: Size) -> Chart:
    import altair as alt

    axis = alt.Axis(title=None, values=[0, 0.5, 1], labelExpr="format(datum.value * 100, 'd') + ' %'", labelFlush=False)
    return alt.X("share:Q", scale=alt.Scale(domain=[0, 1], range=[0, size.plot]), axis=axis)


def _bars(base: Chart, data: Slice, size: Size) -> Chart:
    import altair as alt

    domain = [str(run.number) for run in data.runs]
    colours = [PALETTE[run.colour] for run in data.runs]
    colour = alt.Color("run:N", scale=alt.Scale(domain=domain, range=colours), legend=None)
    return base.mark_bar().encode(x=_share_axis(size), color=colour)


def _whisker(base: Chart, colour: str, width: float) -> Chart:
    return base.mark_rule(color=colour, strokeWidth=width).encode(x="low:Q", x2="high:Q")


def _numbers(base: Chart, size: Size) -> Chart:
    import altair as alt

    mark = base.mark_text(align="left", baseline="middle", fontSize=11, color=MUTED, limit=size.numbers)
    return mark.encode(x=alt.value(size.plot + 14), text="text:N")


def _labels_chart(rows: list[dict[str, Any]]) -> Chart:
    import altair as alt

    size = Size(labels=96, plot=140, numbers=60, full=False)
    y = alt.Y("label:N", sort=_by_place(), axis=_label_axis(size))
    top = max([row["n"] for row in rows] + [1])
    x = alt.X("n:Q", axis=None, scale=alt.Scale(domain=[0, top], range=[0, size.plot]))
    base = _chart(rows).encode(x=x, y=y)
    bars = base.mark_bar(color=SLATE, size=14)
    numbers = base.mark_text(align="left", dx=6, fontSize=12, color=INK).encode(text="text:N")
    return alt.layer(bars, numbers).properties(width=size.plot + size.numbers, height=24 * max(len(rows), 1))


def _by_place() -> Any:
    import altair as alt

    return alt.EncodingSortField(field="place", op="min", order="ascending")


def _label_axis(size: Size) -> Chart:
    import altair as alt

    return alt.Axis(title=None, labelLimit=size.labels - 20, minExtent=size.labels, maxExtent=size.labels)


def _outcome_chart(judge: Judge, colours: Sequence[int], size: Size) -> Chart:
    import altair as alt

    rows = _outcome_rows(judge, colours)
    x = alt.X("start:Q", axis=None, scale=alt.Scale(domain=[0, max(rows[-1]["end"], 1)]))
    colour = alt.Color("colour:N", scale=None, legend=None)
    chart = _chart(rows).mark_rect().encode(x=x, x2="end:Q", color=colour)
    return chart.properties(width=size.labels + size.plot + size.numbers, height=22)


def _outcome_rows(judge: Judge, colours: Sequence[int]) -> list[dict[str, Any]]:
    first, second = judge.metrics.runs[:2]
    wins = judge.metrics.wins
    parts = [(PALETTE[colours[0]], wins.get(first, 0)), (TIE, judge.metrics.all_ties)]
    rows: list[dict[str, Any]] = []
    start = 0
    for colour, n in [*parts, (PALETTE[colours[1]], wins.get(second, 0))]:
        rows.append({"start": start, "end": start + n, "colour": colour})
        start += n
    return rows


def _timeline_chart(timeline: Timeline, colours: Sequence[int | None], size: Size) -> Chart:
    import altair as alt

    width, names = size.labels + size.plot + size.numbers + (400 if size.full else 0), timeline.lanes
    every, unit = next((s, name) for limit, s, name in TIME_UNITS if timeline.seconds < limit)
    x = alt.X(
        "start:Q",
        scale=alt.Scale(domain=[0, max(timeline.seconds / every, 1e-9)], range=[0, width], nice=False),
        axis=alt.Axis(title=None, grid=False, tickCount=6, labelExpr=f"format(datum.value, '~g') + ' {unit}'"),
    )
    y = alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[0, len(names)], range=[0, LANE_PX * len(names)]))
    held, busy = ([_timeline_row(span, colours, every) for span in part] for part in (timeline.jobs, timeline.blocks))
    cuts = [{"start": place / every, "top": 0, "bottom": len(names)} for place in timeline.cuts]
    lanes = [{"top": lane + 0.18, "text": clean(name)} for lane, name in enumerate(names)]
    colour = alt.Color("colour:N", scale=None, legend=None)
    layers = alt.layer(
        _chart(held).mark_rect(color=TIE, opacity=0.3).encode(x=x, x2="end:Q", y=y, y2="bottom:Q"),
        _chart(busy).mark_rect().encode(x=x, x2="end:Q", y=y, y2="bottom:Q", color=colour),
        _chart(held).mark_rule(color=INK).encode(x=x, y=y, y2="bottom:Q"),
        _chart(cuts).mark_rule(color=GRID, strokeDash=[3, 3]).encode(x=x, y=y, y2="bottom:Q"),
        _chart(lanes)
        .mark_text(align="left", fontSize=11, color=MUTED, limit=width)
        .encode(x=alt.value(0), y=y, text="text:N"),
    )
    return layers.properties(width=width, height=LANE_PX * len(names))


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
        made.append(layers.properties(width=width, height=height, title=_panel_title(title, place == last)))
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
    return _chart(rows).mark_line(color=colour, strokeWidth=1.5, point=dots).encode(x=x, y=y)


def _panel_title(title: str, with_steps: bool) -> dict[str, Any]:
    text = f"{title}, by step" if with_steps else title
    return {"text": text, "anchor": "start", "color": MUTED, "fontSize": 11, "fontWeight": "normal", "offset": 2}


def _svg(chart: Chart) -> str:
    import vl_convert

    text: str = vl_convert.vegalite_to_svg(chart.configure(**_theme()).to_dict())
    return text


def _theme() -> dict[str, Any]:
    axis = {
        "labelColor": INK,
        "labelFontSize": 12,
        "gridColor": GRID,
        "domain": False,
        "ticks": False,
        "labelPadding": 8,
        "aria": False,
    }
    return {
        "background": "transparent",
        "font": "sans-serif",
        "padding": {"left": 0, "right": 0, "top": 4, "bottom": 2},
        "view": {"stroke": None},
        "mark": {"aria": False},
        "axis": axis,
        "axisX": {"labelColor": MUTED, "labelFontSize": 11, "labelPadding": 4},
    }
