"""How many values a second each writer takes, and how long a record of 10, 50 and 1,000 metrics keeps its thread.

    python benchmarks/writers.py [seconds]

Each writer is given records for about so many seconds (0.3 by default), five times, in a temporary directory; a record is of a
step of 20 ms. One record before the clock starts opens the files. The time of `write` alone is that of the thread that calls
writers; values a second count `flush` too, for writers that hand records to a thread or a process of their own. The result is
the median, with the slowest. "nan" has one value in ten that is not finite. What is not installed is left out. What all of
this costs the training thread, which only queues a copy of the vector, is in monitor.py.
"""
from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
from rich.console import Console

from benchmarks.reading import names
from benchmarks.timing import print_machine, print_result
from instrument import writers
from instrument.record import Record, RunInfo
from instrument.writers import Writer

SIZES = 10, 50, 1000
ROUNDS = 5
STEP_SECONDS = 0.02


class Discarded(io.TextIOBase):
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


@dataclass(frozen=True)
class Case:
    """How a writer is made for a run directory, and the module and distribution that it needs besides ours."""

    make: Callable[[str], Writer]
    module: str = "instrument"
    distribution: str = "mindspore-instrument"


CASES = {
    "JsonlWriter": Case(writers.JsonlWriter),
    "TensorBoardWriter": Case(lambda run: writers.TensorBoardWriter(run), "tensorboardX", "tensorboardX"),
    "CsvWriter": Case(lambda run: writers.CsvWriter(run)),
    "ConsoleWriter, lines": Case(lambda run: writers.ConsoleWriter(console=Console(file=Discarded()))),
    "ConsoleWriter, panel": Case(lambda run: writers.ConsoleWriter(console=Console(file=Discarded(), force_terminal=True))),
    "PrometheusWriter": Case(lambda run: writers.PrometheusWriter(port=0), "prometheus_client", "prometheus-client"),
    "SummaryRecordWriter": Case(lambda run: writers.SummaryRecordWriter(run), "mindspore", "mindspore"),
    "WandbWriter, offline": Case(lambda run: writers.WandbWriter(mode="offline"), "wandb", "wandb"),
    "MlflowWriter, SQLite": Case(lambda run: writers.MlflowWriter(), "mlflow", "mlflow-skinny"),
    "SwanLabWriter, offline": Case(lambda run: writers.SwanLabWriter(mode="offline"), "swanlab", "swanlab"),
}


def rows(metrics: int, *, nan: bool) -> list[dict[str, float]]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(50):
        values = random.normal(size=metrics).astype(np.float32).astype(float).tolist()
        if nan:
            values[::10] = [math.nan] * len(values[::10])
        made.append(dict(zip(names(metrics), values)))
    return made


def taken(case: Case, run: Path, given: list[dict[str, float]], seconds: float) -> tuple[float, float]:
    """Seconds of a `write`, and values a second. What the clients print is dropped."""
    run.mkdir()
    with contextlib.redirect_stdout(Discarded()), contextlib.redirect_stderr(Discarded()), case.make(str(run)) as writer:
        writer.start(RunInfo("run", run, {}))
        count, spent = -1, 0.0
        while spent < seconds:
            record = Record(count + 2, 1735387200.12 + STEP_SECONDS * count, given[count % len(given)])
            start = time.perf_counter()
            writer.write(record)
            if count >= 0:  # the first opens the files
                spent += time.perf_counter() - start
            count += 1
        start = time.perf_counter()
        writer.flush()
        return spent / count, count * len(given[0]) / (spent + time.perf_counter() - start)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
    os.environ.update(WANDB_SILENT="true", MLFLOW_DISABLE_TELEMETRY="true")
    installed = {name: case for name, case in CASES.items() if importlib.util.find_spec(case.module)}
    print_machine()
    for name in [name for name in CASES if name not in installed]:
        print(f"{name}: left out, since {CASES[name].distribution} is not installed")
    print(f"{'':24}{'metrics':>15}{'us a record':>13}{'slowest':>11}{'values a second':>18}{'slowest':>14}")
    result: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as base:  # to the end, since threads of clients look into runs that are closed
        for (name, case), metrics, nan in itertools.product(installed.items(), SIZES, (False, True)):
            key = f"{metrics}{' nan' if nan else ''}"
            found = [taken(case, Path(base, f"{name} {key} {i}"), rows(metrics, nan=nan), seconds) for i in range(ROUNDS)]
            times, rates = [1e6 * each for each, _ in found], [rate for _, rate in found]
            row = {"us": statistics.median(times), "us_slowest": max(times),
                   "values_per_second": statistics.median(rates), "values_per_second_slowest": min(rates)}
            result.setdefault(name, {})[key] = row
            print(f"{name:24}{key:>15}{row['us']:13,.1f}{row['us_slowest']:11,.1f}{row['values_per_second']:18,.0f}"
                  f"{row['values_per_second_slowest']:14,.0f}", flush=True)
    print_result({"seconds": seconds, "rounds": ROUNDS, "writers": result}, "orjson",
                 *sorted({case.distribution for case in installed.values()}))


if __name__ == "__main__":
    main()
