"""Graph-safe mathematics: one pure function a statistic, on float32 tensors of any shape.

Owns how each number is computed on the device, and nothing else: no parameters, no state, no names. Callers cast to
float32 before (`as_float32`), so that half precision neither overflows nor loses what it sums; every sum is accumulated
in float32. A float64 twin of each stands in the tests.

The range: a square must be a normal float32, so magnitudes from about 1.1e-19 to 1.8e19 are seen, and a root mean square
from `SMALLEST_RMS` upward is right to float32 rounding. `root` shows what lies beyond as infinity or NaN.

Which primitive matters: on a CPU a reduction over all axes at once takes many times as long as rows first and then the
rest, a three-dimensional one likewise, and the distance to zero in the maximum norm is the quickest maximum. On Ascend
and GPU the plain reductions are right. The measurements are in benchmarks/kernels.py.
"""
from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from instrument import _compat
from instrument._compat import constexpr

# Below this a sum of squares may have lost elements that underflowed (the smallest normal float32 is 1.2e-38).
SMALLEST_RMS = 1e-16

# A sum is made of rows of at most so many elements, and of the sums of rows: a long float32 sum loses digits (of a
# constant, 5e-6 with 4,096 elements and 3e-7 with 256), and a short one is no slower.
LONGEST_ROW = 256

# More sums of rows than this are made into sums of rows once more before they are added.
MANY_SUMS = 1024
VERY_MANY_SUMS = 4096

# Primitives are made once: the functional forms (ops.square, ops.sum, ...) add a graph of their own to every call and
# make the compile of a large network slower.
_abs = ops.Abs()
_cast = ops.Cast()
_concat = ops.Concat()
_equal = ops.Equal()
_expand = ops.ExpandDims()
_greatest_distance = ops.Cdist(p=math.inf)
_is_finite = ops.IsFinite()
_is_nan = ops.IsNan()
_less = ops.Less()
_logical_and = ops.LogicalAnd()
_max = ops.ReduceMax()
_mean = ops.ReduceMean()
_mul = ops.Mul()
_not_equal = ops.NotEqual()
_reciprocal = ops.Reciprocal()
_reshape = ops.Reshape()
_select = ops.Select()
_shape = ops.Shape()
_slice = ops.Slice()
_sqrt = ops.Sqrt()
_stack = ops.Stack()
_sub = ops.Sub()
_sum = ops.ReduceSum()

_ONE = Tensor(1.0, ms.float32)
_ZERO = Tensor(0.0, ms.float32)


def size_of(shape: tuple[int, ...]) -> int:
    """How many elements a tensor of this shape has."""
    return math.prod(shape)


def row_length(size: int) -> int:
    """The length of the rows that so many elements are read in: where it is no divisor, a shorter row is left over."""
    if size <= LONGEST_ROW:
        return max(size, 1)
    return next((length for length in range(LONGEST_ROW, 63, -1) if size % length == 0), LONGEST_ROW)


