"""Columns of what `parsing.py` found in the lines of metrics. `reading.py` makes a run of them.

Owns the order of lines, which of them a resume made again, and which of several values at one step counts.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instrument.parsing import Loose, Part


class Columns:
    """Columns of all parts, in the order of the lines, without lines that were made again after a resume.

    Attributes:
        lines, skipped: As of `Part`.
        names: All names, as they appeared first.
    """

    def __init__(self, parts: Sequence[Part]):
        starts = np.cumsum([0, *(part.lines for part in parts)])
        self.lines, self.skipped = int(starts[-1]), sum(part.skipped for part in parts)
        marks = [(start + line, step) for start, part in zip(starts.tolist(), parts) for line, step in part.marks]
        keys = dict.fromkeys(key for part in parts for key, rows in part.rows.items() if rows)
        tables: list[_Table | _LooseTable] = [_Table(key, parts, starts, marks) for key in keys]
        tables += [_LooseTable(part.loose, start, marks) for part, start in zip(parts, starts) if part.loose.counts]
        self._tables = sorted((table for table in tables if len(table.line)), key=lambda table: table.line[0])
        self._where: dict[str, list[tuple[_Table | _LooseTable, int]]] = {}
        for table in self._tables:
            for column, name in enumerate(table.names):
                self._where.setdefault(name, []).append((table, column))
        self.names = tuple(self._where)

    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and times of all lines that count."""
        return _joined([(table.line, table.step, table.time, table.ordered) for table in self._tables])

    def __getitem__(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a name: int64 and float64 of one length, the steps ascending; read-only."""
        return _joined([table.column(column) for table, column in self._where[name]])


# Lines, steps and values of a name in one table, and whether the steps ascend.
_Column = tuple[np.ndarray, np.ndarray, np.ndarray, bool]


class _Table:
    """The rows of one layout, of all parts, as columns."""

    def __init__(self, names: tuple[str, ...], parts: Sequence[Part], starts: np.ndarray, marks: list[tuple[int, int]]):
        self.names = names
        width = len(names) + 3
        pieces = [(np.frombuffer(part.rows[names], np.float64).reshape(-1, width), start)
                  for part, start in zip(parts, starts) if part.rows.get(names)]
        kept = []
        for floats, start in pieces:
            integers = floats.view(np.int64)
            kept.append(_counts(integers[:, 0] + start, integers[:, 1], marks))
        total = sum(len(piece[0]) if keep is None else int(keep.sum()) for piece, keep in zip(pieces, kept))
        self.values = np.empty((len(names), total))
        self.line, self.step, self.time = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total)
        end = 0
        for (floats, start), keep in zip(pieces, kept):
            floats = floats if keep is None else floats[keep]
            here, end = end, end + len(floats)
            integers = floats.view(np.int64)
            self.line[here:end], self.step[here:end] = integers[:, 0] + start, integers[:, 1]
            self.time[here:end], self.values[:, here:end] = floats[:, 2], floats[:, 3:].T
        del floats, integers, pieces
        for part in parts:
            part.rows.pop(names, None)
        self.ordered = _finish(self.step, self.time, self.values)

    def column(self, number: int) -> _Column:
        return self.line, self.step, self.values[number], self.ordered


class _LooseTable:
    """The lines of many layouts, of one part: values sorted by name, and of each value which line it is in."""

    def __init__(self, loose: Loose, start: int, marks: list[tuple[int, int]]):
        heads = np.frombuffer(bytes(loose.heads), np.int64).reshape(-1, 3)
        self.names = tuple(loose.ids)
        line, step, time = heads[:, 0] + start, heads[:, 1], heads[:, 2].view(np.float64)
        ids = np.frombuffer(loose.names, np.intc)
        if len(self.names) <= 1 << 16:
            ids = ids.astype(np.uint16)  # NumPy sorts these by their digits, ten times as fast
        order = np.argsort(ids, kind="stable")
        self._ends = np.cumsum(np.bincount(ids, minlength=len(self.names)))
        self._values = np.frombuffer(loose.values, np.float64)[order]
        self._rows = np.repeat(np.arange(len(heads), dtype=np.int32), np.frombuffer(loose.counts, np.int64))[order]
        self._lines, self._steps = line, step
        keep = _counts(line, step, marks)
        self._keep = keep
        self.line, self.step, self.time = (each if keep is None else each[keep] for each in (line, step, time))
        self.ordered = _finish(self.step, self.time)

    def column(self, number: int) -> _Column:
        found = slice(self._ends[number - 1] if number else 0, self._ends[number])
        rows, values = self._rows[found], self._values[found]
        if self._keep is not None:
            kept = self._keep[rows]
            rows, values = rows[kept], values[kept]
        step = self._steps[rows]
        return self._lines[rows], step, values, _finish(step, values)


def _counts(line: np.ndarray, step: np.ndarray, marks: list[tuple[int, int]]) -> np.ndarray | None:
    """Which rows were not made again; None for all of them."""
    if not marks:
        return None
    at = np.array([number for number, _ in marks])
    lowest = np.minimum.accumulate(np.array([mark for _, mark in marks])[::-1])[::-1]  # of a mark and those behind it
    limits = np.append(lowest, np.iinfo(np.int64).max)
    keep = step <= limits[np.searchsorted(at, line)]
    return None if keep.all() else keep


def _finish(step: np.ndarray, *others: np.ndarray) -> bool:
    """Make columns read-only, since metrics share their steps; whether the steps ascend."""
    for column in (step, *others):
        column.flags.writeable = False
    return bool((step[1:] > step[:-1]).all())


def _joined(columns: list[tuple[np.ndarray, np.ndarray, np.ndarray, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """One column of several, in the order of lines; of several lines of one step the last counts."""
    if len(columns) == 1 and columns[0][3]:
        return columns[0][1:3]
    if not columns:
        return np.empty(0, np.int64), np.empty(0)
    line, step, value = (np.concatenate([column[i] for column in columns]) for i in range(3))
    order = np.lexsort((line, step))
    step, value = step[order], value[order]
    last = np.append(step[1:] != step[:-1], [True] * bool(len(step)))
    step, value = step[last], value[last]
    _finish(step, value)
    return step, value
