"""Where the records of one process go: which writers there are on this rank.

Owns that rank 0 speaks for all and that each rank has a directory of its own for what is its alone.
"""
from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from instrument.place import Place
from instrument.record import Record, RunInfo
from instrument.writers import JsonlWriter, Writer


def destinations(place: Place | None, given: Sequence[Writer], *, rank: int) -> list[Writer]:
    """The writers of this rank.

    Args:
        place: The run directory, if there is one.
        given: Those of the user.
        rank: This process's number.
    """
    if rank != 0:
        mine: list[Writer] = [writer for writer in given if writer.every_rank]
        return mine if place is None else [RankWriter(place), *mine]
    own: list[Writer] = []
    if place is not None:
        from instrument.writers import TensorBoardWriter  # tensorboardX loads only for who writes its files

        run = place.find()
        own = [JsonlWriter(run), TensorBoardWriter(run)]
    if not any(writer.shows_alarms for writer in given):
        own.append(AlarmPrinter())
    return [*own, *given]


class RankWriter(Writer):
    """The files of a rank other than 0, below the directory that rank 0 has taken.

    That one's name is known only when rank 0 has made it, so it is looked for with the first record.
    """

    every_rank = True

    def __init__(self, place: Place):
        self._place = place
        self._total_steps: int | None = None
        self._writer: JsonlWriter | None = None

    def start(self, run: RunInfo) -> None:
        self._total_steps = run.total_steps
        if self._writer is not None:
            self._writer.start(run)

    def write(self, record: Record) -> None:
        if self._writer is None:
            found = self._place.find()
            self._writer = JsonlWriter(found)
            self._writer.start(found.info(total_steps=self._total_steps))
        self._writer.write(record)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class AlarmPrinter(Writer):
    """Prints alarms to standard error, where no writer shows them on the console."""

    def __init__(self, console: Console | None = None):
        self._console = console

    def write(self, record: Record) -> None:
        if record.alarms and self._console is None:
            self._console = Console(stderr=True, highlight=False)
        for incident in record.alarms:
            assert self._console is not None
            self._console.print(Text(str(incident), "dim" if incident.state == "end" else "bold red"), soft_wrap=True)
