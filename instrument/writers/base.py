"""`Writer`: what a destination of records has to do. One file a backend beside this one."""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from instrument.record import Record, RunInfo

if TYPE_CHECKING:
    from typing_extensions import Self


class Writer(ABC):
    """Takes records, in the order of training, and brings them to one destination.

    `TrainingMonitor` calls a writer from one background thread, so a slow one does not slow training. It may raise: the
    monitor reports that once, counts it, and goes on. A record has numbers, and may have histograms, texts and alarms; a
    writer leaves out what its destination has no place for. Files and connections are opened by the first `write`, so that
    making a writer costs nothing, and a `write` after `close` opens them again: one monitor may serve several calls of
    `Model.train`. Used as a context, a writer is closed at its end.

    Attributes:
        every_rank: Whether each rank of a parallel job has to call it. By default rank 0 alone does.
        shows_alarms: Whether it shows alarms on the console, so that nobody else need.
    """

    every_rank: bool = False
    shows_alarms: bool = False

    def start(self, run: RunInfo) -> None:  # noqa: B027 - most writers need to know nothing of the run
        """Hear of the run, before its first record; again for each call of `Model.train`."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Take one record."""

    def flush(self) -> None:  # noqa: B027 - a writer that holds nothing back has nothing to do
        """Bring everything that was written to where a reader sees it. The monitor calls it every few seconds."""

    def close(self) -> None:  # noqa: B027 - likewise
        """Flush, and let go of files and threads. Closing twice is no error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *err: Any) -> None:
        self.close()
