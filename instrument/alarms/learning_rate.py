"""`LearningRate`: a schedule that jumps or stands still, and a rate that the loss does not bear."""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from instrument.alarms.arguments import number, whole
from instrument.alarms.base import NOT_JUDGED, Alarm, Finding, NotJudged, Policy, Verdict, passed_over
from instrument.alarms.baseline import deviation
from instrument.record import Record

# The standard error of a median of n normal numbers is sqrt(pi / 2) = 1.2533 times that of their mean, deviation / sqrt(n).
_OF_A_MEDIAN = 1.2533

_BLOCKS = 4


@dataclass
class _Rate:
    """What is known of one learning rate."""

    step: int
    value: float
    records: int = 1
    largest: float = 0.0
    steepest: dict[bool, float] = field(default_factory=dict)  # change a step, of rises (True) and of falls
    changed: int = 0  # the step of its last change


class LearningRate(Alarm):
    """A learning rate that jumps, stands still where it should fall, or makes the loss rise.

    - A jump: from one record to the next it rises by more than `up`, or falls by more than `down`, and also changes more than
      `up` (or `down`) times faster, a step, than it has ever risen (or fallen). So a warm-up from zero is no jump, nor is
      the end of a schedule that goes to zero, nor a step decay. The first rise is no jump where it is in the second
      record or from a rate of 0. A rate that is negative or not finite is always an alarm.
    - Flat: it has not changed for `flat_after` steps.
    - The loss still rises: from when the rate has stopped rising (from the first record, where it never rose) the
      medians of the loss over four stretches of a quarter of `rising` records have risen each time, by a twentieth in all
      and by three standard errors. It lasts until the loss falls in such a stretch.

    It looks at `learning_rate` and, for jumps and `flat_after`, at `learning_rate/<group>`.

    Args:
        up: The largest factor of a rise. By default 10, the largest that recipes have where a constant low rate
            comes before training.
        down: The largest factor of a fall. By default 100: step decay takes 10, and two of them may meet.
        restarts: The schedule has restarts: a rise to where the rate has been before is no jump.
        flat_after: So many steps without a change are an alarm; None: any number is fine. Let it be longer than the warm-up
            and each plateau of the schedule.
        rising: How many records after the warm-up the loss may rise in; None: it may always.
        policy: As for each `Alarm`, and so `name` and `quiet`.
    """

    quiet = 1
    needs = ("learning_rate", "learning_rate/")

    def __init__(self, *, up: float = 10.0, down: float = 100.0, restarts: bool = False, flat_after: int | None = None,
                 rising: int | None = 100, policy: Policy = "log", name: str | None = None, quiet: int | None = None):
        super().__init__(policy=policy, name=name, quiet=quiet)
        self.up = number("up", up, least=1.0)
        self.down = number("down", down, least=1.0)
        self.restarts = restarts
        self.flat_after = None if flat_after is None else whole("flat_after", flat_after)
        self.rising = None if rising is None else whole("rising", rising, least=4 * _BLOCKS)
        self.reset()

    def reset(self) -> None:
        self._rates: dict[str, _Rate] = {}
        self._losses: list[float] = []  # of the stretch at hand
        self._medians: list[float] = []
        self._deviations: list[float] = []
        self._falls = False  # the loss has fallen since the rate stopped rising, and is not judged any more
        self._rises: Finding | None = None

    def check(self, record: Record) -> Verdict:
        group, _ = self.columns.select(record, "learning_rate/")
        names = group.metrics if "learning_rate" not in record.values else ("learning_rate", *group.metrics)
        verdict: dict[str, Finding | NotJudged | None] = dict.fromkeys(self._rates, NOT_JUDGED)
        for i, name in enumerate(names):
            verdict[name], risen = self._judge(name, record.step, record.values[name])
            if i == 0 and risen:
                self._start_losses()
        verdict["loss"] = self._judge_loss(record)
        if all(each is NOT_JUDGED for each in verdict.values()):
            return NOT_JUDGED
        return {name: each for name, each in verdict.items() if each is not None}

    def _judge(self, name: str, step: int, value: float) -> tuple[Finding | None, bool]:
        """What is wrong with the rate, and whether it has risen."""
        if not math.isfinite(value) or value < 0:
            return Finding(f"{name} is {value:g}", name, value, name.partition("/")[2]), False
        rate = self._rates.get(name)
        if rate is None:
            self._rates[name] = _Rate(step, value, largest=value, changed=step)
            return None, False
        text = ""
        is_rise, change = value > rate.value, abs(value - rate.value)
        if change:
            text = self._jump(rate, step, value)
            if not text:
                rate.steepest[is_rise] = max(rate.steepest.get(is_rise, 0.0), change / max(step - rate.step, 1))
            rate.changed = step
        elif self.flat_after is not None and step - rate.changed > self.flat_after:
            text = f"has been {value:.4g} since step {rate.changed}, longer than {self.flat_after} steps"
        rate.step, rate.value, rate.records, rate.largest = step, value, rate.records + 1, max(rate.largest, value)
        return Finding(f"{name} {text}", name, value, name.partition("/")[2]) if text else None, is_rise

    def _jump(self, rate: _Rate, step: int, value: float) -> str:
        is_rise = value > rate.value
        high, low = max(value, rate.value), min(value, rate.value)
        if high <= (self.up if is_rise else self.down) * low:
            return ""
        if is_rise and (rate.value == 0 or rate.records == 1 or self.restarts and value <= rate.largest * (1 + 1e-6)):
            return ""
        slope = (high - low) / max(step - rate.step, 1)
        if slope <= (self.up if is_rise else self.down) * rate.steepest.get(is_rise, 0.0):
            return ""
        factor = f"by a factor of {high / low:.3g}" if low > 0 else "to nothing"
        return f"has {'risen' if is_rise else 'fallen'} {factor} at once, from {rate.value:.4g} to {value:.4g}"

    def _start_losses(self) -> None:
        self._losses, self._medians, self._deviations = [], [], []
        self._falls, self._rises = False, None

    def _judge_loss(self, record: Record) -> Finding | NotJudged | None:
        loss = record.values.get("loss")
        if self.rising is None or not self._rates or loss is None or not math.isfinite(loss) or passed_over(record):
            return NOT_JUDGED
        if self._falls:
            return None
        self._losses.append(loss)
        length = self.rising // _BLOCKS
        if len(self._losses) == length:
            median = float(np.median(self._losses))
            self._deviations.append(deviation(self._losses, median))
            self._losses = []
            if self._medians and median <= self._medians[-1]:
                self._falls, self._rises = True, None
                return None
            self._medians = [*self._medians, median][-2 * _BLOCKS:]
            if len(self._medians) >= _BLOCKS:
                self._rises = self._rise(length, record)
        return self._rises

    def _rise(self, length: int, record: Record) -> Finding | None:
        first, last = self._medians[0], self._medians[-1]
        # Of the difference of two medians.
        error = math.sqrt(2) * _OF_A_MEDIAN * float(np.median(self._deviations)) / math.sqrt(length)
        if last - first <= max(0.05 * abs(first), 3 * error):
            return None
        (name, rate), *_ = self._rates.items()
        return Finding(f"the loss has risen from {first:.4g} to {last:.4g} since the rate stopped rising ({name} is "
                       f"{rate.value:.4g}): it is too high", "loss", record.values["loss"])
