"""`LossSpike` and `GradientSpike`: a number that stands far above its own recent past."""
from __future__ import annotations

import math
from collections import deque

import numpy as np

from instrument.alarms.arguments import number, warm_up_within, whole
from instrument.alarms.base import NOT_JUDGED, Alarm, Finding, Policy, Verdict, passed_over
from instrument.alarms.baseline import Baseline
from instrument.record import Record

# A rise by less than this part of the level at which the run began is nothing, however quiet the numbers were.
_SMALLEST_RISE = 1e-3

# The logarithm of zero, which a loss can be.
_LOG_OF_ZERO = math.log(1e-30)


class _Spike(Alarm):
    """What `GradientSpike` says, of any metric."""

    metric = ""

    def __init__(self, *, deviations: float, floor: float, window: int, warm_up: int, policy: Policy,
                 name: str | None, quiet: int | None):
        super().__init__(policy=policy, name=name, quiet=quiet)
        self.deviations = number("deviations", deviations)
        self.floor = number("floor", floor)
        self.window = whole("window", window, least=5)
        self.warm_up = warm_up_within(warm_up, self.window, least=2)
        self.reset()

    def reset(self) -> None:
        self._usual = Baseline(self.window)
        self._logarithms = True
        self._began_at: float | None = None
        self._high: deque[bool] = deque(maxlen=5)  # whether each stood out by half of the limit, and was not known

    def check(self, record: Record) -> Verdict:
        value = record.values.get(self.metric)
        if value is None or not math.isfinite(value):  # what is not finite is another alarm's
            return NOT_JUDGED
        left_out = passed_over(record)
        if self._logarithms and value < 0 and not left_out:
            self._logarithms = False
            self._usual.replace(_exp)
        x = value if not self._logarithms else math.log(value) if value > 0 else _LOG_OF_ZERO
        usual = self._usual
        usual.advance()
        if len(usual) < self.warm_up:
            if not left_out:
                usual.add(x)
            return None
        if self._began_at is None:
            self._began_at = abs(self._back(usual.median()))
        half, full = self._stands_out(x, value)
        known = usual.known_height()
        is_known = known > -math.inf and x <= known + self._floor(known)
        self._high.append(half and not is_known)
        spike = not is_known and (full or half and sum(self._high) >= 3)
        verdict = self._finding(record, value, x) if spike else None
        if not left_out:
            (usual.add_outlier if half else usual.add)(x)
        return verdict

    def _stands_out(self, x: float, value: float) -> tuple[bool, bool]:
        """Whether `x` is above half of the limit, and above all of it."""
        median = self._usual.median()
        if x <= median + self._floor(median):  # most values
            return False, False
        if value - self._back(median) <= _SMALLEST_RISE * (self._began_at or 0.0):
            return False, False
        limit = self.deviations * self._deviation()
        return x - median > limit / 2, x - median > limit

    def _deviation(self) -> float:
        return max(self._usual.deviation(), self._usual.upper_deviation())

    def _floor(self, x: float) -> float:
        return math.log1p(self.floor) if self._logarithms else self.floor * abs(x)

    def _back(self, x: float) -> float:
        return _exp(x) if self._logarithms else x

    def _finding(self, record: Record, value: float, x: float) -> Finding:
        median, deviation = self._usual.median(), self._deviation()
        of = " of the logarithm" if self._logarithms else ""
        above = f"{(x - median) / deviation:.3g} deviations{of} above" if deviation > 0 else "above"
        where, detail = self._where(record)
        return Finding(f"{self.metric} is {value:.4g}, {above} {self._back(median):.4g}, the median of the last "
                       f"{len(self._usual)} good records{detail}", self.metric, value, where)

    def _where(self, record: Record) -> tuple[str, str]:
        return "", ""


