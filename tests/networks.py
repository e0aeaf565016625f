"""Small networks that the tests train. Each is quick to compile and has a NumPy twin or an exact property."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class MLP(nn.Cell):
    """16 -> 32 (ReLU) -> 4, returns the mean squared error. `reference.MLP` is its float64 twin."""

    def __init__(self, seed=0, dtype=np.float32):
        super().__init__()
        random = np.random.default_rng(seed)
        self.first = nn.Dense(16, 32, weight_init=Tensor(random.normal(0, 0.3, (32, 16)).astype(dtype)),
                              bias_init=Tensor(random.normal(0, 0.1, 32).astype(dtype)))
        self.act = nn.ReLU()
        self.second = nn.Dense(32, 4, weight_init=Tensor(random.normal(0, 0.3, (4, 32)).astype(dtype)),
                               bias_init=Tensor(random.normal(0, 0.1, 4).astype(dtype)))

    def construct(self, x, y):
        error = self.second(self.act(self.first(x))) - y
        return ops.ReduceMean()(error * error)


def mlp_batches(steps, seed=1, dtype=np.float32, batch=8):
    """`steps` pairs (x, y) of NumPy arrays."""
    random = np.random.default_rng(seed)
    return [(random.normal(size=(batch, 16)).astype(dtype), random.normal(size=(batch, 4)).astype(dtype))
            for _ in range(steps)]


class ConvNet(nn.Cell):
    """Convolution, batch norm, ReLU, pooled to 3 classes; without the loss."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(3)
        self.conv = nn.Conv2d(2, 4, 3, weight_init=Tensor(random.normal(0, 0.3, (4, 2, 3, 3)).astype(np.float32)))
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.head = nn.Dense(4, 3, bias_init="zeros",
                             weight_init=Tensor(random.normal(0, 0.3, (3, 4)).astype(np.float32)))

    def construct(self, x):
        return self.head(ops.ReduceMean()(self.act(self.norm(self.conv(x))), (2, 3)))


def image_batches(steps, seed=2):
    random = np.random.default_rng(seed)
    return [(random.normal(size=(4, 2, 6, 6)).astype(np.float32), random.integers(0, 3, 4).astype(np.int32))
            for _ in range(steps)]


class Scaled(nn.Cell):
    """y = w * x with one weight of any shape; the loss is sum(w * x), so the gradient of w is x itself."""

    def __init__(self, weight):
        super().__init__()
        self.w = ms.Parameter(Tensor(weight), name="w")

    def construct(self, x):
        return ops.ReduceSum()(self.w * x)


class Residual(nn.Cell):
    """A block that can be called with a keyword."""

    def __init__(self, width, seed):
        super().__init__()
        random = np.random.default_rng(seed)
        self.dense = nn.Dense(width, width, bias_init="zeros",
                              weight_init=Tensor(random.normal(0, 0.2, (width, width)).astype(np.float32)))

    def construct(self, x, scale=1.0):
        return x + ops.tanh(self.dense(x)) * scale


class Blocks(nn.Cell):
    """CellList of blocks called with a keyword, and a head; mean of squares of the output as the loss."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        self.blocks = nn.CellList([Residual(width, i) for i in range(depth)])
        self.head = nn.Dense(width, 2, bias_init="zeros",
                             weight_init=Tensor(np.random.default_rng(9).normal(0, 0.3, (2, width)).astype(np.float32)))

    def construct(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return ops.ReduceMean()(ops.square(self.head(x)))


def adam(network):
    """An optimizer of all its parameters."""
    return nn.Adam(network.trainable_params(), 1e-2)


def values_of(parameters):
    """Copies, because on a CPU the arrays are views."""
    return [parameter.asnumpy().copy() for parameter in parameters]


class InAnotherCell(nn.Cell):
    """As a data sink does: the step lies in a graph that is not its own."""

    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, x, y):
        return self.step(x, y)
