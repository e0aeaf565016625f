"""What happens to gradients between the backward pass and the optimizer.

Owns the arithmetic on one gradient of any float type; `step.py` maps it over all of them. Measures nothing.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import ops


def unscale(scale, grad):
    """A gradient without the loss scale, in its own type, as the stock cell does it."""
    return grad * ops.cast(ops.Reciprocal()(scale), grad.dtype)


def clip(factor, grad):
    """A gradient times a float32 factor, multiplied in float32, in its own type."""
    return ops.cast(ops.cast(grad, ms.float32) * factor, grad.dtype)


def add(total, grad):
    """A float32 sum of gradients, and one more."""
    return total + ops.cast(grad, ms.float32)


def mean(share, grad, total):
    """A sum of gradients times the share of one, in the gradient's type."""
    return ops.cast(total * share, grad.dtype)


def assign(buffer, value):
    """Write a buffer."""
    return ops.assign(buffer, value)


def clear(buffer):
    """Write zeros; a product with zero would keep NaN for ever."""
    return ops.assign(buffer, ops.zeros_like(buffer))