class LossSpike(_Spike):
    """A loss that stands far above its own recent past.

    It compares the logarithm of the loss with median and MAD of the last good values, by the formula of `GradientSpike`.

    Args:
        deviations: How many deviations above the median are a spike. By default 6, of which normal noise makes one in a
            billion steps.
        floor: By what part a spike must be above the median at least. By default a tenth: the loss of a language model
            varies by a few parts in a hundred from batch to batch.
        window: How many good values are the recent past; by default 100, of which the deviation is known to a tenth.
        warm_up: How many good values it needs before it judges.
        metric: The loss to look at, such as `loss/<part>`.
        policy: As for each `Alarm`, and so `name` and `quiet`.

    Raises:
        ValueError: A number is out of its range, or `warm_up` is larger than `window`.
    """

    def __init__(self, *, deviations: float = 6.0, floor: float = 0.1, window: int = 100, warm_up: int = 30,
                 metric: str = "loss", policy: Policy = "log", name: str | None = None, quiet: int | None = None):
        super().__init__(deviations=deviations, floor=floor, window=window, warm_up=warm_up, policy=policy, name=name,
                         quiet=quiet)
        self.metric = metric
        self.needs = (metric,)

    def _where(self, record: Record) -> tuple[str, str]:
        return self.metric.partition("/")[2], ""


class GradientSpike(_Spike):
    """A gradient norm that stands far above its own recent past. It names the parameter with the largest part in it.

    Let x be the logarithm of `grad/norm`, m the median of x over the last `window` good records, q the value that nine tenths
    of them do not exceed, and s the deviation, the larger of 1.4826 * median |x - m| (MAD) and (q - m) / 1.2816. Of normal
    numbers both are the standard deviation; losses of small batches, which are learned by heart, have a longer tail upward.

    x stands out if it is above m by more than `deviations` / 2 * s, the norm is above its median by `floor` times the median,
    so that rounding does not count, and by a thousandth of where the run began. It is a spike if it is above m by more than
    `deviations` * s as well, or the third of the last five records to stand out. (Limits for one point and for several in a
    row are the way of control charts: Western Electric, "Statistical Quality Control Handbook", 1956.)

    What stands out is no good record, nor is one whose update was left out, or whose value is NaN or infinite. Where more
    than half of the last `window` records stood out, and do not rise any more, theirs is the new level, with which all is
    compared from there on. A height that three records reached that stood out half a window ago or before is known: what is
    not above it by `floor` is no spike any more, since it comes again and again.

    Logarithms, since norms vary by factors: a number of deviations means the same at each noise level. A metric that turns
    out to have negative values, as a loss can, is compared as it is.

    Args:
        deviations: How many deviations above the median are a spike. By default 6, of which normal noise makes one in a
            billion steps.
        floor: By what part a spike must be above the median at least. By default 1, which is twice the median: less does no
            harm.
        window: How many good values are the recent past; by default 100, of which the deviation is known to a tenth.
        warm_up: How many good values it needs before it judges.
        policy: As for each `Alarm`, and so `name` and `quiet`.

    Raises:
        ValueError: A number is out of its range, or `warm_up` is larger than `window`.
    """

    metric = "grad/norm"
    needs = ("grad/norm",)
    hint = "Train with an InstrumentedStep."

    def __init__(self, *, deviations: float = 6.0, floor: float = 1.0, window: int = 100, warm_up: int = 30,
                 policy: Policy = "log", name: str | None = None, quiet: int | None = None):
        super().__init__(deviations=deviations, floor=floor, window=window, warm_up=warm_up, policy=policy, name=name,
                         quiet=quiet)

    def _where(self, record: Record) -> tuple[str, str]:
        group, norms = self.columns.select(record, "grad/norm/")
        finite = np.where(np.isfinite(norms), norms, 0.0)
        if not len(group) or not finite.any():
            return "", ""
        largest = int(np.argmax(finite))
        share = (norms[largest] / record.values[self.metric]) ** 2
        return group.names[largest], f"; {share:.0%} of its square is of {group.names[largest]}"


def _exp(x: float) -> float:
    return math.exp(min(x, 709.78))  # the logarithm of the largest float64, rounded, has none
