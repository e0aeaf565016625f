"""`StepGraph`: what one step does in the graph: forward and backward once, reduce, measure, clip, update, pack.

Owns this order. What is used here is made by `InstrumentedStep`, whose half this is that the compiler reads; what is measured
lies in `norms.py`, `taps.py` and their like.
"""
from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from instrument import _compat, gradients
from instrument import stats as measure
from instrument.losses import MAX_PARTS
from instrument.optimizer_stats import barrier

LOSSES = MAX_PARTS + 2  # length of the buffer for the loss and its parts, with one to spare so that padding is never empty


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


class StepGraph(nn.TrainOneStepCell):
    """The half of `InstrumentedStep` that the compiler reads."""

    gradients_with_taps = _WithTaps()

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
            # With the times, copied outside of a condition: inside of it, 2.7.0 reads where the Parameter lay before.
            own_norm = self.concat((self._own_norm(grads), self.host_times))
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
        stats = ops.depend(stats, barrier(squares, before))  # for which the update waits
        grads = self._prepare(grads, squares, stats)
        changed = self.no_change
        if not self.can_skip:
            stats = ops.depend(stats, self.optimizer(grads))
            changed = self.update_stats(before, weight_norms, stats)
        elif not self._is_skipped(squares, spiked):
            # The comparison has to stand in this branch: behind it, the compiler reads the weights before the update.
            stats = ops.depend(stats, self.optimizer(grads))
            changed = self.update_stats(before, weight_norms, stats)
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
            own = ops.depend(losses, values), self._own(losses, own_norm)
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
            head = head + (own_norm[:1], self.spread(table))
        head = head + (values,)
        if self.has_taps:
            head = head + (self.activation_stats(slots, scale),)
        if self.has_moments:
            head = head + (self.moment_stats(grads, norms[:self.weight_count]),)
        histograms = losses
        if self.has_histograms:
            histograms = self.histogram_stats(grads, counted, step)
        return self.concat(head), squares, norms, spiked, histograms

    def _own(self, losses, own_norm):
        """What is compared over ranks, of this one; of no meaning where nothing is."""
        own = losses
        if self.has_spread:
            own = self.concat((losses[:1], own_norm))
        return own

    def _gradient_square_sum(self, grads):
        """The sum of all squared gradients, float32 [1], where an update needs it."""
        if self.scaled or self.max_grad_norm is not None:
            return self.norm_stats.gradient_square_sum(grads)
        return self.ceiling

    def _clip_factor(self, squares):
        """What the gradients are multiplied by, float32 [1]."""
        return ops.RealDiv()(self.ceiling, ops.Maximum()(ops.Sqrt()(squares), self.ceiling))
