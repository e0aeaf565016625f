"""`StepOptions`: what is measured in a training step that somebody else has made, and what can be said against it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspore import nn

from instrument.arguments import check_arguments, check_flags
from instrument.histograms import Histogram, check_histograms
from instrument.optimizer_stats import moments_of
from instrument.schema import Scope
from instrument.select import Activations
from instrument.taps import DEFAULT_STATS


class CannotUpgrade(ValueError):
    """A training step that cannot be measured; the message says why."""


@dataclass(frozen=True)
class StepOptions:
    """What is measured in an upgraded step: the arguments of `InstrumentedStep` that do not change training.

    `scope` is `"local"` by default, since a stock step has no AllReduce but those of its gradients: `"global"` adds two small
    ones to a measured step in data parallel, of what is measured and of the loss; `ranks=True` that of the loss.
    """

    activations: Activations = "blocks"
    activation_stats: Sequence[str] = DEFAULT_STATS
    activation_gradients: bool = False
    per_parameter: bool = True
    counts: bool = False
    updates: bool = False
    moments: bool = False
    every: int = 1
    window: int | None = None
    spike_window: int | None = None
    attention: bool = True
    histograms: Sequence[Histogram] = ()
    scope: Scope = "local"
    ranks: bool = False
    allow_unverified: bool = False


def check_options(network: nn.Cell, optimizer: nn.Cell, options: StepOptions) -> None:
    """TypeError or ValueError for the first option that cannot work."""
    if options.moments:
        moments_of(optimizer)
    check_arguments(network, optimizer, loss_scale=None, max_grad_norm=None, accumulate=1, loss_key=None,
                    activation_stats=options.activation_stats, every=options.every, window=options.window,
                    spike_window=options.spike_window, scope=options.scope, allow_unverified=options.allow_unverified,
                    counts=options.counts, updates=options.updates, moments=options.moments, histograms=options.histograms)
    check_flags(activation_gradients=options.activation_gradients, per_parameter=options.per_parameter, counts=options.counts,
                updates=options.updates, moments=options.moments, attention=options.attention, ranks=options.ranks)
    check_histograms(options.histograms, options.every)
