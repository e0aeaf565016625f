"""What all benchmarks say of the machine, and how they take the time."""
from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
import psutil


def machine() -> str:
    """Processor, cores, memory and release: the first line of each benchmark's output."""
    return (f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, "
            f"{psutil.virtual_memory().total / 2**30:.0f} GiB; MindSpore {ms.__version__}, CPU, graph mode")


def seconds(run: Callable[[], Any]) -> float:
    """Seconds of the clock that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
