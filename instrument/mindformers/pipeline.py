"""`MFInstrumentedPipelineStep`: MindFormers' training step for pipelines and accumulated gradients, measured.

Owns where that step is listened to, and what of a network lies on this stage of its pipeline. The step accumulates gradients
in Parameters of its own, which the compiler fills in semi-automatic parallel: what the differentiation returns is not what the
step trains with.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from instrument import _compat
from instrument.choice import Choice
from instrument.mindformers import releases
from instrument.mindformers.steps import Divided, MFStep
from instrument.step_options import CannotUpgrade, StepOptions

REASON = ("MFPipelineWithLossScaleCell works in semi-automatic parallel alone, for which no machine was at hand. What is "
          "measured in it is of the shards and of the pipeline stage that this rank holds, and has been verified outside that "
          "mode only. allow_unverified=True (in YAML, allow_unverified: True) measures it all the same. Without that, "
          "InstrumentMonitor records what the step returns: loss, overflow flag, loss scale and, with use_clip_grad, gradient "
          "norm")
REASON_OF_OLD = (f"in MindFormers {releases.RELEASE} it unscales and uses its gradients without calling anything that sees "
                 "them in each step, so that they cannot be measured; in 1.3.2 and later they can. InstrumentMonitor records "
                 "what the step returns: loss, overflow flag and loss scale")

_bases: tuple[type, ...] = (MFStep, releases.MFPipelineWithLossScaleCell)
if releases.TELLS_DIVISOR:
    _bases = (Divided, *_bases)


class MFInstrumentedPipelineStep(*_bases):  # type: ignore[misc]
    """`MFPipelineWithLossScaleCell`, measured, where `StepOptions` has `allow_unverified`.

    Gradients are those that the step has accumulated over its micro-batches, unscaled and not clipped: the mean over the
    micro-batches, or with a loss per token their sum over the number of tokens. `loss` is the loss whose gradients these are:
    the mean over micro-batches, where the step returns their sum. Losses that MindFormers keeps apart are not kept apart here.

    With several stages, what is measured is what lies on this one: parameters of its optimizer, and cells of its part of the
    network. The loss is there on the last stage alone (with the schedule `zero_bubble_v`, on the first).
    """

    if releases.PIPELINE_SHOWS_GRADIENTS:
        stock_construct = releases.MFPipelineWithLossScaleCell.construct
        stock_start_overflow_check = releases.MFPipelineWithLossScaleCell.start_overflow_check
        stock_get_overflow_status = releases.MFPipelineWithLossScaleCell.get_overflow_status
    if releases.TELLS_DIVISOR:
        stock_grads_for_legacy = releases.MFPipelineWithLossScaleCell.grads_for_legacy
        stock_grads_for_mcore = releases.MFPipelineWithLossScaleCell.grads_for_mcore

    def observe(self, options: StepOptions) -> None:
        """Begin to measure; CannotUpgrade without `allow_unverified`."""
        if options.allow_unverified is False:
            raise CannotUpgrade(REASON)
        super().observe(options)

    def prepare(self, options: StepOptions) -> None:
        super().prepare(options)
        self.hide("has_loss", _compat.has_loss())
        # What the loss is divided by before it is differentiated, while the step returns it undivided.
        summed = float(releases.losses_summed(self))
        self.hide("losses_summed", Tensor([summed], ms.float32))
        self.divisor.set_data(Tensor([1.0 / summed], ms.float32))
        self.hide("clips", bool(self.use_clip_grad))
        self.uncover("clip_grad_norm", "stock_clip_grad_norm")

    def frozen_weights(self, network: nn.Cell) -> list[Parameter]:
        # Those on other stages cannot be told from those on this one.
        return super().frozen_weights(network) if _compat.pipeline_stage()[1] == 1 else []

    def measurable(self, network: nn.Cell, choice: Choice) -> Choice:
        stage, stages = _compat.pipeline_stage()
        if stages == 1:
            return choice
        found = _compat.stages_of(network)
        return choice.only(lambda name: found[name] in (None, stage))

    def clip_grad_norm(self, grads):
        """Measure, and clip."""
        return self.stock_clip_grad_norm(ops.depend(grads, self.measure_unclipped(grads)))

    def get_overflow_status(self, status, compute_output):
        """Whether a gradient overflowed; and measure, where nothing has been clipped before."""
        overflow = self.find_overflow(status, compute_output)
        if not self.clips:
            overflow = ops.depend(overflow, self.measure_unclipped(compute_output))
        return overflow

    def measure_unclipped(self, grads):
        scale = ops.reshape(ops.cast(self.scale_sense, ms.float32), (1,))
        return self.measure(grads, scale, self.not_measured)

    def overflow_of(self, outputs, overflow):
        # With clipping, the step looks for it when the gradients have been measured already.
        return ops.reshape(ops.cast(outputs[1], ms.float32), (1,))

    def loss_of(self, loss):
        return loss / self.losses_summed
