"""Make training fail in six ways, and see which alarm tells of each.

    python examples/07_six_failures.py [--run-dir DIR]

A small network learns to predict a number from 16 counts: once as it should, and then six times with something that goes wrong
in real training as well. A `TrainingMonitor` with its default alarms watches, and prints at once what they say. At the
end a table tells what happened when, which alarm told of it when, and which layer it named. Only the causes are made up: all
numbers are those of the training. It takes half a minute on a CPU. Each run has a directory of its own in
`runs/failures-<date>-<time>`, or in DIR.
"""
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dataset as ds
from mindspore.train import Loss, Model
from mindspore.train.callback import Callback

import instrument
from instrument import InstrumentedStep, TrainingMonitor
from instrument.alarms import DataStarved, default_alarms

BATCH, COUNTS, WIDTH, STEPS, RATE = 32, 16, 32, 80, 0.01
FAILS = 51  # the step at which something goes wrong, where that is one step


def dense(inputs: int, outputs: int) -> nn.Dense:
    weight = np.random.default_rng(inputs + outputs).normal(0, (2 / inputs) ** 0.5, (outputs, inputs))
    return nn.Dense(inputs, outputs, weight_init=Tensor(weight, ms.float32), bias_init="zeros")  # the same on all releases


class Logarithm(nn.Cell):
    """log(1 + count), a usual way to feed counts to a network; NaN of a count below -1."""

    def construct(self, x):
        return ops.log(x + 1)


class Network(nn.Cell):
    """From counts [BATCH, COUNTS] to numbers [BATCH, 1]."""

    def __init__(self):
        super().__init__()
        self.log = Logarithm()
        self.first, self.act1 = dense(COUNTS, WIDTH), nn.ReLU()
        self.second, self.act2 = dense(WIDTH, WIDTH), nn.ReLU()
        self.head = dense(WIDTH, 1)

    def construct(self, x):
        return self.head(self.act2(self.second(self.act1(self.first(self.log(x))))))


class Batches:
    """The same counts and targets in every run, unless `spoil(step, counts, targets)` changes them, or takes its time."""

    def __init__(self, first: int, last: int, spoil: Callable[[int, np.ndarray, np.ndarray], None] | None = None):
        self.first, self.last, self.spoil = first, last, spoil

    def __len__(self):
        return self.last - self.first + 1

    def __getitem__(self, index):
        step = int(index) + self.first
        random = np.random.default_rng(step)
        counts = random.poisson(3, (BATCH, COUNTS)).astype(np.float32)
        targets = np.log1p(counts[:, :4]).sum(axis=1, keepdims=True) - 5 + random.normal(0, 0.3, (BATCH, 1)).astype(np.float32)
        if self.spoil is not None:
            self.spoil(step, counts, targets)
        return counts, targets


class Schedule(Callback):
    """Sets the learning rate of each step."""

    def __init__(self, optimizer: nn.Cell, rate_at: Callable[[int], float]):
        super().__init__()
        self.optimizer, self.rate_at = optimizer, rate_at

    def on_train_step_begin(self, run_context):
        rate = self.rate_at(run_context.original_args().cur_step_num)
        self.optimizer.learning_rate.set_data(Tensor(rate, ms.float32))


