"""The network that `instrument bench` and the benchmarks train: a plain GPT, of three sizes."""
from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from instrument.attention import AttentionProbe

# By the number of parameters: arguments of the network, and how many texts make a batch.
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "0.5M": ({"vocabulary": 96, "width": 96, "depth": 4, "heads": 4, "length": 64}, 12),
    "5M": ({"vocabulary": 512, "width": 256, "depth": 6, "heads": 8, "length": 128}, 8),
    "25M": ({"vocabulary": 512, "width": 512, "depth": 8, "heads": 8, "length": 128}, 8),
}


class Block(nn.Cell):
    """Pre-norm transformer block with causal attention; `has_probe` makes its scores measurable."""

    def __init__(self, width: int, heads: int, length: int, has_probe: bool = False):
        super().__init__()
        self.heads, self.length, self.width = heads, length, width
        self.norm1 = nn.LayerNorm((width,))
        self.qkv = nn.Dense(width, 3 * width)
        self.out = nn.Dense(width, width)
        self.norm2 = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 4 * width)
        self.act = nn.ReLU()
        self.down = nn.Dense(4 * width, width)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.softmax = ops.Softmax(-1)
        self.probe = AttentionProbe() if has_probe else nn.Identity()
        self.mask = Tensor(np.triu(np.full((length, length), -1e9), 1), ms.float32)
        self.split = ops.Split(axis=0, output_num=3)

    def construct(self, x):
        y = ops.reshape(self.qkv(self.norm1(x)), (-1, self.length, 3, self.heads, self.width // self.heads))
        q, k, v = self.split(ops.transpose(y, (2, 0, 3, 1, 4)))
        shape = (-1, self.length, self.width // self.heads)
        scores = self.scores(ops.reshape(q, shape), ops.reshape(k, shape)) / math.sqrt(self.width // self.heads) + self.mask
        y = self.mix(self.softmax(self.probe(scores)), ops.reshape(v, shape))
        y = ops.transpose(ops.reshape(y, (-1, self.heads, self.length, self.width // self.heads)), (0, 2, 1, 3))
        x = x + self.out(ops.reshape(y, (-1, self.width)))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Cell):
    """Returns the mean cross entropy of the next token; about 12 width² depth parameters."""

    def __init__(self, vocabulary: int = 512, width: int = 256, depth: int = 6, heads: int = 8, length: int = 128,
                 has_probes: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.CellList([Block(width, heads, length, has_probes) for _ in range(depth)])
        self.norm = nn.LayerNorm((width,))
        self.head = nn.Dense(width, vocabulary, has_bias=False)
        self.positions = Tensor(np.arange(length), ms.int32)
        self.width = width
        self.loss = nn.CrossEntropyLoss()

    def construct(self, tokens, targets):
        x = ops.reshape(self.embedding(tokens) + self.position(self.positions), (-1, self.width))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), ops.reshape(targets, (-1,)))


def gpt_batch(vocabulary: int = 512, length: int = 128, batch: int = 8) -> tuple[Tensor, Tensor]:
    """Random tokens and targets."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocabulary, (2, batch, length)).astype(np.int32)
    return Tensor(tokens[0]), Tensor(tokens[1])
