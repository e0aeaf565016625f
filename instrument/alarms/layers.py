"""Alarms that look at each layer or parameter by itself: `DeadLayer`, `UpdateRatio` and `HalfSaturation`.

Owns how long each of many metrics has been bad, and how those that turn bad together make one incident.
"""
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

import numpy as np

from instrument.alarms.arguments import number, whole
from instrument.alarms.base import NOT_JUDGED, Alarm, Finding, NotJudged, Policy, Verdict, lost_its_numbers, passed_over
from instrument.alarms.columns import Group
from instrument.record import Record

# The largest finite float16 (IEEE 754 binary16): (2 - 2**-10) * 2**15.
LARGEST_HALF = 65504.0

# How many layers a message names; the rest is counted.
_NAMED = 3


class LayerAlarm(Alarm):
    """What is bad of one layer for several records in a row.

    Layers that turn bad together, one within `quiet` records of the other, are one incident, named by the first; one that
    turns bad later is another, so that a layer that stays dead does not hide the next. A layer that the record does not have
    is not judged.

    Args:
        records: So many records in a row.
        policy: As for each `Alarm`, and so `name` and `quiet`.
    """

    one_matter = False  # whether another metric of a layer that turned bad before tells nothing new

    def __init__(self, *, records: int, policy: Policy = "log", name: str | None = None, quiet: int | None = None):
        super().__init__(policy=policy, name=name, quiet=quiet)
        self.records = whole("records", records)
        self.reset()

    def reset(self) -> None:
        self._slots: dict[str, int] = {}  # where in the arrays below each metric is
        self._of_layer: dict[str, list[int]] = {}  # where those of a layer are
        self._count = np.zeros(0, np.int64)  # records in a row in which it was bad
        self._since = np.zeros(0, np.int64)  # the step of the first of these
        self._counting = False  # one of them is not 0
        self._together = np.zeros(0, np.int64)  # the number of those that it turned bad with; -1 where it never did
        self._of_group: dict[Group, np.ndarray] = {}
        self._judged = 0  # records
        self._groups = 0
        self._found: dict[str, Finding] = {}  # in the record before: what goes on is described once
        self._last_began = 0  # in records

    @abstractmethod
    def judge(self, record: Record) -> Iterator[tuple[Group, np.ndarray, np.ndarray]]:
        """Metrics of the record, their values, float64 [N], and which of them are bad, bool [N]."""

    @abstractmethod
    def describe(self, metric: str, value: float) -> str:
        """What is wrong, such as `activation/rms/relu is 0`, without for how long."""

    def check(self, record: Record) -> Verdict:
        seen = [each for each in self.judge(record) if len(each[0])]
        if not seen:
            return NOT_JUDGED
        self._judged += 1
        if not self._counting and not any(bad.any() for _, _, bad in seen):
            self._found = {}
            return None
        if len(self._of_group) > 64:  # most are of kinds of records that have been forgotten
            self._of_group.clear()
        for group, _, bad in seen:
            slots = self._of_group.get(group)
            if slots is None:
                slots = self._of_group[group] = self._add(group)
            self._since[slots] = np.where(self._count[slots] == 0, record.step, self._since[slots])
            self._count[slots] = (self._count[slots] + 1) * bad
        most = self._count.max()
        self._counting = most > 0
        if most < self.records:
            self._found = {}
            return None
        return self._findings(seen)

    def _add(self, group: Group) -> np.ndarray:
        slots = [self._slots.setdefault(metric, len(self._slots)) for metric in group.metrics]
        for name, slot in zip(group.names, slots):
            of_layer = self._of_layer.setdefault(name, [])
            if slot not in of_layer:
                of_layer.append(slot)
        more = len(self._slots) - len(self._count)
        self._count = np.append(self._count, np.zeros(more, np.int64))
        self._since = np.append(self._since, np.zeros(more, np.int64))
        self._together = np.append(self._together, np.full(more, -1))
        return np.array(slots, np.int64)

    def _findings(self, seen: list[tuple[Group, np.ndarray, np.ndarray]]) -> Verdict:
        long = self._count >= self.records
        first_time = long & (self._together < 0)
        if first_time.any() and self.one_matter:
            for slots in self._of_layer.values():
                if first_time[slots].any():
                    self._together[slots] = self._together[slots].max()
            first_time = long & (self._together < 0)
        if first_time.any():
            if not self._groups or self._judged - self._last_began > self.quiet:
                self._groups, self._last_began = self._groups + 1, self._judged
            self._together[first_time] = self._groups
        verdict: dict[str, Finding | Literal[NotJudged.NOT_JUDGED]] = {}
        found: dict[str, Finding] = {}
        for together in np.unique(self._together[long]):
            key, bad = str(together), long & (self._together == together)
            if not any(bad[self._of_group[group]].any() for group, _, _ in seen):
                verdict[key] = NOT_JUDGED  # those that were bad are not in this record
                continue
            found[key] = self._found.get(key) or self._finding([(group, values, i) for group, values, _ in seen
                                                                for i in np.flatnonzero(bad[self._of_group[group]])])
            verdict[key] = found[key]
        self._found = found
        return verdict

    def _finding(self, bad: list[tuple[Group, np.ndarray, int]]) -> Finding:
        group, values, i = bad[0]
        value = float(values[i])
        message = self.describe(group.metrics[i], value)
        if self.records > 1:
            message += f", for {self.records} records in a row, since step {self._since[self._slots[group.metrics[i]]]}"
        others = list(dict.fromkeys(group.names[i] for group, _, i in bad))[1:]
        if others:
            message += f"; likewise {', '.join(others[:_NAMED])}"
            message += f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        return Finding(message, group.metrics[i], value, group.names[i])


