"""Which primitives count magnitudes by powers of two, against one plain ReduceSum of the same tensor.

    python benchmarks/histograms.py [rounds] [elements]

As in kernels.py: every candidate reads a tensor that another kernel made, in one process, in turn; a ratio is that of the
same round, after the time of making the tensor is taken off both.
"""
from __future__ import annotations

import math
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from benchmarks.timing import print_machine, print_result, seconds
from instrument import bins, histograms

_reshape, _sum, _mul, _add, _sub = ops.Reshape(), ops.ReduceSum(), ops.Mul(), ops.Add(), ops.Sub()
_log, _cast, _and, _maximum, _abs = ops.Log(), ops.Cast(), ops.BitwiseAnd(), ops.Maximum(), ops.Abs()
_bincount, _ones_like, _segment_sum = ops.Bincount(), ops.OnesLike(), ops.UnsortedSegmentSum()
_bucketize = ops.Bucketize(histograms._device_edges())
_search = ops.SearchSorted(dtype=ms.int32, right=True)
_histogram = ops.Histogram(bins.OCTAVES, bins.LOWEST * math.log(2), bins.HIGHEST * math.log(2))

_EDGES = Tensor(histograms._device_edges(), ms.float32)
_NUMBER = Tensor(bins.BINS + 1, ms.int32)


class Candidate(nn.Cell):
    """A producer of the tensor and one way to count."""

    def construct(self, x, one):
        return self.count(_reshape(x * one, (-1,)))


class Producer(Candidate):
    def count(self, x):
        return x[0]


class PlainReduceSum(Candidate):
    def count(self, x):
        return _sum(x)


class SumOfRows(Candidate):
    def count(self, x):
        return _sum(_sum(_reshape(_sum(_reshape(x, (-1, 256)), -1), (-1, 256)), -1))


class BucketizeBincount(Candidate):
    """What log2_counts does."""

    def count(self, x):
        return histograms.log2_counts(x)


class BucketizeAlone(Candidate):
    def count(self, x):
        return _bucketize(x)[0]


class SearchSortedBincount(Candidate):
    def count(self, x):
        where = _search(_EDGES, x)
        return _bincount(where, _NUMBER, _ones_like(where))


class BucketizeSegmentSum(Candidate):
    def count(self, x):
        where = _bucketize(x)
        return _segment_sum(_ones_like(where), where, bins.BINS + 1)


class UnitInTheLastPlace(Candidate):
    """x + x * 2**-24 - x is a power of two whose logarithm is far from any edge; negative ones half a bin off."""

    def __init__(self):
        super().__init__()
        self.half_unit = Tensor(2.0 ** -24 * (1 + 2.0 ** -10), ms.float32)
        self.negative = Tensor(-math.sqrt(2), ms.float32)
        self.tiny, self.scale = Tensor(2.0 ** -126, ms.float32), Tensor(2 / math.log(2), ms.float32)
        self.shift, self.mask, self.number = Tensor(256.5, ms.float32), Tensor(511, ms.int32), Tensor(512, ms.int32)

    def count(self, x):
        unit = _sub(_add(x, _mul(x, self.half_unit)), x)
        magnitude = _maximum(unit, _mul(unit, self.negative))
        place = _add(_mul(_log(_add(magnitude, self.tiny)), self.scale), self.shift)
        where = _and(_cast(place, ms.int32), self.mask)
        return _bincount(where, self.number, _ones_like(where))


class LogHistogram(Candidate):
    """Without sign, zeros and what is not finite; wrong at the edges."""

    def count(self, x):
        return _histogram(_log(_abs(x)))


CANDIDATES = (PlainReduceSum, SumOfRows, BucketizeAlone, BucketizeBincount, SearchSortedBincount, BucketizeSegmentSum,
              UnitInTheLastPlace, LogHistogram)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    elements = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 22
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    print_machine()
    random = np.random.default_rng(0).normal(size=(elements // 1024, 1024)).astype(np.float32)
    results = []
    for label, data in {"normal": random, "constant": np.full_like(random, 0.7)}.items():
        tensor, one = Tensor(data), Tensor(1.0, ms.float32)
        producer, cells = Producer(), {kind.__name__: kind() for kind in CANDIDATES}
        for cell in (producer, *cells.values()):
            cell(tensor, one).asnumpy()
        taken: dict[str, list[float]] = {name: [] for name in cells}
        for _ in range(rounds):
            base = seconds(lambda: producer(tensor, one).asnumpy())  # noqa: B023
            for name, cell in cells.items():
                taken[name].append(seconds(lambda: cell(tensor, one).asnumpy()) - base)  # noqa: B023
        print(f"\n{label}, {elements} elements\n{'candidate':24}{'ms':>8}{'time / plain ReduceSum':>26}")
        for name, values in taken.items():
            ratio = statistics.median(a / b for a, b in zip(values, taken["PlainReduceSum"]))
            results.append({"data": label, "name": name, "milliseconds": 1e3 * statistics.median(values), "ratio": ratio})
            print(f"{name:24}{1e3 * statistics.median(values):8.1f}{ratio:26.1f}")
    print_result({"rounds": rounds, "elements": elements, "results": results})


if __name__ == "__main__":
    main()
