"""What all benchmarks say of the machine, and how they take the time."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from instrument.bench import machine

__all__ = ["machine", "seconds"]


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of the clock that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