class DeadLayer(LayerAlarm):
    """A cell whose output is nothing but zeros, or nearly so, in each of `records` records in a row.

    It looks at `activation/zero_fraction/<cell>`, which ReLU and its like have by default, and at `activation/rms/<cell>`,
    which is 0 only where all elements are.

    Args:
        zero_fraction: From which share of zeros on a layer is dead. The default is far up, since trained networks do well
            with few active units: in the feed-forward layers of a trained T5, 3 % of the elements behind ReLU are not zero
            (Li et al., "The Lazy Neuron Phenomenon", ICLR 2023), and less in single layers.
        records: By default 20, so that a residual branch that begins at zero has been trained out of it.
        policy: As for each `Alarm`, and so `name` and `quiet`.
    """

    one_matter = True
    needs = ("activation/zero_fraction/", "activation/rms/")
    hint = "Make the step with activations, such as activations='leaves'."

    def __init__(self, *, zero_fraction: float = 0.999, records: int = 20, policy: Policy = "log", name: str | None = None,
                 quiet: int | None = None):
        super().__init__(records=records, policy=policy, name=name, quiet=quiet)
        self.zero_fraction = number("zero_fraction", zero_fraction, most=1.0)

    def judge(self, record: Record) -> Iterator[tuple[Group, np.ndarray, np.ndarray]]:
        if lost_its_numbers(record) or passed_over(record):
            return
        group, values = self.columns.select(record, "activation/zero_fraction/")
        yield group, values, values >= self.zero_fraction
        group, values = self.columns.select(record, "activation/rms/")
        yield group, values, values == 0

    def describe(self, metric: str, value: float) -> str:
        return f"{metric} is {value:.7g}: the layer is dead"  # a float32: 0.99997 is not all of it


