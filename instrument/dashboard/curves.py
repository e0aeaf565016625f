"""`Curves`: one chart of curves as one browser has it, and what it gets next of it."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from instrument.dashboard import catalog, charts, decimate, maps, panels
from instrument.dashboard.drawn import Curve
from instrument.dashboard.run import Run
from instrument.dashboard.view import View

# Alarms that are drawn on one chart.
_MARKS = 40
# Buckets that automatic smoothing takes the mean of.
_AUTO = 8
# The ends of a view's range are steps, which are smaller than these, or times, which are right for every run: milliseconds
# since each run's start, or since 1970.
_SINCE_START, _CLOCK = 10 ** 15, 2 * 10 ** 15
_ALL = 1 << 53  # later than all steps


class Range(NamedTuple):
    """Which steps are shown.

    Attributes:
        first, last: Ends of the x axis, as steps.
        start, stop: First and last step of the points that are sent; None for the ends of the curves. With a window they begin
            at a multiple of half of it, so that they need not be sent anew with every step.
    """

    first: int
    last: int
    start: int | None = None
    stop: int | None = None

    @classmethod
    def of(cls, view: View, runs: Sequence[Run]) -> list[Range]:
        """The range that a view has of each of these runs: the same steps, or on an axis of time the same time."""
        times = _times(view, runs)
        if times is not None:
            return [cls.at(run, *each) for run, each in zip(runs, times)] if view.x != "step" else \
                [cls.at(runs[0], *times[0])] * len(runs)
        return [cls.of_steps(view, runs)] * len(runs)

    @classmethod
    def of_steps(cls, view: View, runs: Sequence[Run]) -> Range:
        """The same of a view whose range is not one of time."""
        spans = [run.store.span() for run in runs]
        if view.first is not None and view.last is not None:
            return cls(view.first, view.last, view.first, view.last)
        known = [span for span in spans if span is not None]
        low, high = (min(first for first, _ in known), max(last for _, last in known)) if known else (0, 1)
        if view.window and high - low > view.window:
            first, half = high - view.window, max(view.window // 2, 1)
            return cls(first, high, first // half * half)
        return cls(low, high)

    @classmethod
    def at(cls, run: Run, low: float, high: float) -> Range:
        """The steps of a run at these times, in seconds since 1970."""
        store = run.store
        # Where the range goes on after the newest step, what is sent has no end that moves with the run.
        open_end = not high < store.last_time
        first = store.step_at(low)
        last = max(store.last_step if open_end else store.step_at(high), first)
        return cls(first, last, first, _ALL if open_end else last)

    def width(self, view: View) -> int:
        """Of the buckets."""
        if self.start is not None and self.stop is None:
            return decimate.width_for(view.window * 3 // 2)  # the most that a window is sent of
        return decimate.width_for(self.last - self.first + 1)


def whole(view: View, runs: Sequence[Run]) -> tuple[float, float]:
    """The ends of the x axis where all of the runs is shown."""
    view = replace(view, first=None, last=None, window=0)
    return _ends(runs, view, Range.of(view, runs))


def of_axis(x: float, view: View) -> int:
    """A place on the x axis as an end of a view's range."""
    if view.x == "step":
        return round(x)
    base, milliseconds = (_CLOCK, x) if view.x == "clock" else (_SINCE_START, 1000 * x)
    return base + min(max(round(milliseconds), 0), _SINCE_START - 1)


def _times(view: View, runs: Sequence[Run]) -> list[tuple[float, float]] | None:
    """The range of each run in seconds since 1970, where the view has one of time."""
    if view.first is None or view.last is None or view.first < _SINCE_START or not runs:
        return None
    is_clock = view.first >= _CLOCK
    low, high = ((each - (_CLOCK if is_clock else _SINCE_START)) / 1000 for each in (view.first, view.last))
    # Where the x axis is another one by now, the range is that of the first run.
    if is_clock and view.x == "time":
        low, high, is_clock = low - _start(runs[0]), high - _start(runs[0]), False
    elif not is_clock and view.x == "clock":
        low, high, is_clock = low + _start(runs[0]), high + _start(runs[0]), True
    return [(low, high) if is_clock else (low + _start(run), high + _start(run)) for run in runs]


