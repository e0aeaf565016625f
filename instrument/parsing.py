"""Lines of metrics into packed rows, quickly and in little memory. `columns.py` makes columns of them.

Owns parsing `metrics-*.jsonl`: which lines count, and what is in them. Knows nothing of runs.

Consecutive lines have the same names, so the values of a line are packed as one row behind those of the last line with the
same names (a layout). What other ways cost is in benchmarks/README.md.
"""
from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson

# What is parsed before the next lines are read, in bytes: it stays in a processor's cache.
_BATCH = 1 << 17

# A run in which cells are called at random may have as many layouts as lines. Lines of further ones are kept value by value.
_LAYOUTS = 256

# A process of its own is worth this many bytes; it takes a fifth of a second to start.
_SHARE = 64 << 20

_SPECIAL = frozenset(("resumed", "nonfinite", "reserved"))
_NONFINITE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
_STEP, _TIME = object(), object()  # keys beside those of metrics named like this

_Piece = tuple[str, int, int]  # the lines of a file that begin from here to there, in bytes


class Part:
    """What was in some of the lines. Made by `parse`; `columns.Columns` joins several.

    Attributes:
        lines: How many there were.
        skipped: How many of them were no record.
        marks: `[(line, step)]`: earlier lines of later steps are of no account.
        rows: `{names: rows}`, each row packed as int64 line, int64 step, float64 time, and a float64 for each name.
        loose: Lines whose names are like those of few others.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.skipped = 0
        self.marks: list[tuple[int, int]] = []
        self.rows: dict[tuple[str, ...], bytearray] = {}
        self.loose = Loose()

    def add(self, batch: Iterable[bytes]) -> None:
        """Parse lines."""
        number, loads = self.lines, orjson.loads
        last: list[str] | None = None  # names of the last line, `step` and `time` included
        rows, pack = bytearray(), _packer(0)
        for line in batch:
            try:
                content = loads(line)
            except orjson.JSONDecodeError:
                self.skipped += 1
                number += 1
                continue
            try:
                names = list(content)
                if names != last:
                    # Where a metric is never finite, that is each line.
                    if names[-1] == "nonfinite" and "reserved" not in content:
                        for name, kind in content["nonfinite"].items():
                            if content[name] is None:
                                content[name] = _NONFINITE[kind]
                        del content["nonfinite"], names[-1]
                    if names != last:
                        if names[:2] != ["step", "time"] or not _SPECIAL.isdisjoint(names):
                            raise TypeError
                        key = tuple(names[2:])
                        if key not in self.rows and len(self.rows) >= _LAYOUTS:
                            self.loose.add(number, content)
                            number += 1
                            continue
                        last, rows, pack = names, self.rows.setdefault(key, bytearray()), _packer(len(key))
                rows += pack(number, *content.values())
            except (AttributeError, IndexError, KeyError, OverflowError, TypeError, struct.error):
                self._add_slowly(content, number)
            number += 1
        self.lines = number

    def _add_slowly(self, content: Any, number: int) -> None:
        """A mark, a line with more or other than numbers, or a foreign line."""
        with suppress(AttributeError, KeyError, OverflowError, TypeError, ValueError, struct.error):
            step, time = content.pop("step"), content.pop("time", None)
            if type(step) is not int:
                raise TypeError
            if content.pop("resumed", False) is True:
                self.marks.append((number, step))
                return
            nonfinite = content.pop("nonfinite", {})
            content.update(content.pop("reserved", {}))
            values = {name: np.nan if value is None else value for name, value in content.items()
                      if value is None or isinstance(value, (int, float))}
            values.update((name, float(kind)) for name, kind in nonfinite.items() if name in values)
            names = tuple(values)
            if names in self.rows or len(self.rows) < _LAYOUTS:
                row = _packer(len(names))(number, step, np.nan if time is None else float(time), *values.values())
                self.rows.setdefault(names, bytearray()).extend(row)
            else:
                self.loose.add(number, {_STEP: step, _TIME: np.nan if time is None else float(time), **values})
            return
        self.skipped += 1


class Loose:
    """Lines of many layouts, value by value.

    Attributes:
        ids: `{name: number}`.
        heads: For each line int64 line, int64 step and float64 time, packed.
        counts: How many values each line has.
        names, values: Of each value the number of its name, and float64, packed.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.heads, self.values = bytearray(), bytearray()
        self.counts, self.names = array("q"), array("i")

    def add(self, number: int, content: dict[Any, Any]) -> None:
        """A line's content, its step and time first."""
        step, time, *values = content.values()
        head, row = _packer(0)(number, step, time), _packer(len(values), head="")(*values)  # or nothing is kept of it
        ids = self.ids
        self.names.fromlist([ids.setdefault(name, len(ids)) for name in list(content)[2:]])
        self.counts.append(len(values))
        self.heads += head
        self.values += row


