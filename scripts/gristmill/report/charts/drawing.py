"""What all charts share: sizes, colours, and how a chart becomes SVG text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

#: altair's generated classes are only partly typed.
Chart = Any


#: Okabe and Ito's colour-blind-safe set, its yellow and black replaced by an indigo and a grey that suit both themes.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#332288", "#777777")
INK, MUTED, GRID, HALO = "#1b1b1a", "#5f5f5b", "#e3e3df", "#fffffe"
SLATE, TIE = "#5b6b7f", "#c9c9c4"

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


def clean(text: str) -> str:
    """Text that an SVG can hold: no control characters and no halves of surrogate pairs."""
    return _CONTROL.sub("\ufffd", text) or "(empty)"


def plot(rows: list[dict[str, Any]]) -> Chart:
    """A chart of these rows and nothing else."""
    import altair as alt

    return alt.Chart(alt.InlineData(values=rows))


def svg(chart: Chart) -> str:
    """The chart as SVG text in the report's style."""
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
