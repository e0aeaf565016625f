"""`Store`: what the files of one run say, in memory, and the few points of its curves that are drawn.

Owns the lock, and curves that are kept ready; numbers are in `table.py`, the rest in `notes.py`. Which lines count is decided
as in `instrument.reading`: earlier lines of later steps than a mark are void, and of several values at one step the last
counts. Does no reading: `follow.py` feeds it. Every method may be called from any thread.
"""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.dashboard import decimate
from instrument.dashboard.drawn import NO_MEANS, Curve, Means, joined, points
from instrument.dashboard.notes import Alarm, Notes
from instrument.dashboard.table import Latest, Table, Wanted
from instrument.parsing import Part

# Curves that are kept ready, so that a second browser costs next to nothing.
_READY = 512


class Store:
    """Everything of one run; made empty.

    Attributes:
        lock: Held by every method; hold it to ask several things of one moment.
        version: Rises with every change.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 0
        self._clear(0)

    def _clear(self, generation: int) -> None:
        self._skipped = 0
        self._table = Table(generation)
        self._notes = Notes()
        self._alarms: list[Alarm] | None = None
        self._ready: OrderedDict[tuple[Any, ...], tuple[Any, ...]] = OrderedDict()
        self._known: dict[Any, Any] = {}
        self._known_at = -1

    # What follows is fed by the one thread that reads.

    def restart(self) -> None:
        """Forget everything: another run is in the files now."""
        with self.lock:
            self._clear(self.generation + 1)
            self.version += 1

    def add_metrics(self, lines: bytes, *, wanted: Wanted = lambda name: True, source: int = 0) -> None:
        """Whole lines of `metrics-*.jsonl`, in the order of the files; of metrics with wanted names alone.

        Args:
            lines: The lines.
            wanted: Says of a name whether it counts.
            source: Whose files they are, where those of several processes make one run.
        """
        part = Part()
        part.add(lines.splitlines())
        self.add_part(part, wanted=wanted, source=source)

    def add_part(self, part: Part, *, wanted: Wanted = lambda name: True, source: int = 0) -> None:
        """The same, of lines that were parsed elsewhere."""
        with self.lock:
            self._skipped += part.skipped
            self._table.add(part, wanted=wanted, source=source)
            if self._notes.has_gone_on(self._table.last_step):
                self._alarms = None
            self.version += 1

    def add_alarms(self, lines: bytes) -> None:
        """Whole lines of `alarms.jsonl`."""
        with self.lock:
            self._notes.add_alarms(lines)
            self._notes.has_gone_on(self._table.last_step)
            self._alarms = None
            self.version += 1

    def add_texts(self, lines: bytes) -> None:
        """Whole lines of `samples.jsonl`."""
        with self.lock:
            self._notes.add_texts(lines)
            self.version += 1

    def add_histograms(self, lines: bytes) -> None:
        """Whole lines of `histograms-*.jsonl`."""
        with self.lock:
            self._notes.add_histograms(lines)
            self.version += 1

    # What follows is for those who look.

    @property
    def generation(self) -> int:
        """Rises when what was there has changed, as by a resume: points of another generation are void."""
        return self._table.generation

    @property
    def last_step(self) -> int:
        """The newest step; 0 without any."""
        return self._table.last_step

    @property
    def first_time(self) -> float:
        """When the first record was made, in seconds since 1970 by the clock of the newest; NaN without any."""
        with self.lock:
            return self._once("first_time", self._table.first_time)

    @property
    def last_time(self) -> float:
        """When the newest record was made."""
        return self._table.last_time

    @property
    def put_back(self) -> float:
        """How many seconds the clock was put back since the run began."""
        return self._table.put_back

    @property
    def skipped(self) -> int:
        """How many lines were no record."""
        return self._skipped + self._notes.skipped

    @property
    def alarms(self) -> Sequence[Alarm]:
        """All of them, the oldest first; copies."""
        with self.lock:
            if self._alarms is None:
                self._alarms = [replace(alarm) for alarm in self._notes.alarms]
            return self._alarms

    @property
    def texts(self) -> list[dict[str, Any]]:
        """`{"step", "time", "name", "text"}` of each, the oldest first; a copy."""
        with self.lock:
            return list(self._notes.texts)

    def histogram_names(self) -> list[str]:
        with self.lock:
            return list(self._notes.histograms)

    def histograms(self, name: str) -> list[tuple[int, int, np.ndarray]]:
        """Of one name: (step, first bin, counts from that bin on), the oldest first."""
        with self.lock:
            return list(self._notes.histograms.get(name, ()))

    def names(self) -> list[str]:
        """All metrics that have a value, in the order in which they appeared."""
        with self.lock:
            return self._table.names()

    def span(self) -> tuple[int, int] | None:
        """The first and the last step; None without any."""
        with self.lock:
            return self._once("span", self._table.span)

    def latest(self, name: str) -> Latest | None:
        """The newest value of a metric; None where it has none."""
        with self.lock:
            return self._table.latest(name)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All of a metric: int64 steps, float64 times, float64 values; copies."""
        with self.lock:
            return self._table.series(name)

    def value_at(self, name: str, step: int) -> tuple[int, float] | None:
        """The step and value that a metric had last by then; None where it had none yet."""
        with self.lock:
            return self._table.value_at(name, step)

    def time_at(self, step: int) -> float:
        """When that step was recorded, or the next one that was; NaN without any."""
        with self.lock:
            return self._table.time_at(step)

    def step_at(self, seconds: float) -> int:
        """The first step that was recorded at that time, in seconds since 1970, or later."""
        with self.lock:
            return self._table.step_at(seconds)

    def pace(self, steps: int = 200) -> float | None:
        """Seconds a step took lately, by the clock of the records; None where it is not known."""
        with self.lock:
            return self._table.pace(steps)

    def memory(self) -> int:
        """Bytes of the columns, about."""
        with self.lock:
            return self._table.memory()

    def curve(self, name: str, *, start: int | None = None, stop: int | None = None, width: int | None = None,
              smooth: int = 0, row: int | None = None) -> Curve | None:
        """The points of a metric that are drawn.

        Args:
            name: The metric.
            start: First step; that of the metric by default. A curve in a range has one more point on each side.
            stop: Last step; that of the metric by default.
            width: Width of the buckets, a power of two; by default one that makes `decimate.BUCKETS` of the range.
            smooth: Means over so many steps, 0 for none.
            row: Only what follows the settled points of an earlier curve of the same arguments (its `row`).

        Returns:
            The curve; None where the metric has no values.
        """
        with self.lock:
            table = self._table
            column = table.column(name)
            if column is None:
                return None
            size = column.values.size
            first, last = int(table.steps.array[column.rows.array[0]]), column.last
            low, high = max(first, first if start is None else start), min(last, last if stop is None else stop)
            width = width or decimate.width_for(max(high - low + 1, 1))
            end = size if stop is None else min(table.find(column, high + 1) + 1, size)
            if row is not None:
                return self._once(("tail", name, start, stop, width, smooth, row),
                                  lambda: points(table, column, row, max(end, row), width, smooth))
            key = name, start, stop, width, smooth, table.generation
            ready, known = self._ready.get(key, (None, 0))
            if ready is None:
                begin = max(table.find(column, low) - 1, 0) if start is not None else 0
                ready = points(table, column, begin, max(end, begin), width, smooth)
            elif known != size:
                ready = joined(ready, points(table, column, ready.row, max(end, ready.row), width, smooth))
            self._keep(key, (ready, size))
            return ready

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What does not change until something new comes, computed once for all browsers."""
        if self._known_at != self.version:
            self._known.clear()
            self._known_at = self.version
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _keep(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self._ready[key] = value
        self._ready.move_to_end(key)
        if len(self._ready) > _READY:
            self._ready.popitem(last=False)

    def means(self, name: str, *, width: int, start: int | None = None, stop: int | None = None) -> Means:
        """What a heat map shows of a metric."""
        with self.lock:
            table = self._table
            column = table.column(name)
            if column is None:
                return NO_MEANS
            key = "means", name, width, start, stop, table.generation
            size = column.values.size
            settled, row, known = self._ready.get(key, (None, 0 if start is None else table.find(column, start), -1))
            if known == size:
                return settled
            end = size if stop is None else table.find(column, stop + 1)
            steps, values = table.steps.array[column.rows.array[row:end]], column.values.array[row:end]
            starts = decimate.bucket_starts(steps, width)
            if not len(starts):
                return NO_MEANS
            means, bad = decimate.bucket_means(values, starts)
            first, last = steps[starts], steps[np.append(starts[1:], len(steps)) - 1]
            new = Means(first // width * width, means, bad > 0, first, last)
            # All buckets but the last are settled; the next call computes from the last one on.
            result = new if settled is None else Means(*(np.concatenate([a[:-1], b]) for a, b in zip(settled, new)))
            self._keep(key, (result, row + int(starts[-1]), size))
            return result