def parse(pieces: Iterable[_Piece]) -> Part:
    """What is in pieces of files, in their order. A file that is no longer there has nothing."""
    part = Part()
    for path, start, end in pieces:
        with suppress(FileNotFoundError), open(path, "rb", buffering=_BATCH) as file:
            if start > 0:  # the line across the start belongs to the piece before
                file.seek(start - 1)
                file.readline()
            while (left := end - file.tell()) > 0:
                # It reads on while the lines are no more than what it is told; a line that begins at the end is not ours.
                batch = file.readlines(min(_BATCH, left - 1)) if left > 1 else [file.readline()]
                if not batch or not batch[0]:
                    break
                part.add(batch)
    return part


def parse_all(paths: Sequence[Path], *, processes: int) -> list[Part]:
    """What is in whole files, by several processes at once where that is worth it.

    Args:
        paths: Oldest first.
        processes: How many to use at most, this one included.

    Returns:
        The parts, in order.
    """
    sizes = []
    for path in paths:
        with suppress(FileNotFoundError):
            sizes.append((str(path), path.stat().st_size))
    total = sum(size for _, size in sizes)
    shares = divide(sizes, max(min(processes, total // _SHARE), 1))
    # Not by `multiprocessing`: that runs the user's main module again, or forks a process with MindSpore's threads in it.
    helpers = [_help(share) for share in shares[1:]]
    try:
        parts = [parse(shares[0])]
        for share, helper in zip(shares[1:], helpers):
            parts.append(_result(helper) or parse(share))
        return parts
    finally:
        for helper in helpers:
            if helper is not None and helper.returncode is None:  # an error or an interrupt of ours
                helper.kill()
                helper.communicate()


def divide(sizes: Sequence[tuple[str, int]], shares: int) -> list[list[_Piece]]:
    """Files, given as (path, bytes), in shares of about as many bytes, in order."""
    total = sum(size for _, size in sizes)
    divided: list[list[_Piece]] = []
    for i in range(shares):
        first, last = total * i // shares, total * (i + 1) // shares
        share, begin = [], 0
        for path, size in sizes:
            start, end = max(first - begin, 0), min(last - begin, size)
            if start < end:
                share.append((path, start, end))
            begin += size
        divided.append(share)
    return divided


_PROGRAM = "import sys; sys.path[:] = {path!r}; from instrument import parsing; parsing.answer({share!r})"


def answer(share: list[_Piece]) -> None:
    """In a helper process: parse a share, and write the part to the standard output."""
    pickle.dump(parse(share), sys.stdout.buffer, protocol=5)
    sys.stdout.buffer.flush()


def _help(share: list[_Piece]) -> subprocess.Popen[bytes] | None:
    try:
        program = _PROGRAM.format(path=[os.path.abspath(each) for each in sys.path], share=share)
        return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL)
    except (OSError, ValueError, TypeError):  # no interpreter of its own, as in an embedded Python, or no more processes
        return None


def _result(helper: subprocess.Popen[bytes] | None) -> Part | None:
    """What a helper found; None where it failed, so that its share is to be parsed here."""
    if helper is None:
        return None
    assert helper.stdout is not None
    with helper:
        try:
            part = pickle.load(helper.stdout)
        except Exception:  # whatever it printed in place of a part
            helper.kill()
            return None
    return part if isinstance(part, Part) else None


_packers: dict[tuple[str, int], Any] = {}


def _packer(values: int, *, head: str = "qqd") -> Any:
    found = _packers.get((head, values))
    if found is None:
        found = _packers[head, values] = struct.Struct(f"={head}{values}d").pack
    return found
