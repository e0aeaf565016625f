"""A job of 1,024 ranks on paper: pieces that are measured here, multiplied out.

    python benchmarks/scale.py [ranks]

400 parameters, 100 taps with the default statistics, every step measured, `ranks=True`. Lengths of vectors are those of the
code; sizes of files, open handles and times are measured on this machine, of one rank of each kind; what is multiplied is said
to be. Nothing here has run on more than one machine.
"""
from __future__ import annotations

import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
import psutil
from mindspore import Parameter, Tensor, nn, ops

import instrument
from benchmarks.timing import print_machine, print_result, seconds
from instrument import Metric, NormStats, runs
from instrument.joining import SPREAD, Joining, Spread, own_norm
from instrument.record import Record, RunInfo
from instrument.taps import DEFAULT_STATS, Taps
from instrument.writers import JsonlWriter, TensorBoardWriter, Writer

PARAMETERS, TAPS, STEPS = 400, 100, 200
HOST = ("step_time", "data_wait", "data_wait_fraction", "samples_per_second", "host/memory", "host/memory_available",
        "host/cpu")


class Owner:
    """Stands for a step, which has the taps."""

    def owns(self, cell: nn.Cell) -> bool:
        return True


class Together(nn.Cell):
    """What is computed of a joined vector, without the AllReduce."""

    def __init__(self, taps: Taps, ranks: int):
        super().__init__(auto_prefix=False)
        self.joining = Joining(ranks, 1, taps.extremes(), True)
        self.joining.all_reduce = ops.Identity()
        self.spread = Spread(ranks)

    def construct(self, losses, carried, mine):
        means, joined, _, table = self.joining(losses, (carried,), (), mine)
        return means, joined[0], self.spread(table)


def kernels_time(taps: Taps, ranks: int) -> float:
    """Seconds of the joining on a CPU, graph mode, the communication left out; the shortest of 50."""
    cell = Together(taps, ranks)
    inputs = [Tensor(np.ones(length, np.float32)) for length in (1, taps.length, len(SPREAD))]
    run: Callable[[], object] = lambda: cell(*inputs)[2].asnumpy()  # noqa: E731
    run()
    return min(seconds(run) for _ in range(50))


def written(directory: pathlib.Path, writers: list[Writer], names: list[str], rank: int) -> tuple[int, int, float, int]:
    """Files, files held open, bytes of lines and events a record, and bytes of `config.json`."""
    process = psutil.Process()
    before = process.num_fds()
    random = np.random.default_rng(rank)
    for writer in writers:
        writer.start(RunInfo("run", directory, {}))
    for step in range(1, STEPS + 1):
        values = random.normal(size=len(names)).astype(np.float32).astype(float).tolist()
        for writer in writers:
            writer.write(Record(step, time.time(), dict(zip(names, values))))
    opened = process.num_fds() - before + 1  # the lock was taken before
    for writer in writers:
        writer.close()
    files = [path for path in directory.iterdir() if path.is_file()]
    config = (directory / runs.CONFIG).stat().st_size
    return len(files), opened, (sum(path.stat().st_size for path in files) - config) / STEPS, config


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    owner = Owner()
    taps = Taps([(f"blocks.{i}", nn.Dense(1, 1)) for i in range(TAPS)], [DEFAULT_STATS] * TAPS, False, owner)
    weights = [Parameter(Tensor(np.ones(1, np.float32)), name=f"blocks.{i}.attention.dense.weight") for i in range(PARAMETERS)]
    shared = [Metric("step", "step", "global", "identical"), Metric("loss", "loss", "global", "identical"), own_norm(),
              *Spread.metrics(), *NormStats(weights).schema, *taps.metrics("global")]
    table = ranks * (len(taps.extremes().maxima) + len(SPREAD))
    sent = 4 * (1 + taps.length + table)
    print(f"\nVector: {len(shared)} numbers, {4 * len(shared)} bytes to the host a measured step of a rank.")
    print(f"AllReduce: {sent:,} bytes a measured step, of which the table of ranks is {4 * table:,}; a ring sends "
          f"2 (n-1)/n of it, {2 * (ranks - 1) / ranks * sent:,.0f} bytes a rank. Of 1e9 float32 gradients the reduction sends "
          f"{2 * (ranks - 1) / ranks * 4e9:,.0f}: {sent / 4e9:.2%} of that.")
    times = {number: kernels_time(taps, number) for number in (2, 64, ranks)}
    print("Kernels of the joining on this CPU, without communication: "
          + ", ".join(f"{number} ranks {1e3 * took:.2f} ms" for number, took in times.items()) + ".")

    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "run"
        held = runs.create(path, ranks=ranks, job="job")
        runs.write_schema(held, shared)
        names = [metric.name for metric in shared] + list(HOST)
        zero = written(held.path, [JsonlWriter(held), TensorBoardWriter(held)], names, 0)
        other_names = [metric.name for metric in shared if metric.scope == "local"] + list(HOST)
        look = statistics.median(seconds(lambda: list(runs._runs_of(path, "job"))) for _ in range(50))
        others = []
        for rank in range(1, 17):
            with runs.follow(path, rank=rank, job="job", ranks=ranks) as run:
                runs.write_schema(run, [metric for metric in shared if metric.scope == "local"])
                others.append(written(run.path, [JsonlWriter(run)], other_names, rank))
        held.close()
        other = tuple(statistics.median(column) for column in zip(*others))
        data = instrument.read(path, processes=1)
        reading = seconds(lambda: data.spread("step_time"))
    for name, (files, opened, size, config) in (("Rank 0", zero), ("Another rank", other)):
        print(f"{name}: {files:.0f} files, {opened:.0f} handles, {size:,.0f} bytes a record, config.json {config:,.0f} bytes.")
    rest = ranks - 1
    print(f"Multiplied: {zero[0] + rest * other[0]:,.0f} files in {ranks:,} directories, {rest * other[3] / 1e6:,.0f} MB of "
          f"config.json; {(zero[2] + rest * other[2]) * 1e5 / 1e9:,.1f} GB after 100,000 records, of which rank 0 "
          f"{zero[2] * 1e5 / 1e9:,.1f} GB; handles are {other[1]:.0f} on each machine and rank.")
    print(f"Start: ranks that look for rank 0 do so each 2 s at most, {rest / 2:.0f} looks a second in all, of "
          f"{1e3 * look:.2f} ms here.")
    print(f"run.spread over 16 other ranks with {STEPS} records: {reading:.3f} s; multiplied, {rest:,} ranks with 10,000 "
          f"records: {reading / (16 * STEPS) * rest * 1e4 / 60:.1f} minutes in one process.")
    print(f"Dashboard: {len(names)} curves of rank 0, and {len(other_names)} for each rank that is looked at: "
          f"{len(names) + rest * len(other_names):,} for all of them.")
    print_result({"ranks": ranks, "vector": len(shared), "all_reduce_bytes": sent, "joining_seconds": times, "rank_0": zero,
                  "other": other, "spread_seconds": reading})


if __name__ == "__main__":
    main()
