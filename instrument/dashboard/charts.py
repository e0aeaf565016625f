"""Points to charts: the options of ECharts as plain dictionaries, which are JSON as they are. Pure functions.

The page and the report use the same ones. What depends on the reader's light or dark theme, on number formats and on the
mouse is in `static/plot.js`, which draws them. A chart here is

    {"kind": "lines", "option": {…}, "extra": {…}}       every series with its `data`

A point is [x, y], or [x, null, "nan"] where the value is not finite (`nan`, `inf`, `-inf`): a gap and, by plot.js, a mark.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Calm colours that are told apart on white and on dark grey, by the colour-blind too. Red is for alarms alone.
COLORS = ("#4385d6", "#dd8834", "#37a088", "#9b78d3", "#c9a227", "#5aa9c9", "#b8698f", "#7f8c9b")
ALARM = "#e0464c"
THRESHOLD = "#7f8c9b"
DASHES = ("solid", "dashed", "dotted")
# From little to much, of heat maps: readable on either theme.
RAMP = ("#2b3a67", "#33638d", "#2f8a8c", "#57ae74", "#b5cf5a", "#fbe46b")


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        id: Unique in its chart.
        label: Which metric of which run: unique in its chart.
        points: As above.
        smooth: The smoothed curve of the same points; None without. The raw curve is drawn behind it.
        color: Index into `COLORS`, or a colour.
        axis: 0, the left y axis, or 1 or 2, on the right.
        dash: One of `DASHES`: tells the metrics of a run apart where colours tell runs apart.
        group: The entry of the legend that it belongs to; its label by default. Entries hide and show what belongs to them.
        also: A second entry that it belongs to, in which curves have different colours.
    """

    id: str
    label: str
    points: list[list[Any]]
    smooth: list[list[Any]] | None = None
    color: int | str = 0
    axis: int = 0
    dash: str = DASHES[0]
    group: str = ""
    also: str = ""


@dataclass(frozen=True)
class Mark:
    """An alarm on the curves: a line at x, an area up to `until` where it lasted."""

    x: float
    text: str
    until: float | None = None


def color_of(color: int | str) -> str:
    """A colour of `COLORS` by its index; other ones are what they are."""
    return COLORS[color % len(COLORS)] if isinstance(color, int) else color


def shade(fraction: float) -> str:
    """A colour between the ends of `RAMP`, for curves that have an order, as layers do.

    Examples:
        >>> shade(0.0), shade(1.0)
        ('#33638d', '#e0a93b')
    """
    # Without the ramp's darkest and lightest ends, which vanish on dark grey and on white.
    stops = [*RAMP[1:4], "#9bbf45", "#e0a93b"]
    place = min(max(fraction, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    part = place - low
    ends = [[int(stop[index:index + 2], 16) for index in (1, 3, 5)] for stop in stops[low:low + 2]]
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends))


def points(xs: np.ndarray, ys: np.ndarray) -> list[list[Any]]:
    """Points of arrays.

    Examples:
        >>> points(np.array([1, 2]), np.array([0.5, np.nan]))
        [[1, 0.5], [2, None, 'nan']]
    """
    return [[x, y] if math.isfinite(y) else [x, None, str(y)] for x, y in zip(xs.tolist(), ys.tolist())]


def lines(curves: Sequence[Line], *, x: str = "step", ends: tuple[float, float] | None = None, log: Sequence[bool] = (False,),
          zero: Sequence[bool] = (False,), units: Sequence[str] = ("1",), marks: Sequence[Mark] = (),
          threshold: float | None = None) -> dict[str, Any]:
    """A chart of curves.

    Args:
        curves: What is drawn.
        x: `step`, `time` (seconds since the run's start) or `clock` (milliseconds since 1970).
        ends: Of the x axis; those of the points by default.
        log: For each y axis, whether it is logarithmic. What is not above zero is left out there, which plot.js says.
        zero: For each y axis, whether it begins at zero where it is linear; one of fractions then ends at 100 %.
        units: Of each y axis: `1`, `seconds`, `bytes`, `fraction` or another text.
        marks: Alarms.
        threshold: Where gradients are clipped: a horizontal line.

    Returns:
        The chart. Each curve has a series `line:ID`, and with smoothing one more, `smooth:ID`.
    """
    used = max((curve.axis for curve in curves), default=0) + 1
    units, log, zero = (_padded(each, used, usual) for each, usual in ((units, "1"), (log, False), (zero, False)))
    series: list[dict[str, Any]] = []
    for place, curve in enumerate(curves):
        above = 3 - place / 100  # the first metric is the one to see where curves lie on each other
        color = color_of(curve.color)
        smoothed = curve.smooth is not None
        series.append({
            "id": f"line:{curve.id}", "name": curve.label if not smoothed else f"{curve.label}, unsmoothed", "type": "line",
            "data": curve.points, "yAxisIndex": curve.axis, "showSymbol": False, "symbolSize": 5, "connectNulls": False,
            "animation": False, "z": above - 1 if smoothed else above,
            "itemStyle": {"color": color, "opacity": 0.28 if smoothed else 1},  # of points alone, which plot.js gives a symbol
            "lineStyle": {"width": 1 if smoothed else 1.6, "opacity": 0.28 if smoothed else 1, "color": color,
                          "type": "solid" if smoothed else curve.dash}, "emphasis": {"disabled": True}})
        if smoothed:
            series.append({**series[-1], "id": f"smooth:{curve.id}", "name": curve.label, "data": curve.smooth, "z": above,
                           "itemStyle": {"color": color},
                           "lineStyle": {"width": 2, "opacity": 1, "color": color, "type": curve.dash}})
    series.append(_marks(marks, threshold))
    series += [{**_marks((), None), "id": f"marks:{axis}", "yAxisIndex": axis} for axis in range(1, used)]
    return {"kind": "lines",
            "option": {"animation": False, "grid": {"left": 56, "right": 18 + 48 * (used - 1), "top": 12, "bottom": 26},
                       "tooltip": {"trigger": "axis", "confine": True, "axisPointer": {"type": "line", "snap": True}},
                       "legend": {"show": False},  # plot.js makes one that wraps, and that the keyboard reaches
                       "xAxis": x_axis(x, ends),
                       "yAxis": [_y_axis(axis, log[axis], zero[axis], units[axis]) for axis in range(used)],
                       "series": series},
            "extra": {"legend": _legend(curves), "x": x, "units": units, "log": log, "threshold": threshold}}


