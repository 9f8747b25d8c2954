"""Numbers beside each other: bars by category, counts of labels, wins and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gristmill.report.charts.drawing import (
    DESK,
    HALO,
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
from gristmill.report.data import Judge, Slice
from gristmill.report.inputs import Score
from gristmill.report.words import count, estimate, percent

MAX_VALUES, MAX_LISTED = 30, 500
BAR_PX, GAP_PX = 13, 9


def draw_slice(data: Slice) -> Drawing:
    """Bars with intervals: a group for each value of the column, a bar for each run in its colour."""
    return Drawing(_slice_svg(data, DESK), _slice_svg(data, PHONE))


def draw_labels(pairs: Sequence[tuple[str, int]]) -> str:
    """How often a judge wrote each label; small enough for any screen."""
    rows = [{"label": clean(label), "place": place, "n": n, "text": count(n)} for place, (label, n) in enumerate(pairs)]
    return svg(_labels_chart(rows))


def draw_outcome(judge: Judge, colours: Sequence[int]) -> Drawing:
    """Win, tie and loss as one bar; `colours` are those of the pair's two runs."""
    return Drawing(*(svg(_outcome_chart(judge, colours, size)) for size in (DESK, PHONE)))


def largest(data: Slice, limit: int) -> list[str]:
    """The `limit` values with the most answers, in their own order."""
    total = {value: sum(score.n for score in scores) for value, scores in data.scores.items()}
    kept = set(sorted(total, key=lambda value: -total[value])[:limit])
    return [value for value in data.scores if value in kept]


def _slice_svg(data: Slice, size: Size) -> str:
    import altair as alt

    values = largest(data, MAX_VALUES)
    rows = [row for place, value in enumerate(values) for row in _slice_rows(data, place, value, size)]
    y = _category_axis(size)
    offset = alt.YOffset("run:N", sort=[str(run.number) for run in data.runs], scale=alt.Scale(paddingInner=0.18))
    base = plot(rows).encode(y=y, yOffset=offset)
    layers = alt.layer(_bars(base, data, size), _whisker(base, HALO, 3), _whisker(base, INK, 1.5), _numbers(base, size))
    height = len(values) * (len(data.runs) * BAR_PX + GAP_PX)
    return svg(layers.properties(width=size.plot + size.numbers, height=height))


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
    base = plot(rows).encode(x=x, y=y)
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
    chart = plot(rows).mark_rect().encode(x=x, x2="end:Q", color=colour)
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
