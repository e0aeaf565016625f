"""One rank of test_ranks: makes records as fast as it is told to, without training, and says how long the hooks took.

    python rank.py DIRECTORY RANK RANKS STEPS [stay]

Reads a line before the first step, so that the test says when it begins; with `stay`, another one before the end of training.
"""
import os
import sys
import time

directory, rank, ranks, steps = sys.argv[1], *sys.argv[2:5]
os.environ.update(RANK_ID=rank, RANK_SIZE=ranks)

import numpy as np  # noqa: E402
from mindspore.train.callback import RunContext  # noqa: E402

from instrument import Metric, Schema, TrainingMonitor  # noqa: E402


class Step:
    """Stands for an InstrumentedStep."""

    optimizer = None
    schema = Schema([Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")])


print("ready", flush=True)
sys.stdin.readline()
params = {"train_network": Step(), "cur_step_num": 0, "mode": "train"}
context = RunContext(params)
monitor = TrainingMonitor(directory, alarms=[], writer_timeout=2)
monitor.on_train_begin(context)
longest = 0.0
for step in range(1, int(steps) + 1):
    params.update(cur_step_num=step, net_outputs=(0.0, np.array([step, 10.0 * step], np.float32)))
    began = time.monotonic()
    monitor.on_train_step_begin(context)
    monitor.on_train_step_end(context)
    longest = max(longest, time.monotonic() - began)
    time.sleep(0.002)
if "stay" in sys.argv:
    print("steps", flush=True)
    sys.stdin.readline()
began = time.monotonic()
monitor.on_train_end(context)
print("done", longest, time.monotonic() - began, sum(monitor.errors.values()), monitor.run_dir, flush=True)
