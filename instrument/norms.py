"""Gradient and weight norms as one vector: usable without the step, and the step's own.

Owns which norms there are, their names and their order. The mathematics is in `stats.py`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from instrument import _compat, stats
from instrument.schema import Merge, Metric, Schema, Scope

_rows = ops.MultitypeFuncGraph("instrument_rows")


@_rows.register("Tensor")
def _rows_of_tensor(gradient):
    return stats.as_rows(gradient)


@_rows.register("RowTensor")
def _rows_of_sparse(gradient):
    return stats.as_rows(stats.dense(gradient))


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
        self.gradient_elements = _sizes(parameters)
        self.weight_elements = _sizes(parameters + frozen)
        self.schema = Schema(self._metrics([p.name for p in parameters], [p.name for p in frozen], gradient_scope))

    def construct(self, grads):
        """Measure. Args: grads: one gradient a parameter, in order. Returns: float32 vector, laid out by `schema`."""
        rows = self.map(_rows, grads)
        squares = self.stack(self.map(stats.square_sum, rows))
        seen = self.stack(self.map(stats.witness, rows))
        weight_rows = self.map(stats.as_rows, self.weights)
        weight_squares = self.stack(self.map(stats.square_sum, weight_rows))
        weight_seen = self.stack(self.map(stats.witness, weight_rows))
        values = (self.total_norm(squares, self.gradient_elements, seen),
                  self.total(stats.is_nonfinite(squares)),
                  self.total_norm(weight_squares, self.weight_elements, weight_seen))
        if self.counts:
            zeros = self.total(self.stack(self.map(stats.zero_count, rows)))
            values = values + (zeros / self.total(self.gradient_elements),)
        if self.per_parameter:
            values = values + (stats.root(squares, self.gradient_elements, seen),
                               stats.root(weight_squares, self.weight_elements, weight_seen))
            if self.counts:
                values = values + (self.stack(self.map(stats.nonfinite_count, rows)),)
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


def _sizes(parameters: Sequence[Parameter]) -> Tensor:
    return Tensor(np.array([p.size for p in parameters], np.float32))
