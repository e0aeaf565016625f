"""Sums of squares of tensors of which each rank holds a shard: semi-automatic and automatic parallel, optimizer parallel.

Owns how whole sums are made of those of shards. On each rank there is one float32 vector: of each gradient and weight the
sum of squares and of magnitudes, and of each weight how many elements it has here; one AllReduce(SUM) of it goes over all
ranks. A parameter that k ranks hold one and the same shard of is then counted k times, in its elements as well: n elements
counted of a parameter of N are k = n / N copies, which the sums are divided by; where that is no whole number, the norm is
NaN. So nothing need be known of the layout, which the compiler decides after the graph has been written, and nothing is left
to do on the host. The sum of all copies has to be a float32, so that a norm is infinite from 1.8e19 / sqrt(k) on.

Everything here goes by what a tensor has when the graph runs. Shapes that the graph is compiled with are those of whole
tensors, hence plain reductions and no reshape.

No release of MindSpore compiles these modes for a CPU, so that the way through its compiler has not been verified; the
arithmetic has, with made-up shards on real processes.
"""
from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import Tensor, nn, ops

from instrument import _compat, stats

_abs = ops.Abs()
_cast = ops.Cast()
_concat = ops.Concat()
_expand = ops.ExpandDims()  # of a scalar that is made of a parameter, where MindSpore's compiler does not take a Reshape
_floor = ops.Floor()
_is_finite = ops.IsFinite()
_is_inf = ops.IsInf()
_is_nan = ops.IsNan()
_less = ops.Less()
_logical_and = ops.LogicalAnd()
_mul = ops.Mul()
_select = ops.Select()
_shape = ops.Shape()
_sum = ops.ReduceSum()

_HALF = Tensor(0.5, ms.float32)
_NEARLY_ONE = Tensor(0.999, ms.float32)
_ROUNDING = Tensor(1e-3, ms.float32)  # of a float32 sum of ones, on some ranks, of many copies


def _squares(tensor):
    tensor = stats.as_float32(tensor)
    return _expand(_sum(_mul(tensor, tensor)), 0)


def _magnitudes(tensor):
    return _expand(_sum(_abs(stats.as_float32(tensor))), 0)


def _elements(tensor):
    # Each element is one of three: of a constant, the compiler would make the number in the shape that it knows.
    tensor = stats.as_float32(tensor)
    ones = _cast(_is_finite(tensor), ms.float32) + _cast(_is_nan(tensor), ms.float32) + _cast(_is_inf(tensor), ms.float32)
    return _expand(_sum(ones), 0)


class ShardSums(nn.Cell):
    """As `norms.SquareSums`, of tensors that can be shards.

    Args:
        shapes: Shapes of the whole gradients, then of the whole weights; the gradients are those of the first weights.
        gradients: How many of them are gradients.
        joined: Whether the sums are those of all ranks; else they are of what this rank holds.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], gradients: int, joined: bool):
        super().__init__(auto_prefix=False)
        self.number, self.gradients, self.joined = len(shapes), gradients, joined
        self.sizes = Tensor([float(stats.size_of(shape)) for shape in shapes[gradients:]], ms.float32)
        self.map = ops.HyperMap()
        self.all_reduce = ops.AllReduce() if joined else None

    def construct(self, grads, weights):
        """Sum.

        Args:
            grads: Of any float type, a tuple.
            weights: The same.

        Returns:
            (sums of squares, sums of magnitudes), each float32 [number of tensors]; of whole tensors where they are joined.
        """
        held = self.held(grads, weights)
        if self.joined:
            held = self.all_reduce(held)
        return self.whole(held)

    def held(self, grads, weights):
        """What this rank has, in one float32 vector."""
        return _concat((_concat(self.map(_squares, grads)), _concat(self.map(_squares, weights)),
                        _concat(self.map(_magnitudes, grads)), _concat(self.map(_magnitudes, weights)),
                        _concat(self.map(_elements, weights))))

    def whole(self, total):
        """The result of `construct`, of the sum over ranks."""
        squares, seen = total[:self.number], total[self.number:2 * self.number]
        if self.joined:
            quotients = total[2 * self.number:] / self.sizes
            copies = _floor(quotients + _HALF)
            # Not a whole number where parts of a tensor are on more ranks than others: what was added up is unknown then.
            is_whole = _logical_and(_less(_abs(quotients - copies), copies * _ROUNDING), _less(_NEARLY_ONE, copies))
            copies = _select(is_whole, copies, stats._nans(_shape(copies)))
            squares = squares / _concat((copies[:self.gradients], copies))
        return squares, seen


def check_options(network: nn.Cell, setting: str, **given: object) -> None:
    """ValueError for the first option that has another value than its default and cannot work with shards.

    Args:
        network: What is measured.
        setting: By which tensors are shards.
        given: Options by name; one that is None, False, 1 or empty is not given.
    """
    for name in ("loss_scale", "max_grad_norm", "skip_spikes"):
        if given.get(name) is not None:
            raise ValueError(f"`{name}` decides by norms, and with {setting} they have not been verified: what is measured "
                             f"must not change what is trained. Leave out {name}, and clip or scale as without instrument: a "
                             "monitor measures nn.TrainOneStepWithLossScaleCell as well.")
    for name in ("accumulate", "counts", "updates", "moments", "histograms"):
        if given.get(name) and (name != "accumulate" or given[name] != 1):
            raise ValueError(f"`{name}` goes by the shapes of whole tensors, and with {setting} a rank holds shards: "
                             f"it is not measured there. Leave out {name}.")
    for name, cell in [("", network), *_compat.named_cells(network)]:
        if type(cell).__name__ in ("PipelineCell", "GradAccumulationCell"):
            where = f", {name!r}" if name else ""
            raise ValueError(f"`network` has a {type(cell).__name__}{where}: with {setting} MindSpore's compiler keeps the "
                             "sums over micro-batches, and what the step sees is not the gradient. Nothing is measured there.")
