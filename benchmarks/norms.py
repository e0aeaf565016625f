"""What the norms of all parameters and gradients cost at the least: ours beside the barest kernels that could make them.

    python benchmarks/norms.py [rounds]

The parameters of the 5 M GPT and as many gradients, each made by a kernel as in a step. All candidates run in turn in one
process; the result is the median of the time over the same cell without any reduction, in milliseconds of the clock and of
the processors. "read once" is one `ReduceSum` for each large tensor: it computes no norm, and nothing that does can be
quicker. "squares" is `Mul` and `ReduceSum`, without small tensors and without what tells an underflow from zero.
"""
from __future__ import annotations

import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from benchmarks.networks import GPT
from benchmarks.timing import print_machine, print_result
from instrument import NormStats
from instrument.norms import SMALL

_distance, _mul, _reshape, _slice, _sum = ops.Cdist(p=2.0), ops.Mul(), ops.Reshape(), ops.Slice(), ops.ReduceSum()


def times_one(one, grad):
    return _mul(grad, one)


def first_element(tensor):
    return _slice(_reshape(tensor, (-1,)), (0,), (1,))


def read_once(tensor):
    return _sum(tensor, -1)


def squares(tensor):
    return _sum(_mul(tensor, tensor), -1)


def distances(tensor):
    return _reshape(_distance(tensor, ops.zeros_like(tensor[:1])), (-1,))


class Reduced(nn.Cell):
    """The gradients, made by a kernel each; then one reduction of each large gradient and weight, or `norm_stats`."""

    def __init__(self, parameters, reduction=None, norm_stats=None):
        super().__init__(auto_prefix=False)
        self.enable_tuple_broaden = True
        self.map, self.concat, self.reduction = ops.HyperMap(), ops.Concat(), reduction
        self.large = [i for i, parameter in enumerate(parameters) if parameter.size > SMALL]
        object.__setattr__(self, "weights", ParameterTuple([parameters[i] for i in self.large]))
        object.__setattr__(self, "norm_stats", norm_stats)
        self.has_norm_stats = norm_stats is not None

    def construct(self, grads, one):
        grads = self.map(ops.partial(times_one, one), grads)
        touched = self.concat(self.map(first_element, grads))
        if self.has_norm_stats:
            return touched, self.norm_stats(grads)
        if self.reduction is None:
            return touched, one
        large = ()
        for i in self.large:
            large = large + (grads[i],)
        return touched, self.concat(self.map(self.reduction, large) + self.map(self.reduction, self.weights))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    parameters = GPT().trainable_params()
    random = np.random.default_rng(0)
    grads = tuple(Tensor(random.normal(0, 0.01, p.shape).astype(np.float32)) for p in parameters)
    one = Tensor(1.0, ms.float32)
    cells = {"nothing": Reduced(parameters), "read once": Reduced(parameters, read_once),
             "squares": Reduced(parameters, squares), "distances to zero": Reduced(parameters, distances),
             "NormStats": Reduced(parameters, norm_stats=NormStats(parameters))}

    def run(cell):
        start = np.array([time.perf_counter(), time.process_time()])
        for output in cell(grads, one):
            output.asnumpy()
        return 1000 * (np.array([time.perf_counter(), time.process_time()]) - start)

    for cell in cells.values():
        for _ in range(3):
            run(cell)
    taken: dict[str, list[np.ndarray]] = {name: [] for name in cells}
    for _ in range(rounds):
        for name, cell in cells.items():
            taken[name].append(run(cell))
    result = {}
    print(f"{'':20}{'clock, ms':>12}{'processors, ms':>18}")
    for name in list(cells)[1:]:
        over = [a - b for a, b in zip(taken[name], taken["nothing"])]
        result[name] = [statistics.median(row[i] for row in over) for i in (0, 1)]
        print(f"{name:20}{result[name][0]:12.1f}{result[name][1]:18.1f}")
    print_result({"rounds": rounds, "result": result})


if __name__ == "__main__":
    main()
