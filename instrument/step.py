"""`InstrumentedStep`: the training step that also returns what happened inside it.

Owns the order of one step: forward and backward once, reduce, measure, clip, update, pack. What is measured lies in
`norms.py` and `taps.py`.
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
from mindspore.communication import get_group_size, get_rank

from instrument import _compat, gradients
from instrument import stats as measure
from instrument.arguments import check_arguments
from instrument.attention import attention_taps
from instrument.histograms import Counter, Histogram, HistogramStats, check_histograms, choose_cells, choose_parameters
from instrument.joining import Extremes, Joining, Spread, own_norm
from instrument.losses import MAX_PARTS, LossKey, LossOutputs
from instrument.nonfinite import Place, execution_order
from instrument.norms import NormStats
from instrument.notices import tell
from instrument.optimizer_stats import MomentStats, UpdateStats, moments_of
from instrument.schedule import Schedule, draws_random_numbers
from instrument.schema import Merge, Metric, Schema, Scope
from instrument.scopes import scoped
from instrument.select import Activations, can_be_exactly_zero, select_cells
from instrument.spikes import SpikeScore
from instrument.taps import DEFAULT_STATS, ActivationStats, Taps, check_free, owners_of, release
from instrument.window import RingBuffer, Window

LossScale = Union[float, Tensor, nn.Cell, None]

LOSSES = MAX_PARTS + 2  # length of the buffer for the loss and its parts, with one to spare so that padding is never empty

# In the names of the phases of a graph that measures nothing, and of one with a condition.
UNMEASURED, DECIDING = ".unmeasured", ".deciding"

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
        if not step.is_called:  # it lies in another compiled cell, and nobody on the host says what to measure
            step.decide_in_graph(step.schedule.every > 1)
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
        updates: Norms of what each update changed, and their ratio to the norms of the weights before it, from the weights
            before and after: of half-precision weights, what rounding has left of the update.
        moments: Norms of the optimizer's moments as this step found them, and the cosine of first moment and gradient.
        every: Measure step 1, each multiple of `every`, and the step after `measure_next()`; the other steps cost what the
            stock cell costs, and return the last vector again, whose `step` says so (0 before the first one).
        window: Keep the vectors of the last `window` measured steps on the device, for `read_window()`: a data sink runs many
            steps in one call.
        spike_window: Add `spike/score`, how far loss and gradient norm stand above those of the last `spike_window` good
            steps, in standard deviations. Its history is the Parameter `spike_history` of the step, and in checkpoints of
            it; a checkpoint without it starts an empty one.
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
        allow_unverified: Measure in parallel modes in which tensors of a rank are shards too, where nothing could be verified:
            each metric is then of what this rank holds, and has the scope `shard`. What decides by a norm is refused there.

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

    Example:
        >>> step = InstrumentedStep(nn.WithLossCell(net, loss_fn), nn.Adam(net.trainable_params(), 1e-3))
        >>> loss, stats = step(x, y)
        >>> values = step.schema.unpack(stats)
        >>> values["step"], values["grad/norm"] > 0
        (1.0, True)
    """

    gradients_with_taps = _WithTaps()

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
                        spike_window=spike_window, skip_spikes=skip_spikes, scope=scope, allow_unverified=allow_unverified)
        if moments:
            moments_of(optimizer)
        check_histograms(histograms, every)
        check_no_other_step(network)
        release(network)
        chosen = select_cells(network, activations)
        statistics = [statistics_of(cell, activation_stats, counts) for _, cell in chosen]
        counted = choose_cells(histograms, network)
        only_counted = [(name, cell) for name, (cell, _) in counted.items() if name not in dict(chosen)]
        chosen, statistics = chosen + only_counted, statistics + [()] * len(only_counted)
        attention_cells = attention_taps(network) if attention else []
        check_free(chosen + [(name, cell) for name, cell, _ in attention_cells])
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
        # What is hidden stays outside the Cell tree: it is in no checkpoint and renames nothing.
        self.window = window
        self.has_spikes, self.skips_spikes = spike_window is not None, skip_spikes is not None
        self.can_skip = self.scaled or self.skips_spikes
        self.threshold = Tensor([skip_spikes or 0.0], ms.float32)
        self.no_spike = Tensor([0.0], ms.float32)
        self._choose_scope(scope, ranks)
        if spike_window is not None:
            self.spike_history = Parameter(Tensor(np.zeros((spike_window + 1, 2)), ms.float32), name="spike_history",
                                           requires_grad=False)
            self._hide("spike_score", SpikeScore(spike_window, self.spike_history))
        self._hide("outputs", LossOutputs(network, loss_key, self.scaled, weakref.WeakMethod(self._name_metrics)))
        frozen = frozen_weights(network, self.weights)
        self._hide("norm_stats", NormStats(self.weights, frozen=frozen, per_parameter=per_parameter, counts=counts))
        self._hide("counted_parameters", choose_parameters(histograms, self.weights, frozen))
        self.has_updates, self.has_moments = bool(updates), bool(moments)
        self._hide("update_stats", UpdateStats(self.weights, per_parameter) if updates else None)
        self.no_change = Tensor(np.zeros(len(self.update_stats.metrics()) if updates else 1), ms.float32)
        self._hide("moment_stats", MomentStats(optimizer, per_parameter) if moments else None)
        self._hide("step_count", state("step", np.zeros((), np.int32)))
        self._hide("micro_step", state("micro_step", np.zeros((), np.int32)))
        self._hide("schedule", Schedule(every, accumulate, self.step_count, self.micro_step))
        self.measuring = True  # whether the graph to be compiled, or the call in PyNative mode, measures
        self.decides_in_graph = False  # whether the graph has a condition instead
        self.is_called = False  # whether we are in a call of this very cell
        self.is_random = every > 1 and draws_random_numbers(network)  # as far as its cells tell
        self.checked_for: bool | None = None  # the value of `training` for which its compiled graph has been asked as well
        counters = {name: Counter(name, often, self.step_count) for name, (_, often) in counted.items()}
        self._hide("taps", Taps(chosen, statistics, activation_gradients, self, attention_cells, counters, network=network)
                   if chosen or attention_cells else None)
        self._hide("_schema", Schema([]))
        self._schema.order = weakref.WeakMethod(self._execution_order)
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
        counters = self.taps.counters if self.taps else {}
        targets = ParameterTuple([*self.weights, *slots, *(counter.slot for counter in counters.values())])
        self._hide("value_and_grad", ops.value_and_grad(self.outputs, None, targets, has_aux=True))
        self._hide("value_and_grad_alone", ops.value_and_grad(self.outputs, None, self.weights, has_aux=True))
        self._hide("activation_stats", ActivationStats(self.taps, self.scaled, self.is_joined, self.loss_shares)
                   if self.taps else None)
        if self.joins:
            extremes = self.taps.extremes() if self.taps and self.is_joined else Extremes()
            self._hide("joining", Joining(self.ranks, get_rank(), extremes, self.has_spread))
        self._hide("histogram_stats", HistogramStats(self.counted_parameters, list(counters)))
        self._name_metrics()
        self.has_taps, self.tap_count = bool(slots), len(slots)
        self.has_histograms = bool(self.histogram_stats.names)
        self.weight_count = len(self.weights)
        self.length_without_losses = len(self._schema) - 1 - len(self.outputs.parts)
        last = np.full(self.length_without_losses + LOSSES, np.nan, np.float32)
        last[0] = 0
        self._hide("last_stats", state("last_stats", last))
        self._hide("ring", RingBuffer(self.window, len(last)) if self.window else None)
        self._hide("latest", None)
        self.schedule.start_anew()
        if self.accumulate > 1:
            self.share = Tensor(1 / self.accumulate, ms.float32)
            sums = [state(f"sum.{p.name}", np.zeros(p.shape, np.float32)) for p in targets]
            self._hide("sums", ParameterTuple(sums))
            self._hide("weight_sums", ParameterTuple(sums[:self.weight_count]))
            self._hide("loss_sums", state("sum_of_losses", np.zeros(LOSSES, np.float32)))

    def _choose_scope(self, scope: Scope, ranks: bool) -> None:
        """What is joined over ranks, and where the graph has an AllReduce for it."""
        self.ranks = get_group_size() if self.reducer_flag else 1
        together = self.ranks > 1 and not _compat.sharded_by()
        self.is_joined, self.has_spread = together and scope == "global", together and ranks
        self.joins = self.is_joined or self.has_spread or (together and self.has_spikes)  # ranks must skip alike
        # The gradient that is trained on is of the mean of the ranks' losses, or else of their sum.
        self.loss_shares = self.ranks if self.is_joined and self.mean else 1
        # Processes that train by themselves have each a loss of their own.
        self.scope: Scope = "global" if self.is_joined or (scope == "global" and _compat.rank_and_size()[1] == 1) else "local"
        if self.has_spread:
            self._hide("spread", Spread(self.ranks))
        elif ranks:
            tell("ranks=True has no effect: this is no data parallel job of several processes.", stacklevel=4)

    @property
    def every(self) -> int:
        """One in so many steps is measured."""
        return self.schedule.every

    @property
    def schema(self) -> Schema:
        """The metrics of `stats`, in order. The parts of a loss that has several are in it from the first call on."""
        return self._schema

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
        self._schema.replace(scoped(metrics), self.histogram_stats.names)

    def _execution_order(self) -> list[Place]:
        return execution_order(self.network, self.taps.in_order() if self.taps is not None else [], self.norm_stats.weights)

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
        self.schedule.set_step(step)

    def measure_next(self) -> None:
        """Measure the next update whatever `every` says. On several ranks, call it on each before the same step: in a data
        parallel job a measured step can have an AllReduce more, in which the others would wait for ever."""
        self.schedule.measure_next()

    def read_window(self, after: int | None = None) -> Window:
        """The vectors of measured steps that the device has kept, with one device-to-host copy.

        Args:
            after: Only steps with a higher number; by default, those that came after the last one read.

        Returns:
            (rows, overwritten); see `Window`.

        Raises:
            ValueError: The step was made without `window`.
        """
        if self.ring is None:
            raise ValueError("this step keeps no window: make it with InstrumentedStep(..., window=N).")
        return self.ring.read(after, len(self._schema))

    def owns(self, cell: nn.Cell) -> bool:
        """Whether this step has a tap on this very cell."""
        return self.taps is not None and any(cell is tapped for tapped in self.taps.cells)

    def remove_taps(self) -> None:
        """Give the network its own classes back. The step goes on without activation statistics.

        The vector changes with it: read a window before, and call this between updates, not between calls that make one.
        """
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
            self._hide("latest", stats)
            return loss, stats
        schedule.done()
        if measuring:
            self._hide("latest", stats)
        elif self.latest is None:
            self._hide("latest", Tensor([0.0] + [math.nan] * (len(self._schema) - 1), ms.float32))
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
            return run(*args, **kwargs)
        except BaseException:
            _compat.abandon_gradient()
            raise
        finally:
            self.is_called = False
            if self.taps is not None:
                self.taps.gate.is_open = False

    def construct(self, *inputs):
        if self.measuring:
            (_, loss, losses), grads = self.gradients_with_taps(self.scale_sense, *inputs)
        else:
            (_, loss, losses), grads = self.value_and_grad_alone(self.scale_sense, *inputs)
        if self.accumulate == 1:
            stats = self._update(losses, grads[:self.weight_count], grads[self.weight_count:])
            return ops.depend(loss, stats), stats
        return loss, self._accumulate(losses, grads)

    def _accumulate(self, losses, grads):
        """Add to the sums; update, and start again from zero, when they are complete. Returns: the vector."""
        buffers = self.sums
        if not self.measuring:
            buffers = self.weight_sums
        sums = self.map(gradients.add, buffers, grads)
        loss_sums = self.loss_sums + pad(losses, LOSSES)
        calls = self.micro_step + 1
        if ops.Equal()(calls, self.calls_an_update):
            means = self.map(ops.partial(gradients.mean, self.share), grads[:self.weight_count], sums[:self.weight_count])
            stats = self._update(loss_sums[:losses.shape[0]] * self.share, means, sums[self.weight_count:])
            self._keep(stats)
            self.map(gradients.clear, buffers)
            ops.assign(self.loss_sums, ops.zeros_like(loss_sums))
            ops.assign(self.micro_step, calls - self.accumulate)
        else:
            self.map(gradients.assign, buffers, sums)
            ops.assign(self.loss_sums, loss_sums)
            ops.assign(self.micro_step, calls)
            stats = self._kept(losses)
        return stats

    def _keep(self, stats):
        """Store the vector for calls that measure nothing."""
        if self.measuring:
            ops.assign(self.last_stats, pad(stats, self.length_without_losses + LOSSES))

    def _kept(self, losses):
        """The last vector; where nothing is measured, something of no meaning."""
        if not self.measuring:
            return losses
        # Two slices, because one is a view in PyNative mode: it would show the next vector when that is written.
        return self.concat((self.last_stats[:1], self.last_stats[1:self.length_without_losses + losses.shape[0]]))

    def _update(self, losses, grads, carried):
        """Measure, clip, update.

        Args:
            losses: float32 [1 + parts].
            grads: One a parameter; still scaled.
            carried: The slots' gradients.

        Returns:
            The vector, which comes after the update.
        """
        scale = ops.reshape(self.scale_sense, ())
        if self.scaled:
            grads = self.map(ops.partial(gradients.unscale, scale), grads)
        own_norm = self.no_spike
        if self.has_spread and self.measuring:
            own_norm = self._own_norm(grads)
            grads = ops.depend(grads, own_norm)
        grads = self.grad_reducer(grads)
        step = self.step_count + 1
        ops.assign(self.step_count, step)
        if not self.measuring:
            return self._apply(grads, self._gradient_square_sum(grads), self.no_spike, losses)
        if not self.decides_in_graph:
            return self._measured_update(step, scale, losses, grads, carried, own_norm)
        if self.schedule.is_on():
            stats = self._measured_update(step, scale, losses, grads, carried, own_norm)
            if self.accumulate == 1:  # else the caller keeps it
                self._keep(stats)
        else:
            stats = self._apply(grads, self._gradient_square_sum(grads), self.no_spike, self._kept(losses))
        return ops.depend(stats, self.schedule.advance(step))

    def _own_norm(self, grads):
        """The norm of this rank's gradients before the reduction, float32 [1]; 0 in a step that is not measured."""
        if not self.decides_in_graph:
            return self.norm_stats.gradient_norm(grads)
        norm = self.no_spike
        if self.schedule.is_on():
            norm = self.norm_stats.gradient_norm(grads)
        return norm

    def _measured_update(self, step, scale, losses, grads, carried, own_norm):
        stats, squares, norms, spiked, histograms = self._measure(step, scale, losses, grads, carried, own_norm)
        stats = ops.depend(stats, histograms)  # of this forward's weights, so before the update
        if self.has_updates:
            stats = self._apply_and_compare(grads, squares, spiked, stats, norms[self.weight_count:2 * self.weight_count])
        else:
            stats = self._apply(grads, squares, spiked, stats)
        if self.has_histograms:
            stats = self.concat((stats, histograms))
        if self.window is not None:
            stats = ops.depend(stats, self.ring(pad(stats, self.length_without_losses + LOSSES)))
        return stats

    def _apply(self, grads, squares, spiked, stats):
        """Clip and update, unless there is an overflow or a spike. Returns: `stats`, which then comes after the update."""
        grads = self._prepare(grads, squares, stats)
        if not self.can_skip:
            return ops.depend(stats, self.optimizer(grads))
        if not self._is_skipped(squares, spiked):
            stats = ops.depend(stats, self.optimizer(grads))
        return stats

    def _apply_and_compare(self, grads, squares, spiked, stats, weight_norms):
        """As `_apply`; the vector ends with what the update has changed."""
        before = self.update_stats.before()
        grads = self._prepare(ops.depend(grads, before), squares, stats)
        changed = self.no_change
        if not self.can_skip:
            stats = ops.depend(stats, self.optimizer(grads))
            changed = self.update_stats(ops.depend(before, stats), weight_norms)
        elif not self._is_skipped(squares, spiked):
            # The comparison has to stand in this branch: behind it, the compiler reads the weights before the update.
            stats = ops.depend(stats, self.optimizer(grads))
            changed = self.update_stats(ops.depend(before, stats), weight_norms)
        return self.concat((stats, changed))

    def _prepare(self, grads, squares, stats):
        """The gradients as the optimizer gets them."""
        if self.max_grad_norm is not None:
            factor = ops.reshape(self._clip_factor(squares), ())
            grads = self.map(ops.partial(gradients.clip, factor), grads)
        # The optimizer waits for the vector, so that what is measured of the weights is what this forward used.
        grads = ops.depend(grads, stats)
        if self.exits_on_request:
            grads = self.graceful_exit.exit_by_request(grads, self.init_param, self.exit_param)
        return grads

    def _is_skipped(self, squares, spiked):
        """Whether the update is left out, bool []; adjusts the loss scale."""
        skipped = ops.Greater()(ops.reshape(spiked, ()), self.zero)
        if self.scaled:
            overflowed = ops.Greater()(ops.reshape(measure.is_nonfinite(squares), ()), self.zero)
            if self.loss_scaling_manager is not None:
                overflowed = self.loss_scaling_manager(self.scale_sense, overflowed)
            skipped = ops.LogicalOr()(ops.reshape(overflowed, ()), skipped)
        return skipped

    def _measure(self, step, scale, losses, grads, carried, own_norm):
        """Returns: the vector up to what the update adds; the sum of all squared gradients and the norms, as
        `NormStats.measure` returns them; 1 where a spike leaves the update out, float32 [1]; and the histograms, which
        come last in the vector."""
        values, squares, norms = self.norm_stats.measure(grads)
        slots, counted = carried[:self.tap_count], carried[self.tap_count:]
        means, table = losses, losses
        if self.joins:
            # Behind the reduction of the gradients, so that all ranks come to their AllReduces in one order.
            own = ops.depend(losses, values), self.concat((losses[:1], own_norm))
            if self.is_joined:
                means, slots, counted, table = self.joining(own[0], slots, counted, own[1])
                losses = means
            else:
                means, _, _, table = self.joining(own[0], (), (), own[1])
        head = (ops.reshape(ops.cast(step, ms.float32), (1,)), losses)
        # MindSpore 2.0.0 wants each name set on every way through the construct.
        overflow, spiked, score, seen = self.no_spike, self.no_spike, self.no_spike, losses
        if self.scaled:
            overflow = measure.is_nonfinite(squares)
            head = head + (ops.reshape(scale, (1,)), overflow)
        if self.has_spikes:
            seen = self.concat((means[:1], values[:1]))  # the schema of NormStats starts with grad/norm
            score = self.spike_score(seen)
            if self.skips_spikes:
                spiked = ops.cast(ops.Greater()(score, self.threshold), ms.float32)
        skipped = ops.Maximum()(overflow, spiked)
        if self.can_skip:
            head = head + (skipped,)
        if self.has_spikes:
            # Only after the score: nothing else keeps the runtime from writing the history while it is still being read.
            head = head + (ops.depend(score, self.spike_score.remember(ops.depend(seen, score), skipped)),)
        if self.max_grad_norm is not None:
            head = head + (values[:1] * self._clip_factor(squares),)
        if self.has_spread:
            head = head + (own_norm, self.spread(table))
        head = head + (values,)
        if self.has_taps:
            head = head + (self.activation_stats(slots, scale),)
        if self.has_moments:
            head = head + (self.moment_stats(grads, norms[:self.weight_count]),)
        histograms = losses
        if self.has_histograms:
            histograms = self.histogram_stats(grads, counted, step)
        return self.concat(head), squares, norms, spiked, histograms

    def _gradient_square_sum(self, grads):
        """The sum of all squared gradients, float32 [1], where an update needs it."""
        if self.scaled or self.max_grad_norm is not None:
            return self.norm_stats.gradient_square_sum(grads)
        return self.ceiling

    def _clip_factor(self, squares):
        """What the gradients are multiplied by, float32 [1]."""
        return ops.RealDiv()(self.ceiling, ops.Maximum()(ops.Sqrt()(squares), self.ceiling))


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
