"""Alarms: small classes that look at each record and say what is wrong with training.

    from instrument.alarms import DeadLayer, LossSpike, NonFinite

    TrainingMonitor("runs/first", alarms=[NonFinite(policy="raise"), LossSpike(policy="stop"), DeadLayer()])

`Alarm` is the base class of your own; `AlarmSet` makes incidents of what they find. Nothing here needs MindSpore.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from instrument.alarms.base import NOT_JUDGED, Alarm, AlarmRaised, Finding, Policy, Verdict
from instrument.alarms.layers import DeadLayer, HalfSaturation, LayerAlarm, UpdateRatio
from instrument.alarms.learning_rate import LearningRate
from instrument.alarms.nonfinite import NonFinite
from instrument.alarms.overfitting import Overfitting
from instrument.alarms.ranks import SlowRank
from instrument.alarms.spikes import GradientSpike, LossSpike
from instrument.alarms.throughput import DataStarved, ThroughputDrop
from instrument.alarms.vanishing import VanishingGradient
from instrument.alarms.watch import AlarmSet
from instrument.nonfinite import FirstNonfinite

__all__ = ["NOT_JUDGED", "Alarm", "AlarmRaised", "AlarmSet", "DataStarved", "DeadLayer", "Finding", "GradientSpike",
           "HalfSaturation", "LayerAlarm", "LearningRate", "LossSpike", "NonFinite", "Overfitting", "Policy", "SlowRank",
           "ThroughputDrop", "UpdateRatio", "VanishingGradient", "Verdict", "default_alarms"]


def default_alarms(first_nonfinite: Callable[[Mapping[str, float]], FirstNonfinite | None] | None = None) -> list[Alarm]:
    """The alarms that are right for most training as they are: all but `UpdateRatio`, each with policy `"log"`.

    They either compare a number with its own past (`GradientSpike`, `LossSpike`, `VanishingGradient`, `ThroughputDrop`,
    `Overfitting`, `LearningRate`), or look for what no healthy training has (`NonFinite`, `DeadLayer`, `HalfSaturation`,
    `DataStarved`, `SlowRank`). What a healthy `UpdateRatio` is depends on the optimizer.

    Args:
        first_nonfinite: The step's `schema.first_nonfinite`, if it is known by now.

    Returns:
        New alarms, which know nothing yet.
    """
    slow_rank = SlowRank()
    slow_rank.needs = ()  # nobody has asked for it by name, so that nobody is told where there is one process
    return [NonFinite(first_nonfinite=first_nonfinite), GradientSpike(), LossSpike(), VanishingGradient(), DeadLayer(),
            HalfSaturation(), LearningRate(), ThroughputDrop(), DataStarved(), slow_rank, Overfitting()]
