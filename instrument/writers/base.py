"""`Writer`: what a destination of records has to do. One file a backend beside this one."""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from instrument.record import Record

if TYPE_CHECKING:
    from typing_extensions import Self


class Writer(ABC):
    """Takes records, in the order of training, and brings them to one destination.

    A writer may raise: `TrainingMonitor` reports it, and training goes on. Files are opened by the first `write`, so
    that making a writer costs nothing, and a `write` after `close` opens them again: one monitor may serve several
    calls of `Model.train`. Used as a context, a writer is closed at its end.
    """

    @abstractmethod
    def write(self, record: Record) -> None:
        """Take one record."""

    def flush(self) -> None:  # noqa: B027 - a writer that holds nothing back has nothing to do
        """Bring everything that was written to where a reader sees it."""

    def close(self) -> None:  # noqa: B027 - likewise
        """Flush, and let go of files and threads. Closing twice is no error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *err: Any) -> None:
        self.close()