def _start(run: Run) -> float:
    at = run.start()
    return at if at == at else 0.0


class Curves:
    """Made for a browser that has nothing of the chart yet."""

    def __init__(self) -> None:
        self._signature: Any = None
        # By series: row to go on from, how many points stay, how many it has, and of which version of the store.
        self._cursors: dict[str, tuple[int, int, int, int]] = {}
        self._ends: tuple[float, float] = (0.0, 0.0)
        self._marks: list[charts.Mark] = []

    def update(self, spec: catalog.Spec, runs: Sequence[Run], view: View, *, shown: Sequence[Range], units: Mapping[str, str],
               differs: Mapping[str, str]) -> dict[str, Any] | None:
        """What the browser gets: the chart, what is new in it, or None.

        Args:
            spec: Which metrics it shows.
            runs: Whose.
            view: How.
            shown: Which steps of each run.
            units: `{metric: unit}`.
            differs: `{run: text}`: how the runs differ, for the legend.
        """
        wanted = [(index, run, name, axis) for axis, names in enumerate(spec.axes) for name in names
                  for index, run in enumerate(runs)]
        width, log, marks = max(each.width(view) for each in shown), spec.is_log(view.scales), _marks(spec, runs, view)
        threshold = panels.threshold(runs) if spec.id == "grad" else None
        ends, smooth = _ends(runs, view, shown), _smoothing(spec, view, width)
        signature = (spec, [(run.name, id(run.store), run.store.generation) for run in runs], width,
                     [(each.start, each.stop) for each in shown], view.x, view.x == "time" and [_start(run) for run in runs],
                     smooth, log, threshold,
                     [run.store.latest(name) is not None for _, run, name, _ in wanted], dict(differs))
        if signature == self._signature:
            return self._grown(wanted, view, shown, width, smooth, marks, threshold, ends)
        self._signature, self._marks, self._ends, self._cursors = signature, marks, ends, {}
        lines = []
        for index, run, name, axis in wanted:
            version = run.store.version
            start, stop = shown[index].start, shown[index].stop
            curve = run.store.curve(name, start=start, stop=stop, width=width, smooth=smooth)
            if curve is not None:
                self._cursors[f"{index}:{name}"] = curve.row, curve.settled, len(curve.steps), version
                lines.append(_line(curve, index, run, name, axis, spec=spec, runs=runs, view=view, smooth=smooth,
                                   differs=differs))
        return charts.lines(lines, x=view.x, ends=ends, log=log, zero=spec.zero, marks=marks, threshold=threshold,
                            units=[catalog.unit_of(names[0], units) if names else "1" for names in spec.axes])

    def _grown(self, wanted: Sequence[tuple[int, Run, str, int]], view: View, shown: Sequence[Range], width: int, smooth: int,
               marks: list[charts.Mark], threshold: float | None, ends: tuple[float, float]) -> dict[str, Any] | None:
        series: list[dict[str, Any]] = []
        option: dict[str, Any] = {}
        for index, run, name, _ in wanted:
            key = f"{index}:{name}"
            if key not in self._cursors:
                continue
            row, keep, had, known = self._cursors[key]
            version = run.store.version
            if version == known:
                continue
            start, stop = shown[index].start, shown[index].stop
            curve = run.store.curve(name, start=start, stop=stop, width=width, smooth=smooth, row=row)
            if curve is None:
                continue
            # The last value may have been written again, so the same number of points may be other ones.
            self._cursors[key] = curve.row, keep + curve.settled, keep + len(curve.steps), version
            if keep + len(curve.steps) == had and curve.row == row and not len(curve.steps):
                continue
            xs = _xs(run, curve, view)
            series.append({"id": f"line:{key}", "keep": keep, "add": charts.points(xs, curve.values)})
            if smooth:
                series.append({"id": f"smooth:{key}", "keep": keep, "add": charts.points(xs, curve.smooth)})
        if self._ends != ends:
            self._ends = ends
            option["xAxis"] = {"min": ends[0], "max": ends[1]}
        if self._marks != marks:
            self._marks = marks
            option["series"] = [charts.marks_option(marks, threshold)]
        return {"option": option, "series": series} if series or option else None


