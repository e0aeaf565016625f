"""`Outlet`: where the readings of one monitor go, from the training thread to the end of the process.

Owns what is open and when: the run directory, the writers with their thread, the handler of SIGTERM, and the summary that is
left behind. Also that no error of ours stops training.
"""
from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from instrument.alarms import AlarmRaised
from instrument.background import Background
from instrument.notices import tell
from instrument.place import Place
from instrument.record import RunInfo
from instrument.recorder import Finish
from instrument.signals import OnTermination

# At SIGTERM: what a cluster leaves us before it kills the process is often 30 seconds.
_SECONDS_TO_END = 8.0
_SECONDS_OF_A_WRITER = 3.0
_TERMINATED = "terminated: SIGTERM"


class Outlet:
    """Opened by the first item of a call of `Model.train`, closed at its end, and opened again by a later one.

    Args:
        background: What brings items to the writers.
        place: The run directory, if there is one.
        summary: What is to be in `summary.json` besides `status` and the background's counts.
        ending: Called right before the writers are closed, to read what has not been read yet.
    """

    def __init__(self, background: Background, place: Place | None, summary: Callable[[], Mapping[str, Any]],
                 ending: Callable[[], None]):
        self.background, self.place = background, place
        self.status = "running"
        self.is_open = False
        self._total_steps: int | None = None
        self._summary, self._ending = summary, ending
        self._termination = OnTermination(self._terminated)
        self._process = os.getpid()
        self._has_told = False  # that this is another one
        # Where nobody closes us, the end of the program does; it must not keep us alive.
        atexit.register(_close_at_exit, weakref.ref(self))

    def open(self, total_steps: int | None = None) -> bool:
        """Hold the directory, and tell the writers of the run, unless that has been done; False where it cannot be."""
        self._total_steps = total_steps or self._total_steps
        if os.getpid() != self._process:
            if not self._has_told:
                self._has_told = True
                tell("this process records nothing: its TrainingMonitor belongs to the process that it was forked from, with "
                     "its files and its thread. Make the monitor in the process that trains.")
            return False
        if not self.is_open:
            with self.reported("TrainingMonitor"):
                total = self._total_steps
                if self.place is not None:
                    self.place.open(total)
                self.background.start(RunInfo(total_steps=total) if self.place is None else self.place.info(total))
                self._termination.install()
                self.is_open = True
                if self.status.startswith(_TERMINATED):  # and yet it goes on: the program has a handler of its own
                    self.status = "running"
        return self.is_open

    def put(self, item: Any) -> None:
        """Bring an item to the writers; nothing is written where the directory cannot be held."""
        if self.open():
            self.background.put(item)

    def close(self, **limits: float) -> None:
        """Bring everything to the writers, close them, leave the summary and let go of the directory.

        Called by a handler of signals too, while an earlier call waits for the writers: the later one does the whole work.
        """
        if os.getpid() != self._process:
            return  # a worker of a dataset ends as its parent would, and has nothing of its own
        self._ending()
        if self.is_open:
            with self.reported("TrainingMonitor"):
                self.background.put(Finish())
                self.background.close(**limits)
        if self.is_open:
            with self.reported("summary"):
                if self.place is not None:
                    self.place.close({"status": self.status if self.status != "running" else "closed", **self._summary(),
                                      "records": self.background.written, "dropped": self.background.dropped,
                                      "errors": dict(self.background.errors), "given_up": self.background.given_up})
            self.is_open = False
            self._termination.remove()
        self.report()

    def report(self) -> None:
        """Warn of what went wrong in the background, each thing once."""
        if self.background.has_reports():
            for message in self.background.reports():
                tell(message, stacklevel=4)

    def reported(self, source: str) -> Reported:
        """A context in which an error is counted under the name of `source`, and goes no further."""
        return Reported(self.background, source)

    def _terminated(self) -> None:
        if self.status == "running":  # else it had ended, and was only being written
            self.status = _TERMINATED
        self.background.hurry()
        self.close(timeout=_SECONDS_TO_END, writer_timeout=_SECONDS_OF_A_WRITER)


class Reported:
    """Keeps an error of ours from stopping training: the first one of a source is a warning, and all are counted.

    A class, since a generator with `contextlib` takes four times as long, several times a step.
    """

    __slots__ = "background", "source"

    def __init__(self, background: Background, source: str):
        self.background, self.source = background, source

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, AlarmRaised):
            return False
        self.background.report(self.source, error)
        return True


def _close_at_exit(outlet: Callable[[], Outlet | None]) -> None:
    found = outlet()
    if found is not None:
        found.close()