class Laboratory:
    """One step, compiled once, with which each training begins from the same weights. `directory` is where the runs go.

    Each method trains with another failure, and returns the run and the step at which that happened.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        net, loss_fn = Network(), nn.MSELoss()
        self.optimizer = nn.Momentum(net.trainable_params(), Tensor(RATE, ms.float32), 0.9)
        # All cells of the network, by name: "leaves" would pass over `log`, which has no parameters.
        self.step = InstrumentedStep(nn.WithLossCell(net, loss_fn), self.optimizer, activations=[r"^_backbone\.\w+$"])
        self.model = Model(self.step.set_train(), eval_network=nn.WithEvalCell(net, loss_fn), eval_indexes=[0, 1, 2],
                           metrics={"loss": Loss()})
        self.start = [(parameter, parameter.asnumpy().copy()) for parameter in self.step.get_parameters()]

    def train(self, name: str, *, spoil=None, rate_at=lambda step: RATE, alarms=None) -> instrument.reading.RunData:
        callbacks = self.begin(name, rate_at, alarms)
        batches = ds.GeneratorDataset(Batches(1, STEPS, spoil), ["counts", "targets"], shuffle=False)
        self.model.train(1, batches, callbacks=callbacks, dataset_sink_mode=False)
        return instrument.read(callbacks[-1].run_dir)

    def begin(self, name: str, rate_at: Callable[[int], float], alarms=None) -> list[Callback]:
        for parameter, value in self.start:
            parameter.set_data(Tensor(value))
        self.step.set_step(0)
        monitor = TrainingMonitor(self.directory / name, alarms=alarms, batch_size=BATCH, hyper_parameters={"failure": name})
        return [Schedule(self.optimizer, rate_at), monitor]  # in this order: the monitor reads the rate that has been set

    def healthy(self):
        """Nothing goes wrong."""
        return self.train("healthy"), None

    def explosion(self):
        """The targets of one batch are in grams in place of kilograms: its gradient is a thousand times too large."""
        def spoil(step, counts, targets):
            if step == FAILS:
                targets *= 1000

        return self.train("explosion", spoil=spoil), FAILS

    def learning_rate(self):
        """The schedule multiplies the learning rate by ten twice, where it should have divided."""
        return self.train("learning-rate", rate_at=lambda step: RATE if step < FAILS else 100 * RATE), FAILS

    def starving(self):
        """From one step on, each batch takes 100 ms to load, and the network is quicker than that."""
        def spoil(step, counts, targets):
            if step >= FAILS:
                time.sleep(0.1)

        # The default looks at 50 records, which is most of so short a run.
        others = [alarm for alarm in default_alarms() if alarm.name != "DataStarved"]
        return self.train("starving", spoil=spoil, alarms=[DataStarved(window=20), *others]), FAILS

    def overfitting(self):
        """There are 32 samples of training, with noise in their targets, and the network learns them by heart."""
        def spoil(step, counts, targets):
            targets += np.random.default_rng(0).normal(0, 1, targets.shape)

        callbacks = self.begin("overfitting", lambda step: RATE)
        training, validation = (ds.GeneratorDataset(batches, ["counts", "targets"], shuffle=False)
                                for batches in (Batches(1, 1, spoil), Batches(101, 104)))
        self.model.fit(200, training, validation, valid_frequency=10, callbacks=callbacks, dataset_sink_mode=False,
                       valid_dataset_sink_mode=False)
        run = instrument.read(callbacks[-1].run_dir)
        steps, losses = run["val/loss"]
        return run, int(steps[losses.argmin()])  # from there on the validation loss rises

    def nan(self):
        """One count of one batch is -9, as a code for "unknown", and log(1 - 9) is NaN."""
        def spoil(step, counts, targets):
            if step == FAILS:
                counts[3, 7] = -9

        return self.train("nan", spoil=spoil), FAILS

    def dead(self):
        """The learning rate is ten times too high from the beginning, and pushes biases so far down that ReLU is 0."""
        run = self.train("dead", rate_at=lambda step: 10 * RATE)
        layers = [run[name] for name in run if name.startswith("activation/zero_fraction/")]
        alive = [each.step[each.value < 1] for each in layers]
        return run, min(int(steps[-1]) for steps in alive) + 1


def main(run_dir: str | None = None) -> None:
    """Fail in six ways, and print what was told of it."""
    directory = Path(run_dir or f"runs/failures-{datetime.now():%Y%m%d-%H%M%S}")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)

    lab = Laboratory(directory)
    rows = [("run", "alarm", "happened", "told", "layer", "other alarms")]
    for experiment, expected in ((lab.healthy, ""), (lab.explosion, "GradientSpike"), (lab.learning_rate, "LearningRate"),
                                 (lab.starving, "DataStarved"), (lab.overfitting, "Overfitting"), (lab.nan, "NonFinite"),
                                 (lab.dead, "DeadLayer")):
        print(f"\n{experiment.__doc__}", flush=True)
        run, happened = experiment()
        begun = [each for each in run.alarms if each["state"] == "begin"]
        told = next((each for each in begun if each["alarm"] == expected), None)
        others = ", ".join(dict.fromkeys(each["alarm"] for each in begun if each["alarm"] != expected)) or "-"
        if told is None:
            rows.append((run.path.name, "none", "-", "-", "-", others))
        else:
            rows.append((run.path.name, expected, str(happened), str(told["first_step"]), told["where"] or "-", others))

    widths = [max(map(len, column)) for column in zip(*rows)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    directory = os.path.relpath(directory)
    print(f"\nTo look at them:\n"
          f"    instrument serve {directory}        # pip install \"mindspore-instrument[dashboard]\"\n"
          f"    instrument compare {directory}/{rows[1][0]} {directory}/{rows[2][0]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make training fail in six ways, and see which alarm tells of each.")
    parser.add_argument("--run-dir", help="where the runs go; by default runs/failures-<date>-<time>")
    main(parser.parse_args().run_dir)
