"""MindFormers' step for pipelines and accumulated gradients, outside the parallel mode that it asks for.

A CPU does not run semi-automatic parallel, in which the compiler makes each weight's gradient be added to a Parameter of the
step, `accu_grads`. Here the network does so itself, and what differentiating it returns is something else.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindformers.wrapper import wrapper
from mindspore import Tensor, nn, ops
from mindspore.nn.wrap import cell_wrapper  # noqa: F401

from instrument.mindformers import releases
from trainer import MFPipelineWithLossScaleCell, OnCpu

MICRO = 2
SIZES = (16, 32, 4)
TELLS_DIVISOR = releases.TELLS_DIVISOR


class Accumulate(nn.Cell):
    """A weight, whose gradient is added to `total`; what the caller gets is `share` of it."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def construct(self, weight, total):
        return weight * 1.0

    def bprop(self, weight, total, out, dout):
        added = ops.assign_add(total, dout)
        return ops.depend(dout * self.share, added), ops.zeros_like(total)


class Layer(nn.Cell):
    """A dense layer that adds its gradients to the step's `accu_grads`."""

    def __init__(self, weight, bias, share):
        super().__init__()
        self.weight, self.bias = ms.Parameter(Tensor(weight)), ms.Parameter(Tensor(bias))
        self.accumulate = Accumulate(share)

    def construct(self, x):
        weight = self.accumulate(self.weight, self.totals[0])
        return ops.matmul(x, ops.transpose(weight, (1, 0))) + self.accumulate(self.bias, self.totals[1])


class Accumulating(nn.Cell):
    """16 -> 32 (ReLU) -> 4. `reference.MLP` is the float64 twin.

    Args:
        share: How much of the gradient differentiating returns.
    """

    def __init__(self, share=-3.0):
        super().__init__()
        random = np.random.default_rng(0)
        normal = [(scale * random.normal(size=shape)).astype(np.float32)
                  for scale, shape in ((0.3, (32, 16)), (0.1, 32), (0.3, (4, 32)), (0.1, 4))]
        self.first, self.act, self.second = Layer(*normal[:2], share), nn.ReLU(), Layer(*normal[2:], share)

    def error(self, x, y):
        return self.second(self.act(self.first(x))) - y

    def construct(self, x, y):
        return ops.ReduceMean()(ops.Square()(self.error(x, y)))


class PerToken(Accumulating):
    """Returns the sum of the squared errors, and the number of elements that it has; both [1]."""

    def construct(self, x, y):
        squares = ops.Square()(self.error(x, y))
        return ops.reshape(ops.ReduceSum()(squares), (1,)), ops.reshape(ops.ReduceSum()(ops.ones_like(squares)), (1,))


class Parts(Accumulating):
    """Returns losses that MindFormers keeps apart: one an element of the error, or two."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def get_gpt_transformer_config(self):
        return None

    def construct(self, x, y):
        squares = ops.ReduceMean()(ops.Square()(self.error(x, y)), 0)
        parts = (squares[0:1] + squares[3:4], squares[1:2], squares[2:3])
        if self.number == 4:
            parts = parts + (squares[3:4] * 0.0,)
        return parts


class StockOnCpu(OnCpu, MFPipelineWithLossScaleCell):
    """The stock step, with a look for an overflow that a CPU can take."""


def stand_alone(monkeypatch):
    """Make the class need no other process when it is made."""
    monkeypatch.setattr(wrapper, "create_group", lambda *_: None)
    monkeypatch.setattr(wrapper, "get_rank", lambda: 0)
    monkeypatch.setattr(wrapper, "get_group_size", lambda: 1)


def build(monkeypatch, network, optimizer, *, cls=MFPipelineWithLossScaleCell, wrap=None, **settings):
    """A step of the class `cls`, made as in semi-automatic parallel, which it asks for; the network fills its sums.

    Args:
        wrap: Cuts the batch into micro-batches; by default nn.PipelineCell.
    """
    stand_alone(monkeypatch)
    wrap = wrap or nn.PipelineCell
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
    try:
        step = cls(wrap(network, MICRO), optimizer, micro_batch_num=MICRO, **settings)
    finally:
        ms.reset_auto_parallel_context()
    step.allreduce2 = nn.Identity()  # over the stages, of which there is one
    sums = dict(zip([parameter.name for parameter in optimizer.parameters], step.accu_grads))
    for layer in (network.first, network.second):
        for each in (layer.weight, layer.bias):
            if each.name not in sums:  # one of another stage, or frozen
                sums[each.name] = ms.Parameter(Tensor(np.zeros(each.shape, np.float32)), name=f"unused.{each.name}")
        object.__setattr__(layer, "totals", ms.ParameterTuple([sums[layer.weight.name], sums[layer.bias.name]]))
    return step.set_train()


def batches(steps, rows=8):
    """`steps` pairs (x, y) of NumPy arrays."""
    random = np.random.default_rng(1)
    return [(random.normal(size=(rows, SIZES[0])).astype(np.float32), random.normal(size=(rows, SIZES[-1])).astype(np.float32))
            for _ in range(steps)]
