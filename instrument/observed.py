"""`Observed`: what an upgraded training step does in the graph, beside what the step itself does.

Owns the order of things in one call: `construct` runs the class's own construct; that differentiates through `grad`, which
carries the taps along, and hands the gradients to `measure`; `finish` adds what is known at the end, the loss for one, and
writes the vector. What is used here is made by `Observer`.
"""
from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import ops

from instrument import gradients, stats
from instrument.bins import CARRIED
from instrument.joining import HOST_TIMES
from instrument.optimizer_stats import barrier

_Base: Any = object  # a Cell comes behind it among the bases, whose attributes no type checker knows


class Observed(_Base):
    """The half of `Observer` that the compiler reads."""

    def construct(self, *inputs):
        outputs = self.listened_construct(*inputs)
        loss = outputs
        if isinstance(outputs, tuple):
            loss = outputs[0]
        written, times = self.nothing, self.nothing
        if self.has_spread:
            # Copied outside of the condition: inside of it, 2.7.0 reads where the Parameter lay before it was set.
            times = self.pack((self.host_times, self.nothing))
        if not self.decides:
            written = self.finish(outputs, loss, times)
        else:
            if self.schedule.is_on():
                written = self.finish(outputs, loss, times)
            step = ops.depend(ops.depend(self.step_count, loss), written)
            written = ops.depend(written, self.schedule.advance(step))
        # The call must not return before the vector is there: what the host reads then would be the last one.
        loss = ops.depend(loss, written)
        if isinstance(outputs, tuple):
            return (loss,) + outputs[1:]
        return loss

    def grad(self, network, weights):
        """In place of the step's `GradOperation`."""
        return self.differentiate

    def grad_no_sens(self, network, weights):
        """The same, without a sensitivity among the inputs."""
        return self.differentiate_alone

    def differentiate(self, *inputs):
        """The gradients of the weights, with those of the slots put aside."""
        return self.split(self.stock_grad(self.inner, self.targets)(*inputs))

    def differentiate_alone(self, *inputs):
        """The same, without a sensitivity among the inputs."""
        return self.split(self.stock_grad_no_sens(self.inner, self.targets)(*inputs))

    def split(self, grads):
        """Put aside what the slots carried."""
        own = grads[:self.weight_count]
        if self.has_spread:
            own = ops.depend(own, ops.assign(self.own_norm, self.norm_before(own)))
        if self.has_slots:
            own = ops.depend(own, ops.assign(self.carried, self.pack(grads[self.weight_count:])))
        return own

    def norm_before(self, grads):
        """The norm of this rank's gradients before the reduction, still scaled, float32 [1]; 0 where nothing is measured."""
        if not self.decides:
            return self.norm_stats.gradient_norm(grads)
        norm = self.nothing
        if self.schedule.is_on():
            norm = self.norm_stats.gradient_norm(grads)
        return norm

    def measure(self, grads, scale, overflow):
        """Measure the gradients and the weights, before the update.

        Args:
            grads: One a parameter, reduced, unclipped; unscaled, except where the step has no loss scale but a sensitivity.
            scale: What the backward pass was multiplied by, float32 [1].
            overflow: 1 where a gradient overflowed, float32 [1].

        Returns:
            What the update has to wait for: the compiler orders what is written and read by the data alone, whatever the
            order of the lines.
        """
        step = self.step_count + 1
        written = ops.depend(self.nothing, ops.assign(self.step_count, step))
        if not self.decides:
            written = self.measure_now(step, grads, scale, overflow, written)
        else:
            if self.schedule.is_on():
                written = self.measure_now(step, grads, scale, overflow, written)
        return written

    def measure_now(self, step, grads, scale, overflow, written):
        if not self.scales_loss:
            grads = self.map_over(ops.partial(gradients.unscale, ops.reshape(scale, ())), grads)
        values, _, norms = self.norm_stats.measure(grads)
        pieces = (scale, overflow, values)
        taps, counters = (), ()
        if self.has_taps:
            taps = (ops.depend(self.carried, grads)[:self.tap_length],)
        for start in self.counter_starts:
            counters = counters + (ops.depend(self.carried, grads)[start:start + CARRIED],)
        if self.joins_slots:
            # Behind the reduction of the gradients, so that all ranks come to their AllReduces in one order.
            _, taps, counters, _ = self.joining(ops.depend(scale, values), taps, counters, scale)
        if self.has_taps:
            pieces = pieces + (self.activation_stats(taps, ops.reshape(scale * self.divisor, ())),)
        if self.has_moments:
            pieces = pieces + (self.moment_stats(grads, norms[:self.weight_count]),)
        if self.has_histograms:
            pieces = pieces + (self.histogram_stats(grads, counters, step),)
        written = ops.depend(written, ops.assign(self.measured, self.pack(pieces)))
        if self.has_updates:
            before = self.map_over(gradients.assign, self.weights_before, self.update_stats.before())
            own_norms = ops.assign(self.weight_norms, norms[self.weight_count:2 * self.weight_count])
            written = ops.depend(ops.depend(written, barrier(scale, before)), own_norms)
        return written

    def finish(self, outputs, loss, times):
        """Complete the vector and write it, after the update. Returns: something that waits for that."""
        loss = self.loss_of(ops.reshape(self.mean_of(ops.cast(loss, ms.float32)), (1,)))
        measured = ops.depend(self.measured, loss)  # which waits for the update, and so for what was measured
        norm = measured[2:3]  # the schema of NormStats starts with grad/norm
        pieces = (ops.reshape(ops.cast(ops.depend(self.step_count, loss), ms.float32), (1,)),)
        losses = loss
        if self.has_parts:
            losses = self.pack((loss, self.part_values(loss)))
        own_norm, table = self.nothing, losses
        if self.has_spread:
            own_norm = ops.depend(self.own_norm, loss) / (measured[:1] * self.divisor)
        if self.joins:
            own = losses
            if self.has_spread:
                own = self.pack((loss, own_norm, times[:HOST_TIMES]))
            means, _, _, table = self.meeting(ops.depend(losses, measured), (), (), own)
            if self.is_joined:
                losses = means
        if self.has_loss:
            pieces = pieces + (losses,)
        elif self.has_parts:
            pieces = pieces + (losses[1:],)
        skipped = self.nothing
        if self.scales_loss:
            overflow = self.overflow_of(outputs, measured[1:2])
            skipped = self.is_left_out(outputs, overflow)
            pieces = pieces + (measured[:1], overflow, skipped)
        if self.has_spikes:
            seen = self.pack((losses[:1], norm))
            if not self.has_loss:
                seen = self.pack((norm, norm))
            score = self.spike_score(seen)
            # Only after the score: nothing else keeps the runtime from writing the history while it is still being read.
            pieces = pieces + (ops.depend(score, self.spike_score.remember(ops.depend(seen, score), skipped)),)
        if self.clips_at is not None:
            pieces = pieces + (self.clipped(norm),)
        if self.has_spread:
            pieces = pieces + (own_norm, self.spread(table))
        pieces = pieces + (measured[2:self.body_end],)
        if self.has_updates:
            pieces = pieces + (self.update_stats(self.weights_before, ops.depend(self.weight_norms, loss), loss),)
        if self.has_histograms:
            pieces = pieces + (measured[self.body_end:],)
        vector = self.pack(pieces)
        written = ops.depend(self.nothing, ops.assign(self.vector, vector))
        if self.window is not None:
            written = ops.depend(written, self.ring(vector))
        return written


_map = ops.HyperMap()
_sum = ops.ReduceSum(True)
_stack = ops.Stack()


def _nonfinite(grad):
    return stats.nonfinite_count(stats.as_float32(grad))


def nonfinite_elements(grads):
    """How many elements of all gradients are not finite, float32 [1]."""
    return _sum(_stack(_map(_nonfinite, grads)), 0)
