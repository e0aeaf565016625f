"""Networks that the benchmarks measure, by name: `NETWORKS[name]()` returns a function that makes one, and its batch."""
from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from mindspore import Tensor, nn, ops

from instrument.gpt import GPT, SIZES, gpt_batch

__all__ = ["GPT", "NETWORKS", "gpt_batch"]


class MLP(nn.Cell):
    """Four layers of 512: 1 M parameters."""

    def __init__(self, width: int = 512, depth: int = 4):
        super().__init__()
        self.layers = nn.SequentialCell([nn.SequentialCell(nn.Dense(width, width), nn.ReLU()) for _ in range(depth)])
        self.head = nn.Dense(width, 10)
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, y):
        return self.loss(self.head(self.layers(x)), y)


class Residual(nn.Cell):
    """Two convolutions, and what came in added."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        self.skip: nn.Cell = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.SequentialCell(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def construct(self, x):
        y = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        return self.act2(y + self.skip(x))


class ResNet18(nn.Cell):
    """As for CIFAR, 11 M parameters; for pictures of any size: a CPU takes a second or more for 4 of 16 x 16."""

    def __init__(self):
        super().__init__()
        self.stem = nn.SequentialCell(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.SequentialCell([Residual(before, after, 1 if before == after else 2)
                                         for before, after in zip(widths, widths[1:])])
        self.head = nn.Dense(512, 10)
        self.loss = nn.CrossEntropyLoss()
        self.mean = ops.ReduceMean()

    def construct(self, x, y):
        return self.loss(self.head(self.mean(self.blocks(self.stem(x)), (2, 3))), y)


def _classified(*shape: int) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(0)
    return Tensor(random.normal(size=shape).astype(np.float32)), Tensor(random.integers(10, size=shape[0]).astype(np.int32))


def _gpt(size: str) -> tuple[Callable[[], nn.Cell], tuple]:
    network, batch = SIZES[size]
    return functools.partial(GPT, **network, has_probes=True), gpt_batch(network["vocabulary"], network["length"], batch)


NETWORKS: dict[str, Callable[[], tuple[Callable[[], nn.Cell], tuple]]] = {
    "MLP 1M": lambda: (MLP, _classified(64, 512)),
    "GPT 5M": lambda: _gpt("5M"),
    "GPT 25M": lambda: _gpt("25M"),
    "ResNet-18": lambda: (ResNet18, _classified(4, 3, 16, 16)),
}
