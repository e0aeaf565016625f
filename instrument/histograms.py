"""Histograms of magnitudes on the device: the counting, and what `InstrumentedStep` does with it.

Owns `log2_counts` and the choice of what is counted. Where the bins lie, and what is made of counts, is in `bins.py`.

Two passes over the tensor: the bin of each element (`Bucketize`, which compares with the edges themselves, so that powers of
two and their neighbours are where they belong), and their number (`Bincount`, in int32). The comparisons tell NaN from
nothing, so NaN ends before the first edge or behind the last one, by the platform: both ends are the non-finite bin.
benchmarks/README.md says what else was tried.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from instrument import stats
from instrument._compat import constexpr
from instrument.bins import BINS, HIGHEST, LOWEST, PART, SMALLEST


def _device_edges() -> list[float]:
    """Lower edges of all bins but the first, float32 numbers: an element is in the bin of the last edge not above it."""
    up = [SMALLEST] + [2.0 ** k for k in range(LOWEST + 1, HIGHEST)]
    # -2 is in one bin with -3, and not with the float after it, where the next bin begins.
    down = [-float(np.nextafter(np.float32(edge), np.float32(0))) for edge in reversed(up)]
    return [float(np.finfo(np.float32).min), *down, *up, float("inf")]


_bucketize = ops.Bucketize(_device_edges())
_bincount = ops.Bincount()
_cast = ops.Cast()
_concat = ops.Concat()
_floor_div = ops.FloorDiv()
_mul = ops.Mul()
_ones_like = ops.OnesLike()
_reshape = ops.Reshape()
_shape = ops.Shape()
_slice = ops.Slice()
_sub = ops.Sub()

_NUMBER = Tensor(BINS + 1, ms.int32)  # the two ends are one bin
_PART = Tensor(PART, ms.int32)


@constexpr
def _no_counts() -> Tensor:
    return Tensor(np.zeros(BINS), ms.int32)


def log2_counts(x: Tensor) -> Tensor:
    """How many elements are in each bin. For graph and PyNative mode.

    Args:
        x: Tensor of any float type and static shape, of at most 2**31 - 1 elements. It is read in float32: a float64 beyond
            that counts as not finite, and one below as zero.

    Returns:
        int32 [`bins.BINS`], in the order that `bins` says. The sum is the number of elements, exactly.
    """
    if stats._static_size(_shape(x)) == 0:
        return _no_counts()
    where = _bucketize(_reshape(stats.as_float32(x), (-1,)))
    counts = _bincount(where, _NUMBER, _ones_like(where))  # 2.0.0 refuses to be given no weights
    ends = _slice(counts, (0,), (1,)) + _slice(counts, (BINS,), (1,))
    return _concat((_slice(counts, (1,), (BINS - 1,)), ends))


def carried(counts: Tensor) -> Tensor:
    """Counts in float32, exactly, so that they can be added: the high parts and then the low ones.

    Args:
        counts: int32 [`bins.BINS`].

    Returns:
        float32 [`bins.CARRIED`]; `bins.from_carried` makes counts of it again.
    """
    high = _floor_div(counts, _PART)
    return _cast(_concat((high, _sub(counts, _mul(high, _PART)))), ms.float32)


class Log2Counts(nn.Cell):
    """`log2_counts` as a cell. Its construct takes a float tensor and returns int32 [`bins.BINS`]."""

    def construct(self, x):
        return log2_counts(x)
