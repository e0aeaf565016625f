"""`MFInstrumentedStep`: MindFormers' training step, measured.

Owns where MindFormers' step is listened to, and what it has in common with the one for pipelines, which is in `pipeline.py`.
Its `construct` runs as it is, and returns what it returns.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from instrument.controls import state
from instrument.mindformers import releases, settings
from instrument.notices import tell
from instrument.step_options import CannotUpgrade, StepOptions
from instrument.upgrade import WithLossScale, upgrade

# Cells that MindFormers and MindSpore put around the model; names of cells are those of the model itself, as in a checkpoint.
_AROUND = ("DataOrderWrapperCell", "GradAccumulationCell", "GradAccumulationCellWithTwoOutput",
           "GradAccumulationCellWithMultiOutputs", "PipelineCell", "PipelineCellWithTwoOutput", "PipelineCellWithMultiOutputs",
           "MicroBatchInterleaved", "_VirtualDatasetCell")


class Divided:
    """For releases that tell what gradients are divided by: the number of tokens, where the loss is one a token."""

    def grads_for_legacy(self, scaling_sens, *inputs):
        """As the stock step; keeps the divisor."""
        loss, grads, divisor = self.stock_grads_for_legacy(scaling_sens, *inputs)
        if self.calculate_per_token_loss:
            kept = ops.assign(self.divisor, ops.reshape(ops.cast(divisor, ms.float32), (1,)))
            grads = ops.depend(grads, kept)
        return loss, grads, divisor

    def grads_for_mcore(self, scaling_sens, *inputs):
        """As the stock step; keeps the divisor."""
        loss, grads, divisor = self.stock_grads_for_mcore(scaling_sens, *inputs)
        if self.calculate_per_token_loss:
            kept = ops.assign(self.divisor, ops.reshape(ops.cast(divisor, ms.float32), (1,)))
            grads = ops.depend(grads, kept)
        return loss, grads, divisor


class _KeepsParts(nn.Cell):
    """Calls the network, which returns losses that MindFormers keeps apart, and writes them to `parts`, float32 [3]."""

    def __init__(self, network: nn.Cell, per_token: bool, parts: Parameter):
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "network", network)
        object.__setattr__(self, "parts", parts)
        self.per_token = per_token

    def construct(self, *inputs):
        losses = self.network(*inputs)
        if self.per_token:
            # Sums over tokens, and their numbers; all are divided by the number of tokens of the language model's.
            values = (_element(losses[0]), _element(losses[2]), _element(losses[4]))
            values = ops.Concat()(values) / _element(losses[1])
        else:
            values = ops.Concat()((_element(losses[0]), _element(losses[1]), _element(losses[2])))
        return (ops.depend(losses[0], ops.assign(self.parts, values)),) + losses[1:]


def _element(loss):
    return ops.reshape(ops.cast(loss, ms.float32), (1,))


class _Network:
    """Class attribute: the step's network, and while the step runs the cell that keeps its losses."""

    def __get__(self, step: Any, owner: type | None = None) -> Any:
        if step is None:
            return self
        if vars(step).get("keeper") is not None and step.listens:
            return step.keeper
        try:
            return vars(step)["_cells"]["network"]
        except KeyError:
            raise AttributeError("network") from None


