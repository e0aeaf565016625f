"""Which primitives make a sum of squares, a maximum and a count of zeros, against the memory-bandwidth limit.

    python benchmarks/kernels.py [rounds]

Every candidate reads a tensor that another kernel made (as a tap does), in one process, in turn; a ratio is to NumPy's
dot of the same size in the same round. Errors are against float64, for random and for constant data: a constant shows
what a long float32 sum loses.
"""
from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from benchmarks.timing import machine, seconds

_abs, _cast, _equal, _max, _mul, _reshape = ops.Abs(), ops.Cast(), ops.Equal(), ops.ReduceMax(), ops.Mul(), ops.Reshape()
_square, _sum = ops.Square(), ops.ReduceSum()
_argmax, _distance, _l2 = ops.ArgMaxWithValue(axis=-1), ops.Cdist(p=math.inf), ops.L2Loss()
_batch_matmul = ops.BatchMatMul(transpose_b=True)


class Candidate(nn.Cell):
    """A producer of the tensor and one reduction of it."""

    def __init__(self):
        super().__init__()
        self.zero = Tensor(np.zeros((1, 1024)), ms.float32)

    def construct(self, x, one):
        return self.reduce(x * one)


class Producer(Candidate):
    """The tensor made and read as cheaply as can be: its first element."""

    def reduce(self, x):
        return _reshape(x, (-1,))[0]


class SquareAllAxes(Candidate):
    def reduce(self, x):
        return _sum(_square(x))


class SquareLastAxis(Candidate):
    def reduce(self, x):
        return _sum(_sum(_square(x), -1))


class SquareFirstAxis(Candidate):
    def reduce(self, x):
        return _sum(_sum(_square(x), 0))


class SquareRows256(Candidate):
    def reduce(self, x):
        return _sum(_sum(_reshape(_sum(_reshape(_mul(x, x), (-1, 256)), -1), (-1, 256)), -1))


class SquareRows1024(Candidate):
    def reduce(self, x):
        return _sum(_sum(_reshape(_mul(x, x), (-1, 1024)), -1))


class SquareRows4096(Candidate):
    def reduce(self, x):
        return _sum(_sum(_reshape(_mul(x, x), (-1, 4096)), -1))


class SquareBatchMatMul(Candidate):
    def reduce(self, x):
        rows = _reshape(x, (-1, 1, 1024))
        return _sum(_sum(_reshape(_batch_matmul(rows, rows), (-1, 256)), -1))


class SquareL2Loss(Candidate):
    def reduce(self, x):
        return 2 * _l2(x)


class MaxAbsReduceMax(Candidate):
    def reduce(self, x):
        return _max(_abs(x))


class MaxAbsArgMaxWithValue(Candidate):
    def reduce(self, x):
        return _max(_argmax(_reshape(_abs(x), (-1, 1024)))[1])


class MaxDistanceToZero(Candidate):
    def reduce(self, x):
        return _max(_reshape(_distance(_reshape(x, (-1, 1024)), self.zero), (-1,)))


class ZerosEqualCast(Candidate):
    def reduce(self, x):
        return _sum(_sum(_reshape(_cast(_equal(x, 0), ms.float32), (-1, 256)), -1))


class ZerosNotEqualAllAxes(Candidate):
    def reduce(self, x):
        return _sum(_cast(_equal(x, 0), ms.float32))


CANDIDATES = {"sum of squares": (SquareAllAxes, SquareFirstAxis, SquareLastAxis, SquareRows256, SquareRows1024, SquareRows4096,
                                 SquareBatchMatMul, SquareL2Loss),
              "absolute maximum": (MaxAbsReduceMax, MaxAbsArgMaxWithValue, MaxDistanceToZero),
              "zeros": (ZerosNotEqualAllAxes, ZerosEqualCast)}
SHAPES = {"4096x4096": (4096, 4096), "1024x1024": (1024, 1024), "8x128x256": (8, 128, 256)}
EXACT = {"sum of squares": lambda x: np.sum(np.square(x, dtype=np.float64)), "absolute maximum": lambda x: np.abs(x).max(),
         "zeros": lambda x: np.sum(x == 0)}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print(machine())
    one = Tensor(1.0, ms.float32)
    results = []
    for label, shape in SHAPES.items():
        random = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        constant = np.full(shape, 0.7, np.float32)
        flat, tensor = random.reshape(-1), Tensor(random)
        cells = {(what, kind.__name__): kind() for what, kinds in CANDIDATES.items() for kind in kinds}
        producer = Producer()
        errors = {}
        for (what, name), cell in cells.items():
            exact = [EXACT[what](data) for data in (random, constant)]
            seen = [float(cell(Tensor(data), one).asnumpy()) for data in (random, constant)]
            errors[what, name] = [abs(a - b) / max(abs(b), 1) for a, b in zip(seen, exact)]
        ratios = {key: [] for key in cells}
        for _ in range(rounds):
            dot = seconds(lambda: flat.dot(flat))  # noqa: B023
            base = seconds(lambda: producer(tensor, one).asnumpy())  # noqa: B023
            for key, cell in cells.items():
                taken = seconds(lambda: cell(tensor, one).asnumpy())  # noqa: B023
                ratios[key].append((taken - base) / dot)
        print(f"\n{label}\n{'':18}{'candidate':26}{'time / dot':>12}{'error, random':>15}{'constant':>12}")
        for (what, name), values in ratios.items():
            row = {"shape": label, "what": what, "name": name, "ratio": statistics.median(values),
                   "error_random": errors[what, name][0], "error_constant": errors[what, name][1]}
            results.append(row)
            print(f"{what:18}{name:26}{row['ratio']:12.1f}{row['error_random']:15.1e}{row['error_constant']:12.1e}")
    print(json.dumps({"mindspore": ms.__version__, "python": platform.python_version(), "numpy": np.__version__,
                      "rounds": rounds, "results": results}))


if __name__ == "__main__":
    main()
