"""What every benchmark says of the machine, first and in its last line, and how it takes the time. Without MindSpore."""
from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from instrument.environment import hardware, version_of, versions

__all__ = ["machine", "print_machine", "print_result", "seconds"]


@functools.lru_cache(None)
def machine() -> str:
    """Processor, cores and memory; MindSpore's release, device and mode where it is imported by the first call."""
    if "mindspore" in sys.modules:
        from instrument import bench
        return bench.machine()
    return f"{hardware()}; without MindSpore"


def print_machine(about: str = "") -> None:
    """The first line of a benchmark: the machine, its load, and what the benchmark says of itself."""
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}" + (f"; {about}" if about else ""), flush=True)


def print_result(result: dict[str, Any], *packages: str) -> None:
    """The last line: JSON with the machine, its load at the end, versions (of these packages too), and the result."""
    known = {**versions(), **{package: version_of(package) for package in packages}}
    print(json.dumps({"machine": machine(), "load": round(os.getloadavg()[0], 1), "versions": known, **result}))


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of the clock that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
