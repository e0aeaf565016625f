"""`InstrumentedStep`: the training step that also returns what happened inside it.

Owns the options of a step, what is made of them before the first call, and which graph a call runs. What it does in the graph
is in `step_graph.py`, what else the host may ask of it in `controls.py`.
"""
from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from typing import Any, Union

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.communication import get_rank

from instrument import _compat
from instrument.arguments import check_arguments, check_flags
from instrument.choice import choose, frozen_weights
from instrument.controls import Controls, state
from instrument.histograms import Histogram, HistogramStats, check_histograms, choose_parameters
from instrument.joining import Extremes, Joining, own_norm
from instrument.losses import LossKey, LossOutputs
from instrument.norms import NormStats
from instrument.optimizer_stats import MomentStats, UpdateStats, moments_of
from instrument.schedule import Schedule, draws_random_numbers
from instrument.schema import Merge, Metric, Schema, Scope
from instrument.scopes import scoped
from instrument.select import Activations
from instrument.spikes import SpikeScore
from instrument.step_graph import LOSSES, StepGraph
from instrument.taps import DEFAULT_STATS, ActivationStats, check_free, owners_of, release
from instrument.window import RingBuffer

LossScale = Union[float, Tensor, nn.Cell, None]

# In the names of the phases of a graph that measures nothing, and of one with a condition.
UNMEASURED, DECIDING = ".unmeasured", ".deciding"

_steps: weakref.WeakValueDictionary[int, InstrumentedStep] = weakref.WeakValueDictionary()


