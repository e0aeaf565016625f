"""`Table`: the numbers of one run as columns, in the order of steps. Called by `Store` alone, which holds the lock."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from instrument.dashboard.growing import Column, Growing
from instrument.parsing import Part

Wanted = Callable[[str], bool]
_LATEST = 1e11  # seconds since 1970: the year 5138


@dataclass
class Latest:
    """The newest value of a metric, and the extremes of all finite ones."""

    step: int
    time: float
    value: float
    least: float
    largest: float


class Table:
    """Columns of one run; made empty.

    Attributes:
        generation: Rises when what was there has changed, as by a resume.
        columns: `{metric: column}`, in the order in which they appeared.
        steps, times: Of all lines; columns refer to them by row. Times never go back: see `_steady`.
        last_step: The newest one.
        last_time: Of the newest line, in seconds since 1970; NaN without any.
        put_back: How many seconds clocks were put back in all.
    """

    def __init__(self, generation: int):
        self.generation = generation
        self.columns: dict[str, Column] = {}
        self.steps = Growing(np.empty(0, np.int64))
        self.times = Growing(np.empty(0, np.float64))
        self.last_step, self.last_time, self.put_back = 0, np.nan, 0.0
        self._clocks: dict[int, float] = {}  # by source, the time of the last line
        self._resumes: list[tuple[int, int]] = []  # how many rows there were, and the last step that stayed

    def add(self, part: Part, *, wanted: Wanted = lambda name: True, source: int = 0) -> None:
        """What was in lines that follow those before of that source; of metrics with wanted names alone."""
        if part.marks:
            self.void(min(step for _, step in part.marks), wanted=wanted)
        pieces = [*_of_layouts(part), *_of_loose(part)]
        kept = [_after_marks(piece.lines, piece.steps, part.marks) for piece in pieces]
        rows = self._add_rows(pieces, kept, source)
        columns: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for piece, keep, row in zip(pieces, kept, rows):
            for name, lines, values in piece.columns:
                if not wanted(name):
                    continue
                chosen = keep if lines is None else keep[lines]
                columns.setdefault(name, []).append(((row if lines is None else row[lines])[chosen], values[chosen]))
        for name, parts in columns.items():
            at, values = (parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts)))
            if len(parts) > 1:  # of two layouts in turn, as where some steps have more metrics than others
                order = np.argsort(at, kind="stable")
                at, values = at[order], values[order]
            self._append(name, at, values)

    def _add_rows(self, pieces: list[_Piece], kept: list[np.ndarray], source: int) -> list[np.ndarray]:
        """Take in the lines that are kept, in their order; of each piece the row of each line, as int32."""
        if not pieces:
            return []
        keep = np.concatenate(kept)
        lines, steps, times = (np.concatenate([piece[field] for piece in pieces]) for field in range(3))
        order = np.argsort(lines, kind="stable") if len(pieces) > 1 else np.arange(len(lines))
        rows = np.empty(len(lines), np.int32)
        rows[order] = self.steps.size + np.cumsum(keep[order]) - 1
        times = self._steady(times[order], source)[keep[order]]  # also of lines that do not count
        steps = steps[order[keep[order]]]
        self.steps.extend(steps)
        self.times.extend(times)
        if len(steps):
            self.last_step = max(self.last_step, int(steps.max()))
            self.last_time = float(np.fmax(self.last_time, times.max()))
        return np.split(rows, np.cumsum([len(piece.lines) for piece in pieces])[:-1])

    def _steady(self, times: np.ndarray, source: int) -> np.ndarray:
        """The times of lines that follow, without those that go back.

        Where a clock was put back, all lines before are earlier by as much: so the newest are right, and no curve folds back.
        """
        if not len(times):
            return times
        before = self._clocks.get(source, np.nan)
        # A line without a time, or with one that no clock shows, is as late as the one before it.
        times = np.append(before, times)
        at = np.maximum.accumulate(np.where((times > -_LATEST) & (times < _LATEST), np.arange(len(times)), -1))
        times = np.where(at >= 0, times[at], 0.0)
        self._clocks[source] = float(times[-1])
        back = np.cumsum(np.maximum(-np.diff(times, prepend=times[0]), 0.0))
        if np.isnan(before):
            back -= back[1]  # nothing comes before the first one
        if back[-1] > 0:
            self.times.view()[:] -= back[-1]
            self.last_time -= back[-1]
            self.put_back += float(back[-1])
            self.generation += 1
        return (times - (back[-1] - back))[1:]

    def _append(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        if not len(rows):
            return
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = Column()
        steps = self.steps.array[rows]
        if steps[0] <= column.last or not (steps[1:] > steps[:-1]).all():
            column.ordered = False  # put in order when somebody looks
        column.last = max(column.last, int(steps.max()))
        column.rows.extend(rows)
        column.values.extend(values)
        finite = values[np.isfinite(values)]
        if len(finite):
            column.least, column.largest = min(column.least, finite.min()), max(column.largest, finite.max())

    def void(self, step: int, *, wanted: Wanted = lambda name: True) -> None:
        """Forget all later steps of metrics with wanted names."""
        changed = False
        self._resumes.append((self.steps.size, step))
        for name, column in self.columns.items():
            if column.last > step and wanted(name):
                self._order(column)
                kept = int(np.searchsorted(self.steps.array[column.rows.view()], step, side="right"))
                column.rows.size = column.values.size = kept
                column.last = int(self.steps.array[column.rows.array[kept - 1]]) if kept else -1 << 62
                finite = column.values.view()[np.isfinite(column.values.view())]
                column.least, column.largest = (finite.min(), finite.max()) if len(finite) else (np.inf, -np.inf)
                changed = True
        if changed:
            self.generation += 1
            self.last_step = min(self.last_step, step)

    def _order(self, column: Column) -> None:
        if column.ordered:
            return
        rows, values = column.rows.view(), column.values.view()
        steps = self.steps.array[rows]
        order = np.lexsort((np.arange(len(steps)), steps))
        order = order[np.append(steps[order][1:] != steps[order][:-1], True)]
        if len(order) < len(steps):
            finite = values[order][np.isfinite(values[order])]
            column.least, column.largest = (finite.min(), finite.max()) if len(finite) else (np.inf, -np.inf)
        column.rows, column.values = Growing(rows[order], len(order)), Growing(values[order], len(order))
        column.ordered = True
        self.generation += 1

    def column(self, name: str) -> Column | None:
        """A column, in order; None where it has no values."""
        column = self.columns.get(name)
        if column is None or not column.values.size:
            return None
        self._order(column)
        return column

    def names(self) -> list[str]:
        """All metrics that have a value, in the order in which they appeared."""
        return [name for name, column in self.columns.items() if column.values.size]

    def span(self) -> tuple[int, int] | None:
        """The first and the last step; None where there is none."""
        columns = [column for column in map(self.column, self.columns) if column is not None]
        if not columns:
            return None
        return min(int(self.steps.array[column.rows.array[0]]) for column in columns), max(column.last for column in columns)

    def latest(self, name: str) -> Latest | None:
        """The newest value of a metric."""
        column = self.column(name)
        if column is None:
            return None
        row = column.rows.array[column.rows.size - 1]
        return Latest(int(self.steps.array[row]), float(self.times.array[row]),
                      float(column.values.array[column.values.size - 1]), float(column.least), float(column.largest))

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All of a metric: int64 steps, float64 times, float64 values; copies."""
        column = self.column(name)
        if column is None:
            return np.empty(0, np.int64), np.empty(0), np.empty(0)
        rows = column.rows.view()
        return self.steps.array[rows], self.times.array[rows], column.values.view().copy()

    def value_at(self, name: str, step: int) -> tuple[int, float] | None:
        """The step and value that a metric had last by then; None where it had none yet."""
        column = self.column(name)
        if column is None:
            return None
        index = self.find(column, step + 1) - 1
        if index < 0:
            return None
        return int(self.steps.array[column.rows.array[index]]), float(column.values.array[index])

    def first_time(self) -> float:
        """When the first line that counts was written, in seconds since 1970; NaN without any."""
        return float(self.times.array[np.argmax(self._stays())]) if self.steps.size else np.nan

    def time_at(self, step: int) -> float:
        """When that step was recorded, or the next one that was; NaN without any."""
        found = np.flatnonzero((self.steps.view() >= step) & self._stays())[:1]
        return float(self.times.array[found[0]]) if len(found) else self.last_time

    def _stays(self) -> np.ndarray | np.bool_:
        """Which rows no resume has made void, bool [n]; True where none is."""
        if not self._resumes:
            return np.True_
        keep = np.ones(self.steps.size, bool)
        for rows, step in self._resumes:
            keep[:rows] &= self.steps.view()[:rows] <= step
        return keep

    def find(self, column: Column, step: int) -> int:
        """The first index of a column with that step or a later one."""
        low, high, rows, steps = 0, column.rows.size, column.rows.array, self.steps.array
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if steps[rows[middle]] < step else (low, middle)
        return low

    def step_at(self, seconds: float) -> int:
        """The first step that was recorded at that time, in seconds since 1970, or later."""
        times = self.times.view()
        later = np.flatnonzero((times >= seconds) & self._stays())
        return int(self.steps.array[later[0]]) if len(later) else self.last_step

    def pace(self, steps: int = 200) -> float | None:
        """Seconds a step took lately, by the clock of the records; None where it is not known."""
        times, numbers = self.times.view()[-steps:], self.steps.view()[-steps:]
        if len(times) > 2:
            # Before a resume, or a pause of whatever kind, it was another pace.
            more, later = np.diff(numbers), np.diff(times)
            usual = np.median(later[more > 0] / more[more > 0]) if (more > 0).any() else 0.0
            breaks = np.flatnonzero((more <= 0) | (later < 0) | (later > np.maximum(50 * usual * more, 10.0)))
            if len(breaks) and len(times) - breaks[-1] > 2:
                times, numbers = times[breaks[-1] + 1:], numbers[breaks[-1] + 1:]
        if len(times) < 2 or numbers[-1] <= numbers[0] or not times[-1] > times[0]:
            return None
        return float((times[-1] - times[0]) / (numbers[-1] - numbers[0]))

    def memory(self) -> int:
        """Bytes of the columns, about."""
        return sum(len(column.values.array) * 12 for column in self.columns.values()) + len(self.steps.array) * 16


