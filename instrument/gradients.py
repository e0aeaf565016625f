"""What happens to gradients between the backward pass and the optimizer, dense or sparse.

Owns the arithmetic on one gradient; `step.py` maps it over all of them. Measures nothing.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import ops

from instrument import _compat, stats

unscale = ops.MultitypeFuncGraph("instrument_unscale")
clip = ops.MultitypeFuncGraph("instrument_clip")
add = ops.MultitypeFuncGraph("instrument_add")
mean = ops.MultitypeFuncGraph("instrument_mean")
assign = ops.MultitypeFuncGraph("instrument_assign")
clear = ops.MultitypeFuncGraph("instrument_clear")


@unscale.register("Tensor", "Tensor")
def _unscale_tensor(scale, grad):
    return grad * ops.cast(ops.Reciprocal()(scale), grad.dtype)  # in the gradient's own type, as the stock cell does


@unscale.register("Tensor", "RowTensor")
def _unscale_sparse(scale, grad):
    return _compat.RowTensor(grad.indices, _unscale_tensor(scale, grad.values), grad.dense_shape)


@clip.register("Tensor", "Tensor")
def _clip_tensor(factor, grad):
    return ops.cast(ops.cast(grad, ms.float32) * factor, grad.dtype)


@clip.register("Tensor", "RowTensor")
def _clip_sparse(factor, grad):
    return _compat.RowTensor(grad.indices, _clip_tensor(factor, grad.values), grad.dense_shape)


@add.register("Tensor", "Tensor")
def _add_tensor(total, grad):
    return total + ops.cast(grad, ms.float32)


@add.register("Tensor", "RowTensor")
def _add_sparse(total, grad):
    return total + ops.cast(stats.dense(grad), ms.float32)


@mean.register("Tensor", "Tensor", "Tensor")
def _mean_tensor(share, grad, total):
    return ops.cast(total * share, grad.dtype)


@mean.register("Tensor", "RowTensor", "Tensor")
def _mean_sparse(share, grad, total):
    return ops.cast(total * share, grad.values.dtype)


@assign.register("Tensor", "Tensor")
def _assign_tensor(buffer, value):
    return ops.assign(buffer, value)


@clear.register("Tensor")
def _clear_tensor(buffer):
    return ops.assign(buffer, ops.zeros_like(buffer))  # not a product with zero, which would keep NaN for ever
