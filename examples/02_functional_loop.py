"""Measure gradients and weights in a training loop that is written with `ms.value_and_grad`.

    python examples/02_functional_loop.py

`NormStats` has the norms of `InstrumentedStep` for a loop that has its own step: it takes the gradients and returns one
vector, which its schema names. Activations need `InstrumentedStep`. A `TrainingMonitor` records the loop, as it does
`Model.train`. A small network learns to tell two spirals apart; it takes some seconds on a CPU.
"""
from __future__ import annotations

from datetime import datetime

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import HeUniform

from instrument import NormStats, TrainingMonitor

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

    def show(record):
        """A writer: called in the background with what was recorded."""
        values = record.values
        layer = max((name for name in values if name.startswith("grad/norm/")), key=values.__getitem__, default=None)
        if layer is not None:
            print(f"step {record.step:3}  loss {values['loss']:.4f}  gradient norm {values['grad/norm']:.3f}  "
                  f"weight norm {values['weight/norm']:.2f}  largest gradient {layer[len('grad/norm/'):]}")

    # One call in ten is recorded, and the last one: what the others return stays on the device.
    monitor = TrainingMonitor(run_dir, writers=[show], every=10, batch_size=BATCH)
    with monitor.loop(train_step, schema=norm_stats.schema, optimizer=optimizer) as recorded_step:
        for _ in range(steps):
            loss, stats = recorded_step(*spirals(random))
            if recorded_step.should_stop:  # an alarm with policy="stop"
                break
    print(f"\nThe records are in {monitor.run_dir}")


if __name__ == "__main__":
    main()
