"""`Curve`: the few points of a metric that are drawn, and how it grows; `Means`: a row of a heat map.

`decimate.py` has the mathematics.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from instrument.dashboard import decimate
from instrument.dashboard.growing import Column
from instrument.dashboard.table import Table


@dataclass(frozen=True)
class Curve:
    """The points of a curve that are drawn, in a range.

    Attributes:
        steps: int64 [n], ascending.
        times: float64 [n], seconds since 1970.
        values: float64 [n]; what is not finite is a gap and a mark.
        smooth: float64 [n], the mean around these points; empty without smoothing.
        width: Width of the buckets, in steps.
        generation: Of the store: points of different generations are of different curves.
        settled: So many points at the beginning stay as they are when the curve grows.
        row: Where the others begin among the metric's values; pass it as `row` to get what follows the settled points.
    """

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray
    smooth: np.ndarray
    width: int
    generation: int
    settled: int
    row: int


class Means(NamedTuple):
    """What a heat map shows of a metric: means over buckets.

    Attributes:
        starts: int64 [n], where the buckets begin.
        means: float64 [n], of the finite values; NaN where there is none.
        bad: bool [n], whether some were not finite.
        first, last: int64 [n], the first and the last step with a value.
    """

    starts: np.ndarray
    means: np.ndarray
    bad: np.ndarray
    first: np.ndarray
    last: np.ndarray


NO_MEANS = Means(np.empty(0, np.int64), np.empty(0), np.empty(0, bool), np.empty(0, np.int64), np.empty(0, np.int64))


def points(table: Table, column: Column, begin: int, end: int, width: int, smooth: int) -> Curve:
    """The curve of a column's values from `begin` to `end`, in buckets of `width` steps; see `Store.curve`."""
    rows, values = column.rows.array[begin:end], column.values.array[begin:end]
    steps = table.steps.array[rows]
    starts = decimate.bucket_starts(steps, width)
    chosen = decimate.select(values, starts)
    tail = int(starts[-1]) if len(starts) else 0
    means = np.empty(0)
    if smooth > 0 and len(steps):
        low = table.find(column, int(steps[0]) - smooth // 2)
        high = table.find(column, int(steps[-1]) + decimate.after(smooth) + 1)
        means = decimate.centred_mean(table.steps.array[column.rows.array[low:high]], column.values.array[low:high],
                                      smooth)[begin - low:][chosen]
        # Where steps to come have a part in a mean, it is not settled either.
        unsettled = int(np.searchsorted(steps, column.last - decimate.after(smooth), side="right"))
        tail = min(tail, int(starts[max(int(np.searchsorted(starts, unsettled, side="right")) - 1, 0)]))
    return Curve(steps[chosen], table.times.array[rows[chosen]], values[chosen], means, width, table.generation,
                 int(np.searchsorted(chosen, tail)), begin + tail)


def joined(old: Curve, tail: Curve) -> Curve:
    """A curve and what has become of its points that were not settled."""
    kept = old.settled
    steps, times, values, smooth = (np.concatenate([before[:kept], after]) for before, after in (
        (old.steps, tail.steps), (old.times, tail.times), (old.values, tail.values), (old.smooth, tail.smooth)))
    return Curve(steps, times, values, smooth, tail.width, tail.generation, kept + tail.settled, tail.row)
