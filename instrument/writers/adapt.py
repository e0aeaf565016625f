"""`as_writer`: a writer out of whatever else can take numbers.

Owns how an object is recognised, and which of its methods gets which part of a record. Knows no library by name: what counts
are the methods.
"""
from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from instrument.record import Record, RunInfo
from instrument.writers.base import Writer

if TYPE_CHECKING:
    from typing_extensions import TypeGuard

_ACCEPTED = ("a Writer, an object with write(record), add_scalar(tag, value, step), log_metrics(values, step=...) or "
             "log(values, step=...), or a function of one record")


def as_writer(destination: Any) -> Writer:
    """Make a writer of something that can take numbers.

    The first of these that fits is taken:

    1. A `Writer` is returned as it is.
    2. `write(record)`: gets the whole `Record`. `start(run)` and `every_rank` are used where it has them.
    3. `add_scalar(tag, value, step)`, as SummaryWriters have: gets each number. `add_text(tag, text, step)` gets texts, and
       alarms as `alarms/<name>`; `add_histogram_raw`, with tensorboardX's arguments, histograms; each where it is there.
    4. `log_metrics(values, step=...)` or `log(values, step=...)`, as experiment trackers have: gets a dictionary of all
       numbers of a record; without a `step` argument, the dictionary has the step as `step`.
    5. A function, or another object that can be called: gets the `Record`.

    `flush` and `close` are passed on to the object where it has them, `close` once after the last record of each call of
    `Model.train`, so the object has to take records after it, as SummaryWriters do. `finish` and `end`, which end a tracker's
    run for good, are not called: whoever began the run ends it, and several calls of `Model.train` may write into one.

    Args:
        destination: Any of these.

    Returns:
        The writer. Its attribute `name`, for messages, is the name of the object's class, or of the function or module.

    Raises:
        TypeError: It is none of these, or a class where an instance is needed, or a file, which takes text.

    Examples:
        >>> steps = []
        >>> with as_writer(lambda record: steps.append(record.step)) as writer:
        ...     writer.write(Record(7, 0.0, {"loss": 1.5}))
        >>> steps
        [7]
    """
    if isinstance(destination, Writer):
        return destination
    if isinstance(destination, type):
        raise TypeError(f"a writer must be {_ACCEPTED}, but {destination.__name__} is a class. Make an instance of it.")
    if isinstance(destination, io.IOBase) or hasattr(destination, "writelines"):
        raise TypeError(f"a writer must be {_ACCEPTED}, but {destination!r} is a file, which takes text. Use JsonlWriter or "
                        "CsvWriter, or a function that writes the line you want.")
    if _takes(getattr(destination, "write", None), _RECORD):
        return _RecordWriter(destination, destination.write)
    if _takes(getattr(destination, "add_scalar", None), "tag", 0.0, 1):
        return _ScalarWriter(destination)
    for method in ("log_metrics", "log"):
        log = getattr(destination, method, None)
        if _takes(log, {}, step=1) or _takes(log, {}):
            return _LogWriter(destination, log)
    if _takes(destination, _RECORD):
        return _RecordWriter(destination, destination)
    raise TypeError(f"a writer must be {_ACCEPTED}, but {destination!r} is none of these.")


_RECORD = Record(0, 0.0, {})


def _takes(function: Any, *arguments: Any, **named: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether this can be called so. Functions written in C may not tell: they are believed."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


class _Adapter(Writer):
    """What is common to all: names, flushing and closing."""

    def __init__(self, destination: Any):
        self.destination = destination
        self.name: str = getattr(destination, "__name__", None) or type(destination).__name__
        self._open = False  # whether anything was written since it was closed

    def write(self, record: Record) -> None:
        self._open = True
        self._take(record)

    def _take(self, record: Record) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        if self._open:
            self._call("flush")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._call("flush")
            self._call("close")

    def _call(self, method: str) -> None:
        function = getattr(self.destination, method, None)
        if _takes(function):
            function()


class _RecordWriter(_Adapter):
    """For what takes records."""

    def __init__(self, destination: Any, take: Callable[[Record], Any]):
        super().__init__(destination)
        self.every_rank = getattr(destination, "every_rank", False) is True
        self._function = take

    def start(self, run: RunInfo) -> None:
        function = getattr(self.destination, "start", None)
        if _takes(function, run):
            function(run)

    def _take(self, record: Record) -> None:
        self._function(record)


class _ScalarWriter(_Adapter):
    """For what takes one number at a time."""

    def _take(self, record: Record) -> None:
        to, step = self.destination, record.step
        for name, value in record.values.items():
            to.add_scalar(name, float(value), step)
        if hasattr(to, "add_text"):
            for name, text in record.texts.items():
                to.add_text(name, text.encode("utf-8", "replace").decode(), step)  # half of a surrogate pair has no UTF-8
            for incident in record.alarms:
                to.add_text(f"alarms/{incident.alarm}", str(incident), step)
        if record.histograms and hasattr(to, "add_histogram_raw"):
            from instrument.writers.tensorboard import histogram

            for name, counts in record.histograms.items():
                histo = histogram(counts)
                if histo.num:  # nothing finite: there is nothing to draw
                    to.add_histogram_raw(name, histo.min, histo.max, histo.num, histo.sum, histo.sum_squares,
                                         list(histo.bucket_limit), list(histo.bucket), step)


class _LogWriter(_Adapter):
    """For what takes all numbers of a step in a dictionary."""

    def __init__(self, destination: Any, log: Callable[..., Any]):
        super().__init__(destination)
        self._log = log
        self._step_apart = _takes(log, {}, step=1)

    def _take(self, record: Record) -> None:
        values = {name: float(value) for name, value in record.values.items()}
        if not values:
            return
        if self._step_apart:
            self._log(values, step=record.step)
        else:
            self._log({"step": record.step, **values})
