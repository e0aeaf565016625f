"""`TensorBoardWriter`: event files for TensorBoard, in tensorboardX's messages.

Owns what each part of a record is in TensorBoard. The file itself is `event_file.py`.
"""
from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

from instrument import bins
from instrument.record import VALIDATION, Record, RunInfo
from instrument.writers.base import Writer
from instrument.writers.event_file import EventFile

_VERSION = "brain.Event:2"
_TEMPLATES = 16

_EDGES = bins.edges()
# Of magnitudes from a to 2a, spread evenly by their logarithm, the mean is a / ln 2, and that of squares is 3 a² / (2 ln 2).
_MEANS = np.where(_EDGES[:-1] < 0, _EDGES[1:], _EDGES[:-1]) / math.log(2)
_MEANS[bins.ZERO] = 0
_MEAN_SQUARES = 1.5 * math.log(2) * _MEANS ** 2


class TensorBoardWriter(Writer):
    """Writes each record into TensorBoard's files of a run directory. Tags are the names of metrics and texts.

    - values: Scalars, one event for all. NaN and infinities are marked in the chart.
    - histograms: Histograms and Distributions, of finite elements, in the bins of `instrument.bins`. Where others were
      counted, the scalar `<name>/nonfinite` says how many.
    - texts: Text, verbatim (as Markdown's code).
    - alarms: Text `alarms/<name of the alarm>`.

    `RunInfo.config["hyper_parameters"]` is the run's line in HParams, with `loss` and all of `val/` as its metrics. A resumed
    run begins with the mark by which TensorBoard drops what an earlier process wrote of the same or later steps
    (`purge_step` of other writers), so that no curve folds back.

    The messages are made here, since `SummaryWriter.add_scalar` makes an event of every number, prints "NaN or Inf found
    in input tensor" without a name for each such value, and hands it to a thread, so that its `flush` misses what is
    still on the way there.

    Args:
        run_dir: The run directory; made where it does not exist. TensorBoard shows it as one run.
        flush_seconds: A record flushes the file when its time is this many seconds after that of the last one that did;
            `flush`, `close` and the end of the program do so in any case.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, flush_seconds: float = 5.0):
        self.run_dir = Path(run_dir).absolute()
        self.flush_seconds = flush_seconds
        self._file: EventFile | None = None
        self._flushed = -math.inf
        self._templates: dict[tuple[str, ...], tuple[Event, list[Any]]] = {}
        self._hyper_parameters: dict[str, Any] = {}
        self._resumed = False
        self._goes_on_after: int | None = None
        self._begun = self._ended = False  # whether this process has written the beginning and the end of the run
        self._outcomes: dict[str, float] = {}  # metrics for HParams

    def start(self, run: RunInfo) -> None:
        self._hyper_parameters = _plain(run.config.get("hyper_parameters") or {})
        self._resumed, self._goes_on_after = run.resumed, run.resumed_step

    def write(self, record: Record) -> None:
        file = self._file = self._file or self._open(record)
        if record.values:
            file.add(self._scalars(record))
        others = _others(record)
        if others:
            file.add(Event(wall_time=record.time, step=record.step, summary=Summary(value=others)).SerializeToString())
        if not 0 <= record.time - self._flushed < self.flush_seconds:  # below 0: the clock was set back
            self._flushed = record.time
            file.flush()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if self._hyper_parameters and not self._ended:
            self._ended = True
            experiment, _, _ = summary.hparams(self._hyper_parameters, self._outcomes)
            file.add(Event(summary=experiment).SerializeToString())
        file.close()

    def _scalars(self, record: Record) -> bytes:
        """The event, made from one of the same names where there was any: setting 1,000 numbers takes a tenth of the time of
        making 1,000 messages."""
        names = tuple(record.values)
        if names not in self._templates:
            if len(self._templates) >= _TEMPLATES:
                self._templates.clear()
            event = Event(summary=Summary(value=[Summary.Value(tag=name) for name in names]))
            self._templates[names] = event, list(event.summary.value)
            self._outcomes.update((name, 0.0) for name in names if name == "loss" or name.startswith(VALIDATION))
        event, scalars = self._templates[names]
        event.step, event.wall_time = record.step, record.time
        for scalar, value in zip(scalars, record.values.values()):
            scalar.simple_value = value
        return event.SerializeToString()

    def _open(self, record: Record) -> EventFile:
        follows = any(self.run_dir.glob("events.out.tfevents.*"))
        file = EventFile(self.run_dir)
        self._flushed = -math.inf
        file.add(Event(wall_time=record.time, file_version=_VERSION).SerializeToString())
        if not self._begun:
            self._begun = True
            if self._resumed and follows:
                # TensorBoard takes the first START of a run for its beginning, and drops nothing: so it gets two.
                # What only validation measured comes after a step of training that stays.
                first = record.step + (not record.has_training)
                if self._goes_on_after is not None:  # the first step recorded may come later
                    first = min(first, self._goes_on_after + 1)
                start = Event(wall_time=record.time, step=first,
                              session_log=SessionLog(status=SessionLog.START))
                file.add(start.SerializeToString())
                file.add(start.SerializeToString())
            elif self._hyper_parameters:
                _, session, _ = summary.hparams(self._hyper_parameters, {})
                file.add(Event(wall_time=record.time, summary=session).SerializeToString())
        return file


def histogram(counts: Any) -> HistogramProto:
    """TensorBoard's histogram of our counts.

    `min` and `max` are edges of the outermost bins that hold something (0 for zeros), so each is within a factor of 2. `sum`
    and `sum_squares` take magnitudes for evenly spread within a bin by their logarithm, as `bins.quantiles` does. Empty bins
    at both ends are left out, and several in the middle are one. NaN and infinities are not in it; without finite elements
    it is empty.

    Args:
        counts: int64 [`bins.BINS`].

    Returns:
        The message; each of its limits is the upper edge of its bucket.

    Examples:
        >>> counts = np.zeros(bins.BINS, int); counts[bins.ZERO] = 3; counts[bins.ZERO + 1 - bins.LOWEST] = 5    # from 1 to 2
        >>> histo = histogram(counts)
        >>> histo.min, histo.max, histo.num, list(histo.bucket)
        (0.0, 2.0, 8.0, [3.0, 0.0, 5.0])
    """
    finite = np.asarray(counts)[:bins.NONFINITE]
    filled = finite > 0
    places = filled.nonzero()[0]
    if not places.size:
        return HistogramProto()
    first, last = int(places[0]), int(places[-1])
    # A bucket begins where the one before it ends, the first one at `min`: so empty ones are kept before one that is not.
    filled[first:last] |= filled[first + 1:last + 1]
    return HistogramProto(
        min=0.0 if first == bins.ZERO else _EDGES[first], max=0.0 if last == bins.ZERO else _EDGES[last + 1],
        num=float(finite.sum()), sum=float(finite @ _MEANS), sum_squares=float(finite @ _MEAN_SQUARES),
        bucket_limit=_EDGES[1:][filled].tolist(), bucket=finite[filled].tolist())


def _others(record: Record) -> list[Any]:
    """Everything but numbers, as values of a summary."""
    values = []
    for name, counts in record.histograms.items():
        values.append(Summary.Value(tag=name, histo=histogram(counts)))
        if counts[bins.NONFINITE]:
            values.append(Summary.Value(tag=f"{name}/nonfinite", simple_value=int(counts[bins.NONFINITE])))
    for name, text in record.texts.items():
        # Four spaces make it code, where TensorBoard neither joins lines nor takes out * and <.
        values += _text(name, "    " + text.replace("\n", "\n    "))
    sentences: dict[str, list[str]] = {}
    for incident in record.alarms:
        sentences.setdefault(incident.alarm, []).append(str(incident))
    for alarm, said in sentences.items():  # TensorBoard keeps one text of a tag and step
        values += _text(f"alarms/{alarm}", "\n\n".join(said))
    return values


def _text(name: str, text: str) -> Any:
    return summary.text(name, text.encode("utf-8", "replace").decode()).value  # half of a surrogate pair has no UTF-8


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters as TensorBoard takes them: numbers, texts and flags. It cannot show NaN and infinities as numbers."""
    plain: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (bool, int, float, str, type(None))) or isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        plain[str(name)] = value
    return plain
