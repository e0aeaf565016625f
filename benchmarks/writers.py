"""How many values a second each writer takes, for records of 10, 50 and 1,000 metrics.

    python benchmarks/writers.py [seconds]

Records are made before the clock starts; each size is written for about so many seconds (1 by default), five times, to a
temporary directory. The result is the median, with the slowest. "nan" has one value in ten that is not finite.
"""
from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import orjson

from benchmarks.reading import hardware, names
from instrument.record import Record
from instrument.writers import JsonlWriter, Writer

WRITERS: dict[str, Callable[[str], Writer]] = {"JsonlWriter": JsonlWriter}

SIZES = 10, 50, 1000
ROUNDS = 5


def records(metrics: int, *, nan: bool) -> list[Record]:
    random = np.random.default_rng(0)
    made = []
    for step in range(1, 51):
        values = random.normal(size=metrics).astype(np.float32).astype(float).tolist()
        if nan:
            values[::10] = [math.nan] * len(values[::10])
        made.append(Record(step, 1735387200.12 + step, dict(zip(names(metrics), values))))
    return made


def rate(make: Callable[[str], Writer], given: list[Record], seconds: float) -> float:
    """Values a second."""
    with tempfile.TemporaryDirectory() as run, make(run) as writer:
        writer.write(given[0])  # opens the file
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for record in given:
                writer.write(record)
            count += len(given)
        writer.flush()
        return count * len(given[0].values) / (time.perf_counter() - start)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    print(hardware())
    print(f"{'':14}{'metrics':>9}{'':6}{'values a second':>18}{'slowest':>14}")
    result: dict[str, dict[str, float]] = {}
    for name, make in WRITERS.items():
        for metrics in SIZES:
            for nan in (False, True):
                rates = [rate(make, records(metrics, nan=nan), seconds) for _ in range(ROUNDS)]
                key = f"{metrics}{' nan' if nan else ''}"
                result.setdefault(name, {})[key] = round(statistics.median(rates))
                print(f"{name:14}{metrics:9}{' nan' if nan else '':6}{statistics.median(rates):18,.0f}{min(rates):14,.0f}",
                      flush=True)
    print(json.dumps({"python": platform.python_version(), "orjson": orjson.__version__, "rounds": ROUNDS,
                      "values_per_second": result}))


if __name__ == "__main__":
    main()
