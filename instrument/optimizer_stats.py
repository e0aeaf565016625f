"""What the optimizer did and remembers: norms of updates, of Adam's moments, and the cosine of gradient and momentum.

Owns which of these numbers there are, their names and their order. The mathematics is in `stats.py` and `norms.py`.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from instrument import stats
from instrument.norms import SMALL, SegmentSums, SquareSums
from instrument.schema import Metric

# Where optimizers of MindSpore and MindFormers keep the first and second moment of each parameter.
_MOMENTS = (("moment1", "moment2"), ("moments1", "moments2"), ("exp_avg", "exp_avg_sq"), ("moments", None))


def barrier(tensor, done):
    """Something small that is there when all of `done` is, by one kernel on a small float32 tensor.

    What waits for a tuple waits for each of its elements: of n tensors that wait for n others, the runtime keeps n * n arrows,
    and a step takes longer by their number.
    """
    return ops.Neg()(ops.depend(tensor, done))


def _negated(weight):
    """A float32 copy that the update does not change, with the opposite sign."""
    return ops.Neg()(stats.as_float32(weight))


def _difference(updated, weight, negated):
    # Both wait for the update: the compiler may read a Parameter at any time before.
    return ops.Add()(stats.as_float32(ops.depend(weight, updated)), ops.depend(negated, updated))


def _products(a, b, length):
    return stats.row_sums(ops.Mul()(stats.as_float32(a), stats.as_float32(b)), length)


class UpdateStats(nn.Cell):
    """Norms of what an update changed, and their ratios to the norms of the weights before it.

    Computed from the weights themselves, before and after, so that weight decay, clipping and rounding are in it: of a
    float16 or bfloat16 parameter it is what rounding has left of the update, which can be nothing.

    Args:
        parameters: The parameters that the optimizer updates, in its order.
        per_parameter: Whether each parameter's numbers are there beside the totals.
    """

    def __init__(self, parameters: Sequence[Parameter], per_parameter: bool):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "weights", ParameterTuple(parameters))
        self.names = [parameter.name for parameter in parameters]
        self.per_parameter = per_parameter
        self.map = ops.HyperMap()
        self.concat = ops.Concat()
        self.square_sums = SquareSums([p.shape for p in parameters], len(parameters))
        sizes = np.array([stats.size_of(p.shape) for p in parameters], np.float32)
        self.elements, self.all_elements = Tensor(sizes), Tensor(sizes.sum(keepdims=True))
        self.total = SegmentSums([len(parameters)])

    def before(self):
        """What `construct` needs of the weights before the update."""
        return self.map(_negated, self.weights)

    def construct(self, before, weight_norms, updated):
        """Measure, after the update.

        Args:
            before: What `before()` returned.
            weight_norms: Norms of the weights before the update, float32 [number of parameters].
            updated: Something that waits for the update.

        Returns:
            float32 [K], laid out by `metrics`.
        """
        updated = barrier(weight_norms, updated)
        squares, seen = self.square_sums.of_one(self.map(ops.partial(_difference, updated), self.weights, before))
        norm = stats.root(self.total(squares), self.all_elements, self.total(seen))
        values = (norm, stats.ratio(norm, ops.Sqrt()(self.total(weight_norms * weight_norms))))
        if self.per_parameter:
            norms = stats.root(squares, self.elements, seen)
            values = values + (norms, stats.ratio(norms, weight_norms))
        return self.concat(values)

    def metrics(self) -> list[Metric]:
        """What `construct` returns, in its order."""
        groups = ("update/norm", "update/ratio")
        metrics = [Metric(group, "1", "global", "identical") for group in groups]
        if self.per_parameter:
            metrics += [Metric(f"{group}/{name}", "1", "global", "identical") for group in groups for name in self.names]
        return metrics


class MomentStats(nn.Cell):
    """Norms of an optimizer's moments as this step found them, and the cosine of the first one and the new gradient.

    cosine = Σ g·m / (‖g‖ ‖m‖), with the gradient before clipping and the moment before this update: 1 where the gradient
    points where the last ones did, 0 where it has nothing in common with them; NaN where a norm is zero, as in step 1.

    Args:
        optimizer: Has moments under one of the names that MindSpore's optimizers use.
        per_parameter: Whether each parameter's numbers are there beside the totals.

    Raises:
        ValueError: The optimizer has no moments.
    """

    def __init__(self, optimizer: nn.Cell, per_parameter: bool):
        super().__init__(auto_prefix=False)
        parameters = list(optimizer.parameters)
        first, second = moments_of(optimizer)
        object.__setattr__(self, "first", ParameterTuple(first))
        object.__setattr__(self, "second", ParameterTuple(second))
        self.names = [parameter.name for parameter in parameters]
        self.per_parameter = per_parameter
        self.has_second = bool(second)
        self.map = ops.HyperMap()
        self.concat = ops.Concat()
        shapes = [p.shape for p in parameters]
        sizes = [stats.size_of(shape) for shape in shapes]
        self.groups = 1 + self.has_second
        self.square_sums = SquareSums(shapes * self.groups, len(shapes))
        self.lengths = tuple(1 if size <= SMALL else stats.row_length(size) for size in sizes)
        self.product_sums = SegmentSums([stats.number_of_row_sums(*pair) for pair in zip(sizes, self.lengths)])
        self.total = SegmentSums([len(shapes)])
        self.totals = SegmentSums([len(shapes)] * self.groups)
        self.count = len(shapes)
        self.elements = Tensor(np.array(sizes * self.groups, np.float32))
        self.total_elements = Tensor(np.array([sum(sizes)] * self.groups, np.float32))

    def construct(self, grads, grad_norms):
        """Measure, before the update.

        Args:
            grads: One gradient a parameter.
            grad_norms: Their norms, float32 [number of parameters].

        Returns:
            float32 [K], laid out by `metrics`.
        """
        if self.has_second:
            squares, seen = self.square_sums(self.first, self.second)
        else:
            squares, seen = self.square_sums.of_one(self.first)
        norms = stats.root(squares, self.elements, seen)
        totals = stats.root(self.totals(squares), self.total_elements, self.totals(seen))
        products = self.product_sums(self.concat(self.map(_products, grads, self.first, self.lengths)))
        grad_norm = ops.Sqrt()(self.total(grad_norms * grad_norms))
        values = (totals, self.total(products) / (grad_norm * totals[:1]))
        if self.per_parameter:
            values = values + (norms, products / (grad_norms * norms[:self.count]))
        return self.concat(values)

    def metrics(self) -> list[Metric]:
        """What `construct` returns, in its order."""
        groups = ("moment1/norm", "moment2/norm", "moment1/cosine") if self.has_second else ("moment1/norm", "moment1/cosine")
        metrics = [Metric(group, "1", "global", "identical") for group in groups]
        if self.per_parameter:
            metrics += [Metric(f"{group}/{name}", "1", "global", "identical") for group in groups for name in self.names]
        return metrics


def moments_of(optimizer: Any) -> tuple[list[Parameter], list[Parameter]]:
    """First and second moments of an optimizer's parameters, in their order; the second can be empty.

    Raises:
        ValueError: There are none.
    """
    shapes = [parameter.shape for parameter in optimizer.parameters]
    for first, second in _MOMENTS:
        if second is None and not isinstance(optimizer, nn.Momentum):
            continue  # other optimizers keep something else under this name, as nn.FTRL its squared gradients
        moments = [list(getattr(optimizer, name, None) or ()) for name in (first, second) if name is not None]
        if all([moment.shape for moment in group] == shapes for group in moments):
            return moments[0], moments[1] if len(moments) > 1 else []
    raise ValueError(f"moments=True needs an optimizer that keeps moments, but {type(optimizer).__name__} has none that are "
                     "known (moment1 and moment2, moments1 and moments2, exp_avg and exp_avg_sq). Use nn.Adam, "
                     "nn.AdamWeightDecay, nn.Lamb or nn.Momentum, or leave `moments` out.")
