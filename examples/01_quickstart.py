"""Train a small GPT on the Python standard library's own source text, and watch it from inside.

    instrument demo                        # this script, as the package installs it
    python examples/01_quickstart.py       # the same, from a checkout

The two lines that matter are in `main`: `InstrumentedStep` takes the place of `nn.TrainOneStepCell` and returns the
loss with one small vector of statistics, computed in the compiled graph; `TrainingMonitor` records that vector.
The rest is an ordinary MindSpore program. It runs on a CPU, in about a minute.
"""
from __future__ import annotations

import math
import os
import string
import sysconfig
from datetime import datetime
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dataset as ds
from mindspore.common.initializer import Normal, initializer
from mindspore.train import Model

import instrument
from instrument import InstrumentedStep, TrainingMonitor
from instrument.writers import ConsoleWriter

VOCABULARY = "\n" + string.printable[:95]  # any other character is read as "\n"
CONTEXT, BATCH, WIDTH, HEADS, BLOCKS = 64, 12, 96, 4, 4
SCALE = (WIDTH // HEADS) ** -0.5
PEAK_RATE, WARM_UP = 1.5e-3, 20


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init=Normal(0.04))  # releases differ in the default


class Attention(nn.Cell):
    """Causal self-attention over [batch, time, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.qkv = dense(WIDTH, 3 * WIDTH)
        self.out = dense(WIDTH, WIDTH)
        self.mask = Tensor(np.triu(np.full((CONTEXT, CONTEXT), -1e9), 1), ms.float32)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.softmax = nn.Softmax()
        self.mix = ops.BatchMatMul()

    def construct(self, x):
        heads = self.qkv(x).reshape(-1, CONTEXT, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
        weights = self.softmax(self.scores(heads[0], heads[1]) * SCALE + self.mask)
        return self.out(self.mix(weights, heads[2]).transpose(0, 2, 1, 3).reshape(-1, CONTEXT, WIDTH))


class Block(nn.Cell):
    """Attention, then two layers, each added to its own input."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.attention = Attention()
        self.mlp = nn.SequentialCell(dense(WIDTH, 4 * WIDTH), nn.ReLU(), dense(4 * WIDTH, WIDTH))

    def construct(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Cell):
    """Mean loss, in nats a character, of [batch, time] characters and the ones that follow them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), WIDTH, embedding_table=Normal(0.5))
        self.position = Parameter(initializer(Normal(0.5), (CONTEXT, WIDTH)))
        self.blocks = nn.CellList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.head = dense(WIDTH, len(VOCABULARY))
        self.loss = nn.CrossEntropyLoss()

    def construct(self, characters, following):
        x = self.embedding(characters) + self.position
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)).reshape(-1, len(VOCABULARY)), following.reshape(-1))


class Batches:
    """Random windows of a text, the same in every run: (characters, the ones that follow) for each step."""

    def __init__(self, text: str, steps: int):
        number = {character: i for i, character in enumerate(VOCABULARY)}
        self.text = np.array([number.get(character, 0) for character in text], np.int32)
        self.steps = steps

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        starts = np.random.default_rng(int(step)).integers(len(self.text) - CONTEXT, size=BATCH)
        windows = np.stack([self.text[start:start + CONTEXT + 1] for start in starts])
        return windows[:, :-1], windows[:, 1:]


def learning_rates(steps: int) -> list[float]:
    """Linear warm-up, times half a cosine down to a tenth."""
    cosine = (0.55 + 0.45 * math.cos(math.pi * step / steps) for step in range(steps))
    return [PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * factor for step, factor in enumerate(cosine)]


def main(steps: int = 200, run_dir: str | None = None) -> None:
    """Train for `steps` steps, and record them in a new directory."""
    run_dir = run_dir or f"runs/demo-{datetime.now():%Y%m%d-%H%M%S}"
    ms.set_context(mode=ms.GRAPH_MODE)
    if hasattr(ms, "set_device"):  # newer releases warn of the other way
        ms.set_device("CPU")
    else:
        ms.set_context(device_target="CPU")
    ms.set_seed(1)

    net = GPT()
    optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rates(steps), weight_decay=0.01)
    step = InstrumentedStep(net, optimizer)
    monitor = TrainingMonitor(run_dir, writers=[ConsoleWriter()], batch_size=BATCH, tokens_per_sample=CONTEXT,
                              hyper_parameters={"width": WIDTH, "blocks": BLOCKS, "peak_rate": PEAK_RATE})
    run_dir = monitor.run_dir                 # the next free name, if that one was taken

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(source.read_text("utf-8", errors="replace") for source in sources)
    dataset = ds.GeneratorDataset(Batches(text, steps), ["characters", "following"], shuffle=False)
    print(f"A GPT with {sum(p.size for p in net.trainable_params()):,} weights learns from {len(text):,} characters of "
          f"Python.\nThe step is compiled first, which takes some seconds.", flush=True)
    Model(step).train(1, dataset, callbacks=[monitor], dataset_sink_mode=False)

    number, loss = instrument.read(run_dir)["loss"]
    run_dir = os.path.relpath(run_dir)
    print(f"\nLoss {loss[0]:.2f} at step {number[0]}, {loss[-1]:.2f} at step {number[-1]}. "
          f"The records are in {run_dir}. To look at them:\n"
          f"    instrument serve {Path(run_dir).parent}            # pip install \"mindspore-instrument[dashboard]\"\n"
          f"    instrument tail {run_dir}\n"
          f"    tensorboard --logdir {Path(run_dir).parent}        # pip install tensorboard")


if __name__ == "__main__":
    main()
