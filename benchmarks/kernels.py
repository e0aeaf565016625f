"""Which primitives make a sum of squares, a maximum and a count of zeros, against the memory-bandwidth limit.

    python benchmarks/kernels.py

What `instrument.stats` does, on 1e3 to 1e8 elements of three types, and on 1e6 and 1e7 in float32 what else was tried. Every
candidate reads a tensor that another kernel made and casts it to float32, as a tap does; all run in turn in one process. A
ratio is to NumPy's dot of as many float32 elements in the same round, after the time of making the tensor is taken off. Of few
elements that time is launches, so microseconds stand beside it. Errors are against float64, for random and for constant data:
a constant shows what a long float32 sum loses.
"""
from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from benchmarks.timing import print_machine, print_result, seconds
from instrument import stats

WIDTH = 1000  # of the tensors, which are matrices
ROUNDS = {10 ** 3: 31, 10 ** 4: 31, 10 ** 5: 31, 10 ** 6: 21, 10 ** 7: 11, 10 ** 8: 3}  # by number of elements
COMPARED = 10 ** 6, 10 ** 7
TYPES = ms.float32, ms.float16, ms.bfloat16

_abs, _cast, _divide, _equal, _maximum, _mul = ops.Abs(), ops.Cast(), ops.DivNoNan(), ops.Equal(), ops.Maximum(), ops.Mul()
_not_equal, _ones, _reshape, _select, _sign = ops.NotEqual(), ops.OnesLike(), ops.Reshape(), ops.Select(), ops.Sign()
_slice, _square, _sum, _max, _zeros = ops.Slice(), ops.Square(), ops.ReduceSum(), ops.ReduceMax(), ops.ZerosLike()
_argmax, _distance, _l2, _top = ops.ArgMaxWithValue(axis=-1), ops.Cdist(p=2.0), ops.L2Loss(), ops.TopK()
_batch_matmul, _matmul, _square_sums = ops.BatchMatMul(transpose_b=True), ops.MatMul(), ops.SquareSumAll()
_l2_norm, _pool = ops.LpNorm(axis=[0, 1], p=2), ops.MaxPool(kernel_size=(1, WIDTH), strides=(1, WIDTH))


def first_element(x):
    """The tensor read as cheaply as can be."""
    return _slice(_reshape(x, (-1,)), (0,), (1,))


def rest(rows):
    """Sum of the sums of rows."""
    return _sum(_sum(_reshape(rows, (-1, 250)), -1))


def square_sum(x):
    return stats.element_sum(_mul(x, x))


def square_sum_square(x):
    return stats.element_sum(_square(x))


def square_sum_rows_1000(x):
    return rest(_sum(_mul(x, x), -1))


def square_sum_rows_4000(x):
    return rest(_sum(_reshape(_mul(x, x), (-1, 4000)), -1))


def square_sum_three_dimensions(x):
    x = _reshape(x, (-1, 100, WIDTH))
    return _sum(_sum(_mul(x, x), -1))


def square_sum_all_axes(x):
    return _sum(_mul(x, x))


def square_sum_first_axis(x):
    return _sum(_sum(_mul(x, x), 0))


def square_sum_batch_matmul(x):
    rows = _reshape(x, (-1, 1, WIDTH))
    return rest(_batch_matmul(rows, rows))


def square_sum_distance(x):
    return rest(_square(_distance(x, _zeros(x[:1]))))


def square_sum_matmul(x):
    return _reshape(_matmul(_reshape(x, (1, -1)), _reshape(x, (-1, 1))), ())


def square_sum_l2_loss(x):
    return 2 * _l2(x)


def square_sum_lp_norm(x):
    return _square(_l2_norm(x))


def square_sum_norm(x):
    return _square(ops.norm(x))


def square_sum_all(x):
    return _square_sums(x, x)[0]


def maximum_argmax(x):
    return _max(_argmax(_abs(x))[1])


def maximum_pool(x):
    return _max(_reshape(_pool(_reshape(_abs(x), (1, 1, -1, WIDTH))), (-1,)))


def maximum_halves(x):
    x = _reshape(_abs(x), (-1,))
    for _ in range(6):
        half = x.shape[0] // 2
        x = _maximum(x[:half], x[half:])
    return _max(x)


def maximum_reduce(x):
    return _max(_abs(x))


def maximum_top(x):
    return _top(_reshape(_abs(x), (-1,)), 1)[0][0]


def maximum_aminmax(x):
    return ops.aminmax(_reshape(_abs(x), (-1,)))[1]


def zeros_all_axes(x):
    return _sum(_cast(_equal(x, 0), ms.float32))


def zeros_not_equal(x):
    return x.size - stats.element_sum(_cast(_not_equal(x, 0), ms.float32))


def zeros_bool(x):
    return x.size - stats.element_sum(_cast(_cast(x, ms.bool_), ms.float32))


def zeros_select(x):
    return stats.element_sum(_select(_equal(x, 0), _ones(x), _zeros(x)))


def zeros_sign(x):
    return x.size - stats.element_sum(_abs(_sign(x)))


def zeros_divide(x):
    return x.size - stats.element_sum(_divide(x, x))


def zeros_count_nonzero(x):
    return x.size - ops.count_nonzero(x)