def _smoothing(spec: catalog.Spec, view: View, width: int) -> int:
    """Steps that each point is the mean of; 0 for none."""
    if not spec.smooth:
        return 0
    # Where a point stands for many steps, their extremes alone would be a band.
    return view.smooth if view.smooth >= 0 else _AUTO * width if width > 2 else 0


def _line(curve: Curve, index: int, run: Run, name: str, axis: int, *, spec: catalog.Spec, runs: Sequence[Run], view: View,
          smooth: int, differs: Mapping[str, str]) -> charts.Line:
    place, several, short = spec.names.index(name), len(runs) > 1, _without_shared(name, spec)
    # One run: a colour a metric. Several: a colour a run, and dashes for their metrics.
    color: int | str = index if several else place
    if not several and len(spec.names) > (3 if spec.ordered else len(charts.COLORS)):
        color = charts.shade(place / (len(spec.names) - 1))
    label = short if not several else f"{run.name}, {short}" if len(spec.names) > 1 else run.name
    # The core charts say how the runs differ; the others would have more of legend than of curves.
    how = differs.get(run.name, "") if not spec.section else ""
    xs = _xs(run, curve, view)
    group = short if not several else f"{run.name} ({how})" if how else run.name
    return charts.Line(f"{index}:{name}", label, charts.points(xs, curve.values),
                       charts.points(xs, curve.smooth) if smooth else None, color=color, axis=axis,
                       dash=charts.DASHES[place % len(charts.DASHES)] if several else charts.DASHES[0], group=group,
                       also=short if several and len(spec.names) > 1 else "")


def _without_shared(name: str, spec: catalog.Spec) -> str:
    """A metric's name without what all names of the chart begin with, which its title says."""
    shared = os.path.commonprefix(list(spec.names)).rpartition("/")[0] if len(spec.names) > 2 else ""
    return name[len(shared) + 1:] if shared else name


def _xs(run: Run, curve: Curve, view: View) -> np.ndarray:
    if view.x == "step":
        return curve.steps
    return np.round(curve.times * 1000) if view.x == "clock" else np.round(curve.times - _start(run), 3)


def _x_of(run: Run, view: View, step: int) -> float:
    if view.x == "step":
        return step
    at = run.store.time_at(step)
    if at != at:
        return 0.0
    return round(at * 1000) if view.x == "clock" else round(at - _start(run), 3)


def _ends(runs: Sequence[Run], view: View, shown: Sequence[Range]) -> tuple[float, float]:
    if view.x == "step":
        return shown[0].first, shown[0].last
    times = _times(view, runs)
    if times is not None:
        start = 0.0 if view.x == "clock" else _start(runs[0])
        low, high = ((each - start) * (1000 if view.x == "clock" else 1) for each in times[0])
        return round(low, 3), round(high, 3)
    ends = [(_x_of(run, view, each.first), _x_of(run, view, min(each.last, run.store.last_step)))
            for run, each in zip(runs, shown)]
    return min(first for first, _ in ends), max(last for _, last in ends)


def _marks(spec: catalog.Spec, runs: Sequence[Run], view: View) -> list[charts.Mark]:
    found = []
    for run in runs:
        for alarm in maps.both_ends(run.store.alarms, _MARKS // 2, _MARKS // 2):
            if alarm.metric in spec.names or (spec.id in ("loss", "grad") and not alarm.metric):
                text = f"{alarm.alarm} at step {alarm.first_step}" + (f", {alarm.where}" if alarm.where else "")
                until = _x_of(run, view, alarm.last_step) if alarm.last_step > alarm.first_step else None
                found.append(charts.Mark(_x_of(run, view, alarm.first_step), text, until))
    return found