def number_of_row_sums(size: int, length: int) -> int:
    """How many elements `row_sums` returns."""
    rows = -(-size // length)
    return -(-rows // LONGEST_ROW) if length > 1 and rows > VERY_MANY_SUMS else rows


@constexpr
def _static_size(shape: tuple[int, ...]) -> int:
    if any(length is None or length < 0 for length in shape):
        raise ValueError(f"instrument needs static shapes, but a tensor to measure has shape {shape}, where -1 is a "
                         "dynamic axis. Leave the cell out by `activations`, or do not use set_inputs with None axes.")
    return size_of(shape)


_row_length = constexpr(row_length)


@constexpr
def _wide_shape(size: int) -> tuple[int, int]:
    """Long rows, for a maximum, which loses no digits."""
    length = next((length for length in range(4096, 63, -1) if size % length == 0), size)
    return size // length, length


@constexpr
def _rows_first() -> bool:
    # Where a rank can hold shards, the shapes that a graph is compiled with are those of whole tensors.
    return _compat.device_target() == "CPU" and not _compat.sharded_by()


@constexpr
def _holds_shards() -> bool:
    return bool(_compat.sharded_by())


@constexpr
def _nans(shape: tuple[int, ...]) -> Tensor:
    return Tensor(np.full(shape, np.nan), ms.float32)


@constexpr
def _zero_row(length: int) -> Tensor:
    return Tensor(np.zeros((1, length)), ms.float32)


@constexpr
def _calls_and_elements(shape: tuple[int, ...], has_calls: bool, has_elements: bool) -> Tensor:
    elements = 1.0 if _compat.sharded_by() else float(size_of(shape))  # as `_total` counts them
    return Tensor([1.0] * has_calls + [elements] * has_elements, ms.float32)


@constexpr
def _of_nothing(columns: tuple[str, ...]) -> Tensor:
    """Columns of a tensor without elements, of which the CPU's reductions make whatever lies in memory."""
    return Tensor([float(column == "calls") for column in columns], ms.float32)


def as_float32(x: Tensor) -> Tensor:
    """`x` in float32; nothing where it is."""
    return _cast(x, ms.float32)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, float32; NaN where `a` is, of which a division by zero makes minus infinity on a CPU."""
    return _mul(a, _reciprocal(b))


def _sums_of_rows(x: Tensor, length: int) -> Tensor:
    size = _static_size(_shape(x))
    left = size % length
    if left == 0:
        return _sum(_reshape(x, (-1, length)), -1)
    x = _reshape(x, (-1,))
    rows = _sum(_reshape(_slice(x, (0,), (size - left,)), (-1, length)), -1)
    return _concat((rows, _reshape(_sum(_slice(x, (size - left,), (left,))), (1,))))


def row_sums(x: Tensor, length: int) -> Tensor:
    """Sums of the rows of `length` elements that `x` is read in, or of rows of these where they are very many.

    Returns:
        float32 [`number_of_row_sums`]; rows of one element are the elements themselves, and cost nothing.
    """
    if length == 1:
        return _reshape(x, (-1,))
    sums = _sums_of_rows(x, length)
    if _shape(sums)[0] > VERY_MANY_SUMS:
        sums = _sums_of_rows(sums, LONGEST_ROW)
    return sums


def row_square_sums(x: Tensor, length: int) -> Tensor:
    """Sums of squares of the rows of `length` elements that `x` is read in; as `row_sums`."""
    return row_sums(_mul(x, x), length)  # multiplied before the reshape, which is free of a result and copies a parameter


def row_magnitude_sums(x: Tensor, length: int) -> Tensor:
    """Sums of magnitudes of the rows of `length` elements that `x` is read in, zero only where all are; as `row_sums`."""
    return row_sums(_abs(x), length)


def _few_row_sums(x: Tensor) -> Tensor:
    sums = row_sums(x, _row_length(_static_size(_shape(x))))
    if _shape(sums)[0] > MANY_SUMS:
        sums = _sums_of_rows(sums, LONGEST_ROW)
    return sums


def element_sum(x: Tensor) -> Tensor:
    """Sum of all elements, float32 scalar."""
    if _rows_first():
        return _sum(_few_row_sums(x))
    return _sum(x)


def _total(x: Tensor) -> Tensor:
    """Sum of all elements, float32 scalar; where a rank can hold shards, whose number of elements is not known, their mean."""
    if _holds_shards():
        return _mean(x)
    return element_sum(x)


def _alone(scalar: Tensor) -> Tensor:
    """The same in float32 [1]."""
    if _holds_shards():
        return _expand(scalar, 0)
    return _reshape(scalar, (1,))


def sum_and_square_sum(x: Tensor) -> Tensor:
    """Both, float32 [2]."""
    if _rows_first():
        return _sum(_stack((_few_row_sums(x), _few_row_sums(_mul(x, x)))), -1)
    return _stack((_sum(x), _sum(_mul(x, x))))


def absolute_maximum(x: Tensor) -> Tensor:
    """Largest magnitude, float32 scalar. A NaN may be passed over: on a CPU no maximum of MindSpore reports it reliably."""
    if _rows_first():
        rows = _reshape(x, _wide_shape(_static_size(_shape(x))))
        return _max(_reshape(_greatest_distance(rows, _zero_row(_shape(rows)[1])), (-1,)))
    return _max(_abs(x))


def zero_count(x: Tensor) -> Tensor:
    """How many elements are exactly zero, float32 scalar, exact up to 2**24 and to float32 rounding beyond."""
    return element_sum(is_zero(x))


def is_zero(x: Tensor) -> Tensor:
    """1.0 where an element is exactly zero, else 0.0; float32 of the shape of `x`."""
    return _cast(_equal(x, _ZERO), ms.float32)


def nonfinite_count(x: Tensor) -> Tensor:
    """How many elements are NaN or infinite, float32 scalar, exact as `zero_count` is."""
    return element_sum(is_nonfinite(x))


def is_nonfinite(x: Tensor) -> Tensor:
    """1.0 where an element is NaN or infinite, else 0.0; float32 of the shape of `x`."""
    return _sub(_ONE, _cast(_is_finite(x), ms.float32))


def or_nan(values: Tensor, witness: Tensor) -> Tensor:
    """`values`, and NaN where `witness` is NaN; both float32 [N]."""
    return _select(_is_nan(witness), witness, values)


def root(squares: Tensor, elements: Tensor, seen: Tensor) -> Tensor:
    """Square root of sums (or means) of squares, NaN where float32 squares cannot tell it.

    Args:
        squares: float32 [N].
        elements: float32 [N] or [1], how many squares were added (1 for a mean).
        seen: float32 [N], not zero where some element is known to be not zero. A sum whose mean is below
            `SMALLEST_RMS` squared may have lost elements to underflow, unless all of them are zero.
    """
    lost = _logical_and(_less(squares, elements * SMALLEST_RMS ** 2), _not_equal(seen, _ZERO))
    return _select(lost, _nans(_shape(squares)), _sqrt(squares))  # a sum with NaN is folded away in graph mode


# What one tap can carry, in the order in which it does. All of them merge by addition.
COLUMNS = ("calls", "elements", "sum", "square_sum", "absmax", "zeros", "nonfinite")


class Columns(nn.Cell):
    """The chosen `COLUMNS` of one tensor.

    Args:
        columns: Names out of `COLUMNS`, in its order.
    """

    def __init__(self, columns: tuple[str, ...]):
        super().__init__(auto_prefix=False)
        self.columns = columns
        self.has_calls, self.has_elements, self.has_sum = (name in columns for name in COLUMNS[:3])
        self.has_square_sum, self.has_absmax, self.has_zeros, self.has_nonfinite = (name in columns for name in COLUMNS[3:])

    def construct(self, x):
        """Measure.

        Args:
            x: Tensor of any float type.

        Returns:
            float32 vector, in the order of `COLUMNS`.
        """
        if _static_size(_shape(x)) == 0:
            return _of_nothing(self.columns)
        x = as_float32(x)
        carried = ()
        if self.has_calls or self.has_elements:
            carried = carried + (_calls_and_elements(_shape(x), self.has_calls, self.has_elements),)
        if self.has_sum and self.has_square_sum and not _holds_shards():
            carried = carried + (sum_and_square_sum(x),)
        else:
            if self.has_sum:
                carried = carried + (_alone(_total(x)),)
            if self.has_square_sum:
                carried = carried + (_alone(_total(_mul(x, x))),)
        if self.has_absmax:
            carried = carried + (_alone(absolute_maximum(x)),)
        if self.has_zeros:
            carried = carried + (_alone(_total(is_zero(x))),)
        if self.has_nonfinite:
            carried = carried + (_alone(nonfinite_count(x)),)
        return _concat(carried)