class _Piece(NamedTuple):
    """Lines of a part that are packed alike: numbers of lines, steps and times, and columns.

    A column is a name, which of the lines have it (None: all), and its values.
    """

    lines: np.ndarray
    steps: np.ndarray
    times: np.ndarray
    columns: list[tuple[str, np.ndarray | None, np.ndarray]]


def _of_layouts(part: Part) -> Iterator[_Piece]:
    for names, packed in part.rows.items():
        table = np.frombuffer(packed, np.float64).reshape(-1, len(names) + 3)
        integers = table.view(np.int64)
        yield _Piece(integers[:, 0], integers[:, 1], table[:, 2],
                     [(name, None, table[:, index + 3]) for index, name in enumerate(names)])


def _of_loose(part: Part) -> Iterator[_Piece]:
    loose = part.loose
    if not loose.counts:
        return
    heads = np.frombuffer(loose.heads, np.int64).reshape(-1, 3)
    ids = np.frombuffer(loose.names, np.intc)
    order = np.argsort(ids, kind="stable")
    lines = np.repeat(np.arange(len(heads)), np.frombuffer(loose.counts, np.int64))[order]
    values = np.frombuffer(loose.values)[order]
    ends = np.cumsum(np.bincount(ids, minlength=len(loose.ids))).tolist()
    yield _Piece(heads[:, 0], heads[:, 1], heads[:, 2].view(np.float64),
                 [(name, lines[begin:end], values[begin:end]) for name, begin, end in zip(loose.ids, [0, *ends], ends)])


def _after_marks(lines: np.ndarray, steps: np.ndarray, marks: list[tuple[int, int]]) -> np.ndarray:
    """Which lines no later mark made void: bool [n]."""
    keep = np.ones(len(lines), bool)
    for line, step in marks:
        keep &= (lines > line) | (steps <= step)
    return keep
