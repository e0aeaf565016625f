"""`Observer`: what measures in a training step that is not ours, beside what the step itself does.

Owns which numbers are measured there, and their way out: Parameters outside the Cell tree, in no checkpoint, that the graph
writes. Where a step's class is listened to is the part of its subclass, in `upgrade.py`; what one call does in the graph is in
`observed.py`.
"""
from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.communication import get_rank

from instrument import _compat
from instrument.arguments import check_arguments
from instrument.bins import CARRIED
from instrument.choice import Choice, choose, frozen_weights
from instrument.controls import Controls, state
from instrument.histograms import HistogramStats, choose_parameters
from instrument.joining import Extremes, Joining, own_norm
from instrument.norms import NormStats
from instrument.notices import tell
from instrument.observed import Observed
from instrument.optimizer_stats import MomentStats, UpdateStats
from instrument.schedule import Schedule
from instrument.schema import Merge, Metric, Schema
from instrument.scopes import scoped
from instrument.spikes import SpikeScore
from instrument.step_options import CannotUpgrade, StepOptions, check_options
from instrument.taps import DEFAULT_STATS, ActivationStats, check_free, release
from instrument.window import RingBuffer


class _Listened:
    """Class attribute of an upgraded step: its class's own construct. Taking it opens the gate of the taps.

    The compiler reads this attribute before it reaches the network, and so does PyNative mode.
    """

    def __get__(self, step: Any, owner: type | None = None) -> Any:
        if step is None:
            return self
        step.hide("listens", True)
        if step.taps is not None:
            step.taps.gate.is_open = True
        return types.MethodType(owner.stock_construct, step)  # type: ignore[union-attr]


