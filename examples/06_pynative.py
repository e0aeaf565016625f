"""Look for a NaN in PyNative mode, where a `print` in `construct` prints numbers and a breakpoint stops.

    python examples/06_pynative.py

In PyNative mode nothing is compiled: each operator runs at once, and `construct` is ordinary Python. `InstrumentedStep` is
used as in graph mode, and measures the same. One sample of zeros comes at step 25, and a layer of this network divides each
row by its length: 0 / 0. The loss says that something is wrong, `schema.first_nonfinite` says where, and what is written in
that layer's `construct` says why. It takes some seconds on a CPU.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import HeUniform

from instrument import InstrumentedStep

BATCH, WIDTH, STEPS, BAD = 32, 32, 40, 25


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init=HeUniform(), has_bias=False)


class Normalise(nn.Cell):
    """Divides each row by its length. Here is the bug: a row of zeros has none."""

    def construct(self, x):
        length = ops.sqrt((x * x).sum(axis=-1, keepdims=True))
        zeros = np.flatnonzero(length.asnumpy() == 0)
        if len(zeros):
            # Any Python does here, on numbers: in graph mode there would be none yet. Try `breakpoint()`.
            print(f"in Normalise.construct: rows {zeros.tolist()} of {x.shape[0]} have the length 0")
        return x / length


class Network(nn.Cell):
    """Mean loss of [BATCH, 16] samples and their classes."""

    def __init__(self):
        super().__init__()
        self.embed, self.act, self.normalise, self.head = dense(16, WIDTH), nn.ReLU(), Normalise(), dense(WIDTH, 2)
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, labels):
        return self.loss(4 * self.head(self.normalise(self.act(self.embed(x)))), labels)


def batch(random: np.random.Generator, step: int) -> tuple[Tensor, Tensor]:
    x = random.normal(size=(BATCH, 16)).astype(np.float32)
    labels = (x[:, 0] > x[:, 1]).astype(np.int32)
    if step == BAD:
        x[7] = 0  # as an empty picture, or a text of padding alone
    return Tensor(x), Tensor(labels)


def main(steps: int = STEPS) -> None:
    """Train until something is not finite."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(1)
    random = np.random.default_rng(1)

    network = Network()
    # The cells to be measured, by their names: "leaves" would pass over `Normalise`, which has no parameters.
    step = InstrumentedStep(network, nn.Momentum(network.trainable_params(), 0.1, 0.9),
                            activations=["^embed$", "^act$", "^normalise$", "^head$"]).set_train()
    for number in range(1, steps + 1):
        loss, stats = step(*batch(random, number))
        first = step.schema.first_nonfinite(stats)
        if first is not None or number % 5 == 0 or number == 1:
            values = step.schema.unpack(stats)
            print(f"step {number:2}  loss {values['loss']:.4f}  gradient norm {values['grad/norm']:.4f}  "
                  f"rms of embed {values['activation/rms/embed']:.3f}, of normalise {values['activation/rms/normalise']:.3f}")
        if first is not None:
            print(f"first not finite: {first}")
            break


if __name__ == "__main__":
    main()