CHOSEN: dict[str, dict[str, Callable]] = {
    "sum of squares": {"ours": square_sum}, "absolute maximum": {"ours": stats.absolute_maximum},
    "zeros": {"ours": stats.zero_count}, "not finite": {"ours": stats.nonfinite_count}}
OTHERS: dict[str, dict[str, Callable]] = {
    "sum of squares": {
        "Square for Mul": square_sum_square, "rows of 1000": square_sum_rows_1000, "rows of 4000": square_sum_rows_4000,
        "three dimensions": square_sum_three_dimensions, "all axes at once": square_sum_all_axes,
        "first axis first": square_sum_first_axis, "BatchMatMul of rows": square_sum_batch_matmul,
        "Cdist(p=2), squared": square_sum_distance, "MatMul with itself": square_sum_matmul, "L2Loss": square_sum_l2_loss,
        "LpNorm, squared": square_sum_lp_norm, "ops.norm, squared": square_sum_norm, "SquareSumAll": square_sum_all},
    "absolute maximum": {
        "Abs, ArgMaxWithValue(-1)": maximum_argmax, "Abs, MaxPool": maximum_pool, "Abs, halves by Maximum": maximum_halves,
        "Abs, ReduceMax": maximum_reduce, "Abs, TopK": maximum_top, "Abs, aminmax": maximum_aminmax},
    "zeros": {
        "Equal, all axes at once": zeros_all_axes, "NotEqual": zeros_not_equal, "cast to bool": zeros_bool,
        "Select": zeros_select, "Sign": zeros_sign, "DivNoNan": zeros_divide, "count_nonzero": zeros_count_nonzero}}
EXACT = {"sum of squares": lambda x: np.sum(np.square(x, dtype=np.float64)), "absolute maximum": lambda x: np.abs(x).max(),
         "zeros": lambda x: np.sum(x == 0), "not finite": lambda x: np.sum(~np.isfinite(x))}


class Candidate(nn.Cell):
    """A producer of the tensor and one reduction of it."""

    def __init__(self, reduce: Callable):
        super().__init__()
        self.reduce = reduce

    def construct(self, x, one):
        return self.reduce(_cast(x * one, ms.float32))


def measured(size: int, dtype: Any, candidates: Mapping[str, Mapping[str, Callable]]) -> list[dict[str, Any]]:
    """One row for each candidate."""
    random = np.random.default_rng(0).standard_normal((size // WIDTH, WIDTH), np.float32)
    random.reshape(-1)[::7] = 0
    tensor, one = Tensor(random).astype(dtype), Tensor(1.0, dtype)
    random = tensor.astype(ms.float32).asnumpy().copy()  # rounded to the type
    constant = Tensor(np.full(random.shape, 0.7, np.float32)).astype(dtype)
    rounded = constant.astype(ms.float32).asnumpy()
    flat, producer = random.reshape(-1), Candidate(first_element)
    producer(tensor, one).asnumpy()
    rows, cells = [], []
    for what, ways in candidates.items():
        for name, reduce in ways.items():
            cell = Candidate(reduce)
            errors = []
            for data, given in ((random, tensor), (rounded, constant)):
                exact = float(EXACT[what](data))
                errors.append(abs(float(cell(given, one).asnumpy()) - exact) / max(abs(exact), 1))
            rows.append({"elements": size, "type": str(dtype), "what": what, "name": name, "error_random": errors[0],
                         "error_constant": errors[1]})
            cells.append(cell)
    taken: list[list[float]] = [[] for _ in cells]
    ratios: list[list[float]] = [[] for _ in cells]

    def call(run: Callable[[], Any]) -> float:
        """Seconds of a call, among several where they are short."""
        calls = min(max(10 ** 6 // size, 1), 30)
        return seconds(lambda: [run() for _ in range(calls)]) / calls

    for _ in range(ROUNDS[size]):
        dot, base = call(lambda: flat.dot(flat)), call(lambda: producer(tensor, one).asnumpy())
        for i, cell in enumerate(cells):
            taken[i].append(call(lambda: cell(tensor, one).asnumpy()) - base)  # noqa: B023
            ratios[i].append(taken[i][-1] / dot)
    for i, row in enumerate(rows):
        row.update(ratio=statistics.median(ratios[i]), minimum=min(ratios[i]), rounds=ROUNDS[size],
                   microseconds=1e6 * statistics.median(taken[i]))
    return rows


def main() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    print(f"{'elements':>10} {'type':10}{'what':18}{'candidate':30}{'time / dot':>11}{'least':>8}{'us':>11}"
          f"{'error, random':>15}{'constant':>10}")
    results = []
    for dtype in TYPES:
        for size in ROUNDS:
            chosen = CHOSEN
            if dtype == ms.float32 and size in COMPARED:
                chosen = {what: {**ways, **OTHERS.get(what, {})} for what, ways in CHOSEN.items()}
            rows = measured(size, dtype, chosen)
            results += rows
            for row in rows:
                print(f"{size:10.0e} {dtype!s:10}{row['what']:18}{row['name']:30}{row['ratio']:11.1f}{row['minimum']:8.1f}"
                      f"{row['microseconds']:11.1f}{row['error_random']:15.1e}{row['error_constant']:10.1e}", flush=True)
    print_result({"rounds": ROUNDS, "results": results})


if __name__ == "__main__":
    main()
