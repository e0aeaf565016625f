"""`JsonlWriter`: JSON Lines, the files of a run directory that `instrument.read` reads back."""
from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from instrument import bins, runs
from instrument.lines import LineFile, dump, plain
from instrument.record import Record, RunInfo
from instrument.writers.base import Writer

# Names that a line has for itself. A metric with one of them goes into the object `reserved` of its line.
RESERVED = frozenset(("step", "time", "nonfinite", "resumed", "reserved"))

_KEPT = 1 << 20  # bytes of alarms that wait

_NUMPY = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class JsonlWriter(Writer):
    """Appends each record to the line files of a run directory; a reader sees it at once.

    - `metrics-00000.jsonl` and on: `{"step": 10, "time": 1735387200.12, "loss": 2.3, "grad/norm": 0.8}`. JSON has no NaN and
      no infinity: such a value is null, and `"nonfinite": {"loss": "nan"}` in the same line says what it was: `nan`, `inf` or
      `-inf`. A record without values makes no line.
    - `histograms-00000.jsonl` and on: `{"step": …, "time": …, "histograms": {name: {"low": 61, "counts": […]}}}`, the counts
      of the bins from the first to the last that holds anything (`instrument.bins`).
    - `alarms.jsonl`: one line an incident, its fields and the record's step and time.
    - `samples.jsonl`: `{"step": …, "time": …, "name": …, "text": …}`, one line a text.

    A line is in its file as a whole or not at all, also where the process is killed within `write`, except for the last one.
    After a resume each file gets `{"step": 99, "time": …, "resumed": true}` before the first record, of step 100: earlier
    lines of later steps are of no account, for those steps are made again.

    Args:
        run_dir: The run directory, or a `Run`; made where it does not exist.
        rotate_bytes: Metrics and histograms go on in a new file when one would get larger than this.
        rotate_seconds: Likewise after this many seconds; None for no limit.
        keep_last: How many files of metrics, and of histograms, to keep; older ones are deleted. None keeps all.

    Raises:
        ValueError: A limit is not positive.
    """

    every_rank = True

    def __init__(self, run_dir: str | os.PathLike[str], *, rotate_bytes: int | None = 256 << 20,
                 rotate_seconds: float | None = None, keep_last: int | None = None):
        for name, value in (("rotate_bytes", rotate_bytes), ("rotate_seconds", rotate_seconds), ("keep_last", keep_last)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a positive number, but it is {value!r}. Use None for no limit.")
        self._run = run_dir  # holds a `Run`, and so its lock, for as long as this writes there
        directory = Path(run_dir).absolute()

        def rotated(pattern: str) -> LineFile:
            return LineFile(directory, pattern, rotate_bytes=rotate_bytes, rotate_seconds=rotate_seconds, keep_last=keep_last)

        self._metrics, self._histograms = rotated(runs.METRICS), rotated(runs.HISTOGRAMS)
        self._alarms, self._samples = LineFile(directory, runs.ALARMS), LineFile(directory, runs.SAMPLES)
        self._files = self._metrics, self._histograms, self._alarms, self._samples
        self._goes_on_after: int | None = None
        self._to_mark: bool | None = None  # None: it is not known yet whether the run goes on

    def start(self, run: RunInfo) -> None:
        if self._to_mark is None:  # further calls of Model.train go on where this process is
            self._to_mark = run.resumed
            self._goes_on_after = run.resumed_step

    def write(self, record: Record) -> None:
        failed: list[Exception] = []
        if self._to_mark:
            self._mark(record, failed)
        if record.values:
            self._put(self._metrics, lambda: _metrics_line(record, failed), failed)
        if record.histograms:
            self._put(self._histograms, lambda: _histograms_line(record), failed)
        if record.alarms:
            refused: list[Exception] = []
            self._put(self._alarms, lambda: _alarm_lines(record), refused)
            if refused and isinstance(refused[0], OSError) and len(self._alarms.due) < _KEPT:
                self._alarms.due += _alarm_lines(record)  # told once, and short: they wait until there is space
            failed += refused
        if record.texts:
            self._put(self._samples, lambda: _text_lines(record), failed)
        if failed:
            raise failed[0]

    def flush(self) -> None:
        self._write_waiting_alarms()
        deleted = [file.pattern for file in self._files if file.check()]
        if deleted:
            raise FileNotFoundError(f"somebody deleted {', '.join(deleted)} in {self._metrics.directory} while it was "
                                    "written: the records in it are lost, and new ones go into new files there")

    def close(self) -> None:
        self._write_waiting_alarms()
        for file in self._files:
            file.close()

    def _mark(self, record: Record, failed: list[Exception]) -> None:
        # Training makes its step again. What only validation measured, or a text, comes after a step that stays.
        step = int(record.step) - record.has_training
        if self._goes_on_after is not None:  # the first step recorded may come later
            step = min(step, self._goes_on_after)
        mark = dump({"step": step, "time": record.time, "resumed": True})
        self._to_mark = False
        for file in self._files:
            if file.files():
                file.due = mark
                self._put(file, lambda: b"", failed)

    def _write_waiting_alarms(self) -> None:
        if self._alarms.due:
            with contextlib.suppress(OSError):  # as was told before
                self._alarms.write()

    def _put(self, file: LineFile, lines: Callable[[], bytes], failed: list[Exception]) -> None:
        try:
            file.write(lines())
        except Exception as error:  # raised when the other files have what is theirs
            failed.append(error)


def _metrics_line(record: Record, failed: list[Exception]) -> bytes:
    line, refused = encode(record)
    if refused:
        failed.append(TypeError(f"metrics must be numbers, but at step {record.step} these are none, and were left out: "
                                f"{', '.join(refused)}. Give float(value), or text as a text."))
    return line


def encode(record: Record) -> tuple[bytes, list[str]]:
    """The line of a record's values, and the names of those that are no numbers and so are not in it.

    Returns:
        The line, its newline included, and the names.

    Examples:
        >>> encode(Record(3, 1735387200.0, {"loss": float("inf")}))
        (b'{"step":3,"time":1735387200.0,"loss":null,"nonfinite":{"loss":"inf"}}\\n', [])
    """
    values = record.values
    if RESERVED.isdisjoint(values):
        try:
            line = orjson.dumps({"step": int(record.step), "time": record.time, **values}, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # NumPy's scalars; a lone surrogate in a name; what is no number
            pass
        else:
            # orjson writes null for what is not finite, and what is no number has a quote or bracket more than its name. To
            # look for these takes a tenth of the time that a look at each value takes.
            if b":null" not in line and b":[" not in line and b":{" not in line and line.count(b'"') == 2 * len(values) + 4:
                return line, []
    return _encode_slowly(record)


def _encode_slowly(record: Record) -> tuple[bytes, list[str]]:
    content: dict[str, Any] = {"step": int(record.step), "time": float(record.time)}
    reserved: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    refused: list[str] = []
    for name, value in record.values.items():
        name = plain(str(name))
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        try:
            number = None if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None:
            refused.append(repr(name))
            continue
        (reserved if name in RESERVED else content)[name] = number
        if not math.isfinite(number):
            nonfinite[name] = str(number)
    if reserved:
        content["reserved"] = reserved
    if nonfinite:
        content["nonfinite"] = nonfinite
    return orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE), refused


def _histograms_line(record: Record) -> bytes:
    histograms = {}
    for name, counts in record.histograms.items():
        counts = np.ascontiguousarray(counts, np.int64)
        low, end = bins.occupied(counts)
        histograms[plain(str(name))] = {"low": low, "counts": counts[low:end]}
    return orjson.dumps({"step": int(record.step), "time": float(record.time), "histograms": histograms}, option=_NUMPY)


def _alarm_lines(record: Record) -> bytes:
    lines = []
    for incident in record.alarms:
        fields = asdict(incident)
        if incident.value is not None:
            fields["value"] = value = float(incident.value)
            if not math.isfinite(value):
                fields.update(value=None, nonfinite={"value": str(value)})
        lines.append(dump({"step": int(record.step), "time": float(record.time), **fields}))
    return b"".join(lines)


def _text_lines(record: Record) -> bytes:
    head = {"step": int(record.step), "time": float(record.time)}
    return b"".join(dump({**head, "name": name, "text": text}) for name, text in record.texts.items())
