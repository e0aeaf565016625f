"""Gradient and weight norms as one vector: usable without the step, and the step's own.

Owns which norms there are, their names and their order. The mathematics is in `stats.py`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from instrument import stats
from instrument.schema import Merge, Metric, Schema, Scope

_dense = ops.MultitypeFuncGraph("instrument_dense")


@_dense.register("Tensor")
def _dense_tensor(gradient):
    return stats.as_float32(gradient)


@_dense.register("RowTensor")
def _dense_sparse(gradient):
    return stats.as_float32(stats.dense(gradient))


# A kernel costs more to launch than to run on so few elements: such tensors are stacked first.
SMALL = 8192


class SquareSums(nn.Cell):
    """Sums of squares of many tensors, with few operators: tensors of one size go together.

    Small tensors of one size are stacked and squared at once; larger ones are squared one by one, and the sums of their
    rows are stacked. Beside each sum comes what tells an underflow from zero, see `stats.root`.

    Args:
        shapes: Shapes of the tensors.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        super().__init__(auto_prefix=False)
        groups: dict[int, list[int]] = {}
        for i, shape in enumerate(shapes):
            groups.setdefault(stats.size_of(shape), []).append(i)
        self.small = tuple(tuple(group) for size, group in groups.items() if size <= SMALL)
        # What is stacked must agree in rows as well, and a matrix is read in its own rows.
        large: dict[tuple[int, int], list[int]] = {}
        for size, group in groups.items():
            for i in group if size > SMALL else ():
                large.setdefault(stats.row_shape(shapes[i]), []).append(i)
        self.large = tuple(tuple(group) for group in large.values())
        order = [i for group in self.small + self.large for i in group]
        self.order = Tensor(np.argsort(order).astype(np.int32))
        self.elements = Tensor(np.array([stats.size_of(shape) for shape in shapes], np.float32))
        self.abs = ops.Abs()
        self.concat = ops.Concat()
        self.gather = ops.Gather()
        self.mul = ops.Mul()
        self.reshape = ops.Reshape()
        self.stack = ops.Stack()
        self.sum = ops.ReduceSum()

    def construct(self, tensors):
        """Sum.

        Args:
            tensors: float32 tensors of the shapes given, a tuple.

        Returns:
            (sums of squares, witnesses), each float32 [number of tensors].
        """
        squares = ()
        seen = ()
        for group in self.small:
            rows = ()
            for i in group:
                rows = rows + (self.reshape(tensors[i], (-1,)),)
            rows = self.stack(rows)
            squares = squares + (self.sum(self.mul(rows, rows), -1),)
            seen = seen + (self.sum(self.abs(rows), -1),)
        for group in self.large:
            square_rows = ()
            rows = ()
            for i in group:
                square_rows = square_rows + (stats.row_square_sums(tensors[i]),)
                rows = rows + (stats.row_sums(tensors[i]),)
            squares = squares + (self.sum(self.stack(square_rows), -1),)
            seen = seen + (self.sum(self.abs(self.stack(rows)), -1),)
        return self.gather(self.concat(squares), self.order, 0), self.gather(self.concat(seen), self.order, 0)


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
        ValueError: There is no parameter, or two have one name.

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
        # Outside the Cell tree: this cell must neither rename nor save parameters that belong to the network.
        object.__setattr__(self, "weights", ParameterTuple(parameters + frozen))
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
            grads: One gradient a parameter, in order, of any float type; sparse (RowTensor) ones too.

        Returns:
            float32 [K], laid out by `schema`.
        """
        grads = self.map(_dense, grads)
        squares, seen = self.of_gradients(grads)
        weight_squares, weight_seen = self.of_weights(self.map(stats.as_float32, self.weights))
        elements = self.of_gradients.elements
        weight_elements = self.of_weights.elements
        values = (self.total_norm(squares, elements, seen),
                  self.total(stats.is_nonfinite(squares)),
                  self.total_norm(weight_squares, weight_elements, weight_seen))
        if self.counts:
            zeros = self.total(self.stack(self.map(stats.zero_count, grads)))
            values = values + (zeros / self.total(elements),)
        if self.per_parameter:
            values = values + (stats.root(squares, elements, seen),
                               stats.root(weight_squares, weight_elements, weight_seen))
            if self.counts:
                values = values + (self.stack(self.map(stats.nonfinite_count, grads)),)
        return self.concat(values)

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
