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

from gristmill.report.charts.drawing import GRID, HALO, INK, MUTED, PALETTE, SLATE, TIE, Drawing
from gristmill.report.charts.over_time import (
    MAX_LINES,
    MAX_PANELS,
    draw_curve,
    draw_throughput,
    draw_timeline,
    drawn_measures,
)
from gristmill.report.charts.scores import MAX_LISTED, MAX_VALUES, draw_labels, draw_outcome, draw_slice, largest

__all__ = [
    "GRID",
    "HALO",
    "INK",
    "MAX_LINES",
    "MAX_LISTED",
    "MAX_PANELS",
    "MAX_VALUES",
    "MUTED",
    "PALETTE",
    "SLATE",
    "TIE",
    "Drawing",
    "draw_curve",
    "draw_labels",
    "draw_outcome",
    "draw_slice",
    "draw_throughput",
    "draw_timeline",
    "drawn_measures",
    "largest",
]
