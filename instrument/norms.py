"""Gradient and weight norms as one vector: usable without the step, and the step's own.

Owns which norms there are, their names and their order. The mathematics is in `stats.py`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from instrument import _compat, stats
from instrument.notices import tell
from instrument.schema import NO_GRADIENT, Merge, Metric, Schema, Scope, of_this_rank
from instrument.shards import ShardSums


def _rows(tensor, length):
    tensor = stats.as_float32(tensor)
    if length == 1:
        return stats.row_sums(tensor, length)
    return stats.row_square_sums(tensor, length)


def _seen_rows(tensor, length):
    tensor = stats.as_float32(tensor)
    if length == 1:
        return stats.row_sums(tensor, length)
    return stats.row_magnitude_sums(tensor, length)  # not the sums of the rows themselves, which can cancel


def _zeros(tensor):
    return stats.zero_count(stats.as_float32(tensor))


def _nonfinite(tensor):
    return stats.nonfinite_count(stats.as_float32(tensor))


# Tensors of at most so many elements are not summed in kernels of their own, but with all the others.
SMALL = 4096


@_compat.constexpr
def _checked(number: int, for_shards: bool, joined: bool) -> int:
    """`number`; ValueError where the graph is compiled for another layout than it was made for."""
    _compat.check_layout(for_shards, joined)
    return number


def _layout(value):
    """What `_check_gradients` asks of each gradient."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    return None, ()


