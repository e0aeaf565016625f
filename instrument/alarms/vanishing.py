"""`VanishingGradient`: nothing, or next to nothing, comes back through the network."""
from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import numpy as np

from instrument.alarms.arguments import number, whole
from instrument.alarms.base import Policy, lost_its_numbers, passed_over
from instrument.alarms.columns import Group
from instrument.alarms.layers import LayerAlarm
from instrument.record import Record


class VanishingGradient(LayerAlarm):
    """A gradient that is zero, or next to it, in each of `records` records in a row; it names the parameters.

    The global norm is compared with its own beginning, the median of its first `warm_up` values; the norm of a parameter's
    gradient with that of the parameter. A norm below what a float32 can hold (NaN while nothing is counted as not finite)
    has vanished as well. Steps whose update was left out are passed over.

    Args:
        fraction: Below this part of its beginning the global norm has vanished. By default 1e-6: a network that has learned
            its data well may come down to a ten-thousandth.
        layer_fraction: Below this part of the parameter's norm its gradient has vanished. By default 1e-10: with rounding
            alone, a bias that has no effect (before a normalisation, or of the keys of attention) has about 1e-8.
            A gradient of exactly 0 has vanished in any case.
        records: By default 20, so that a part that is left out of some batches is no alarm.
        warm_up: From how many values the beginning is taken.
        policy: As for each `Alarm`, and so `name` and `quiet`.
    """

    needs = ("grad/norm",)
    hint = "Train with an InstrumentedStep."

    def __init__(self, *, fraction: float = 1e-6, layer_fraction: float = 1e-10, records: int = 20, warm_up: int = 20,
                 policy: Policy = "log", name: str | None = None, quiet: int | None = None):
        super().__init__(records=records, policy=policy, name=name, quiet=quiet)
        self.fraction = number("fraction", fraction, most=1.0)
        self.layer_fraction = number("layer_fraction", layer_fraction, most=1.0)
        self.warm_up = whole("warm_up", warm_up)

    def reset(self) -> None:
        super().reset()
        self._first: list[float] = []
        self._limit = 0.0
        self._total = Group("grad/norm", ["grad/norm"])

    def judge(self, record: Record) -> Iterator[tuple[Group, np.ndarray, np.ndarray]]:
        norm, count = record.values.get("grad/norm"), record.values.get("grad/nonfinite")
        if norm is None or passed_over(record) or lost_its_numbers(record):
            return
        too_small = math.isnan(norm) and count == 0
        if not (math.isfinite(norm) or too_small):
            return
        if norm > 0 and len(self._first) < self.warm_up:
            self._first.append(norm)
            if len(self._first) == self.warm_up:
                self._limit = self.fraction * statistics.median(self._first)
        yield self._total, np.array([norm]), np.array([too_small or norm <= self._limit])
        group, norms = self.columns.select(record, "grad/norm/")
        limits = self.layer_fraction * self.columns.beside(record, group, "weight/norm/")
        limits[~np.isfinite(limits)] = 0.0  # not measured, or not finite itself
        yield group, norms, ~(norms > limits)

    def describe(self, metric: str, value: float) -> str:
        if math.isnan(value):
            return f"{metric} is below what float32 can hold"
        if value == 0:
            return f"{metric} is 0"
        if metric == "grad/norm":
            return f"{metric} is {value:.3g}, below {self.fraction:.3g} of what it was at first"
        return f"{metric} is {value:.3g}, below {self.layer_fraction:.3g} of the parameter's norm"
