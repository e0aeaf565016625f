"""Fine-tune the head of a network, crash, and go on from the checkpoint in the same run directory.

    python examples/04_resume.py

A body learns to tell two spirals apart. Then it is frozen, and a new head learns another task from what the body sees. After
60 of 120 steps an exception ends that; a new step and a new optimizer load the checkpoint of step 50, and a monitor with
`resume=True` goes on with step 51 in the same directory. The steps 51 to 60 are made twice: the table shows that each loss is
what it was before the crash, so that the curve has no seam. It takes some seconds on a CPU.
"""
from __future__ import annotations

from datetime import datetime
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import dataset as ds
from mindspore import nn
from mindspore.common.initializer import HeUniform
from mindspore.train import Model
from mindspore.train.callback import Callback, CheckpointConfig, ModelCheckpoint

import instrument
from instrument import InstrumentedStep, TrainingMonitor

BATCH, WIDTH, STEPS, SAVED, CRASH = 128, 32, 120, 50, 60


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init=HeUniform(), bias_init="zeros")  # releases differ in the default


class Classifier(nn.Cell):
    """Mean loss of [BATCH, 2] points and their classes."""

    def __init__(self, body: nn.Cell, classes: int):
        super().__init__()
        self.body, self.head = body, dense(WIDTH, classes)
        self.loss = nn.CrossEntropyLoss()

    def construct(self, points, labels):
        return self.loss(self.head(self.body(points)), labels)


class Batches:
    """Points on two spirals, and a class: which spiral (`task` 0), or which of its four quarters (1). Steps `first` to `last`.

    The batch of a step depends on its number alone, so that a run that goes on finds the data that it would have had.
    """

    def __init__(self, task: int, first: int, last: int):
        self.task, self.first, self.last = task, first, last

    def __len__(self):
        return self.last - self.first + 1

    def __getitem__(self, index):
        random = np.random.default_rng(int(self.first + index))
        arm, along = random.integers(2, size=BATCH), random.uniform(0, 1, BATCH)
        angle = 3 * np.pi * np.sqrt(0.02 + along)
        points = np.stack([np.cos(angle + np.pi * arm), np.sin(angle + np.pi * arm)], axis=1) * angle[:, None] / 5
        return points.astype(np.float32), (arm if self.task == 0 else (4 * along).astype(int)).astype(np.int32)


class Crash(Callback):
    """An exception after some step, as a full disk or a lost node would make one."""

    def __init__(self, step: int):
        super().__init__()
        self.step = step

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == self.step:
            raise RuntimeError(f"something broke after step {self.step}")


def train(step: nn.Cell, batches: Batches, *callbacks: Callback) -> None:
    dataset = ds.GeneratorDataset(batches, ["points", "labels"], shuffle=False)
    Model(step).train(1, dataset, callbacks=list(callbacks), dataset_sink_mode=False)


def fine_tuning(body: nn.Cell) -> InstrumentedStep:
    """A new head on the frozen body, and a new optimizer, whose learning rate falls to nothing."""
    for parameter in body.get_parameters():
        parameter.requires_grad = False  # before the step is made: it has a weight norm then, and no gradient
    network = Classifier(body, 4)
    rates = [0.03 * (1 - number / STEPS) for number in range(STEPS)]
    return InstrumentedStep(network, nn.Adam(network.trainable_params(), rates)).set_train()


def main(run_dir: str | None = None) -> None:
    """Pre-train, fine-tune until it breaks, and go on."""
    run_dir = run_dir or f"runs/resume-{datetime.now():%Y%m%d-%H%M%S}"
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)

    body = nn.SequentialCell(dense(2, WIDTH), nn.ReLU(), dense(WIDTH, WIDTH), nn.ReLU())
    network = Classifier(body, 2)
    losses: list[float] = []
    keep = TrainingMonitor(writers=[lambda record: losses.append(record.values["loss"])], measure=False)
    train(nn.TrainOneStepCell(network, nn.Adam(network.trainable_params(), 1e-2)).set_train(), Batches(0, 1, 300), keep)
    print(f"The body has learned to tell two spirals apart: loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end.\n"
          "Now it is frozen, and a new head learns in which quarter of its spiral a point lies.")

    monitor = TrainingMonitor(run_dir)
    run_dir = monitor.run_dir  # the next free name, if that one was taken
    checkpoints = ModelCheckpoint("head", str(run_dir / "checkpoints"), CheckpointConfig(save_checkpoint_steps=SAVED))
    try:
        train(fine_tuning(body), Batches(1, 1, STEPS), monitor, checkpoints, Crash(CRASH))
    except RuntimeError as error:
        print(f"Training has crashed: {error}.")
    before = instrument.read(run_dir)

    # From here on, as in a new process: nothing is left but the files.
    body = nn.SequentialCell(dense(2, WIDTH), nn.ReLU(), dense(WIDTH, WIDTH), nn.ReLU())
    step = fine_tuning(body)
    # Weights, frozen ones too, the moments of Adam, and `global_step`, from which numbers of steps and the schedule go on.
    [checkpoint] = Path(run_dir).glob("checkpoints/*.ckpt")
    ms.load_param_into_net(step, ms.load_checkpoint(str(checkpoint)))
    done = int(step.optimizer.global_step.asnumpy()[0])
    print(f"{checkpoint.name} is of step {done}, so training goes on with step {done + 1}, in the same directory.\n")
    train(step, Batches(1, done + 1, STEPS), TrainingMonitor(run_dir, resume=True))
    after = instrument.read(run_dir)

    loss, again, rate = (dict(zip(*run[name])) for run, name in ((before, "loss"), (after, "loss"), (after, "learning_rate")))
    for number in [1, 20, 40, *range(SAVED - 1, CRASH + 3), 80, 100, STEPS]:
        was = f"{loss[number]:.6f}" if number in loss else 8 * "-"
        print(f"step {number:3}  loss before the crash {was}  of the whole run {again[number]:.6f}  "
              f"learning rate {rate[number]:.5f}")
    difference = max(abs(loss[number] - again[number]) for number in loss)
    steps = after["loss"].step
    print(f"\nThe run has the steps {steps[0]} to {steps[-1]}, {len(steps)} records. Losses before the crash and those of the "
          f"whole run differ by {difference:.1g} at most.")
    name = "body.0.weight"
    norm = after[f"weight/norm/{name}"].value
    print(f"{name} is frozen: its norm is {norm[0]:.4f} at step 1 and {norm[-1]:.4f} at step {steps[-1]}, and "
          f"grad/norm/{name} is {'recorded' if f'grad/norm/{name}' in after else 'not there'}.\n"
          f"The records are in {run_dir}.")


if __name__ == "__main__":
    main()