class InstrumentedStep(Controls, StepGraph):
    """A training step that returns `(loss, stats)`, in place of `nn.TrainOneStepCell` or `TrainOneStepWithLossScaleCell`.

    `stats` is one float32 vector of shape [K], computed in the graph, that `schema` names. Training is what it is
    without: parameters, optimizer state, names and checkpoint keys are those of the stock cell.

    Args:
        network: A Cell that returns the loss: a scalar, or a tuple, list or dict with the loss among its values.
        optimizer: Updates parameters of `network`.
        loss_scale: A number (fixed), a Tensor (set from the host by `set_sense_scale`), or an update cell
            (`nn.FixedLossScaleUpdateCell`, `nn.DynamicLossScaleUpdateCell`). A step whose gradient norm is not finite
            is an overflow: it skips the update. None: no scaling, and no step is skipped.
        max_grad_norm: Clip the gradients by their global norm: g * max / max(norm, max), in float32. Where the norm is
            infinite (squares beyond float32: above 1.8e19) finite gradients become zeros, and `grad/norm_clipped` is NaN; with
            a `loss_scale` such a step is an overflow, and skipped.
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
        updates: Norms of what each update changed, and their ratio to the norms of the weights before it, from the weights
            before and after: of half-precision weights, what rounding has left of the update.
        moments: Norms of the optimizer's moments as this step found them, and the cosine of first moment and gradient.
        every: Measure step 1, each multiple of `every`, and the step after `measure_next()`; the other steps run the stock
            cell's graph, and return the last vector again, whose `step` says so (0 before the first one). A network that
            draws random numbers (Dropout) has one graph with a condition, and pays some percent on those steps too.
        window: Keep the vectors of the last `window` measured steps on the device, for `read_window()`: a data sink runs many
            steps in one call.
        spike_window: Add `spike/score`, how far loss and gradient norm stand above those of the last `spike_window` good
            measured steps, in standard deviations. Its history is the Parameter `spike_history` of the step, and in
            checkpoints of it; a checkpoint without it starts an empty one.
        skip_spikes: Leave out the update of a step whose score is above this; `skipped` says so.
        counts: Count elements too: `grad/nonfinite/<parameter>`, `grad/zero_fraction`, and of every measured cell
            `zero_fraction` and `nonfinite_elements`.
        attention: Measure each `AttentionProbe` and `nn.MultiheadAttention` of the network, whatever `activations` says.
        histograms: Which weights, gradients and activations are counted by magnitude, each with an `every` of its own: a
            list of `Histogram`. `schema.histograms(stats)` returns the counts.
        scope: In a data parallel job, `"global"`: losses, activations, attention and histograms are those of the batches of
            all ranks as one, by one AllReduce in a measured step; or `"local"`: of this rank's. Alone, both are the same.
        ranks: In a data parallel job, add `grad/norm_local`, and of it and of the loss the smallest and the largest over
            ranks, and which rank has the largest: `rank/argmax/loss`.
        allow_unverified: Measure in parallel modes in which tensors of a rank are shards too, `AutoParallel` among them, where
            nothing could be verified on an accelerator. Norms are added up over all ranks, and have the scope `unverified`;
            all else is of what this rank holds, and has the scope `shard`. What decides by a norm, or goes by the shapes of
            whole tensors, is refused there.

    Inputs:
        - **inputs** (tuple of Tensor) - what `network` takes.

    Outputs:
        - **loss** (Tensor) - the network's loss on this rank, unscaled, of its own type.
        - **stats** (Tensor) - float32 [K]. `step` counts updates from 1 (exact up to 2**24); `loss` is the mean over
          accumulated calls; `grad/norm` is unscaled, after the reduction over ranks, before clipping; `weight/norm` is
          of the weights that this forward used.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that cannot work; the message says what to do. The network is as it was.

    Examples:
        >>> step = InstrumentedStep(nn.WithLossCell(net, loss_fn), nn.Adam(net.trainable_params(), 1e-3))
        >>> loss, stats = step(x, y)
        >>> values = step.schema.unpack(stats)
        >>> values["step"], values["grad/norm"] > 0
        (1.0, True)
    """

    how_to_keep_a_window = "make it with InstrumentedStep(..., window=N)"

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, *, loss_scale: LossScale = None,
                 max_grad_norm: float | None = None, accumulate: int = 1, loss_key: LossKey = None,
                 activations: Activations = "blocks", activation_stats: Sequence[str] = DEFAULT_STATS,
                 activation_gradients: bool = False, per_parameter: bool = True, counts: bool = False,
                 updates: bool = False, moments: bool = False, every: int = 1, window: int | None = None,
                 spike_window: int | None = None, skip_spikes: float | None = None, attention: bool = True,
                 histograms: Sequence[Histogram] = (), scope: Scope = "global", ranks: bool = False,
                 allow_unverified: bool = False):
        nn.Cell.__init__(self, auto_prefix=False)  # first, because the destructor of 2.0.0 fails on less than a Cell
        _compat.warn_if_untested()
        check_arguments(network, optimizer, loss_scale=loss_scale, max_grad_norm=max_grad_norm, accumulate=accumulate,
                        loss_key=loss_key, activation_stats=activation_stats, every=every, window=window,
                        spike_window=spike_window, skip_spikes=skip_spikes, scope=scope, allow_unverified=allow_unverified,
                        counts=counts, updates=updates, moments=moments, histograms=histograms)
        check_flags(activation_gradients=activation_gradients, per_parameter=per_parameter, counts=counts, updates=updates,
                    moments=moments, attention=attention, ranks=ranks)
        self.allow_unverified = allow_unverified
        if moments:
            moments_of(optimizer)
        check_histograms(histograms, every)
        check_no_other_step(network)
        release(network)
        choice = choose(network, activations=activations, activation_stats=activation_stats, counts=counts,
                        histograms=histograms, attention=attention and not _compat.sharded_here(allow_unverified))
        check_free(choice.tapped)
        super().__init__(network, optimizer)
        self.exits_on_request = bool(getattr(self, "use_graceful_exit", False))  # the stock step's, 2.5 and later
        self.map = ops.HyperMap()
        self.concat = ops.Concat()
        self.scaled = loss_scale is not None
        self._make_loss_scale(loss_scale)
        self.max_grad_norm = max_grad_norm
        self.zero = Tensor(0.0, ms.float32)
        self.ceiling = Tensor([max_grad_norm or 0.0], ms.float32)
        self.accumulate = accumulate
        # Tensors, because with numbers 2.10 makes operators that no platform is documented for.
        self.calls_an_update = Tensor(accumulate, ms.int32)
        self.window = window
        self.has_spikes, self.skips_spikes = spike_window is not None, skip_spikes is not None
        self.can_skip = self.scaled or self.skips_spikes
        self.threshold = Tensor([skip_spikes or 0.0], ms.float32)
        self.no_spike = Tensor([0.0], ms.float32)
        self._choose_joining(scope, ranks)
        self.hide("joins", self.joins or (self.is_together and self.has_spikes))  # ranks must skip alike
        if spike_window is not None:
            self.spike_history = Parameter(Tensor(np.zeros((spike_window + 1, 2)), ms.float32), name="spike_history",
                                           requires_grad=False)
            self.hide("spike_score", SpikeScore(spike_window, self.spike_history))
        self.hide("outputs", LossOutputs(network, loss_key, self.scaled, weakref.WeakMethod(self._name_metrics)))
        frozen = frozen_weights(network, self.weights)
        self.hide("norm_stats", NormStats(self.weights, frozen=frozen, per_parameter=per_parameter, counts=counts,
                                          allow_unverified=allow_unverified))
        self.hide("counted_parameters", choose_parameters(histograms, self.weights, frozen))
        self.has_updates, self.has_moments = bool(updates), bool(moments)
        self.hide("update_stats", UpdateStats(self.weights, per_parameter) if updates else None)
        self.no_change = Tensor(np.zeros(len(self.update_stats.metrics()) if updates else 1), ms.float32)
        self.hide("moment_stats", MomentStats(optimizer, per_parameter) if moments else None)
        self.hide("step_count", state("step", np.zeros((), np.int32)))
        self.hide("micro_step", state("micro_step", np.zeros((), np.int32)))
        self.hide("schedule", Schedule(every, accumulate, self.step_count, self.micro_step))
        self.measuring = True  # whether the graph to be compiled, or the call in PyNative mode, measures
        self.decides_in_graph = False  # whether the graph has a condition instead
        self.is_called = False  # whether we are in a call of this very cell
        self.is_random = every > 1 and draws_random_numbers(network)  # as far as its cells tell
        self.checked_for: bool | None = None  # the value of `training` for which its compiled graph has been asked as well
        self.hide("taps", choice.taps(self, network, self.step_count, activation_gradients))
        self.hide("_schema", Schema([]))
        self._schema.order = weakref.WeakMethod(self._execution_order)
        try:
            self._build()
        except BaseException:
            self.remove_taps()
            raise
        _steps[id(network)] = self

    def _build(self) -> None:
        """Make what depends on whether there are taps: the function that differentiates, the schema, the buffers."""
        slots = [tap.slot for tap in self.taps.taps] if self.taps else []
        counters = self.taps.counters if self.taps else {}
        targets = ParameterTuple([*self.weights, *slots, *(counter.slot for counter in counters.values())])
        self.hide("value_and_grad", ops.value_and_grad(self.outputs, None, targets, has_aux=True))
        self.hide("value_and_grad_alone", ops.value_and_grad(self.outputs, None, self.weights, has_aux=True))
        self.hide("activation_stats", ActivationStats(self.taps, self.scaled, self.is_joined, self.loss_shares)
                   if self.taps else None)
        if self.joins:
            extremes = self.taps.extremes() if self.taps and self.is_joined else Extremes()
            self.hide("joining", Joining(self.ranks, get_rank(), extremes, self.has_spread))
        self.hide("histogram_stats", HistogramStats(self.counted_parameters, list(counters)))
        self._name_metrics()
        self.has_taps, self.tap_count = bool(slots), len(slots)
        self.has_histograms = bool(self.histogram_stats.names)
        self.weight_count = len(self.weights)
        self.length_without_losses = len(self._schema) - 1 - len(self.outputs.parts)
        last = np.full(self.length_without_losses + LOSSES, np.nan, np.float32)
        last[0] = 0
        self.hide("last_stats", state("last_stats", last))
        self.hide("ring", RingBuffer(self.window, len(last)) if self.window else None)
        self.hide("latest", None)
        self.schedule.start_anew()
        if self.accumulate > 1:
            self.share = Tensor(1 / self.accumulate, ms.float32)
            sums = [state(f"sum.{p.name}", np.zeros(p.shape, np.float32)) for p in targets]
            self.hide("sums", ParameterTuple(sums))
            self.hide("weight_sums", ParameterTuple(sums[:self.weight_count]))
            self.hide("loss_sums", state("sum_of_losses", np.zeros(LOSSES, np.float32)))

    def _name_metrics(self) -> None:
        of_losses: Merge = "mean" if self.scope == "local" else "identical"
        metrics = [Metric("step", "step", "global", "identical"), Metric("loss", "loss", self.scope, of_losses)]
        metrics += [Metric(f"loss/{part}", "loss", self.scope, of_losses) for part in self.outputs.parts]
        if self.scaled:
            metrics += [Metric("loss_scale", "1", "global", "identical"), Metric("overflow", "flag", "global", "identical")]
        if self.can_skip:
            metrics.append(Metric("skipped", "flag", "global", "identical"))
        if self.has_spikes:
            metrics.append(Metric("spike/score", "deviations", "global", "identical"))
        if self.max_grad_norm is not None:
            metrics.append(Metric("grad/norm_clipped", "1", "global", "identical"))
        if self.has_spread:
            metrics += [own_norm(), *self.spread.metrics()]
        metrics += self.norm_stats.schema.metrics
        metrics += self.taps.metrics(self.scope) if self.taps is not None else []
        for part in (self.moment_stats, self.update_stats):  # in the order of the vector
            metrics += part.metrics() if part is not None else []
        self._schema.replace(scoped(metrics, self.allow_unverified), self.histogram_stats.names)

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

    def _let_go(self) -> None:
        if _steps.get(id(self.network)) is self:
            del _steps[id(self.network)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; see the class."""
        if kwargs:
            raise TypeError("InstrumentedStep takes its inputs by position, as nn.TrainOneStepCell does, but it is given "
                            f"{', '.join(kwargs)} by name. Give them in the order of the network's construct.")
        schedule = self.schedule
        if schedule.every == 1:
            return self._closing_the_gate(super().__call__, *args, **kwargs)
        compiles = _compat.is_graph_mode()
        if compiles and self.checked_for != self.training:  # Dropout draws numbers in training alone
            # Before anything runs, because a second graph would start the random stream anew.
            self.decide_in_graph(self.is_random)
            if not self.is_random:
                self.compile(*args, **kwargs)
                self.is_random = _compat.draws_random_numbers(self)
            self.checked_for = self.training
        in_graph = compiles and self.is_random
        self.decide_in_graph(in_graph)
        if in_graph:
            if schedule.step is not None and self.latest is not None:  # the host has decided so far
                kept = np.full(self.last_stats.shape, np.nan, np.float32)
                kept[:len(self._schema)] = self.latest.asnumpy()
                self.last_stats.set_data(Tensor(kept))
            schedule.hand_over()
            schedule.tell_device(is_call=True)
        else:
            self.measuring = schedule.decide()
        phase: str = getattr(self, "phase")  # noqa: B009  (the type checker knows no property of MindSpore's)
        self.phase = phase + (DECIDING if in_graph else "" if self.measuring else UNMEASURED)
        try:
            loss, stats = self._closing_the_gate(super().__call__, *args, **kwargs)
        except BaseException:
            schedule.forget()
            raise
        finally:
            self.phase = phase
            measuring, self.measuring = self.measuring, True
        if in_graph:
            self.hide("latest", stats)
            return loss, stats
        schedule.done()
        if measuring:
            self.hide("latest", stats)
        elif self.latest is None:
            self.hide("latest", Tensor([0.0] + [math.nan] * (len(self._schema) - 1), ms.float32))
        return loss, self.latest

    def decide_in_graph(self, yes: bool) -> None:
        """Whether the graph to be compiled has a condition on the schedule's flag."""
        if yes != self.decides_in_graph:
            self.decides_in_graph = yes
            for tap in self.taps.taps if self.taps is not None else ():
                tap.set_flag(self.schedule.flag if yes else None)

    def _closing_the_gate(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_called = True
        try:
            return super()._closing_the_gate(run, *args, **kwargs)
        finally:
            self.is_called = False


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
