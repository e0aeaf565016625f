"""Gradient and weight norms as one vector: usable without the step, and the step's own.

Owns which norms there are, their names and their order. The mathematics is in `stats.py`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from instrument import _compat, stats
from instrument.schema import Merge, Metric, Schema, Scope


def _row_square_sums(tensor, length):
    return stats.row_square_sums(stats.as_float32(tensor), length)


def _row_sums(tensor, length):
    return stats.row_sums(stats.as_float32(tensor), length)


def _zeros(tensor):
    return stats.zero_count(stats.as_float32(tensor))


def _nonfinite(tensor):
    return stats.nonfinite_count(stats.as_float32(tensor))


# Tensors of at most so many elements are not summed in kernels of their own, but with all the others.
SMALL = 4096

# A segment sum adds one element after the other: it is given few at a time.
CHUNK = 64


class SquareSums(nn.Cell):
    """Sums of squares of many tensors with few operators: one or two a tensor, and the rest for all at once.

    A launch costs as much as the arithmetic on a small tensor, and loops over a tuple compile several times as slowly
    as a map: hence this shape. Beside each sum comes what tells an underflow from zero, see `stats.root`.

    Args:
        shapes: Shapes of the tensors.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        super().__init__(auto_prefix=False)
        sizes = [stats.size_of(shape) for shape in shapes]
        self.lengths = tuple(1 if size <= SMALL else stats.row_length(size) for size in sizes)
        self.seen_lengths = tuple(_seen_length(shape) for shape in shapes)
        self.sums = _SegmentSums([stats.number_of_row_sums(*pair) for pair in zip(sizes, self.lengths)])
        self.seen_sums = _SegmentSums([stats.number_of_row_sums(*pair) for pair in zip(sizes, self.seen_lengths)])
        self.elements = Tensor(np.array(sizes, np.float32))
        self.abs = ops.Abs()
        self.concat = ops.Concat()
        self.map = ops.HyperMap()

    def construct(self, tensors):
        """Sum.

        Args:
            tensors: Of the shapes given and any float type, a tuple.

        Returns:
            (sums of squares, witnesses), each float32 [number of tensors].
        """
        squares = self.concat(self.map(_row_square_sums, tensors, self.lengths))
        seen = self.abs(self.concat(self.map(_row_sums, tensors, self.seen_lengths)))
        return self.sums(squares), self.seen_sums(seen)


class _SegmentSums(nn.Cell):
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


def _seen_length(shape: tuple[int, ...]) -> int:
    """Length of the rows whose sums tell whether anything is not zero."""
    size = stats.size_of(shape)
    if size <= SMALL:
        return 1  # rows of one element cannot cancel; of large tensors they would be too many
    # A parameter that is read in its own rows is not reshaped, which would copy it.
    return shape[1] if len(shape) == 2 and 64 <= shape[1] <= 4096 else stats.row_length(size)


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

    Raises:
        ValueError: There is no parameter, one is of no float type, or two have one name.

    Example:
        >>> norm_stats = NormStats(net.trainable_params())
        >>> loss, gradients = ms.value_and_grad(forward, None, net.trainable_params())(x, y)
        >>> values = norm_stats.schema.unpack(norm_stats(gradients))
        >>> values["grad/norm"], values["weight/norm"]
    """

    def __init__(self, parameters: Iterable[Parameter], *, frozen: Iterable[Parameter] = (), per_parameter: bool = True,
                 counts: bool = False, gradient_scope: Scope = "global"):
        super().__init__(auto_prefix=False)
        parameters, frozen = list(parameters), list(frozen)
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
        self.of_gradients = SquareSums([p.shape for p in parameters])
        self.of_weights = SquareSums([p.shape for p in parameters + frozen])
        self.schema = Schema(self._metrics([p.name for p in parameters], [p.name for p in frozen], gradient_scope))

    def construct(self, grads):
        """Measure.

        Args:
            grads: One gradient a parameter, in order, of any float type.

        Returns:
            float32 [K], laid out by `schema`.
        """
        return self.measure(grads)[0]

    def measure(self, grads):
        """As `construct`, and the sum of all squared gradients, float32 [1]: not finite only where a gradient is not.

        A norm is NaN too where squares have underflowed, which is neither an overflow nor a reason to clip.
        """
        squares, seen = self.of_gradients(grads)
        weight_squares, weight_seen = self.of_weights(self.weights)
        elements = self.of_gradients.elements
        weight_elements = self.of_weights.elements
        values = (self.total_norm(squares, elements, seen),
                  self.total(stats.is_nonfinite(squares)),
                  self.total_norm(weight_squares, weight_elements, weight_seen))
        if self.counts:
            zeros = self.total(self.stack(self.map(_zeros, grads)))
            values = values + (zeros / self.total(elements),)
        if self.per_parameter:
            values = values + (stats.root(squares, elements, seen),
                               stats.root(weight_squares, weight_elements, weight_seen))
            if self.counts:
                values = values + (self.stack(self.map(_nonfinite, grads)),)
        return self.concat(values), self.total(squares)

    def total(self, values):
        """Sum of a vector, shape [1]."""
        return self.sum(values, 0)

    def total_norm(self, squares, elements, seen):
        """Norm of all tensors together from each one's sum of squares, shape [1]."""
        return stats.root(self.total(squares), self.total(elements), self.total(seen))

    def _metrics(self, trained: list[str], frozen: list[str], scope: Scope) -> list[Metric]:
        # After the reduction every rank holds the same gradient, hence "identical"; a local one is a part of a whole.
        merge: Merge = "identical" if scope == "global" else "rms"
        metrics = [Metric("grad/norm", "1", scope, merge), Metric("grad/nonfinite", "parameters", scope, "max"),
                   Metric("weight/norm", "1", "global", "identical")]
        if self.counts:
            metrics.append(Metric("grad/zero_fraction", "fraction", scope, "mean"))
        if self.per_parameter:
            metrics += [Metric(f"grad/norm/{name}", "1", scope, merge) for name in trained]
            metrics += [Metric(f"weight/norm/{name}", "1", "global", "identical") for name in trained + frozen]
            if self.counts:
                metrics += [Metric(f"grad/nonfinite/{name}", "elements", scope, "max") for name in trained]
        return metrics
