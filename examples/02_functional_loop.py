"""Measure gradients and weights in a training loop that is written with `ms.value_and_grad`.

    python examples/02_functional_loop.py

`NormStats` has the norms of `InstrumentedStep` for a loop that has its own step: it takes the gradients and returns one
vector, which its schema names. Activations need `InstrumentedStep`. A small network learns to tell two spirals apart;
it takes some seconds on a CPU.
"""
from __future__ import annotations

import time
from datetime import datetime

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import HeUniform

from instrument import NormStats, runs
from instrument.record import Record
from instrument.writers import JsonlWriter

BATCH, STEPS, WIDTH, MAX_NORM = 256, 120, 64, 1.0


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init=HeUniform(), bias_init="zeros")  # releases differ in the default


def spirals(random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Points [BATCH, 2] on two spirals, and which of the two each lies on."""
    labels = random.integers(2, size=BATCH)
    angle = 3 * np.pi * np.sqrt(random.uniform(0.02, 1, BATCH))
    points = np.stack([np.cos(angle + np.pi * labels), np.sin(angle + np.pi * labels)], axis=1) * angle[:, None] / 5
    points += random.normal(0, 0.03, points.shape)
    return Tensor(points.astype(np.float32)), Tensor(labels.astype(np.int32))


def main(steps: int = STEPS, run_dir: str | None = None) -> None:
    """Train for `steps` steps, and record them in a new directory."""
    run_dir = run_dir or f"runs/functional-{datetime.now():%Y%m%d-%H%M%S}"
    ms.set_context(mode=ms.PYNATIVE_MODE)  # what is not inside `ms.jit` runs at once
    ms.set_seed(1)
    random = np.random.default_rng(1)

    net = nn.SequentialCell(dense(2, WIDTH), nn.ReLU(), dense(WIDTH, WIDTH), nn.ReLU(), dense(WIDTH, 2))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.Adam(net.trainable_params(), 1e-2)

    def forward(points, labels):
        return loss_fn(net(points), labels)

    loss_and_gradients = ms.value_and_grad(forward, None, optimizer.parameters)
    # The same parameters as above, in the same order: a gradient has no name of its own.
    norm_stats = NormStats(optimizer.parameters)

    @ms.jit  # one graph; without it everything below works as well, operator by operator
    def train_step(points, labels):
        loss, gradients = loss_and_gradients(points, labels)
        # Before clipping, which would hide how large the gradient is. With loss scaling or several devices: after the
        # gradients have been unscaled and reduced.
        stats = norm_stats(gradients)
        optimizer(ops.clip_by_global_norm(gradients, MAX_NORM))
        return loss, stats

    run = runs.create(run_dir)
    with run, JsonlWriter(run) as writer:
        for step in range(1, steps + 1):
            loss, stats = train_step(*spirals(random))
            if step % 10 and step != 1:
                continue  # `stats` stays on the device: only the steps that are recorded cost a copy
            values = {"loss": float(loss.asnumpy()), **norm_stats.schema.unpack(stats)}
            writer.write(Record(step, time.time(), values))
            layer = max((name for name in values if name.startswith("grad/norm/")), key=values.__getitem__)
            print(f"step {step:3}  loss {values['loss']:.4f}  gradient norm {values['grad/norm']:.3f}  "
                  f"weight norm {values['weight/norm']:.2f}  largest gradient {layer[len('grad/norm/'):]}")
    print(f"\nThe records are in {runs.metrics_file(run)}")


if __name__ == "__main__":
    main()