class MFStep(WithLossScale):
    """What is the same in MindFormers' two training steps."""

    def prepare(self, options: StepOptions) -> None:
        super().prepare(options)
        releases.warn_if_untested()
        if self.is_per_token and options.activation_gradients and not releases.TELLS_DIVISOR:
            raise ValueError("activation_gradients: with calculate_per_token_loss, MindFormers "
                             f"{releases.RELEASE} does not tell what they are to be divided by. Leave one of them out.")
        if getattr(self, "use_clip_grad", False):
            self.hide("clips_at", float(self._cells["clip_grad_norm"].clip_norm.asnumpy().item()))
            self.hide("ceiling", Tensor([self.clips_at], ms.float32))
        self.hide("skips_by_norm", bool(getattr(self, "use_skip_data_by_global_norm", False)))

    @property
    def is_per_token(self) -> bool:
        """Whether the loss is the sum over tokens, divided by their number."""
        return bool(getattr(self, "calculate_per_token_loss", False))

    def observed_network(self) -> nn.Cell:
        network = self._cells["network"]
        while type(network).__name__ in _AROUND:
            inside = network.name_cells()
            network = inside["network"] if "network" in inside else inside["_backbone"]  # that of _VirtualDatasetCell
        return network

    def steps_before(self, params: Mapping[str, Any]) -> int:
        return releases.steps_before(params)

    def clipped(self, norm):
        """In the graph: the norm of the gradients that the optimizer gets, float32 [1]."""
        return norm * self.ceiling / (ops.Maximum()(norm, self.ceiling) + 1e-6)  # as mindformers.core.clip_grad has it

    def is_left_out(self, outputs, overflow):
        left_out = overflow
        if self.skips_by_norm:
            too_large = ops.GreaterEqual()(ops.reshape(outputs[4], (1,)), self.global_norm_spike_threshold)
            left_out = ops.Maximum()(overflow, ops.cast(too_large, ms.float32))
        return left_out


_bases: tuple[type, ...] = (MFStep, releases.MFTrainOneStepCell)
if releases.TELLS_DIVISOR:
    _bases = (Divided, *_bases)


class MFInstrumentedStep(*_bases):  # type: ignore[misc]
    """`MFTrainOneStepCell`, measured: `runner_wrapper: type: MFInstrumentedStep`.

    Training is what it was, and so is the tuple that each call returns. The vector of the last measured step is
    `snapshot()`, its names are in `schema`, and `InstrumentMonitor` records it.

    Args:
        network: The network that returns the loss.
        optimizer: Updates its parameters.
        given: The other arguments of `MFTrainOneStepCell`, those that the trainer adds, and the fields of
            `instrument.upgrade.StepOptions`. None stands for a default.

    Raises:
        ValueError: A name is unknown; the message has near ones. Or a value cannot work.
    """

    network = _Network()
    stock_construct = releases.MFTrainOneStepCell.construct
    stock_start_overflow_check = releases.MFTrainOneStepCell.start_overflow_check
    stock_get_overflow_status = releases.MFTrainOneStepCell.get_overflow_status
    if releases.TELLS_DIVISOR:
        stock_grads_for_legacy = releases.MFTrainOneStepCell.grads_for_legacy
        stock_grads_for_mcore = releases.MFTrainOneStepCell.grads_for_mcore

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, **given: Any):
        nn.Cell.__init__(self, auto_prefix=False)  # first, because the destructor of 2.0.0 fails on less than a Cell
        settings.check_names("runner_wrapper: MFInstrumentedStep", given, releases.stock_names() | {*settings.STEP_NAMES})
        options = settings.step_options(given)
        stock = {name: value for name, value in given.items() if name not in settings.STEP_NAMES}
        stock = {name: value for name, value in stock.items() if value is not None or not _has_default(name)}
        if isinstance(stock.get("scale_sense"), (int, float)):
            stock["scale_sense"] = Tensor(float(stock["scale_sense"]), ms.float32)  # 0.8 takes no number
        releases.MFTrainOneStepCell.__init__(self, network, optimizer, **releases.stock_arguments(stock))
        self.__class__ = releases.MFTrainOneStepCell
        try:
            upgrade(self, options)
        except CannotUpgrade as error:
            tell(f"MFInstrumentedStep is a plain MFTrainOneStepCell here: {error}")
            return
        settings.show("MFInstrumentedStep", vars(options))

    def prepare(self, options: StepOptions) -> None:
        super().prepare(options)
        self.hide("keeper", None)
        if not getattr(self, "use_legacy", True):
            self.hide("parts", state("parts", np.zeros(3, np.float32)))
            self.hide("keeper", _KeepsParts(self.inner, self.is_per_token, self.parts))

    def loss_parts(self) -> tuple[str, ...]:
        return () if self.keeper is None else ("lm", "mtp", "aux")

    def part_values(self, loss):
        return ops.depend(self.parts, loss)


def _has_default(name: str) -> bool:
    known = inspect.signature(releases.MFTrainOneStepCell.__init__).parameters
    return name in known and known[name].default is not inspect.Parameter.empty
