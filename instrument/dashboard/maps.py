"""Heat maps and bars, as `charts.py` has curves: layers over time and at one step, histograms likewise. Pure functions."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from instrument.bins import HIGHEST, LOWEST, NONFINITE, OCTAVES, ZERO
from instrument.dashboard.charts import ALARM, COLORS, RAMP
from instrument.dashboard.drawn import Means

# Drawn at once: in parts, as ECharts does with thousands of cells, half of a map may stand there for a while.
_CELLS = {"type": "heatmap", "animation": False, "progressiveThreshold": 10**9, "emphasis": {"disabled": True}}


def heat_map(rows: Sequence[str], steps: Sequence[tuple[int, int]], cells: list[list[Any]], *, bad: Sequence[list[Any]] = (),
             ends: tuple[float, float] = (0.0, 1.0), log: bool = False, unit: str = "1") -> dict[str, Any]:
    """A map of colours: a row a layer, or a row a bin of a histogram; a column a stretch of steps.

    Args:
        rows: Labels, from below.
        steps: Of each column, the first and the last step at which something was measured.
        cells: [column, row, what is coloured, value]; the third is the value or its logarithm (`log`).
        bad: The same where something was not finite, which has a colour of its own.
        ends: Range of what is coloured.
        log: For the legend.
        unit: As in `lines`.
    """
    return {"kind": "heat",
            "option": {"animation": False, "grid": {"left": 8, "right": 8, "top": 10, "bottom": 58, "containLabel": True},
                       "tooltip": {"trigger": "item", "confine": True},
                       "xAxis": {"type": "category", "data": [first for first, _ in steps], "splitLine": {"show": False},
                                 "axisTick": {"show": False}, "axisLabel": {"hideOverlap": True}},
                       "yAxis": {"type": "category", "data": list(rows), "splitLine": {"show": False},
                                 "axisTick": {"show": False}, "axisLabel": {"hideOverlap": True, "width": 120,
                                                                             "overflow": "truncate"}},
                       "visualMap": {"type": "continuous", "seriesIndex": 0, "dimension": 2, "min": ends[0],
                                     "max": ends[1] if ends[1] > ends[0] else ends[0] + 1, "orient": "horizontal",
                                     "left": "center", "bottom": 0, "itemWidth": 10, "itemHeight": 180, "calculable": False,
                                     "inRange": {"color": list(RAMP)}, "textGap": 6},
                       "series": [{**_CELLS, "id": "cells", "data": cells},
                                  {**_CELLS, "id": "bad", "data": list(bad), "itemStyle": {"color": ALARM}}]},
            "extra": {"log": log, "units": [unit], "steps": list(steps)}}


def bars(labels: Sequence[str], values: Sequence[float | None], *, unit: str = "1", name: str = "", horizontal: bool = False,
         log: bool = False) -> dict[str, Any]:
    """Bars: the layers of one step (horizontal), or the bins of one histogram."""
    category = {"type": "category", "data": list(labels), "axisTick": {"show": False},
                "axisLabel": {"hideOverlap": True, "width": 110, "overflow": "truncate"}, "splitLine": {"show": False}}
    value = {"type": "log" if log else "value", "splitNumber": 3, "axisLabel": {"hideOverlap": True},
             "splitLine": {"show": True}}
    return {"kind": "bars",
            "option": {"animation": False, "grid": {"left": 8, "right": 18, "top": 10, "bottom": 8, "containLabel": True},
                       "tooltip": {"trigger": "axis", "confine": True, "axisPointer": {"type": "shadow"}},
                       "xAxis": value if horizontal else category, "yAxis": category if horizontal else value,
                       "series": [{"id": "bars", "type": "bar", "name": name, "data": list(values), "animation": False,
                                   "barCategoryGap": "18%", "itemStyle": {"color": COLORS[2], "borderRadius": 2}}]},
            "extra": {"units": [unit], "horizontal": horizontal}}


def bin_label(index: int) -> str:
    """What a bin of `instrument.bins` holds: its edge nearer to zero.

    Examples:
        >>> from instrument.bins import ZERO
        >>> bin_label(ZERO + 1 + 40), bin_label(ZERO), bin_label(ZERO - 1)
        ('1', '0', '−2⁻⁴⁰')
    """
    if index == ZERO:
        return "0"
    if index == NONFINITE:
        return "not finite"
    power = index - ZERO - 1 + LOWEST if index > ZERO else LOWEST + OCTAVES - 1 - index
    assert LOWEST <= power < HIGHEST
    raised = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ("−" if index < ZERO else "") + ("1" if power == 0 else f"2{raised}")


def histogram_map(snapshots: Sequence[tuple[int, int, np.ndarray]], *, most: int = 120) -> dict[str, Any]:
    """Histograms over time: a column a snapshot, a row a bin, coloured by the share of the elements.

    Args:
        snapshots: (step, first bin, counts from that bin on), the oldest first.
        most: Columns at most; of more, some are left out, never the first or the last.
    """
    shown = thinned(snapshots, most)
    # Between the least magnitudes of either sign and zero lie dozens of bins that hold nothing in most runs.
    used = sorted({ZERO, *(first + index for _, first, counts in shown for index in np.flatnonzero(counts).tolist())})
    row = {index: place for place, index in enumerate(used)}
    cells: list[list[Any]] = []
    for column, (_, first, counts) in enumerate(shown):
        total = max(int(counts.sum()), 1)
        for index in np.flatnonzero(counts).tolist():
            share = int(counts[index]) / total
            cells.append([column, row[first + index], round(math.log10(share), 3), share])
    least = min((cell[2] for cell in cells), default=-1.0)
    return heat_map([bin_label(index) for index in used], [(step, step) for step, _, _ in shown], cells,
                    ends=(max(least, -4.0), 0.0), log=True, unit="fraction")


def histogram_bars(snapshot: tuple[int, int, np.ndarray]) -> dict[str, Any]:
    """One histogram as bars: shares of the elements."""
    _, first, counts = snapshot
    total = max(int(counts.sum()), 1)
    used = sorted({ZERO - first, *np.flatnonzero(counts).tolist()})
    return bars([bin_label(first + index) for index in used],
                [round(int(counts[index]) / total, 6) if 0 <= index < len(counts) else 0 for index in used],
                unit="fraction", name="share of elements")


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of a sequence, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def both_ends(items: Sequence[Any], first: int, last: int) -> list[Any]:
    """At most so many from the beginning of a sequence, and so many from its end."""
    return list(items) if len(items) <= first + last else [*items[:first], *items[-last:]]


def layer_cells(columns: Mapping[str, Means]) \
        -> tuple[list[tuple[int, int]], list[list[Any]], list[list[Any]], tuple[float, float], bool]:
    """Cells of a heat map of layers.

    Args:
        columns: `{metric: means}`, the first layer first, of one width.

    Returns:
        First and last steps with a value of each column, cells and bad cells in the order of columns, range of colours,
        whether it is logarithmic.
    """
    joined = Means(*map(np.concatenate, zip(*columns.values())))
    starts, column_of = np.unique(joined.starts, return_inverse=True)
    place = {start: index for index, start in enumerate(starts.tolist())}
    first, last = np.full(len(starts), np.iinfo(np.int64).max), np.full(len(starts), np.iinfo(np.int64).min)
    np.minimum.at(first, column_of, joined.first)
    np.maximum.at(last, column_of, joined.last)
    every = joined.means[np.isfinite(joined.means)]
    # A few wild values must not leave the others one colour.
    nearly_all = [round(share * (len(every) - 1)) for share in (0.01, 0.99)]
    low, high = np.sort(every)[nearly_all].tolist() if len(every) else (0.0, 1.0)
    log = bool(len(every) and every.min() > 0 and high > 8 * low)
    cells: list[list[Any]] = []
    bad: list[list[Any]] = []
    for row, each in enumerate(columns.values()):
        with np.errstate(divide="ignore", invalid="ignore"):
            shade = np.log10(each.means) if log else each.means
        for start, value, color, flag in zip(each.starts.tolist(), each.means.tolist(), shade.tolist(), each.bad.tolist()):
            if flag:
                bad.append([place[start], row, 0, None])  # drawn only with some value to be coloured
            elif math.isfinite(value):
                cells.append([place[start], row, _rounded(color, 4), _rounded(value, 5)])
    cells.sort(key=lambda cell: cell[0])
    bad.sort(key=lambda cell: cell[0])
    ends = (math.log10(low), math.log10(high)) if log else (low, high)
    return list(zip(first.tolist(), last.tolist())), cells, bad, ends, log


def _rounded(value: float, digits: int) -> float:
    short = float(f"{value:.{digits}g}")
    return short if math.isfinite(short) else value
