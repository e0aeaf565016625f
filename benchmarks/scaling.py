"""Whether what measuring costs grows in a line with parameters, measured cells and metrics, or faster.

    python benchmarks/scaling.py [pairs]

Chains of small Dense layers, so that launches, and not arithmetic, are what costs; each number of layers twice the last. The
step is the difference to `nn.TrainOneStepCell` on the same network, median of steps that ran one after the other; the compile
is that of the first call, in seconds of processors, beside the stock step's own. The exponent is the slope of log(cost) over
log(layers) by least squares: 1 is a line.
"""
from __future__ import annotations

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from benchmarks.timing import print_machine, print_result
from instrument import InstrumentedStep
from instrument.bench import seconds_of
from instrument.record import Record

LAYERS = (16, 32, 64, 128)
WIDTH = 64
WHAT = ("metrics", "step_ms", "compile_s", "read_us")
OPTIONS = {"norms": {"activations": None}, "norms and leaves": {"activations": "leaves"},
           "updates and moments": {"activations": None, "updates": True, "moments": True}}


def chain(layers: int) -> tuple[nn.Cell, nn.Cell]:
    net = nn.SequentialCell([nn.Dense(WIDTH, WIDTH) for _ in range(layers)])
    return nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 1e-5)


def first_call(step: nn.Cell, batch: list) -> float:
    """Seconds of processors."""
    start = time.process_time()
    seconds_of(step, batch)
    return time.process_time() - start


def exponent(sizes: tuple[int, ...], costs: list[float]) -> float:
    """Slope of a straight line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    batch = [Tensor(np.random.default_rng(i).normal(size=(32, WIDTH)).astype(np.float32)) for i in range(2)]
    result: dict[str, dict] = {name: {what: [] for what in WHAT} for name in ("the plain step", *OPTIONS)}
    for layers in LAYERS:
        plain = nn.TrainOneStepCell(*chain(layers)).set_train()
        result["the plain step"]["compile_s"].append(first_call(plain, batch))
        for name, options in OPTIONS.items():
            step = InstrumentedStep(*chain(layers), **options).set_train()
            compiled = first_call(step, batch)
            for _ in range(3):
                seconds_of(plain, batch), seconds_of(step, batch)
            more = []
            for i in range(pairs):
                first, second = (seconds_of(each, batch) for each in ((plain, step) if i % 2 else (step, plain)))
                more.append(second - first if i % 2 else first - second)
            _, stats = step(*batch)
            reads = []
            for _ in range(200):
                start = time.perf_counter()
                Record.from_stats(stats, step.schema, time=0.0)
                reads.append(time.perf_counter() - start)
            row = result[name]
            row["step_ms"].append(1000 * float(np.median(more)))
            row["compile_s"].append(compiled)
            row["read_us"].append(1e6 * float(np.median(reads)))
            row["metrics"].append(len(step.schema))
    print(f"{'':24}{'':18}" + "".join(f"{layers:>10}" for layers in LAYERS) + f"{'exponent':>10}   (layers)")
    for name, row in result.items():
        for what in (what for what in WHAT if row[what]):
            row[f"{what}_exponent"] = slope = exponent(LAYERS, row[what])
            print(f"{name:24}{what:18}" + "".join(f"{value:10.4g}" for value in row[what]) + f"{slope:10.2f}")
    print_result({"layers": LAYERS, "pairs": pairs, "options": result})


if __name__ == "__main__":
    main()