class UpdateRatio(LayerAlarm):
    """A parameter whose update is too large or too small against it, in each of `records` records in a row.

    It looks at `update/ratio/<parameter>`. Steps that left the update out are passed over. It is not among the defaults:
    what is right depends on the optimizer, and of a bias that starts at zero and has next to no gradient, as that of the
    keys of attention, Adam makes large updates for a hundred steps without harm.

    Args:
        low: Below it the parameter does not learn. The default is about the rounding of float32, 2^-24: an update that is
            smaller is lost in the sum. Judged while the learning rate is at least a tenth of the largest so far, and always
            where none is recorded: at both ends of a schedule updates are small for a reason.
        high: Above it the parameter does not settle. About 0.001 is the usual; 0.1 changes all of it in ten steps.
        records: By default 20, since the ratio of a parameter that starts at zero falls as 1, 1/2, 1/3.
        policy: As for each `Alarm`, and so `name` and `quiet`.

    Raises:
        ValueError: `low` is not below `high`.
    """

    needs = ("update/ratio/",)
    hint = "Make the step with updates=True and per_parameter=True."

    def __init__(self, *, low: float = 6e-8, high: float = 0.1, records: int = 20, policy: Policy = "log",
                 name: str | None = None, quiet: int | None = None):
        super().__init__(records=records, policy=policy, name=name, quiet=quiet)
        self.low = number("low", low)
        self.high = number("high", high, least=self.low, hint="It must be above `low`.")

    def reset(self) -> None:
        super().reset()
        self._largest_rate = self._last_rate = 0.0

    def judge(self, record: Record) -> Iterator[tuple[Group, np.ndarray, np.ndarray]]:
        rate = record.values.get("learning_rate")
        is_working = rate is None
        if rate is not None:
            self._largest_rate = max(self._largest_rate, rate)
            is_working = self._last_rate >= rate >= 0.1 * self._largest_rate > 0
            self._last_rate = rate
        if passed_over(record):
            return
        group, values = self.columns.select(record, "update/ratio/")
        bad = values > self.high
        if is_working:
            bad |= values < self.low
        yield group, values, bad

    def describe(self, metric: str, value: float) -> str:
        if value < self.low:
            return f"{metric} is {value:.3g}, below {self.low:.3g}"
        return f"{metric} is {value:.3g}, above {self.high:.3g}"


class HalfSaturation(LayerAlarm):
    """An activation, or the scaled gradient of one, at the end of what float16 can hold.

    Ascend can be set to make 65504 of what does not fit, in place of infinity: nothing looks wrong then, and no overflow is
    seen. It looks at `activation/absmax/<cell>` and `activation_grad/absmax/<cell>`; a gradient is multiplied by
    `loss_scale` where there is one, since that is what float16 had to hold. Above 65504 there is no float16, so a cell that
    was seen there has another type, and is not judged any more. A cell that puts out scores masked by the lowest float16 is
    taken for saturated: do not measure it.

    Args:
        fraction: From which share of 65504 on. The default leaves no room for the next factor of 1.1, and is high, since a
            float32 network may well be close to half of it.
        records: So many records in a row.
        policy: As for each `Alarm`, and so `name` and `quiet`.
    """

    needs = ("activation/absmax/", "activation_grad/absmax/")
    hint = "Make the step with activations, such as activations='leaves'."

    def __init__(self, *, fraction: float = 0.9, records: int = 1, policy: Policy = "log", name: str | None = None,
                 quiet: int | None = None):
        super().__init__(records=records, policy=policy, name=name, quiet=quiet)
        self.fraction = number("fraction", fraction, most=1.0)

    def reset(self) -> None:
        super().reset()
        self._wider: set[str] = set()  # metrics that were seen above

    def judge(self, record: Record) -> Iterator[tuple[Group, np.ndarray, np.ndarray]]:
        group, values = self.columns.select(record, "activation/absmax/")
        yield group, values, self._is_near(group, values)
        if not passed_over(record):
            group, values = self.columns.select(record, "activation_grad/absmax/")
            scale = record.values.get("loss_scale", 1.0)
            with np.errstate(all="ignore"):  # of a gradient or a scale that is not finite
                values = values * scale
            yield group, values, self._is_near(group, values)

    def _is_near(self, group: Group, values: np.ndarray) -> np.ndarray:
        near = values >= self.fraction * LARGEST_HALF
        if not near.any():
            return near
        # A thousandth above, as the product of a rounded gradient and the scale may be.
        finite = np.isfinite(values)
        self._wider.update(group.metrics[i] for i in np.flatnonzero(finite & (values > 1.001 * LARGEST_HALF)))
        return near & finite & [metric not in self._wider for metric in group.metrics]

    def describe(self, metric: str, value: float) -> str:
        scaled = ", times the loss scale," if metric.startswith("activation_grad") else ""
        return f"{metric}{scaled} is {value:.6g}, at the end of what float16 can hold ({LARGEST_HALF:.0f})"
