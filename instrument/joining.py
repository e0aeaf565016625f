"""What the ranks of a data parallel job measure of the joined batch, and how far they are apart: one AllReduce for all of it.

Owns how each number merges over ranks. What the numbers are is the part of `taps.py`, `histograms.py` and `losses.py`.

The AllReduce is a sum, of float32, because a CPU has no other. Sums, sums of squares and counts are added. What has to be
seen rank by rank, a maximum for one, goes into a table with a row for each rank: each fills its own row by Select and leaves
zeros in the others (a product with a mask would make NaN of NaN times zero), so that the sum is the whole table. Two
AllReduces of one tensor are no way: MindSpore's compiler merges them, whatever their operations.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from instrument import stats
from instrument.schema import Metric

# What is spread over ranks, in the order of the table's columns, with units. The last ones are the host's, which may not know
# them: NaN then.
SPREAD = {"loss": "loss", "grad/norm_local": "1", "step_time": "s", "data_wait": "s"}
HOST_TIMES = 2

_cast = ops.Cast()
_concat = ops.Concat()
_equal = ops.Equal()
_gather = ops.Gather()
_is_finite = ops.IsFinite()
_is_nan = ops.IsNan()
_max = ops.ReduceMax()
_reshape = ops.Reshape()
_select = ops.Select()
_shape = ops.Shape()
_sum = ops.ReduceSum()
_tile = ops.Tile()

_ZERO = Tensor(0.0, ms.float32)


class Extremes(NamedTuple):
    """Where in the slots' gradients, one behind the other, there is what does not merge by addition.

    Attributes:
        maxima: Sums of the maxima of each call.
        calls: For each of these, the number of calls that it is divided by.
        counts: Numbers of calls.
        length: That of all.
    """

    maxima: Sequence[int] = ()
    calls: Sequence[int] = ()
    counts: Sequence[int] = ()
    length: int = 0


class Joining(nn.Cell):
    """Joins what the ranks have measured.

    Args:
        ranks: How many there are.
        rank: This one.
        extremes: What of the slots' gradients is not simply added; empty where they are not joined.
        spread: Whether there is a table of `SPREAD` as well.
    """

    def __init__(self, ranks: int, rank: int, extremes: Extremes, spread: bool):
        super().__init__(auto_prefix=False)
        length, found = extremes.length, len(extremes.maxima)
        self.ranks, self.length, self.found = ranks, length, found
        self.columns = found + (len(SPREAD) if spread else 0)
        self.has_maxima, self.has_spread = bool(found), spread
        self.maxima, self.calls = (Tensor(np.array(each or [0], np.int32)) for each in (extremes.maxima, extremes.calls))
        mine = np.zeros((ranks, max(self.columns, 1)), bool)
        mine[rank] = True
        self.mine, self.nothing = Tensor(mine), Tensor(np.zeros(mine.shape), ms.float32)
        # Each element of the result lies among the sums, their shares of one rank, or the maxima.
        where = np.arange(max(length, 1))
        where[list(extremes.counts)] += length
        where[list(extremes.maxima)] = 2 * length + np.arange(found)
        self.where = Tensor(where.astype(np.int32))
        self.number = Tensor([float(ranks)], ms.float32)
        self.never = Tensor(np.full(max(found, 1), -math.inf), ms.float32)
        self.all_reduce = ops.AllReduce()

    def construct(self, losses, carried, counted, mine):
        """Join.

        Args:
            losses: This rank's, float32 [L].
            carried: The slots' gradients that are joined, a tuple of float32 vectors.
            counted: Likewise the histograms'.
            mine: This rank's `SPREAD`, float32; of no meaning where there is none.

        Returns:
            (losses, carried, counted, table): means over ranks, float32 [L]; the slots' gradients of all ranks, a tuple of
            one vector, in which a sum of maxima has become the largest quotient with the number of calls, and the number of
            calls a mean over ranks; the histograms' in one vector, likewise a tuple; and float32 [ranks, 4], `SPREAD` of
            each rank. What there is not is `losses`.
        """
        parts = (losses,) + carried + counted
        end = losses.shape[0] + self.length
        if self.columns > 0:
            parts = parts + (_reshape(self.table(carried, mine), (-1,)),)
        total = self.all_reduce(_concat(parts))
        start = total.shape[0] - self.ranks * self.columns
        means = total[:losses.shape[0]] / self.number
        joined, histograms, spread, table = (means,), (means,), means, means  # 2.0.0 wants each name set on every way
        if self.columns > 0:
            table = _reshape(total[start:], (self.ranks, self.columns))
            if self.has_spread:
                spread = table[:, self.found:]
        if self.length > 0:
            sums = total[losses.shape[0]:end]
            found = (sums, sums / self.number)
            if self.has_maxima:
                found = found + (largest(table[:, :self.found]),)
            joined = (_gather(_concat(found), self.where, 0),)
        if start > end:
            histograms = (total[end:start],)
        return means, joined, histograms, spread

    def table(self, carried, mine):
        """The table with this rank's row filled, float32 [ranks, columns]."""
        row = mine
        if self.has_maxima:
            raw = _concat(carried)
            calls = _gather(raw, self.calls, 0)
            maxima = _gather(raw, self.maxima, 0) / calls
            row = _select(_equal(calls, _ZERO), self.never, maxima)
            if self.has_spread:
                row = _concat((row, mine))
        return _select(self.mine, _tile(_reshape(row, (1, -1)), (self.ranks, 1)), self.nothing)


