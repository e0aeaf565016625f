"""What is usual: median and median absolute deviation of the last good values. Knows nothing of records and alarms."""
from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

# The median absolute deviation of normal numbers is 0.6745 of their standard deviation (Rousseeuw and Croux, "Alternatives
# to the Median Absolute Deviation", JASA 88 (1993), section 1).
TO_DEVIATION = 1.4826

# Nine tenths of normal numbers lie below the mean and so many standard deviations.
NINE_TENTHS = 1.2816


class Baseline:
    """The last `window` good values; those that stood out are kept apart.

    Where more than half of the last `window` records stood out, and do not rise any more, that is the new level: their values
    become the good ones.

    Args:
        window: How many values are kept, and so many records.

    Examples:
        >>> baseline = Baseline(5)
        >>> for value in (1.0, 2.0, 3.0, 4.0, 100.0):
        ...     baseline.add(value)
        >>> baseline.median(), baseline.deviation()
        (3.0, 1.4826)
    """

    def __init__(self, window: int):
        self.window = window
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        self._now = 0  # in records
        # Of what stood out: (record, value). The last `window` records; and those half a window to one and a half ago.
        self._recent: deque[tuple[int, float]] = deque()
        self._waiting: deque[tuple[int, float]] = deque()
        self._known: deque[tuple[int, float]] = deque()
        self._sorted_known: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, value: float) -> None:
        """Take a good value, which is finite."""
        if len(self._order) == self.window:
            _remove(self._sorted, self._order.popleft())
        self._order.append(value)
        insort(self._sorted, value)

    def add_outlier(self, value: float) -> None:
        """Take a finite value that stood out."""
        self._recent.append((self._now, value))
        self._waiting.append((self._now, value))
        values = [value for _, value in self._recent]
        # What still rises above its own first half is no level.
        if 2 * len(values) > self.window and value <= max(values[:len(values) // 2]):
            self._order = deque(values)
            self._sorted = sorted(self._order)
            for each in (self._recent, self._waiting, self._known):
                each.clear()
            self._sorted_known.clear()

    def advance(self) -> None:
        """Say that the next record has come."""
        self._now += 1
        half = self.window // 2
        while self._recent and self._recent[0][0] <= self._now - self.window:
            self._recent.popleft()
        while self._waiting and self._waiting[0][0] <= self._now - half:
            self._known.append(self._waiting.popleft())
            insort(self._sorted_known, self._known[-1][1])
        while self._known and self._known[0][0] <= self._now - half - self.window:
            _remove(self._sorted_known, self._known.popleft()[1])

    def median(self) -> float:
        """The median of the good values; the mean of the two in the middle where their number is even."""
        values, half = self._sorted, len(self._sorted) // 2
        return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2

    def deviation(self) -> float:
        """1.4826 times the median of |value - median|, the standard deviation of normal numbers."""
        return deviation(self._sorted, self.median())

    def upper_deviation(self) -> float:
        """(q - median) / 1.2816 with q of rank ceil(0.9 n): the standard deviation again, by the upper tail."""
        rank = -(-9 * len(self._sorted) // 10)  # rounded up
        return (self._sorted[rank - 1] - self.median()) / NINE_TENTHS

    def known_height(self, times: int = 3) -> float:
        """What so many values reach that stood out half a window ago or before; -inf where there were fewer."""
        return self._sorted_known[-times] if len(self._sorted_known) >= times else -math.inf

    def replace(self, function: Callable[[float], float]) -> None:
        """Put function(value) in the place of each value; the function must not fall."""
        self._order = deque(function(value) for value in self._order)
        self._sorted = [function(value) for value in self._sorted]
        self._recent, self._waiting, self._known = (deque((record, function(value)) for record, value in values)
                                                    for values in (self._recent, self._waiting, self._known))
        self._sorted_known = [function(value) for value in self._sorted_known]


def deviation(values: Sequence[float], median: float) -> float:
    """1.4826 times the median of |value - median|."""
    with np.errstate(over="ignore"):  # the difference of the largest numbers of both signs
        return TO_DEVIATION * float(np.median(np.abs(np.array(values) - median)))


def _remove(values: list[float], value: float) -> None:
    del values[bisect_left(values, value)]
