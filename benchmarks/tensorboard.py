"""Numbers a second into TensorBoard's files: `TensorBoardWriter` against tensorboardX's own ways and against the disk.

    python benchmarks/tensorboard.py [rounds] [metrics]

Each candidate writes the same records of so many metrics to a file of its own, in one process, in turn; closing it, which
waits for the thread of tensorboardX, is in the time. `write` is the floor: the bytes of the first file, handed to the
operating system in as many pieces. `JsonlWriter` is there to compare with. A ratio is that of the same round.
"""
from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import tensorboardX
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from benchmarks.timing import print_machine, print_result, seconds
from instrument import bins
from instrument.record import Record
from instrument.writers import JsonlWriter, TensorBoardWriter, Writer, event_file

RECORDS = 20


def through(writer: Writer, records: list[Record]) -> None:
    with writer:
        for record in records:
            writer.write(record)


def add_scalar(run: str, records: list[Record]) -> None:
    """What most programs do: a call and an event for each number."""
    with tensorboardX.SummaryWriter(run) as writer:
        for record in records:
            for name, value in record.values.items():
                writer.add_scalar(name, value, record.step)


def one_event(run: str, records: list[Record]) -> None:
    """One event a record, in tensorboardX's file."""
    os.makedirs(run)
    writer = EventsWriter(os.path.join(run, "events"))
    for record in records:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
        writer.write_event(Event(wall_time=record.time, step=record.step, summary=Summary(value=scalars)))
    writer.close()


def raw(run: str, content: bytes) -> None:
    os.makedirs(run)
    size = -(-len(content) // RECORDS)
    with open(os.path.join(run, "raw"), "wb", buffering=0) as file:
        for start in range(0, len(content), size):
            file.write(content[start:start + size])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    metrics = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    print_machine()
    random = np.random.default_rng(0)
    names = [f"activation/rms/blocks.{place // 10}.attention.dense_{place % 10}" for place in range(metrics)]
    records = [Record(step, 1e9 + step, dict(zip(names, random.normal(size=metrics).tolist()))) for step in range(RECORDS)]
    counts = random.integers(0, 1000, bins.BINS)
    histograms = [Record(step, 1e9 + step, {}, {name: counts for name in names[:metrics // 10]}) for step in range(RECORDS)]
    with tempfile.TemporaryDirectory() as base:
        through(TensorBoardWriter(f"{base}/once"), records)
        content = next(Path(f"{base}/once").iterdir()).read_bytes()
        candidates: dict[str, tuple[int, Callable[[str], None]]] = {
            "TensorBoardWriter": (metrics, lambda run: through(TensorBoardWriter(run), records)),
            "tensorboardX add_scalar": (metrics, lambda run: add_scalar(run, records)),
            "tensorboardX, one event": (metrics, lambda run: one_event(run, records)),
            "JsonlWriter": (metrics, lambda run: through(JsonlWriter(run), records)),
            "write": (metrics, lambda run: raw(run, content)),
            "a tenth as many histograms": (metrics // 10, lambda run: through(TensorBoardWriter(run), histograms)),
        }
        taken: dict[str, list[float]] = {name: [] for name in candidates}
        for turn in range(rounds):
            for name, (_, candidate) in candidates.items():
                taken[name].append(seconds(lambda: candidate(f"{base}/{name} {turn}")))  # noqa: B023
    print(f"checksum by {'the package crc32c' if event_file._native else 'NumPy'}; {metrics} metrics a record, {RECORDS} "
          f"records, {len(content) / RECORDS / 1000:.1f} kB a record; median and minimum of {rounds} rounds")
    print(f"{'candidate':26}{'ms/record':>10}{'minimum':>9}{'values/s':>12}{'/ TensorBoardWriter':>21}")
    results = []
    for name, values in taken.items():
        median, least = (1e3 * each / RECORDS for each in (statistics.median(values), min(values)))
        ratio = statistics.median(a / b for a, b in zip(values, taken["TensorBoardWriter"]))
        results.append({"name": name, "milliseconds": median, "minimum": least, "ratio": ratio,
                        "values_per_second": 1e3 * candidates[name][0] / median})
        print(f"{name:26}{median:10.3f}{least:9.3f}{results[-1]['values_per_second']:12,.0f}{ratio:21.2f}")
    print_result({"rounds": rounds, "metrics": metrics, "records": RECORDS, "results": results}, "tensorboardX")


if __name__ == "__main__":
    main()
