"""`upgrade`: measure in a training step that somebody else has made, without changing what it returns.

Owns which step cells of MindSpore can be upgraded, and where each of them is listened to. What is measured there, and where
it is kept, lies in `observer.py`.

A step is upgraded by giving the object a subclass of its own class. The subclass keeps the class's own `construct` and
overrides what that calls: the function that differentiates, which then differentiates by the slots of the taps as well, and
what sees the gradients unscaled and reduced over ranks, before they are clipped.
"""
from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from instrument import _compat
from instrument.notices import tell
from instrument.observed import nonfinite_elements
from instrument.observer import Observer
from instrument.outputs import instrumented
from instrument.step_options import CannotUpgrade, StepOptions
from instrument.taps import owners_of

__all__ = ["CannotUpgrade", "StepOptions", "begin", "find_step", "refuse", "register", "upgrade"]

_upgrades: dict[type, type[Observer]] = {}
_reasons: dict[type, str] = {}


def register(stock: type, upgraded: type[Observer]) -> None:
    """Say which class a step of the class `stock` is given."""
    _upgrades[stock] = upgraded


def refuse(stock: type, reason: str) -> None:
    """Say why no step of the class `stock` can be measured."""
    _reasons[stock] = reason


def upgrade(step: nn.Cell, options: StepOptions | None = None) -> Any:
    """Measure in a training step, which goes on as it is, and returns what it returns.

    Args:
        step: An `nn.TrainOneStepCell` or `nn.TrainOneStepWithLossScaleCell`, of this very class, not compiled yet; or
            MindFormers' `MFTrainOneStepCell`, or `MFPipelineWithLossScaleCell` where `options` has `allow_unverified`.
        options: What is measured, and when.

    Returns:
        `step` itself. It has `schema` now, and `snapshot()`, a float32 [K] Tensor of the last measured step; and `step_count`,
        `set_step`, `measure_next`, `read_window` and `remove_taps` as an `InstrumentedStep` has.

    Raises:
        CannotUpgrade: The step is of another class, is compiled, or trains in a way that cannot be measured; the message says
            which. The step is as it was.
        ValueError: An option has a value that cannot work. The step is as it was.
        TypeError: An option has the wrong type.

    Examples:
        >>> step = upgrade(nn.TrainOneStepCell(network, optimizer), StepOptions(activations="leaves"))
        >>> loss = step(x, y)
        >>> step.schema.unpack(step.snapshot())["grad/norm"] > 0
        True
    """
    if isinstance(step, Observer):
        raise CannotUpgrade(f"this {type(step).__name__} is upgraded already")
    own = type(step)
    if own.__module__.startswith("mindformers."):
        import_module("instrument.mindformers")  # registers its steps
    if own in _reasons:
        raise CannotUpgrade(f"the training step is a {own.__name__}: {_reasons[own]}")
    if own not in _upgrades:
        known = ", ".join(cls.__name__ for cls in _upgrades)
        raise CannotUpgrade(f"the training step is a {own.__module__}.{own.__name__}; it is known how to measure in {known}")
    if getattr(step, "compile_cache", None):
        raise CannotUpgrade("the training step is compiled already: upgrade it before its first call")
    step.__class__ = _upgrades[own]
    try:
        step.observe(options or StepOptions())
    except BaseException:
        step.__class__ = own
        raise
    return step


def find_step(network: Any) -> Any:
    """The outermost training step in a train network, or None."""
    cells = network.cells_and_names() if hasattr(network, "cells_and_names") else ()
    return next((cell for _, cell in cells if isinstance(cell, nn.TrainOneStepCell)), None)


