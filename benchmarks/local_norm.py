"""What MindFormers measures by itself, as `alternatives.py` measures it: its local norm, its clipping, its norm of weights.

`MFTrainOneStepCell` around the same GPT, which takes it as any network that returns a loss. Its own operators that look for an
overflow have no kernel on a CPU; all of them here, the plain one too, look as an upgraded step does. Nothing is clipped: the
bound is out of reach, so that all make the same steps.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.core.callback.callback import TrainingStateMonitor, _get_loss_output
from mindformers.tools.logger import get_logger
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Tensor, ops
from mindspore.train.callback import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from benchmarks.ways import Way, compare, fresh, show, true_norms
from instrument.observed import nonfinite_elements
from instrument.upgrade import StepOptions, upgrade

OUT_OF_REACH = 1e6


class Stock(MFTrainOneStepCell):
    """MindFormers' step, which looks for an overflow with kernels that a CPU has."""

    def __init__(self, **options: Any):
        super().__init__(*fresh(), max_grad_norm=OUT_OF_REACH, **options)
        self.no_elements = Tensor(0.0, ms.float32)
        self.set_train()

    def start_overflow_check(self, pre_cond, compute_input):
        return Tensor([0] * 8, ms.int32), compute_input

    def get_overflow_status(self, status, compute_output):
        return ops.Greater()(ops.reshape(nonfinite_elements(compute_output), ()), self.no_elements)


def plain(batch: tuple) -> Callable[[], None]:
    """The step with nothing looked at but the loss."""
    step = Stock()
    return lambda: step(*batch)[0].asnumpy() and None


def clipping(batch: tuple) -> Way:
    """The global norm, which the step returns where it clips."""
    step = Stock(use_clip_grad=True)
    return Way("MindFormers, use_clip_grad", lambda: float(step(*batch)[4].asnumpy()), 4, "norm of all gradients")


def local_norm(batch: tuple) -> Way:
    """`local_norm`, which MFLossMonitor logs: here read as its callback reads it, and the root of its sum taken."""
    step = Stock(local_norm=True)

    def run() -> float:
        outputs = step(*batch)
        _get_loss_output(outputs)  # logs it
        return float(np.sqrt(outputs[5].asnumpy().sum()))

    return Way("MindFormers, local_norm", run, 4 * len(step.weights),
               "sum of squares of each gradient of this rank, without names, before the reduction over ranks")


def weight_state(batch: tuple) -> tuple[Way, Callable[[], float]]:
    """TrainingStateMonitor's `weight_state_format`: the way, and the relative error of what it said last."""
    step = Stock()
    said: list[float] = []
    monitor = TrainingStateMonitor(1, {"weight_state_format": "log"})
    monitor._output = lambda tag, data, *where: said.append(data)
    params = InternalCallbackParam(network=step, dataset_sink_mode=False, batch_num=10 ** 6, cur_epoch_num=1, cur_step_num=0)
    context = RunContext(params)

    def run() -> None:
        monitor.on_train_step_begin(context)
        params["net_outputs"] = step(*batch)
        params["cur_step_num"] += 1
        params["net_outputs"][0].asnumpy()
        monitor.on_train_step_end(context)

    def error() -> float:
        true = np.sqrt(sum(np.sum(np.square(weight.asnumpy().astype(np.float64))) for weight in step.weights))
        return abs(said[-1] - true) / true

    return Way("MindFormers, weight_state_format", run, 4, "norm of all weights"), error


def upgraded(batch: tuple, name: str, **options: Any) -> Way:
    """Ours, in MindFormers' step."""
    step = upgrade(MFTrainOneStepCell(*fresh()).set_train(), StepOptions(**options))

    def run() -> float:
        step(*batch)[0].asnumpy()
        return step.schema.unpack(step.snapshot())["grad/norm"]

    sees = "norms of gradients and weights" + ("" if options else ", activations")
    return Way(name, run, 4 * len(step.schema), sees)


def rows(batch: tuple, pairs: int) -> dict[str, Any]:
    """Measure all of them, print the table, and return what goes into the result."""
    get_logger().setLevel(logging.WARNING)  # what it logs is put together all the same, and not printed among the rows
    true, base = true_norms(batch, pairs + 2), plain(batch)
    weights, weight_error = weight_state(batch)
    ways = [upgraded(batch, "ours, norms", activations=None), upgraded(batch, "ours, norms and blocks"), clipping(batch),
            local_norm(batch), weights]
    for run in (base, *(way.step for way in ways)):
        run()
    taken = compare(base, ways, pairs)
    print(f"graph mode, a plain MFTrainOneStepCell: {1000 * taken:.0f} ms")
    found = {"seconds": taken, "rows": list(show(ways, true)), "weight_norm_error": weight_error()}
    print(f"weight_state_format: off by {found['weight_norm_error']:.1e}")
    return found