def own_norm() -> Metric:
    """The norm of a rank's gradients before they are reduced."""
    return Metric("grad/norm_local", "1", "local", "rms")


def largest(table):
    """Maxima of columns, NaN where one element is, which a maximum may pass over; float32 [M] of [ranks, M]."""
    nans = _sum(_cast(_is_nan(table), ms.float32), 0)
    maxima = _max(table, 0)
    return _select(_equal(nans, _ZERO), maxima, stats._nans(_shape(maxima)))


class Spread(nn.Cell):
    """How far ranks are apart, and which one has the largest number. Args: ranks: how many there are."""

    def __init__(self, ranks: int):
        super().__init__(auto_prefix=False)
        shape = ranks, len(SPREAD)
        is_told = np.arange(len(SPREAD)) >= len(SPREAD) - HOST_TIMES
        self.is_told = Tensor(np.broadcast_to(is_told, shape).copy())
        self.numbers = Tensor(np.arange(ranks)[:, None].repeat(len(SPREAD), 1), ms.float32)
        self.none = Tensor(np.full(shape, float(ranks)), ms.float32)
        self.infinite, self.lowest = (Tensor(np.full(shape, each), ms.float32) for each in (math.inf, -math.inf))
        self.unknown = Tensor(np.full(len(SPREAD), math.nan), ms.float32)
        self.all = Tensor(float(ranks), ms.float32)
        self.first = ops.ReduceMin()
        self.both = ops.LogicalAnd()

    def construct(self, table):
        """Compare.

        Args:
            table: float32 [ranks, 4], `SPREAD` of each rank.

        Returns:
            float32 [12], laid out by `metrics`: of each the smallest, NaN apart (infinite where all are NaN); the largest, NaN
            where one is; and the rank of the largest, the lowest of several, where one that is not finite counts as the
            largest. Of what hosts tell, ranks that did not have no say, and all three are NaN where none did.
        """
        is_nan = _is_nan(table)
        missing = self.both(is_nan, self.is_told)
        table = _select(missing, self.lowest, table)
        smallest = self.first(_select(is_nan, self.infinite, table), 0)
        bad = _select(_is_finite(table), table, _select(missing, self.lowest, self.infinite))
        here = _equal(bad, _max(bad, 0))
        rank = self.first(_select(here, self.numbers, self.none), 0)
        nobody = _equal(_sum(_cast(missing, ms.float32), 0), self.all)
        return _concat((_select(nobody, self.unknown, smallest), _select(nobody, self.unknown, largest(table)),
                        _select(nobody, self.unknown, rank)))

    @staticmethod
    def metrics() -> list[Metric]:
        """What `construct` returns, in its order."""
        told = list(SPREAD)[-HOST_TIMES:]
        return [Metric(f"rank/{what}/{name}", unit or own, "global", "identical", is_optional=name in told)
                for what, unit in (("min", ""), ("max", ""), ("argmax", "rank")) for name, own in SPREAD.items()]