def begin(params: Mapping[str, Any], measure: StepOptions | bool | None = None) -> str | None:
    """What a callback does when training begins: upgrade the train network's step, and have its steps numbered.

    Args:
        params: What the callback's context holds.
        measure: The options; None for the default ones; False to leave the step as it is.

    Returns:
        Why the step is not measured; None where it is, or where `measure` is False or there is no Cell at all.

    Raises:
        ValueError: An option of `measure` has a value that cannot work.
        TypeError: An option of `measure` has the wrong type.
    """
    network = params.get("train_network")
    step, measured = find_step(network), instrumented(network)
    if measured is not None and isinstance(measure, StepOptions):
        tell(f"`measure` has no effect, since this {type(measured).__name__} measures already what it was made to.",
             stacklevel=4)
    if measured is None:
        if measure is False or not isinstance(network, nn.Cell):
            return None
        stock = network if step is None else step
        if _compat.auto_parallel_around(network) and not (isinstance(measure, StepOptions) and measure.allow_unverified):
            return ("AutoParallel is around the training step, where tensors of this rank can be shards, and what is measured "
                    "there could not be verified: allow_unverified=True measures all the same, and marks each metric so")
        _take_over(stock)
        try:
            upgrade(stock, measure if isinstance(measure, StepOptions) else None)
        except CannotUpgrade as error:
            return str(error)
        except Exception as error:
            if isinstance(measure, StepOptions):
                raise
            return f"{type(error).__name__}: {error}"
    if isinstance(step, Observer):
        made = step.steps_before(params) + params.get("cur_step_num", 0)
        if made > int(step.step_count.asnumpy()):
            step.set_step(made)
    return None


def _take_over(step: Any) -> None:
    """Have steps that a monitor upgraded around the same network, in an earlier training, give their taps back.

    MindSpore keeps a compiled step, though nothing of the user's refers to it any more, as where a notebook makes another
    `Model` of the same network. One that trains again goes on without activation statistics.
    """
    network = getattr(step, "network", None)
    for owner in owners_of(network) if isinstance(network, nn.Cell) else ():
        if isinstance(owner, Observer) and owner is not step:
            owner.remove_taps()


class UpgradedTrainOneStepCell(Observer, nn.TrainOneStepCell):
    """An `nn.TrainOneStepCell` that is measured: where it reduces the gradients."""

    stock_construct = nn.TrainOneStepCell.construct

    def prepare(self, options: StepOptions) -> None:
        # An optimizer with a loss scale of its own is refused before, so that this one is not undone by anything.
        self.hide("sensitivity", Tensor([float(self.sens)], ms.float32))
        self.uncover("grad_reducer", "stock_reducer")

    def grad_reducer(self, grads):
        """Reduce, and measure."""
        grads = self.stock_reducer(grads)
        return ops.depend(grads, self.measure(grads, self.sensitivity, self.not_measured))


class WithLossScale(Observer):
    """A step with a loss scale: measured where it looks for an overflow. What it overrides is kept under `stock_...`."""

    scales_loss = True

    def prepare(self, options: StepOptions) -> None:
        # The operators that the stock step asks have no kernel on a CPU.
        self.hide("looks_itself", _compat.device_target() == "CPU")
        self.hide("no_elements", Tensor(0.0, ms.float32))

    def start_overflow_check(self, pre_cond, compute_input):
        """As the stock step; nothing on a CPU."""
        if self.looks_itself:
            return Tensor([0] * 8, ms.int32), compute_input
        return self.stock_start_overflow_check(pre_cond, compute_input)

    def get_overflow_status(self, status, compute_output):
        """Whether a gradient overflowed, and measure."""
        overflow = self.find_overflow(status, compute_output)
        measured = self.measure(compute_output, ops.reshape(ops.cast(self.scale_sense, ms.float32), (1,)),
                                ops.reshape(ops.cast(overflow, ms.float32), (1,)))
        return ops.depend(overflow, measured)

    def find_overflow(self, status, compute_output):
        """Whether a gradient overflowed."""
        if self.looks_itself:
            return ops.Greater()(ops.reshape(nonfinite_elements(compute_output), ()), self.no_elements)
        return self.stock_get_overflow_status(status, compute_output)


class UpgradedTrainOneStepWithLossScaleCell(WithLossScale, nn.TrainOneStepWithLossScaleCell):
    """An `nn.TrainOneStepWithLossScaleCell` that is measured. On a CPU, where the stock one does not run, it does."""

    stock_construct = nn.TrainOneStepWithLossScaleCell.construct
    stock_start_overflow_check = nn.TrainOneStepWithLossScaleCell.start_overflow_check
    stock_get_overflow_status = nn.TrainOneStepWithLossScaleCell.get_overflow_status


register(nn.TrainOneStepCell, UpgradedTrainOneStepCell)
register(nn.TrainOneStepWithLossScaleCell, UpgradedTrainOneStepWithLossScaleCell)