class Observer(Controls, Observed):
    """Comes before a step's own class among the bases of an upgraded class, which names that class's construct.

    Attributes:
        scales_loss: Whether the step has a loss scale, and leaves out the update after an overflow.
        stock_construct: The construct of the step's own class.
        clips_at: The norm that the step clips its gradients to, in `finish` of a subclass; None where it does not.
        has_loss: Whether what the step returns as its loss is one; of a pipeline, not on every stage.
    """

    scales_loss: ClassVar[bool] = False
    stock_construct: ClassVar[Any]
    listened_construct = _Listened()
    clips_at: float | None = None
    has_loss: bool = True
    how_to_keep_a_window = "upgrade it with StepOptions(window=N)"

    # What a subclass says of its step.

    def prepare(self, options: StepOptions) -> None:
        """Make what the subclass needs; nothing has been made before but what the step's own class has."""

    def frozen_weights(self, network: nn.Cell) -> list[Parameter]:
        """Weights that the optimizer does not have, and whose norms are measured."""
        return frozen_weights(network, self.weights)

    def measurable(self, network: nn.Cell, choice: Choice) -> Choice:
        """What of the choice can be measured in this process."""
        return choice

    def loss_parts(self) -> tuple[str, ...]:
        """Names of the losses that the step keeps apart."""
        return ()

    def part_values(self, loss):
        """In the graph: these losses, float32 [number of parts]. `loss` waits for the update."""
        return self.nothing

    def loss_of(self, loss):
        """In the graph: the loss that is differentiated, of the one that the step returns; both float32 [1]."""
        return loss

    def overflow_of(self, outputs, overflow):
        """In the graph: whether a gradient overflowed, of what was told to `measure`; both float32 [1]."""
        return overflow

    def is_left_out(self, outputs, overflow):
        """In the graph: whether the update was left out, float32 [1]."""
        return overflow

    def steps_before(self, params: Mapping[str, Any]) -> int:
        """How many steps were made before this call of the trainer, as far as it tells; `params` are a callback's."""
        return 0

    # What is made once.

    def observe(self, options: StepOptions) -> None:
        """Begin to measure; a failure leaves the step as it was, but for hidden attributes that nobody reads."""
        _compat.warn_if_untested()
        network = self.observed_network()
        try:
            check_arguments(network, self.optimizer, loss_scale=None, max_grad_norm=None, accumulate=1, loss_key=None,
                            activation_stats=list(DEFAULT_STATS), allow_unverified=options.allow_unverified)
        except (TypeError, ValueError) as error:
            raise CannotUpgrade(str(error)) from error
        check_options(network, self.optimizer, options)
        release(network)
        choice = choose(network, activations=options.activations, activation_stats=options.activation_stats,
                        counts=options.counts, histograms=options.histograms,
                        attention=options.attention and not _compat.sharded_here(options.allow_unverified))
        choice = self.measurable(network, choice)
        try:
            check_free(choice.tapped)
        except ValueError as error:
            raise CannotUpgrade(str(error)) from error
        frozen = self.frozen_weights(network)
        hide = self.hide
        hide("options", options)
        hide("window", options.window)
        hide("nothing", Tensor([0.0], ms.float32))
        hide("not_measured", Tensor([np.nan], ms.float32))
        hide("map_over", ops.HyperMap())
        hide("pack", ops.Concat())
        hide("mean_of", ops.ReduceMean())
        hide("norm_stats", NormStats(self.weights, frozen=frozen, per_parameter=options.per_parameter, counts=options.counts,
                                     allow_unverified=options.allow_unverified))
        hide("counted_parameters", choose_parameters(options.histograms, self.weights, frozen))
        hide("moment_stats", MomentStats(self.optimizer, options.per_parameter) if options.moments else None)
        hide("update_stats", UpdateStats(self.weights, options.per_parameter) if options.updates else None)
        hide("has_moments", bool(options.moments))
        hide("has_updates", bool(options.updates))
        hide("has_spikes", options.spike_window is not None)
        hide("step_count", state("step", np.zeros((), np.int32)))
        hide("micro_step", state("micro_step", np.zeros((), np.int32)))
        hide("schedule", Schedule(options.every, 1, self.step_count, self.micro_step))
        hide("decides", options.every > 1)
        hide("divisor", state("divisor", np.ones(1, np.float32)))
        if options.spike_window is not None:
            history = state("spike_history", np.zeros((options.spike_window + 1, 2), np.float32))
            hide("spike_score", SpikeScore(options.spike_window, history))
        if options.updates:
            hide("weights_before", ParameterTuple([state(f"before.{p.name}", np.zeros(p.shape, np.float32))
                                                   for p in self.weights]))
            hide("weight_norms", state("weight_norms", np.zeros(len(self.weights), np.float32)))
        hide("host_step", 0)  # number of the last call's step, where each one came through `__call__`
        hide("listens", False)  # whether the compiler, or PyNative mode, now goes through the step
        hide("inner", self._cells["network"])
        self.prepare(options)
        self._choose_joining(options.scope, options.ranks, can_join=self.has_loss)
        if self.has_spread:
            hide("own_norm", state("own_norm", np.full(1, np.nan, np.float32)))
        hide("_schema", Schema([]))
        self._schema.order = weakref.WeakMethod(self._execution_order)
        hide("taps", choice.taps(self, network, self.step_count, options.activation_gradients))
        for tap in self.taps.taps if self.taps and self.decides else ():
            tap.set_flag(self.schedule.flag)
        try:
            self._build()
        except BaseException:
            self.taps and self.taps.remove()
            raise
        for name in ("grad", "grad_no_sens"):
            if name in self.__dict__:
                self.uncover(name, f"stock_{name}")

    def uncover(self, name: str, kept_as: str) -> None:
        """Make the class's own `name` be found, in place of the object's, which is kept under another one."""
        value = self.__dict__.pop(name) if name in self.__dict__ else self._cells[name]
        self.hide(kept_as, value)

    def _build(self) -> None:
        """Make what depends on whether there are taps."""
        taps = self.taps.taps if self.taps else []
        counters = list(self.taps.counters.items()) if self.taps else []
        slots = [tap.slot for tap in taps] + [counter.slot for _, counter in counters]
        hide = self.hide
        hide("targets", ParameterTuple([*self.weights, *slots]))
        hide("has_slots", bool(slots))
        hide("weight_count", len(self.weights))
        hide("tap_length", sum(tap.slot.size for tap in taps))
        hide("carried", state("carried", np.zeros(max(sum(slot.size for slot in slots), 1), np.float32)))
        hide("activation_stats", ActivationStats(self.taps, True, self.is_joined, self.loss_shares) if taps else None)
        hide("joins_slots", self.is_joined and bool(slots))
        if self.joins_slots:
            hide("joining", Joining(self.ranks, get_rank(), self.taps.extremes() if taps else Extremes(), False))
        if self.joins:
            hide("meeting", Joining(self.ranks, get_rank(), Extremes(), self.has_spread))
        hide("has_taps", bool(taps))
        hide("histogram_stats", HistogramStats(self.counted_parameters, [name for name, _ in counters]))
        hide("has_histograms", bool(self.histogram_stats.names))
        hide("counter_starts", tuple(self.tap_length + CARRIED * i for i in range(len(counters))))
        body = [*self.norm_stats.schema.metrics]
        body += self.taps.metrics(self.scope) if self.taps is not None else []
        body += self.moment_stats.metrics() if self.moment_stats is not None else []
        parts = self.loss_parts()
        hide("has_parts", bool(parts))
        head = [Metric("step", "step", "global", "identical")]
        of_losses: Merge = "identical" if self.is_joined else "mean"
        head += [Metric("loss", "loss", self.scope, of_losses)] if self.has_loss else []
        head += [Metric(f"loss/{part}", "loss", self.scope, of_losses) for part in parts]
        if self.scales_loss:
            head += [Metric("loss_scale", "1", "global", "identical"), Metric("overflow", "flag", "global", "identical"),
                     Metric("skipped", "flag", "global", "identical")]
        if self.has_spikes:
            # Of this rank's loss, and unlike in `InstrumentedStep` nothing depends on it.
            alone = self.is_joined or _compat.rank_and_size()[1] == 1
            head.append(Metric("spike/score", "deviations", *(("global", "identical") if alone else ("local", "mean"))))
        if self.clips_at is not None:
            head.append(Metric("grad/norm_clipped", "1", "global", "identical"))
        if self.has_spread:
            head += [own_norm(), *self.spread.metrics()]
        hide("body_end", 2 + len(body))
        if self.update_stats is not None:
            body += self.update_stats.metrics()
        self._schema.replace(scoped(head + body, self.options.allow_unverified), self.histogram_stats.names)
        histograms = CARRIED * len(self.histogram_stats.names)
        hide("measured", state("measured", np.full(self.body_end + histograms, np.nan, np.float32)))
        unknown = np.full(len(self._schema), np.nan, np.float32)
        unknown[0] = 0
        hide("vector", state("vector", unknown))
        hide("ring", RingBuffer(self.window, len(unknown)) if self.window else None)
        self.schedule.start_anew()
        hide("was_called", False)
        hide("comes_by_call", False)  # whether there was a call since the vector was taken: else it may lie in another graph
        hide("is_new", True)  # whether the vector may have changed since it was taken
        hide("last_snapshot", None)

    # What is asked from the host, besides `Controls`.

    def snapshot(self) -> Tensor:
        """The vector of the last measured step, float32 [K], which the next step does not change.

        The same Tensor again where no step has been measured since.
        """
        if self.is_new or not self.comes_by_call:
            if _compat.device_target() == "CPU":
                copy = Tensor(np.array(self.vector.asnumpy()))  # there, it would be a view
            else:
                copy = ops.Mul()(self.vector, Tensor(1.0, ms.float32))
            if self.was_called and not self.is_new and copy[:1].asnumpy() == self.last_snapshot[:1].asnumpy():
                return self.last_snapshot
            self.hide("last_snapshot", copy)
            self.hide("is_new", False)
        self.hide("comes_by_call", False)
        return self.last_snapshot

    def set_step(self, step: int) -> None:
        """Go on counting from `step`: the next one is number `step + 1`. For a run that resumes."""
        super().set_step(step)
        self.hide("host_step", step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; see the step's own class."""
        step = self.host_step + 1
        if self.schedule.asked or self.schedule.is_due(step):
            self.hide("is_new", True)
        if self.decides:
            self.schedule.tell_device(is_call=True)
        try:
            outputs = self._closing_the_gate(super().__call__, *args, **kwargs)
        except Exception:
            if not self.was_called:
                tell("the first call of a training step that is measured has failed. If it works with "
                     "TrainingMonitor(measure=False), then measuring is what failed.", stacklevel=3)
            raise
        self.hide("was_called", True)
        self.hide("comes_by_call", True)
        self.hide("host_step", step)
        return outputs

    def _closing_the_gate(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._closing_the_gate(run, *args, **kwargs)
        finally:
            self.hide("listens", False)
