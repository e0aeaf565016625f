"""`InstrumentedStep`: the training step that also returns what happened inside it.

Owns the order of one step: forward and backward once, reduce, measure, clip, update, pack. What is measured lies in
`norms.py` and `taps.py`.
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from instrument import _compat, gradients
from instrument import stats as measure
from instrument.arguments import check_arguments
from instrument.losses import MAX_PARTS, LossKey, LossOutputs
from instrument.norms import NormStats
from instrument.schema import Metric, Schema
from instrument.select import Activations, can_be_exactly_zero, select_cells
from instrument.taps import DEFAULT_STATS, ActivationStats, Taps, check_free, owners_of, release

LossScale = Union[float, Tensor, nn.Cell, None]

LOSSES = MAX_PARTS + 2  # length of the buffer for the loss and its parts, with one to spare so that padding is never empty

_steps: weakref.WeakValueDictionary[int, InstrumentedStep] = weakref.WeakValueDictionary()

@_compat.constexpr
def zeros(length: int) -> Tensor:
    """A float32 constant."""
    return Tensor(np.zeros(length), ms.float32)


def pad(vector, length):
    """A vector with zeros behind it, `length` elements in all."""
    return ops.Concat()((vector, zeros(length - vector.shape[0])))


class _WithTaps:
    """Class attribute of the step: its value-and-gradient function. Taking it opens the gate of the taps.

    The compiler reads this attribute before it reaches the network through it, in whatever graph the step lies (a data
    sink wraps it in another cell), and PyNative mode reads it at every call.
    """

    def __get__(self, step: Any, owner: type | None = None) -> Any:
        if step is None:
            return self
        if step.taps is not None:
            step.taps.gate.is_open = True
        return step.value_and_grad


class InstrumentedStep(nn.TrainOneStepCell):
    """A training step that returns `(loss, stats)`, in place of `nn.TrainOneStepCell` or `TrainOneStepWithLossScaleCell`.

    `stats` is one float32 vector of shape [K], computed in the graph, that `schema` names. Training is what it is
    without: parameters, optimizer state, names and checkpoint keys are those of the stock cell.

    Args:
        network: A Cell that returns the loss: a scalar, or a tuple, list or dict with the loss among its values.
        optimizer: Updates parameters of `network`.
        loss_scale: A number (fixed), a Tensor (set from the host by `set_sense_scale`), or an update cell
            (`nn.FixedLossScaleUpdateCell`, `nn.DynamicLossScaleUpdateCell`). A step whose gradient norm is not finite
            is an overflow: it skips the update. None: no scaling, and no step is skipped.
        max_grad_norm: Clip the gradients by their global norm: g * max / max(norm, max), in float32.
        accumulate: So many calls make one update, with the mean of their gradients, summed in float32. Calls in between
            return the last vector again; its `step` is 0 before the first update.
        loss_key: Index or key of the loss where the network returns several values; the default is the first. The
            other scalars come back as `loss/<index or key>`, and get no gradient.
        activations: Which cells' outputs are measured: `"blocks"` (members of a CellList or SequentialCell of like
            cells, embeddings and head; leaves where there are no blocks), `"leaves"` (cells without children that own a
            parameter or are an activation function), a list of regular expressions on the names of `cells_and_names()`
            or of cell types, a callable `(name, cell) -> bool`, or None. A cell that returns several values
            is measured by its first float tensor.
        activation_stats: Names out of `count`, `mean`, `rms`, `absmax`, `nonfinite`, `zero_fraction`,
            `nonfinite_elements`. With the default, cells whose output can be exactly zero have `zero_fraction` as well.
        activation_gradients: Whether the gradients of the loss by these outputs are measured too, unscaled, unclipped,
            of this rank's own loss.
        per_parameter: Whether norms of each parameter are there beside the totals.
        counts: Count elements too: `grad/nonfinite/<parameter>`, `grad/zero_fraction`, and of every measured cell
            `zero_fraction` and `nonfinite_elements`.

    Inputs:
        - **inputs** (tuple of Tensor) - what `network` takes.

    Outputs:
        - **loss** (Tensor) - the network's loss, unscaled, of its own type.
        - **stats** (Tensor) - float32 [K]. `step` counts updates from 1 (exact up to 2**24); `loss` is the mean over
          accumulated calls; `grad/norm` is unscaled, after the reduction over ranks, before clipping; `weight/norm` is
          of the weights that this forward used.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that cannot work; the message says what to do. The network is as it was.

    Example:
        >>> step = InstrumentedStep(nn.WithLossCell(net, loss_fn), nn.Adam(net.trainable_params(), 1e-3))
        >>> loss, stats = step(x, y)
        >>> step.schema.unpack(stats)["grad/norm"]
    """

    gradients_with_taps = _WithTaps()

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, *, loss_scale: LossScale = None,
                 max_grad_norm: float | None = None, accumulate: int = 1, loss_key: LossKey = None,
                 activations: Activations = "blocks", activation_stats: Sequence[str] = DEFAULT_STATS,
                 activation_gradients: bool = False, per_parameter: bool = True, counts: bool = False):
        nn.Cell.__init__(self, auto_prefix=False)  # first, because the destructor of 2.0.0 fails on less than a Cell
        _compat.warn_if_untested()
        check_arguments(network, optimizer, loss_scale=loss_scale, max_grad_norm=max_grad_norm, accumulate=accumulate,
                        loss_key=loss_key, activation_stats=activation_stats)
        check_no_other_step(network)
        release(network)
        chosen = select_cells(network, activations)
        check_free(chosen)
        super().__init__(network, optimizer)
        self.exits_on_request = bool(getattr(self, "use_graceful_exit", False))  # the stock step's, 2.5 and later
        self.map = ops.HyperMap()
        self.concat = ops.Concat()
        self.scaled = loss_scale is not None
        self._make_loss_scale(loss_scale)
        self.max_grad_norm = max_grad_norm
        self.no_overflow = Tensor(0.0, ms.float32)
        self.ceiling = Tensor([max_grad_norm or 0.0], ms.float32)
        self.accumulate = accumulate
        # Tensors, because with numbers 2.10 makes operators that no platform is documented for.
        self.calls_an_update = Tensor(accumulate, ms.int32)
        # Everything below stays outside the Cell tree: it is in no checkpoint and renames nothing.
        self._hide("outputs", LossOutputs(network, loss_key, self.scaled, weakref.WeakMethod(self._name_metrics)))
        self._hide("norm_stats", NormStats(self.weights, frozen=frozen_weights(network, self.weights),
                                           per_parameter=per_parameter, counts=counts))
        self._hide("step_count", state("step", np.zeros((), np.int32)))
        statistics = [statistics_of(cell, activation_stats, counts) for _, cell in chosen]
        self._hide("taps", Taps(chosen, statistics, activation_gradients, self) if chosen else None)
        self._hide("_schema", Schema([]))
        try:
            self._build()
        except BaseException:
            self.remove_taps()
            raise
        _steps[id(network)] = self

    def _hide(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _build(self) -> None:
        """Make what depends on whether there are taps: the function that differentiates, the schema, the buffers."""
        slots = [tap.slot for tap in self.taps.taps] if self.taps else []
        targets = ParameterTuple([*self.weights, *slots])
        self._hide("value_and_grad", ops.value_and_grad(self.outputs, None, targets, has_aux=True))
        self._hide("activation_stats", ActivationStats(self.taps, self.scaled) if self.taps else None)
        self._name_metrics()
        self.has_taps = bool(slots)
        self.weight_count = len(self.weights)
        if self.accumulate > 1:
            self.length_without_losses = len(self._schema) - 1 - len(self.outputs.parts)
            self.share = Tensor(1 / self.accumulate, ms.float32)
            self._hide("sums", ParameterTuple([state(f"sum.{p.name}", np.zeros(p.shape, np.float32)) for p in targets]))
            self._hide("loss_sums", state("sum_of_losses", np.zeros(LOSSES, np.float32)))
            self._hide("micro_step", state("micro_step", np.zeros((), np.int32)))
            last = np.full(self.length_without_losses + LOSSES, np.nan, np.float32)
            last[0] = 0
            self._hide("last_stats", state("last_stats", last))

    @property
    def schema(self) -> Schema:
        """The metrics of `stats`, in order. The parts of a loss that has several are in it from the first call on."""
        return self._schema

    def _name_metrics(self) -> None:
        metrics = [Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")]
        metrics += [Metric(f"loss/{part}", "loss", "local", "mean") for part in self.outputs.parts]
        if self.scaled:
            metrics += [Metric("loss_scale", "1", "global", "identical"), Metric("overflow", "flag", "global", "identical"),
                        Metric("skipped", "flag", "global", "identical")]
        if self.max_grad_norm is not None:
            metrics.append(Metric("grad/norm_clipped", "1", "global", "identical"))
        self._schema.replace(metrics + list(self.norm_stats.schema.metrics) + (self.taps.metrics() if self.taps else []))

    def _make_loss_scale(self, loss_scale: LossScale) -> None:
        self.loss_scaling_manager = None
        if loss_scale is None:
            self.scale_sense = Tensor(1.0, ms.float32)
            return
        if isinstance(loss_scale, nn.Cell):  # named as in the stock loss-scale cell: the checkpoint keys are its own
            self.loss_scaling_manager = loss_scale
            loss_scale = loss_scale.get_loss_scale()
        value = loss_scale if isinstance(loss_scale, Tensor) else Tensor(float(loss_scale), ms.float32)
        self.scale_sense = Parameter(value, name="scale_sense", requires_grad=False)

    def set_sense_scale(self, sens: Tensor) -> None:
        """Set the loss scale from the host. Args: sens: Tensor of the present loss scale's shape and type."""
        if not self.scaled:
            raise ValueError("set_sense_scale needs a step with a loss scale; give InstrumentedStep one as `loss_scale`.")
        if self.accumulate > 1 and int(self.micro_step.asnumpy()) != 0:
            raise ValueError("set_sense_scale must not be called between the calls that make one update: their gradients "
                             f"would have two scales. Call it every {self.accumulate} calls.")
        self.scale_sense.set_data(sens)

    def set_step(self, step: int) -> None:
        """Go on counting from `step`: the next update is number `step + 1`. For a run that resumes."""
        self.step_count.set_data(Tensor(step, ms.int32))

    def owns(self, cell: nn.Cell) -> bool:
        """Whether this step has a tap on this very cell."""
        return self.taps is not None and any(cell is tapped for tapped in self.taps.cells)

    def remove_taps(self) -> None:
        """Give the network its own classes back. The step goes on without activation statistics."""
        if _steps.get(id(self.network)) is self:
            del _steps[id(self.network)]
        if self.taps is not None:
            self.taps.remove()
            self._hide("taps", None)
            self._build()
            getattr(self, "compile_cache", set()).clear()  # the next call compiles anew, without taps

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the graph for these inputs, as `nn.Cell.compile` does."""
        return self._closing_the_gate(super().compile, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; see the class."""
        return self._closing_the_gate(super().__call__, *args, **kwargs)

    def _closing_the_gate(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException:
            _compat.abandon_gradient()
            raise
        finally:
            if self.taps is not None:
                self.taps.gate.is_open = False

    def construct(self, *inputs):
        (_, loss, losses), grads = self.gradients_with_taps(self.scale_sense, *inputs)
        if self.accumulate == 1:
            done, stats = self._update(losses, grads[:self.weight_count], grads[self.weight_count:])
            return ops.depend(loss, done), stats
        return loss, self._accumulate(losses, grads)

    def _accumulate(self, losses, grads):
        """Add to the sums; update, and start again from zero, when they are complete. Returns: the vector."""
        sums = self.map(gradients.add, self.sums, grads)
        loss_sums = self.loss_sums + pad(losses, LOSSES)
        calls = self.micro_step + 1
        length = self.length_without_losses + losses.shape[0]
        if ops.Equal()(calls, self.calls_an_update):
            means = self.map(ops.partial(gradients.mean, self.share), grads[:self.weight_count], sums[:self.weight_count])
            done, stats = self._update(loss_sums[:losses.shape[0]] * self.share, means, sums[self.weight_count:])
            ops.assign(self.last_stats, pad(stats, self.last_stats.shape[0]))
            self.map(gradients.clear, self.sums)
            ops.assign(self.loss_sums, ops.zeros_like(loss_sums))
            ops.assign(self.micro_step, calls - self.accumulate)
            stats = ops.depend(stats, done)
        else:
            self.map(gradients.assign, self.sums, sums)
            ops.assign(self.loss_sums, loss_sums)
            ops.assign(self.micro_step, calls)
            # Two slices, because one is a view in PyNative mode: it would show the next vector when that is written.
            stats = self.concat((self.last_stats[:1], self.last_stats[1:length]))
        return stats

    def _update(self, losses, grads, carried):
        """Measure, clip, update.

        Args:
            losses: float32 [1 + parts].
            grads: One a parameter; still scaled.
            carried: The slots' gradients.

        Returns:
            What the loss must wait for, and the vector.
        """
        scale = ops.reshape(self.scale_sense, ())
        if self.scaled:
            grads = self.map(ops.partial(gradients.unscale, scale), grads)
        grads = self.grad_reducer(grads)
        norms, squares = self.norm_stats.measure(grads)
        step = self.step_count + 1
        ops.assign(self.step_count, step)
        head = (ops.reshape(ops.cast(step, ms.float32), (1,)), losses)
        if self.scaled:
            overflow = measure.is_nonfinite(squares)
            head = head + (ops.reshape(scale, (1,)), overflow, overflow)
        if self.max_grad_norm is not None:
            factor = ops.RealDiv()(self.ceiling, ops.Maximum()(ops.Sqrt()(squares), self.ceiling))
            head = head + (norms[:1] * factor,)  # the schema of NormStats starts with grad/norm
            grads = self.map(ops.partial(gradients.clip, ops.reshape(factor, ())), grads)
        head = head + (norms,)
        if self.has_taps:
            head = head + (self.activation_stats(carried, scale),)
        stats = self.concat(head)
        # The optimizer waits for the vector, so that what is measured of the weights is what this forward used.
        grads = ops.depend(grads, stats)
        if self.exits_on_request:
            grads = self.graceful_exit.exit_by_request(grads, self.init_param, self.exit_param)
        if not self.scaled:
            return self.optimizer(grads), stats
        overflowed = ops.Greater()(ops.reshape(measure.is_nonfinite(squares), ()), self.no_overflow)
        if self.loss_scaling_manager is not None:
            overflowed = self.loss_scaling_manager(self.scale_sense, overflowed)
        if not overflowed:
            stats = ops.depend(stats, self.optimizer(grads))
        return stats, stats


def check_no_other_step(network: nn.Cell) -> None:
    """ValueError where a step that is still in use was made around this network."""
    if id(network) in _steps:
        gc.collect()  # Cells refer to each other, so a step that was let go of may still wait for the collector
    if id(network) in _steps:
        raise ValueError("`network` already has an InstrumentedStep. Use one step a network, or call remove_taps() on the "
                         "other step first; instrument.remove_taps(network) does so where nothing refers to it any more "
                         "(MindSpore itself keeps a compiled cell).")


def remove_taps(network: nn.Cell) -> None:
    """Take all taps off a network, whichever step they are of; that step goes on without activation statistics.

    Args:
        network: A network that an `InstrumentedStep` was made around, or a part of it.
    """
    for step in {*owners_of(network), _steps.get(id(network))} - {None}:
        step.remove_taps()
    release(network)


def state(name: str, value: np.ndarray) -> Parameter:
    """A buffer of the step's own on the device, in no checkpoint."""
    return Parameter(Tensor(value), name=f"instrument.{name}", requires_grad=False)


def statistics_of(cell: nn.Cell, wanted: Sequence[str], counts: bool) -> tuple[str, ...]:
    """The statistics to measure of one cell."""
    if counts:
        return (*wanted, "zero_fraction", "nonfinite_elements")
    if tuple(wanted) == DEFAULT_STATS and can_be_exactly_zero(cell):
        return (*wanted, "zero_fraction")
    return tuple(wanted)


def frozen_weights(network: nn.Cell, trained: Sequence[Parameter]) -> list[Parameter]:
    """The network's other weights of float type; running averages of normalisation layers are no weights."""
    averages = {id(parameter) for _, cell in network.cells_and_names() for attribute, parameter in cell._params.items()
                if attribute in ("moving_mean", "moving_variance", "running_mean", "running_var")}
    known = averages | {id(parameter) for parameter in trained}
    return [p for p in network.get_parameters() if id(p) not in known and p.dtype in _compat.FLOAT_TYPES]
