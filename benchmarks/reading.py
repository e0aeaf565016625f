"""How long `instrument.read` takes on a long run, in how much memory; beside it, what parts of the work cost by themselves.

    python benchmarks/reading.py [lines] [metrics]         # 1,000,000 and 50 by default: 3.1 GB in a temporary directory

The run is written by `JsonlWriter`, so it lies in files of 256 MiB. Each way reads it in a process of its own, without
MindSpore; seconds are those of the clock and of the processors, helpers included, and the peak of memory is that of the
process and of a helper beside it. The files come from the page cache: a slow disk adds its own time. "every metric" also
takes each `run[name]` once, as a plot of all of them would.
"""
from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import orjson

import instrument
from benchmarks.timing import print_machine, print_result
from instrument.record import Record
from instrument.writers import JsonlWriter


def names(metrics: int) -> list[str]:
    return ["loss", *(f"{('grad/norm', 'activation/rms')[i % 2]}/network.blocks.{i}.attention" for i in range(1, metrics))]


def batches(run: str) -> Iterator[list[bytes]]:
    for path in sorted(Path(run).glob("metrics-*")):
        with open(path, "rb", buffering=1 << 17) as file:
            while lines := file.readlines(1 << 17):
                yield lines


def lines_alone(run: str) -> None:
    for _ in batches(run):
        pass


def parsing_alone(run: str) -> None:
    for lines in batches(run):
        for line in lines:
            orjson.loads(line)


def json_alone(run: str) -> None:
    for lines in batches(run):
        for line in lines:
            json.loads(line)


def array_extend(run: str) -> None:
    values = array("d")
    for lines in batches(run):
        for line in lines:
            values.extend(orjson.loads(line).values())
    np.frombuffer(values).reshape(-1, len(orjson.loads(line))).T.copy()


def numpy_fromiter(run: str) -> None:
    columns = []
    for lines in batches(run):
        found = list(map(orjson.loads, lines))
        flat = np.fromiter(chain.from_iterable(map(dict.values, found)), np.float64)
        columns.append(flat.reshape(len(lines), -1).T.copy())
    np.concatenate(columns, axis=1)


def read(run: str, processes: int) -> None:
    instrument.read(run, processes=processes)


def every_metric(run: str, processes: int) -> None:
    data = instrument.read(run, processes=processes)
    sum(float(data[name].value[-1]) for name in data)


WAYS: dict[str, Callable[[str], None]] = {
    "lines alone": lines_alone, "orjson.loads alone": parsing_alone, "json.loads alone": json_alone,
    "orjson, array.extend": array_extend, "orjson, numpy.fromiter": numpy_fromiter,
    "read, 1 process": lambda run: read(run, 1), "read, 2 processes": lambda run: read(run, 2),
    "every metric, 2 processes": lambda run: every_metric(run, 2)}


def write(run: str, lines: int, metrics: int) -> float:
    """Write the run; the seconds that the writer took."""
    taken, random, keys = 0.0, np.random.default_rng(0), names(metrics)
    with JsonlWriter(run) as writer:
        for first in range(0, lines, 1000):
            rows = random.normal(size=(min(1000, lines - first), metrics)).astype(np.float32).astype(float).tolist()
            start = time.perf_counter()
            for step, row in enumerate(rows, first + 1):
                writer.write(Record(step, 1735387200.12 + step, dict(zip(keys, row))))
            taken += time.perf_counter() - start
    return taken


def way(name: str, run: str) -> None:
    """In a process of its own: take one way, and print what it took."""
    clock, before = time.perf_counter(), time.process_time()
    WAYS[name](run)
    clock = time.perf_counter() - clock
    own, helpers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = sum(each.ru_utime + each.ru_stime for each in (own, helpers)) - before
    print(json.dumps({"seconds": round(clock, 2), "cpu_seconds": round(processors, 2), "rss_mb": own.ru_maxrss >> 10,
                      "helper_rss_mb": helpers.ru_maxrss >> 10}))


def main() -> None:
    lines, metrics = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 1_000_000), (2, 50)))
    print_machine()
    result = {}
    with tempfile.TemporaryDirectory() as run:
        taken = write(run, lines, metrics)
        size = sum(path.stat().st_size for path in Path(run).iterdir())
        print(f"{lines:,} lines of {metrics} metrics, {size / 1e9:.2f} GB, written at {lines * metrics / taken:,.0f} values a "
              "second")
        print(f"{'':28}{'clock, s':>10}{'processors, s':>15}{'peak, MB':>10}{'helper, MB':>12}")
        for name in WAYS:
            output = subprocess.run([sys.executable, __file__, "--way", name, run], check=True, capture_output=True, text=True)
            found = result[name] = json.loads(output.stdout)
            print(f"{name:28}{found['seconds']:10.1f}{found['cpu_seconds']:15.1f}{found['rss_mb']:10}"
                  f"{found['helper_rss_mb']:12}", flush=True)
    print_result({"lines": lines, "metrics": metrics, "bytes": size,
                  "written_values_per_second": round(lines * metrics / taken), "result": result}, "orjson")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--way"]:
        way(*sys.argv[2:4])
    else:
        main()
