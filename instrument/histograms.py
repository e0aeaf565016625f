"""Histograms of magnitudes on the device: the counting, and what `InstrumentedStep` does with it.

Owns `log2_counts` and the choice of what is counted. Where the bins lie, and what is made of counts, is in `bins.py`.

Two passes over the tensor: the bin of each element (`Bucketize`, which compares with the edges themselves, so that powers of
two and their neighbours are where they belong), and their number (`Bincount`, in int32). The comparisons tell NaN from
nothing, so NaN ends before the first edge or behind the last one, by the platform: both ends are the non-finite bin.
benchmarks/README.md says what else was tried.
"""
from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from instrument import _compat, stats
from instrument._compat import constexpr
from instrument.bins import BINS, CARRIED, HIGHEST, LOWEST, PART, SMALLEST
from instrument.buffers import own_name
from instrument.kinds import is_whole
from instrument.select import why_unmeasurable

Kind = Literal["weight", "gradient", "activation"]


@dataclass(frozen=True)
class Histogram:
    """What is counted, and how often.

    Attributes:
        kind: `"weight"` (of trained and frozen parameters, before the update), `"gradient"` (of trained parameters,
            unscaled, after the reduction over ranks, before clipping) or `"activation"` (outputs of cells, of this rank).
        pattern: A regular expression; one that is found anywhere in the name of a parameter or a cell chooses it.
        every: Count in step 1 and in each multiple of `every`; a multiple of the step's own `every`.

    Raises:
        ValueError: One of them is none of these.

    Examples:
        >>> step = InstrumentedStep(network, optimizer, histograms=[Histogram("gradient", "2.weight", every=50)])
        >>> step.schema.histogram_names
        ('histogram/gradient/2.weight',)
    """

    kind: Kind
    pattern: str
    every: int = 100

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"`kind` of a Histogram must be one of {', '.join(get_args(Kind))}, but it is {self.kind!r}.")
        if not is_whole(self.every) or self.every < 1:
            raise ValueError(f"`every` of a Histogram must be a whole number of steps from 1, but it is {self.every!r}.")
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"`pattern` of a Histogram is {self.pattern!r}, which is not a regular expression: {error}"
                             ) from None

    def matches(self, names: Sequence[str]) -> list[str]:
        """Those of the names that the expression is found in; ValueError with near names where there is none."""
        found = [name for name in names if re.search(self.pattern, name)]
        if not found:
            near = difflib.get_close_matches(self.pattern, names, n=5, cutoff=0.1)
            what = "cell" if self.kind == "activation" else "trained parameter" if self.kind == "gradient" else "parameter"
            raise ValueError(f"`histograms`: the expression {self.pattern!r} matches no {what} of the network. Near names: "
                             f"{', '.join(near) or 'none'}.")
        return found


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
_equal = ops.Equal()
_floor_div = ops.FloorDiv()
_floor_mod = ops.FloorMod()
_logical_or = ops.LogicalOr()
_mul = ops.Mul()
_ones_like = ops.OnesLike()
_reshape = ops.Reshape()
_shape = ops.Shape()
_slice = ops.Slice()
_sub = ops.Sub()

_NUMBER = Tensor(BINS + 1, ms.int32)  # the two ends are one bin
_PART = Tensor(PART, ms.int32)
_ZERO = Tensor(0, ms.int32)
_ONE = Tensor(1, ms.int32)


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


def is_due(step, every):
    """In the graph: whether step number `step` is counted, bool []. Both int32 []."""
    return _logical_or(_equal(_floor_mod(step, every), _ZERO), _equal(step, _ONE))


def _counted(x):
    return carried(log2_counts(x))


class _Group(nn.Cell):
    """What is counted of weights and gradients with one `every`.

    Args:
        every: Counted in step 1 and in each multiple of it.
        weights: To count.
        positions: Of the gradients to count, among all.
    """

    def __init__(self, every: int, weights: Sequence[Parameter], positions: Sequence[int]):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "weights", ParameterTuple(weights))  # outside the Cell tree: they are the network's
        self.has_weights, self.positions = bool(weights), tuple(positions)
        self.always = every == 1
        self.every = Tensor(every, ms.int32)
        self.nothing = Tensor(np.zeros(CARRIED * (len(weights) + len(positions))), ms.float32)
        self.map = ops.HyperMap()

    def construct(self, grads, step):
        if self.always:
            return self.count(grads)
        counted = self.nothing
        if is_due(step, self.every):
            counted = self.count(grads)
        return counted

    def count(self, grads):
        counted = ()
        if self.has_weights:
            counted = counted + (_concat(self.map(_counted, self.weights)),)
        for position in self.positions:
            counted = counted + (_counted(grads[position]),)
        return _concat(counted)