def _padded(values: Sequence[Any], count: int, usual: Any) -> list[Any]:
    return [*values[:count], *[usual] * (count - len(values))]


def _legend(curves: Sequence[Line]) -> list[dict[str, Any]]:
    """Entries: label, colour and axis (None where its curves have several), dashes, and ids of its curves."""
    entries: dict[str, dict[str, Any]] = {}
    for curve in curves:
        label = curve.group or curve.label
        entry = entries.setdefault(label, {"label": label, "color": color_of(curve.color), "dash": DASHES[0],
                                           "axis": None if curve.also else curve.axis, "curves": []})
        entry["curves"].append(curve.id)
    for curve in curves:
        if curve.also:
            entry = entries.setdefault(curve.also, {"label": curve.also, "color": None, "dash": curve.dash, "axis": curve.axis,
                                                    "curves": []})
            entry["curves"].append(curve.id)
    return list(entries.values())


def x_axis(x: str, ends: tuple[float, float] | None) -> dict[str, Any]:
    """The x axis of curves: `lines` has it, and it changes alone when a run grows."""
    axis: dict[str, Any] = {"type": "time" if x == "clock" else "value", "splitLine": {"show": False},
                            "axisLabel": {"hideOverlap": True}, "minInterval": 1 if x == "step" else 0, "splitNumber": 6}
    if ends is not None:
        low, high = ends
        axis.update(min=low, max=high if high > low else low + 1)
    return axis


def _y_axis(index: int, log: bool, zero: bool, unit: str) -> dict[str, Any]:
    from_zero = {"min": 0, **({"max": 1, "interval": 0.25} if unit == "fraction" else {})} if zero and not log else {}
    return {"type": "log" if log else "value", "scale": True, "position": "left" if index == 0 else "right",
            "offset": 52 * max(index - 1, 0), "splitLine": {"show": index == 0}, "splitNumber": 4,
            "axisLabel": {"hideOverlap": True}, "alignTicks": False, **from_zero}


def _marks(marks: Sequence[Mark], threshold: float | None) -> dict[str, Any]:
    at = [{"xAxis": mark.x, "name": mark.text} for mark in marks]
    lasting = [[{"xAxis": mark.x, "name": mark.text}, {"xAxis": mark.until}] for mark in marks if mark.until is not None]
    level = [] if threshold is None else [{
        "yAxis": threshold, "name": "clipping threshold", "lineStyle": {"color": THRESHOLD, "type": "dotted", "width": 1.5}}]
    return {"id": "marks", "type": "scatter", "data": [], "symbol": "diamond", "symbolSize": 9, "itemStyle": {"color": ALARM},
            "z": 6, "animation": False, "tooltip": {"show": True},
            "markLine": {"silent": True, "symbol": "none", "animation": False, "precision": -1,  # not rounded
                          "data": at + level, "label": {"show": False},
                         "lineStyle": {"color": ALARM, "width": 1, "type": "solid", "opacity": 0.75}},
            "markArea": {"silent": True, "animation": False, "itemStyle": {"color": ALARM, "opacity": 0.09},
                         "label": {"show": False}, "data": lasting}}


def marks_option(marks: Sequence[Mark], threshold: float | None = None) -> dict[str, Any]:
    """The part of `lines` that changes when an alarm begins or ends."""
    series = _marks(marks, threshold)
    return {"id": "marks", "markLine": series["markLine"], "markArea": series["markArea"]}
