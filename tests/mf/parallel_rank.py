"""One rank of test_parallel_training: MindFormers' Trainer in data parallel; leaves what each run did in a file.

    python parallel_rank.py DIRECTORY
"""
from __future__ import annotations

import dataclasses
import pathlib
import pickle
import sys
import warnings

from mindspore.communication import get_rank, init
from mindspore.train import Callback

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trainer

BATCHES = 8  # four steps of each of two ranks
EVERYTHING = {"scope": "global", "ranks": True, "activations": "leaves", "activation_gradients": True, "updates": True,
              "spike_window": 2}
# Mode, and what is measured; None for MindFormers' own step.
RUNS = {"stock": ("graph", None), "local": ("graph", {}), "global": ("graph", EVERYTHING),
        "pynative": ("pynative", EVERYTHING)}


class Inputs(Callback):
    """Keeps what each step was given: int32 [BATCH, LENGTH + 1]."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_step_begin(self, run_context):
        [rows] = run_context.original_args().train_dataset_element
        self.rows.append(trainer.plain(rows))


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    init()
    for name, (mode, measured) in RUNS.items():
        inputs = Inputs()
        changes = {"runner_wrapper": {"scale_sense": 4.0}, "use_parallel": True}
        if measured is not None:
            changes["callbacks"] = trainer.with_monitor(folder / "runs" / name, **measured)
        run = trainer.run(folder / f"{name}_{get_rank()}", mode=mode, stock=measured is None, batches=BATCHES, more=[inputs],
                          **changes)
        about = {"rows": inputs.rows, "step": type(run.step).__name__}
        with open(folder / f"{name}_{get_rank()}.pickle", "wb") as file:
            pickle.dump((dataclasses.replace(run, step=None), about), file)
