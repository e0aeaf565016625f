"""`TensorBoardWriter`: event files for TensorBoard, through tensorboardX."""
from __future__ import annotations

import atexit
import itertools
import os
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from instrument.record import Record
from instrument.writers.base import Writer

_files = itertools.count()


class TensorBoardWriter(Writer):
    """Writes each record as one event with one scalar a metric, in a run directory.

    Tags are the metrics' names. NaN and infinities are written as they are; TensorBoard marks them in the chart.

    The event is built here, since `SummaryWriter.add_scalar` makes an event of every number, prints "NaN or Inf found
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
        self._events: EventsWriter | None = None
        self._flushed = 0.0

    def write(self, record: Record) -> None:
        events = self._events = self._events or self._open()
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
        events.write_event(Event(wall_time=record.time, step=record.step, summary=Summary(value=scalars)))
        if record.time - self._flushed >= self.flush_seconds:
            events.flush()
            self._flushed = record.time

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            atexit.unregister(self.close)
            events.close()

    def _open(self) -> EventsWriter:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # tensorboardX names a file after the second in which it is opened, and truncates one of the same name.
        suffix = f".{os.getpid()}.{next(_files)}"
        atexit.register(self.close)
        return EventsWriter(str(self.run_dir / "events"), suffix)
