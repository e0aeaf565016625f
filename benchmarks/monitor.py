"""What a record costs the training thread, and what a monitor costs training.

    python benchmarks/monitor.py [records]

First the hook after a step, with a vector of 1,002 metrics that is on the host already; the device read is apart, since it
depends on the device. "bare" has the background thread with JSON Lines and TensorBoard, "log" the default alarms beside them,
and "stop" one alarm that may stop training, and so is looked at in its thread. They are called every 10 ms as by a quick step,
after which a processor's caches are cold, which is most of the time that is seen; "warm" is bare, called at once again. "CPU"
is the thread's own time, which a busy machine changes less.
"""
from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore.train.callback import RunContext

from benchmarks.timing import print_machine, print_result, seconds
from instrument import Metric, Schema, TrainingMonitor
from instrument.alarms import NonFinite

METRICS = 1002


class Step:
    """Stands for an InstrumentedStep, whose numbers are not measured here."""

    optimizer = None
    schema = Schema([Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean"),
                     Metric("grad/norm", "1", "global", "identical"),
                     *(Metric(f"{kind}/blocks.{i}.weight", "1", "global", "identical") for i in range(333)
                       for kind in ("grad/norm", "weight/norm", "activation/rms"))])


def hook_seconds(records: int, pause: float, **options: object) -> list[tuple[float, float]]:
    """Seconds of each call of the hook after a step: of the clock, and of this thread's own work."""
    random = np.random.default_rng(0)
    params = {"train_network": Step(), "cur_step_num": 0, "batch_num": records, "epoch_num": 1}
    context = RunContext(params)
    taken = []
    with tempfile.TemporaryDirectory() as directory, \
            TrainingMonitor(os.path.join(directory, "run"), **options) as monitor:  # type: ignore[arg-type]
        monitor.on_train_begin(context)
        monitor.on_train_epoch_begin(context)
        for step in range(1, records + 1):
            monitor.on_train_step_begin(context)
            time.sleep(pause)
            vector = random.normal(1.0, 0.01, METRICS).astype(np.float32)
            vector[0] = step
            params.update(cur_step_num=step, net_outputs=(vector[1], vector))
            start = time.perf_counter(), time.thread_time()
            monitor.on_train_step_end(context)
            taken.append((time.perf_counter() - start[0], time.thread_time() - start[1]))
        monitor.on_train_end(context)
        assert not monitor.errors and not monitor.dropped, (monitor.errors, monitor.dropped)
    return taken


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    variants: dict[str, tuple[float, dict[str, object]]] = {
        "warm": (0.0, {"alarms": []}), "bare": (0.01, {"alarms": []}), "log": (0.01, {}),
        "stop": (0.01, {"alarms": [NonFinite(policy="stop")]})}
    result: dict[str, object] = {"records": records, "metrics": METRICS}
    print(f"{'':12}{'median':>10}{'90 %':>10}{'CPU':>10}   microseconds of the training thread a record")
    for name, (pause, options) in variants.items():
        # The first ones open files and name metrics.
        taken, own = np.array(hook_seconds(records, pause, **options)[5:]).T * 1e6
        result[name] = {"median_us": float(np.median(taken)), "p90_us": float(np.percentile(taken, 90)),
                        "cpu_us": float(np.median(own))}
        print(f"{name:12}{np.median(taken):10.0f}{np.percentile(taken, 90):10.0f}{np.median(own):10.0f}", flush=True)
    vector = ms.Tensor(np.zeros(METRICS), ms.float32)
    read = statistics.median(seconds(lambda: np.array(vector.asnumpy())) for _ in range(1000)) * 1e6
    result["device_read_us"] = read
    print(f"{'device read':12}{read:10.0f}             (on a CPU)")
    print_result(result)


if __name__ == "__main__":
    main()