class Counter(nn.Cell):
    """The identity, whose backward counts magnitudes as the gradient of a slot: `taps.py` says why.

    Args:
        name: The cell's.
        every: Counted in step 1 and in each multiple of it.
        step_count: Number of the last step, int32 [].
    """

    def __init__(self, name: str, every: int, step_count: Parameter):
        super().__init__(auto_prefix=False)
        self.slot = Parameter(Tensor(np.zeros(CARRIED), ms.float32), name=own_name(f"histogram.{name}"))
        object.__setattr__(self, "step_count", step_count)
        self.carrier = _carrier(every)

    def construct(self, x):
        return self.carrier(x, self.slot, self.step_count)


class _Carrier(nn.Cell):
    def __init__(self, every: int):
        super().__init__(auto_prefix=False)
        self.always = every == 1
        self.every = Tensor(every, ms.int32)
        self.nothing = Tensor(np.zeros(CARRIED), ms.float32)

    def construct(self, x, slot, last_step):
        return x

    def bprop(self, x, slot, last_step, out, dout):
        if self.always:
            return dout, _counted(x), last_step  # nobody asks for the gradient of the step's number
        counted = self.nothing
        if is_due(last_step + _ONE, self.every):
            counted = _counted(x)
        return dout, counted, last_step


_carrier = functools.lru_cache(maxsize=None)(_Carrier)


class HistogramStats(nn.Cell):
    """The histograms of one step as one vector.

    Args:
        chosen: What is counted of weights and gradients.
        counted: Names of the cells whose slots are given to `construct`.
    """

    def __init__(self, chosen: Sequence[Chosen], counted: Sequence[str]):
        super().__init__(auto_prefix=False)
        groups = [(every, [each for each in chosen if each.every == every])
                  for every in sorted({each.every for each in chosen})]
        ordered = [(every, [each for each in group if each.weight is not None],
                    [each for each in group if each.weight is None]) for every, group in groups]
        self.groups = nn.CellList([_Group(every, [each.weight for each in weights], [each.position for each in gradients])
                                   for every, weights, gradients in ordered], auto_prefix=False)
        self.names = (*(f"histogram/{'gradient' if each.weight is None else 'weight'}/{each.name}"
                        for _, weights, gradients in ordered for each in weights + gradients),
                      *(f"histogram/activation/{name}" for name in counted))

    def construct(self, grads, slots, step):
        """Count.

        Args:
            grads: The gradients, a tuple of float tensors.
            slots: The counters' gradients, a tuple of float32 [`bins.CARRIED`].
            step: This step's number, int32 [].

        Returns:
            float32 [`bins.CARRIED` times the number of `names`], in their order; zeros for what is not counted in this step.
        """
        counted = ()
        for group in self.groups:
            counted = counted + (group(grads, step),)
        return _concat(counted + slots)


class Chosen(NamedTuple):
    """A parameter to count: its weight, or the gradient at `position` where `weight` is None."""

    name: str
    every: int
    weight: Parameter | None
    position: int


def choose_parameters(histograms: Sequence[Histogram], trained: Sequence[Parameter],
                      frozen: Sequence[Parameter]) -> list[Chosen]:
    """What the histograms of weights and gradients choose; where two choose one, the first counts."""
    chosen: dict[tuple[str, str], Chosen] = {}
    for kind, parameters in (("weight", [*trained, *frozen]), ("gradient", list(trained))):
        named = {parameter.name: (i, parameter) for i, parameter in enumerate(parameters)
                 if parameter.dtype in _compat.FLOAT_TYPES}
        for histogram in (each for each in histograms if each.kind == kind):
            for name in histogram.matches(list(named)):
                position, parameter = named[name]
                chosen.setdefault((kind, name),
                                  Chosen(name, histogram.every, parameter if kind == "weight" else None, position))
    return list(chosen.values())


def choose_cells(histograms: Sequence[Histogram], network: nn.Cell) -> dict[str, tuple[nn.Cell, int]]:
    """`{name: (cell, every)}` of the cells that the histograms of activations choose; where two choose one, the first."""
    cells = dict(_compat.named_cells(network))
    chosen: dict[str, tuple[nn.Cell, int]] = {}
    for histogram in (each for each in histograms if each.kind == "activation"):
        for name in histogram.matches(list(cells)):
            reason = why_unmeasurable(cells[name])
            if reason:
                raise ValueError(f"`histograms`: cell {name!r} ({type(cells[name]).__name__}), which the expression "
                                 f"{histogram.pattern!r} matches, cannot be measured: {reason}. Use a narrower expression.")
            chosen.setdefault(name, (cells[name], histogram.every))
    return chosen


def check_histograms(histograms: Any, every: int) -> None:
    """Raise TypeError or ValueError unless `histograms` is what a step measured each `every` steps can count."""
    if not isinstance(histograms, (list, tuple)) or not all(isinstance(each, Histogram) for each in histograms):
        raise TypeError(f"`histograms` must be a list of instrument.Histogram, but it is {histograms!r}.")
    for each in histograms:
        if each.every % every:
            raise ValueError(f"`histograms`: {each} has an `every` that is no multiple of the step's, {every}, but histograms "
                             "are counted in steps that are measured.")
