"""Everything that depends on which MindFormers this is; no other module asks.

Each entry says which releases need it.
"""
from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import mindformers
from mindformers.wrapper.wrapper import MFPipelineWithLossScaleCell, MFTrainOneStepCell

from instrument import runs
from instrument.record import to_float
from instrument.supported import PAIRS

__all__ = ["MFPipelineWithLossScaleCell", "MFTrainOneStepCell"]

TESTED = tuple(PAIRS)

# The module's own `__version__` is missing up to 1.0.2, and wrong in 1.2.0; a checkout on the path has nothing else.
RELEASE = runs.version_of("mindformers") or str(getattr(mindformers, "__version__", "unknown"))

# 1.7 and later: two methods that return the loss, the gradients, and what these have to be divided by.
TELLS_DIVISOR = hasattr(MFTrainOneStepCell, "grads_for_legacy")

# 1.3.2 and later: the pipeline step asks a method of its own for an overflow, after clipping. That of 0.8 does not, so that
# without clipping nothing sees its gradients but the optimizer, which is not called after an overflow.
PIPELINE_SHOWS_GRADIENTS = hasattr(MFPipelineWithLossScaleCell, "get_overflow_status")

# Keys that the trainer adds to those of `runner_wrapper`, beside the ones that the class names; by 1.9.
FROM_TRAINER = ("parallel_config", "lr_scheduler", "grouped_lr_scheduler", "micro_batch_num", "calculate_per_token_loss",
                "global_norm_spike_threshold", "print_separate_loss", "use_skip_data_by_global_norm")


@functools.cache
def warn_if_untested(release: str = RELEASE) -> None:
    """Warn, once a process, about a MindFormers release that no test of ours has seen."""
    if release not in TESTED:
        warnings.warn(f"instrument has not been tested with MindFormers {release}; tested: {', '.join(TESTED)}. "
                      "If a number looks wrong, compare with one of those.", stacklevel=3)


def stock_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Those that the stock step's class takes."""
    known = inspect.signature(MFTrainOneStepCell.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return settings
    return {name: value for name, value in settings.items() if name in known}


def stock_names() -> set[str]:
    """Names of the arguments of the stock step, and what the trainer adds to them."""
    named = [name for name, parameter in inspect.signature(MFTrainOneStepCell.__init__).parameters.items()
             if parameter.kind is not parameter.VAR_KEYWORD]
    return {*named, *FROM_TRAINER} - {"self"}


def losses_summed(step: Any) -> int:
    """How many losses, each the mean of its micro-batch, the loss is the sum of that this step returns.

    The pipeline step divides the sum by their number before it differentiates; MFLossMonitor does so before it prints.
    """
    if not isinstance(step, MFPipelineWithLossScaleCell) or getattr(step, "calculate_per_token_loss", False):
        return 1
    return int(step.micro_size)


def steps_before(params: Mapping[str, Any]) -> int:
    """How many steps were made before this run of the trainer, which tells only its own callbacks; from a callback's context.

    A callback of MindFormers' keeps `initial_step`; where there is none, the optimizer's counter has the number.
    """
    for callback in getattr(params.get("list_callback"), "_callbacks", ()):
        number = getattr(callback, "initial_step", None)
        if isinstance(number, int) and number > 0:
            return number
    counted = getattr(getattr(params.get("train_network"), "optimizer", None), "global_step", None)
    return max(int(to_float(counted) or 0) - params.get("cur_step_num", 0), 0)
