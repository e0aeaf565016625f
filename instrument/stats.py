"""Graph-safe mathematics: one pure function a statistic, on tensors of any float type and shape.

Owns how each number is computed on the device, and nothing else: no parameters, no state, no names. Every function
casts to float32 first and accumulates in float32, so that half precision neither overflows nor loses what it sums. A
float64 twin of each stands in the tests.

The range: a square must be a normal float32, so magnitudes from about 1e-19 to 1.8e19 are seen, and a root mean square
from `SMALLEST_RMS` upward is right to float32 rounding. `norms` and `rms` show what is out of range as NaN or infinity.
"""
from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from instrument._compat import constexpr

# Below this a sum of squares may have lost elements that underflowed (the smallest normal float32 is 1.2e-38).
SMALLEST_RMS = 1e-16

# Primitives are made once: the functional forms (ops.square, ops.sum, ...) add a graph of their own to every call and
# make the compile of a large network slower.
_abs = ops.Abs()
_argmax = ops.ArgMaxWithValue(axis=-1)
_cast = ops.Cast()
_equal = ops.Equal()
_is_finite = ops.IsFinite()
_less = ops.Less()
_logical_and = ops.LogicalAnd()
_max = ops.ReduceMax()
_not_equal = ops.NotEqual()
_reshape = ops.Reshape()
_segment_sum = ops.UnsortedSegmentSum()
_select = ops.Select()
_shape = ops.Shape()
_sqrt = ops.Sqrt()
_square = ops.Square()
_sum = ops.ReduceSum()


def size_of(shape: tuple[int, ...]) -> int:
    """How many elements a tensor of this shape has."""
    return math.prod(shape)


@constexpr
def row_layout(shape: tuple[int, ...]) -> tuple[int, int]:
    """The (rows, columns) that a reduction of a tensor of this shape reads: last axis first, then the rest.

    Two short stages are quicker than one (see benchmarks) and round better: the error of a float32 sum grows with its
    length. A long vector is folded by its largest divisor below the square root.
    """
    if any(length < 0 for length in shape):
        raise ValueError(f"instrument needs static shapes, but a tensor to measure has shape {shape}, where -1 is a "
                         "dynamic axis. Leave the cell out by `activations`, or do not use set_inputs with None axes.")
    size = math.prod(shape)
    columns = shape[-1] if shape else 1
    if len(shape) < 2 and size > 4096:
        columns = next(k for k in range(math.isqrt(size), 0, -1) if size % k == 0)
    return size // max(columns, 1), columns


def as_rows(x: Tensor) -> Tensor:
    """`x` as a float32 matrix, for the two-stage reductions below."""
    return _cast(_reshape(x, row_layout(_shape(x))), ms.float32)


def dense(gradient: Any) -> Tensor:
    """A sparse (RowTensor) gradient as the tensor that it stands for; rows that occur twice are added."""
    return _segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])


def element_sum(rows: Tensor) -> Tensor:
    """Sum of the elements, float32 scalar. Args: rows: float32 matrix, see `as_rows`."""
    return _sum(_sum(rows, -1))


def square_sum(rows: Tensor) -> Tensor:
    """Sum of squares, float32 scalar."""
    return _sum(_sum(_square(rows), -1))


def absolute_maximum(rows: Tensor) -> Tensor:
    """Largest magnitude, float32 scalar."""
    return _max(_argmax(_abs(rows))[1])


def zero_count(rows: Tensor) -> Tensor:
    """How many elements are exactly zero, float32 scalar, exact up to 2**24 and to float32 rounding beyond."""
    return element_sum(_cast(_equal(rows, 0), ms.float32))


def nonfinite_count(rows: Tensor) -> Tensor:
    """How many elements are NaN or infinite, float32 scalar, exact as `zero_count` is."""
    return element_sum(1 - _cast(_is_finite(rows), ms.float32))


def is_nonfinite(x: Tensor) -> Tensor:
    """1.0 where an element is NaN or infinite, else 0.0; float32 of the shape of `x`."""
    return 1 - _cast(_is_finite(x), ms.float32)


@constexpr
def element_count(shape: tuple[int, ...]) -> Tensor:
    """The number of elements as a float32 constant."""
    return Tensor(float(math.prod(shape)), ms.float32)


# What one tap can carry, in the order in which it does. All of them merge by addition.
COLUMNS = ("calls", "elements", "sum", "square_sum", "absmax", "nonfinite_calls", "zeros", "nonfinite")


def columns_of(x: Tensor, columns: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The chosen `COLUMNS` of one tensor, each a float32 scalar, in the order of `COLUMNS`."""
    rows = as_rows(x)
    total = element_sum(rows)
    carried = ()
    if "calls" in columns:
        carried = carried + (_ONE,)
    if "elements" in columns:
        carried = carried + (element_count(_shape(x)),)
    if "sum" in columns:
        carried = carried + (total,)
    if "square_sum" in columns:
        carried = carried + (square_sum(rows),)
    if "absmax" in columns:
        carried = carried + (absolute_maximum(rows),)
    if "nonfinite_calls" in columns:
        carried = carried + (is_nonfinite(total),)
    if "zeros" in columns:
        carried = carried + (zero_count(rows),)
    if "nonfinite" in columns:
        carried = carried + (nonfinite_count(rows),)
    return carried


_ONE = Tensor(1.0, ms.float32)
_NAN = Tensor(float("nan"), ms.float32)


def witness(rows: Tensor) -> Tensor:
    """Not zero where some element is known to be not zero, float32 scalar: the sum of the magnitudes of the row sums."""
    return _sum(_abs(_sum(rows, -1)))


def root(squares: Tensor, elements: Tensor, seen: Tensor) -> Tensor:
    """Square root of sums (or means) of squares, NaN where float32 squares cannot tell it.

    Args:
        squares: float32 [N].
        elements: float32 [N] or scalar, how many squares were added (1 for a mean).
        seen: float32 [N], not zero where some element is known to be not zero. A sum whose mean is below
            `SMALLEST_RMS` squared may have lost elements to underflow, unless all of them are zero.
    """
    lost = _logical_and(_less(squares, elements * SMALLEST_RMS ** 2), _not_equal(seen, 0))
    roots = _sqrt(squares)
    return _select(lost, roots + _NAN, roots)
