"""Train a detector whose network returns several losses: one is differentiated, all are reported.

    python examples/03_several_losses.py

A detector's loss is a sum of parts, and what one wants to see is each part. `loss_key` names the one that trains; the
other scalars come back as `loss/<key>` in the same vector, with no gradient of their own. (`nn.TrainOneStepCell`
differentiates every output of the network, so one that returns total and parts trains on twice the sum, silently.)
The detector finds a coloured rectangle in noise; it takes some seconds on a CPU.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from instrument import InstrumentedStep

IMAGE, GRID, CLASSES, BATCH, STEPS = 32, 4, 3, 16, 60
CELL = IMAGE // GRID


class Stage(nn.Cell):
    """Halves height and width."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, weight_init="HeUniform")
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU()

    def construct(self, x):
        return self.act(self.norm(self.conv(x)))


class Detector(nn.Cell):
    """From images and targets to the losses; each grid cell predicts object or not, a box, and a class."""

    def __init__(self):
        super().__init__()
        # Members of a SequentialCell that are alike: what `activations="blocks"`, the default, measures, with the head.
        self.backbone = nn.SequentialCell(Stage(3, 16), Stage(16, 32), Stage(32, 32))
        self.head = nn.Conv2d(32, 1 + 4 + CLASSES, 1, has_bias=True, weight_init="HeUniform")
        self.objectness = nn.BCEWithLogitsLoss()
        self.distance = nn.SmoothL1Loss(reduction="none")
        self.log_softmax = nn.LogSoftmax(axis=-1)
        self.sum = ops.ReduceSum()

    def construct(self, images, present, boxes, classes):
        predicted = self.head(self.backbone(images)).transpose(0, 2, 3, 1)
        # Box and class count only where there is an object, of which each image has one.
        box = self.sum(self.distance(predicted[..., 1:5], boxes) * present) / BATCH
        class_ = -self.sum(self.log_softmax(predicted[..., 5:]) * classes * present) / BATCH
        objectness = self.objectness(predicted[..., :1], present) * GRID
        return {"total": objectness + box + class_, "objectness": objectness, "box": box, "class": class_}


def scenes(random: np.random.Generator) -> tuple[Tensor, ...]:
    """Images [BATCH, 3, IMAGE, IMAGE], and by grid cell: object or not, its box, and its class as one of CLASSES."""
    images = random.normal(0, 0.3, (BATCH, 3, IMAGE, IMAGE))
    present, boxes = np.zeros((BATCH, GRID, GRID, 1)), np.zeros((BATCH, GRID, GRID, 4))
    classes = np.zeros((BATCH, GRID, GRID, CLASSES))
    for i in range(BATCH):
        (row, column), (height, width) = random.integers(4, IMAGE - 4, 2), random.integers(4, 9, 2)
        colour = random.integers(CLASSES)
        top, left = row - height // 2, column - width // 2
        images[i, colour, top:top + height, left:left + width] += 2
        place = i, row // CELL, column // CELL
        present[place], classes[(*place, colour)] = 1, 1
        boxes[place] = row % CELL / CELL, column % CELL / CELL, height / CELL, width / CELL
    return tuple(Tensor(array.astype(np.float32)) for array in (images, present, boxes, classes))


def main(steps: int = STEPS) -> None:
    """Train for `steps` steps, and print every tenth."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    random = np.random.default_rng(1)

    net = Detector()
    optimizer = nn.Momentum(net.trainable_params(), 0.02, 0.9)
    step = InstrumentedStep(net, optimizer, loss_key="total").set_train()  # set_train: batch norm uses the batch

    # `Model(step).train(...)` with a `TrainingMonitor` records the same values; a plain loop shows where they come from.
    for number in range(1, steps + 1):
        _, stats = step(*scenes(random))
        if number % 10 and number != 1:
            continue
        # The names of the parts are known from the first call on, when the network has been compiled.
        values = step.schema.unpack(stats)
        parts = "  ".join(f"{name} {values[f'loss/{name}']:.3f}" for name in ("objectness", "box", "class"))
        rms = "  ".join(f"{values[f'activation/rms/backbone.{i}']:.2f}" for i in range(3))
        print(f"step {number:3}  total {values['loss']:.3f} = {parts}  gradient norm {values['grad/norm']:.2f}  "
              f"rms of the stages {rms}")


if __name__ == "__main__":
    main()
