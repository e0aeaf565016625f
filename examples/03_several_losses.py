"""Train a detector whose network returns several losses: one is differentiated, all are reported.

    python examples/03_several_losses.py

A detector's loss is a sum of parts, and what one wants to see is each part. `loss_key` names the one that trains; the
other scalars come back as `loss/<key>` in the same vector, with no gradient of their own. (`nn.TrainOneStepCell`
differentiates every output of the network, so one that returns total and parts trains on twice the sum, silently.)

The detector finds coloured rectangles in noise by deformable attention, as Deformable DETR (Zhu et al., ICLR 2021) does: each
query looks at a few points around its place, and learns which; by a falling entropy an `AttentionProbe` shows how the queries
make up their minds. The mean IoU of its boxes and the true ones, on fresh pictures, is printed before and after. It takes half
a minute on a CPU.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import HeUniform, Normal, initializer

from instrument import AttentionProbe, InstrumentedStep

IMAGE, CLASSES, BATCH, STEPS = 32, 3, 16, 200
GRID = 2                      # each of GRID * GRID queries finds the object, if there is one, of its part of the picture
QUERIES, SIDE = GRID * GRID, IMAGE // 4                 # the feature map is SIDE * SIDE
WIDTH, HEADS, POINTS, LAYERS = 32, 4, 4, 2


def dense(inputs: int, outputs: int, scale: float = 1.0) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init=Normal(scale * inputs ** -0.5), bias_init="zeros")  # releases differ in it


def stage(inputs: int) -> nn.SequentialCell:
    """Halves height and width."""
    return nn.SequentialCell(nn.Conv2d(inputs, WIDTH, 3, stride=2, weight_init=HeUniform()), nn.BatchNorm2d(WIDTH), nn.ReLU())


class DeformableAttention(nn.Cell):
    """Each query [BATCH, QUERIES, WIDTH] takes POINTS samples a head from the features [BATCH, SIDE * SIDE, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.offsets = dense(WIDTH, HEADS * POINTS * 2, 0.1)
        self.scores = dense(WIDTH, HEADS * POINTS, 0.1)
        self.value, self.out = dense(WIDTH, WIDTH), dense(WIDTH, WIDTH)
        self.probe = AttentionProbe()
        self.softmax = nn.Softmax()
        # At first head h looks in direction h, at points that are one, two, ... pixels of the feature map away.
        angle = 2 * np.pi * np.arange(HEADS) / HEADS + np.pi / 4
        ring = np.stack([np.cos(angle), np.sin(angle)], -1)[:, None] * (1 + np.arange(POINTS))[:, None]
        self.offsets.bias.set_data(Tensor(ring.reshape(-1), ms.float32))
        places = (np.stack(np.meshgrid(np.arange(GRID), np.arange(GRID)), -1).reshape(QUERIES, 1, 1, 2) + 0.5) / GRID
        self.places = Tensor(places * SIDE - 0.5, ms.float32)  # x and y, in pixels of the feature map
        self.first = Tensor(np.arange(BATCH * HEADS).reshape(BATCH, 1, HEADS, 1) * SIDE * SIDE, ms.int32)

    def construct(self, queries, features):
        points = self.places + self.offsets(queries).reshape(BATCH, QUERIES, HEADS, POINTS, 2)
        points = ops.clip_by_value(points, Tensor(0.0, ms.float32), Tensor(SIDE - 1.001, ms.float32))
        weights = self.softmax(self.probe(self.scores(queries).reshape(BATCH, QUERIES, HEADS, POINTS)))
        # One row for each picture, head and pixel; between the four pixels around a point, bilinear interpolation.
        rows = self.value(features).reshape(BATCH, -1, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3).reshape(-1, WIDTH // HEADS)
        corner = ops.floor(ops.stop_gradient(points))
        right, below = (points - corner)[..., 0], (points - corner)[..., 1]
        index = self.first + ops.cast(corner[..., 1] * SIDE + corner[..., 0], ms.int32)
        sampled = 0.0
        for shift, share in ((0, (1 - right) * (1 - below)), (1, right * (1 - below)), (SIDE, (1 - right) * below),
                             (SIDE + 1, right * below)):
            sampled = sampled + ops.gather(rows, index + shift, 0) * (share * weights).expand_dims(-1)
        return self.out(sampled.sum(axis=3).reshape(BATCH, QUERIES, WIDTH))


class Layer(nn.Cell):
    """Deformable attention, then two layers, each added to its own input."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.attention = DeformableAttention()
        self.mlp = nn.SequentialCell(dense(WIDTH, 2 * WIDTH), nn.ReLU(), dense(2 * WIDTH, WIDTH))

    def construct(self, queries, features):
        queries = queries + self.attention(self.norm1(queries), features)
        return queries + self.mlp(self.norm2(queries))


class Detector(nn.Cell):
    """From images to class scores [BATCH, QUERIES, CLASSES + 1], the last for nothing, and boxes (x, y, width, height)."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.SequentialCell(stage(3), stage(WIDTH))
        self.position = Parameter(initializer(Normal(0.5), (SIDE * SIDE, WIDTH)), name="position")
        self.queries = Parameter(initializer(Normal(0.5), (1, QUERIES, WIDTH)), name="queries")
        self.layers = nn.CellList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.head = dense(WIDTH, CLASSES + 1 + 4)
        self.sigmoid = nn.Sigmoid()

    def construct(self, images):
        features = self.backbone(images).reshape(BATCH, WIDTH, SIDE * SIDE).transpose(0, 2, 1) + self.position
        queries = ops.tile(self.queries, (BATCH, 1, 1))
        for layer in self.layers:
            queries = layer(queries, features)
        predicted = self.head(self.norm(queries))
        return predicted[..., :CLASSES + 1], self.sigmoid(predicted[..., CLASSES + 1:])


def overlap(a, b):
    """IoU and generalised IoU (Rezatofighi et al., CVPR 2019) of boxes (x, y, width, height), x and y in the middle."""
    (a1, a2), (b1, b2) = [(each[..., :2] - each[..., 2:] / 2, each[..., :2] + each[..., 2:] / 2) for each in (a, b)]
    inner, outer = ops.relu(ops.minimum(a2, b2) - ops.maximum(a1, b1)), ops.maximum(a2, b2) - ops.minimum(a1, b1)
    common, hull = inner[..., 0] * inner[..., 1], outer[..., 0] * outer[..., 1]
    union = a[..., 2] * a[..., 3] + b[..., 2] * b[..., 3] - common
    return common / union, common / union - (hull - union) / hull


class Losses(nn.Cell):
    """From images and targets to the losses. Each query has its own part of the picture, so nothing needs to be matched."""

    def __init__(self, detector: nn.Cell):
        super().__init__(auto_prefix=False)
        self.detector = detector
        self.log_softmax = nn.LogSoftmax()

    def construct(self, images, classes, boxes, present):
        scores, predicted = self.detector(images)
        class_ = -(self.log_softmax(scores) * classes).sum() / (BATCH * QUERIES)
        # Boxes count only where there is an object.
        box = 5 * (ops.abs(predicted - boxes).sum(axis=-1) * present).sum() / present.sum()
        giou = 2 * ((1 - overlap(predicted, boxes)[1]) * present).sum() / present.sum()
        return {"total": class_ + box + giou, "class": class_, "box": box, "giou": giou}


def scenes(random: np.random.Generator) -> tuple[Tensor, ...]:
    """Images [BATCH, 3, IMAGE, IMAGE], and by query: class (one-hot), box as parts of the image, and object or not."""
    part, images = IMAGE // GRID, random.normal(0, 0.3, (BATCH, 3, IMAGE, IMAGE))
    classes, boxes = np.zeros((BATCH, QUERIES, CLASSES + 1)), np.full((BATCH, QUERIES, 4), 0.5)
    present = random.uniform(size=(BATCH, QUERIES)) < 0.75
    for i, query in np.ndindex(BATCH, QUERIES):
        colour = random.integers(CLASSES) if present[i, query] else CLASSES
        classes[i, query, colour] = 1
        if present[i, query]:
            height, width = random.integers(5, 11, 2)
            top = query // GRID * part + random.integers(part - height + 1)
            left = query % GRID * part + random.integers(part - width + 1)
            images[i, colour, top:top + height, left:left + width] += 2
            boxes[i, query] = np.array([left + width / 2, top + height / 2, width, height]) / IMAGE
    return tuple(Tensor(array.astype(np.float32)) for array in (images, classes, boxes, present))


def mean_iou(detector: nn.Cell, random: np.random.Generator, batches: int = 4) -> float:
    """Over the objects of fresh pictures."""
    detector.set_train(False)
    found = []
    for _ in range(batches):
        images, _, boxes, present = scenes(random)
        found += overlap(detector(images)[1], boxes)[0].asnumpy()[present.asnumpy() > 0].tolist()
    detector.set_train()  # batch norm uses the batch
    return float(np.mean(found))


def main(steps: int = STEPS) -> None:
    """Train for `steps` steps, and print every twentieth."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    random, fresh = np.random.default_rng(1), np.random.default_rng(2)

    detector = Detector()
    network = Losses(detector)
    optimizer = nn.Adam(network.trainable_params(), 3e-3)
    step = InstrumentedStep(network, optimizer, loss_key="total").set_train()
    print(f"mean IoU before training {mean_iou(detector, fresh):.3f}", flush=True)

    # `Model(step).train(...)` with a `TrainingMonitor` records the same values; a plain loop shows where they come from.
    for number in range(1, steps + 1):
        _, stats = step(*scenes(random))
        if number % 20 and number != 1:
            continue
        # The names of the parts are known from the first call on, when the network has been compiled.
        values = step.schema.unpack(stats)
        parts = "  ".join(f"{name} {values[f'loss/{name}']:.3f}" for name in ("class", "box", "giou"))
        entropy = values[f"attention/entropy/detector.layers.{LAYERS - 1}.attention.probe"]
        print(f"step {number:3}  total {values['loss']:.3f} = {parts}  gradient norm {values['grad/norm']:.2f}  "
              f"entropy of attention {entropy:.2f}", flush=True)
    print(f"mean IoU after training {mean_iou(detector, fresh):.3f}")


if __name__ == "__main__":
    main()