@_compat.constexpr
def _check_gradients(layouts: Any, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> int:
    """ValueError unless the gradients are of these parameters, in their order. Returns: how many."""
    if len(layouts) != len(names):
        raise ValueError(f"NormStats was made for {len(names)} gradients, one a parameter in their order, but it is given "
                         f"{len(layouts)}.")
    for (dtype, shape), name, expected in zip(layouts, names, shapes):
        if dtype not in _compat.FLOAT_TYPES or tuple(shape) != expected:
            given = "no tensor" if dtype is None else f"of type {dtype} and shape {tuple(shape)}"
            raise ValueError(f"the gradient of {name!r} must be a tensor of a float type and shape {expected}, but it is "
                             f"{given}. Pass the gradients in the order of the parameters that NormStats was made with.")
    return len(names)


# A segment sum adds one element after the other: it is given few at a time.
CHUNK = 64


class SquareSums(nn.Cell):
    """Sums of squares of gradients and weights with few operators: two or three a large tensor, the rest for all at once.

    A launch costs as much as the arithmetic on a small tensor, and loops over a tuple compile several times as slowly
    as a map: hence this shape. Beside each sum comes what tells an underflow from zero, see `stats.root`.

    Args:
        shapes: Shapes of the gradients, then of the weights.
        gradients: How many of them are gradients.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], gradients: int):
        super().__init__(auto_prefix=False)
        sizes = [stats.size_of(shape) for shape in shapes]
        lengths = [1 if size <= SMALL else stats.row_length(size) for size in sizes]
        numbers = [stats.number_of_row_sums(*pair) for pair in zip(sizes, lengths)]
        self.lengths = tuple(lengths[:gradients]), tuple(lengths[gradients:])
        is_raw = np.repeat([length == 1 for length in lengths], numbers)
        self.is_raw, self.is_raw_gradient = Tensor(is_raw), Tensor(is_raw[:sum(numbers[:gradients])])
        self.gradient_sums = SegmentSums(numbers[:gradients])
        self.sums = SegmentSums(numbers)
        self.abs = ops.Abs()
        self.mul = ops.Mul()
        self.select = ops.Select()
        self.concat = ops.Concat()
        self.map = ops.HyperMap()

    def construct(self, grads, weights):
        """Sum.

        Args:
            grads: Of the shapes given and any float type, a tuple.
            weights: The same.

        Returns:
            (sums of squares, witnesses), each float32 [number of tensors].
        """
        # Small tensors come as they are, large ones as sums of squares of rows: the small ones' squares are still to be made.
        rows = self.concat((self.concat(self.map(_rows, grads, self.lengths[0])),
                            self.concat(self.map(_rows, weights, self.lengths[1]))))
        seen = self.concat((self.concat(self.map(_seen_rows, grads, self.lengths[0])),
                            self.concat(self.map(_seen_rows, weights, self.lengths[1]))))
        return self.sums(self.select(self.is_raw, self.mul(rows, rows), rows)), self.sums(self.abs(seen))

    def of_one(self, grads):
        """As `construct`, of the gradients alone, or of whatever has their shapes."""
        seen = self.concat(self.map(_seen_rows, grads, self.lengths[0]))
        return self.of_gradients(grads), self.gradient_sums(self.abs(seen))

    def of_gradients(self, grads):
        """The sums of squares of the gradients alone."""
        rows = self.concat(self.map(_rows, grads, self.lengths[0]))
        return self.gradient_sums(self.select(self.is_raw_gradient, self.mul(rows, rows), rows))


class SegmentSums(nn.Cell):
    """Sums of consecutive parts of a vector, in two stages. Args: lengths: of the parts."""

    def __init__(self, lengths: Sequence[int]):
        super().__init__(auto_prefix=False)
        chunks = [-(-length // CHUNK) for length in lengths]
        starts = np.cumsum([0, *chunks])
        first = np.concatenate([start + np.arange(length) // CHUNK for start, length in zip(starts, lengths)])
        self.first, self.chunks = Tensor(first.astype(np.int32)), int(starts[-1])
        self.second, self.parts = Tensor(np.repeat(np.arange(len(lengths)), chunks).astype(np.int32)), len(lengths)
        self.segment_sum = ops.UnsortedSegmentSum()

    def construct(self, vector):
        return self.segment_sum(self.segment_sum(vector, self.first, self.chunks), self.second, self.parts)


class NormStats(nn.Cell):
    """Norms of gradients and weights, in one float32 vector, for graph and PyNative mode.

    Global norms are the root of the sum of all squares; the squares are computed and added in float32 whatever the
    tensors' type. Gradients are measured as they are given: unscale and reduce them first, clip them afterwards.

    Args:
        parameters: The parameters that the gradients belong to, in the gradients' order. Float types.
        frozen: More parameters, whose weight norms are wanted and which have no gradient.
        per_parameter: Whether each parameter's norms are there beside the totals.
        counts: Whether elements are counted too: `grad/nonfinite/<parameter>` and `grad/zero_fraction`.
        gradient_scope: `"global"` where the gradients are the same on every rank.
        allow_unverified: Measure in parallel modes in which a rank holds shards of tensors too: `shards.py` adds up those of
            all ranks, which has not been verified on an accelerator. Each metric has the scope `unverified` then, or
            `shard` in a pipeline, where nothing is added up.

    Raises:
        ValueError: There is no parameter, one is of no float type, or two have one name; or this is a parallel mode in which
            a rank holds shards, without `allow_unverified`, or with `counts`.

    Examples:
        >>> norm_stats = NormStats(net.trainable_params())
        >>> loss, gradients = ms.value_and_grad(forward, None, net.trainable_params())(x, y)
        >>> values = norm_stats.schema.unpack(norm_stats(gradients))
        >>> values["grad/norm"] > 0, values["weight/norm"] > 0
        (True, True)
    """

    def __init__(self, parameters: Iterable[Parameter], *, frozen: Iterable[Parameter] = (), per_parameter: bool = True,
                 counts: bool = False, gradient_scope: Scope = "global", allow_unverified: bool = False):
        super().__init__(auto_prefix=False)
        parameters, frozen = list(parameters), list(frozen)
        setting = _compat.sharded_here(allow_unverified)
        if setting and not allow_unverified:
            _compat.refuse_shards(setting)
        if setting and counts:
            raise ValueError(f"`counts` goes by the shapes of whole tensors, and with {setting} a rank holds shards. "
                             "Leave it out.")
        if not parameters:
            raise ValueError("`parameters` must hold at least one parameter, but it is empty. "
                             "Pass net.trainable_params() or optimizer.parameters.")
        for parameter in parameters + frozen:
            if parameter.dtype not in _compat.FLOAT_TYPES:
                raise ValueError(f"parameter {parameter.name!r} is of type {parameter.dtype}, but norms are of float types "
                                 "only. Leave it out.")
        # Outside the Cell tree: this cell must neither rename nor save parameters that belong to the network.
        object.__setattr__(self, "weights", ParameterTuple(parameters + frozen))
        # Without it a compiled NormStats that is called by itself takes a tuple for a constant, and reads gradients that
        # are still being computed (2.7.0).
        self.enable_tuple_broaden = True
        self.per_parameter = per_parameter
        self.counts = counts
        self.map = ops.HyperMap()
        self.stack = ops.Stack()
        self.concat = ops.Concat()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.names = tuple(parameter.name for parameter in parameters)
        self.shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        shapes = [p.shape for p in parameters + parameters + frozen]
        sizes = np.array([stats.size_of(shape) for shape in shapes], np.float32)
        self.gradients = len(parameters)
        self.for_shards, self.joined = bool(setting), bool(setting) and _compat.pipeline_stage()[1] == 1
        self.square_sums = (ShardSums(shapes, self.gradients, self.joined) if setting else
                            SquareSums(shapes, self.gradients))
        self.gradient_total = SegmentSums([self.gradients])
        self.totals = SegmentSums([self.gradients, len(shapes) - self.gradients])
        self.elements = Tensor(sizes)
        self.total_elements = Tensor([sizes[:self.gradients].sum(), sizes[self.gradients:].sum()], ms.float32)
        # Not a slice of it: 2.10 makes an operator without documented platforms of a number times what it has not folded.
        self.gradient_elements = Tensor([sizes[:self.gradients].sum()], ms.float32)
        metrics = self._metrics(list(self.names), [p.name for p in frozen], gradient_scope)
        if setting:
            metrics = ([replace(each, scope="unverified") for each in metrics] if self.joined else
                       of_this_rank(metrics, "shard"))
        self.schema = Schema(metrics)
        self.select = ops.Select()
        self.no_gradient = Tensor(np.full(len(shapes), NO_GRADIENT), ms.float32)
        self._told: set[str] = set()
        self.leave_out([])
        self.tell_of_frozen([i for i, parameter in enumerate(parameters) if not parameter.requires_grad])

    def leave_out(self, frozen: Sequence[int]) -> None:
        """Have `unpack` leave out the norms of these gradients, which PyNative mode does not compute: it gives zeros."""
        object.__setattr__(self, "has_frozen", bool(frozen))
        if frozen:
            mask = np.zeros(len(self.no_gradient), bool)
            mask[list(frozen)] = True
            object.__setattr__(self, "is_frozen", Tensor(mask))

    def tell_of_frozen(self, frozen: Sequence[int]) -> None:
        """Say what becomes of these parameters, once of each."""
        names = [self.weights[i].name for i in frozen if self.weights[i].name not in self._told]
        if names:
            self._told.update(names)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            tell(f"parameters that do not require a gradient are among those to train: {', '.join(names[:5])}{more}. In graph "
                 "mode an optimizer that has them trains them all the same; in PyNative mode it is given zeros, with which "
                 "momentum and weight decay still move them. Freeze first, and make the optimizer with "
                 "network.trainable_params() afterwards.", stacklevel=4)

    def construct(self, grads):
        """Measure.

        Args:
            grads: One gradient a parameter, in order, of any float type.

        Returns:
            float32 [K], laid out by `schema`.

        Raises:
            ValueError: They are not as many as the parameters, or one is of another shape or of no float type.
        """
        if not isinstance(grads, (tuple, list)):
            grads = (grads,)
        if not self.for_shards:
            _check_gradients(self.map(_layout, grads), self.names, self.shapes)
        return self.measure(grads)[0]

    def measure(self, grads):
        """As `construct`; the sum of all squared gradients, float32 [1], not finite only where a gradient is not; and the
        norms of the gradients and then the weights, float32 [number of both].

        A norm is NaN too where squares have underflowed, which is neither an overflow nor a reason to clip.
        """
        squares, seen = self.square_sums(grads, self.weights)
        gradients = _checked(self.gradients, self.for_shards, self.joined)
        totals = self.totals(squares)
        norms = stats.root(squares, self.elements, seen)
        values = (stats.root(totals, self.total_elements, self.totals(seen)),
                  self.sum(stats.is_nonfinite(squares[:gradients]), 0))
        if self.counts:
            zeros = self.sum(self.stack(self.map(_zeros, grads)), 0)
            values = values + (zeros / self.gradient_elements,)
        if self.per_parameter:
            shown = norms
            if self.has_frozen:
                shown = self.select(self.is_frozen, self.no_gradient, norms)
            values = values + (shown,)
            if self.counts:
                values = values + (self.stack(self.map(_nonfinite, grads)),)
        return self.concat(values), totals[:1], norms

    def gradient_square_sum(self, grads):
        """The second result of `measure` alone, the same to the bit."""
        return self.gradient_total(self.square_sums.of_gradients(grads))

    def gradient_norm(self, grads):
        """The norm of all gradients alone, float32 [1]."""
        squares, seen = self.square_sums.of_one(grads)
        return stats.root(self.gradient_total(squares), self.gradient_elements, self.gradient_total(seen))

    def _metrics(self, trained: list[str], frozen: list[str], scope: Scope) -> list[Metric]:
        # After the reduction every rank holds the same gradient, hence "identical"; a local one is a part of a whole.
        merge: Merge = "identical" if scope == "global" else "rms"
        metrics = [Metric("grad/norm", "1", scope, merge), Metric("weight/norm", "1", "global", "identical"),
                   Metric("grad/nonfinite", "parameters", scope, "max")]
        if self.counts:
            metrics.append(Metric("grad/zero_fraction", "fraction", scope, "mean"))
        if self.per_parameter:
            metrics += [Metric(f"grad/norm/{name}", "1", scope, merge) for name in trained]
            metrics += [Metric(f"weight/norm/{name}", "1", "global", "identical") for name in trained + frozen]
            if self.counts:
                metrics += [Metric(f"grad/nonfinite/{name}", "elements", scope, "max") for name in trained]
        return metrics
