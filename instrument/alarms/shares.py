"""`TimeShare`: the base of alarms that look at a share of the time of the last records."""
from __future__ import annotations

from collections import deque
from typing import Any

from instrument.alarms.arguments import number, whole
from instrument.alarms.base import Alarm, Policy


class TimeShare(Alarm):
    """Keeps what a subclass takes from each of the last `window` records but the first, in which data pipelines start.

    Args:
        fraction: From which share of the time on there is a finding, above 0 and up to 1.
        window: How many records it needs before it judges.
        policy: As for each `Alarm`, and so `name` and `quiet`.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(self, fraction: float, window: int, *, policy: Policy = "log", name: str | None = None,
                 quiet: int | None = None):
        super().__init__(policy=policy, name=name, quiet=quiet)
        self.fraction = number("fraction", fraction, most=1.0)
        self.window = whole("window", window)
        self.reset()

    def reset(self) -> None:
        self._is_first = True
        self._kept: deque[Any] = deque(maxlen=self.window)

    def keep(self, step: Any) -> bool:
        """Keep what was taken from a record. Returns: whether the window is full."""
        if self._is_first:
            self._is_first = False
            return False
        self._kept.append(step)
        return len(self._kept) == self.window
