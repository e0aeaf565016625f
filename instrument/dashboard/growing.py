"""Arrays that are appended to, and the column of one metric made of them."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Growing:
    """An array that is appended to."""

    array: np.ndarray
    size: int = 0

    def extend(self, more: np.ndarray) -> None:
        end = self.size + len(more)
        if end > len(self.array):
            # A quarter more, not twice as much: at 1,000,000 steps of 50 metrics what is spare counts.
            grown = np.empty(max(end + (end >> 2), 256), self.array.dtype)
            grown[:self.size] = self.array[:self.size]
            self.array = grown
        self.array[self.size:end] = more
        self.size = end

    def view(self) -> np.ndarray:
        return self.array[:self.size]


@dataclass
class Column:
    rows: Growing = field(default_factory=lambda: Growing(np.empty(0, np.int32)))
    values: Growing = field(default_factory=lambda: Growing(np.empty(0, np.float64)))
    ordered: bool = True  # the steps ascend strictly
    last: int = -1 << 62
    least: float = np.inf
    largest: float = -np.inf
