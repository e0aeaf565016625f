"""`ThroughputDrop` and `DataStarved`: training that goes on, and takes longer than it should."""
from __future__ import annotations

import math

from instrument.alarms.arguments import number, warm_up_within, whole
from instrument.alarms.base import NOT_JUDGED, Alarm, Finding, Policy, Verdict
from instrument.alarms.baseline import Baseline
from instrument.alarms.shares import TimeShare
from instrument.record import Record


class ThroughputDrop(Alarm):
    """Steps that take longer than usual, in each of `records` records in a row.

    What is usual is the median of the last `window` values that were not slow. Where more than half of the last `window`
    records were, theirs is the new pace, and the incident over.

    Args:
        factor: From how many times the usual time on a step is slow. By default 2: on a machine shared with others
            times vary by a half.
        records: By default 20, so that a checkpoint, an evaluation or a slow file is no alarm.
        seconds: How long the slow steps of these records must have taken together, where `step_time` is recorded: 20 steps of
            some milliseconds are slow whenever something else runs for a moment.
        window: How many values are the recent past.
        warm_up: How many values it needs before it judges. The first one is left out, since it has compilation in it.
        metric: `step_time`, or what is fewer where training is slower: a name that ends in `_per_second`.
        policy: As for each `Alarm`, and so `name` and `quiet`.

    Raises:
        ValueError: A number is out of its range, or `warm_up` is larger than `window`.
    """

    def __init__(self, *, factor: float = 2.0, records: int = 20, seconds: float = 1.0, window: int = 200,
                 warm_up: int = 20, metric: str = "step_time", policy: Policy = "log", name: str | None = None,
                 quiet: int | None = None):
        super().__init__(policy=policy, name=name, quiet=quiet)
        self.factor = number("factor", factor, least=1.0)
        self.records = whole("records", records)
        self.seconds = number("seconds", seconds)
        self.window = whole("window", window, least=2)
        self.warm_up = warm_up_within(warm_up, self.window)
        self.metric = metric
        self.needs = (metric,)
        self.reset()

    def reset(self) -> None:
        self._usual = Baseline(self.window)
        self._is_first = True
        self._slow = 0  # records in a row
        self._slow_seconds = 0.0  # a step of each, together

    def check(self, record: Record) -> Verdict:
        value = record.values.get(self.metric)
        if value is None or not math.isfinite(value) or value <= 0:
            return NOT_JUDGED
        if self._is_first:
            self._is_first = False
            return None
        usual = self._usual
        usual.advance()
        if len(usual) < self.warm_up:
            usual.add(value)
            return None
        median = usual.median()
        slower = median / value if self.metric.endswith("_per_second") else value / median
        if slower < self.factor:
            usual.add(value)
            self._slow, self._slow_seconds = 0, 0.0
            return None
        usual.add_outlier(value)
        self._slow += 1
        self._slow_seconds += record.values.get("step_time", math.inf)
        if self._slow < self.records or self._slow_seconds < self.seconds:
            return None
        return Finding(f"{self.metric} is {value:.4g}, and was {median:.4g} (median): {slower:.3g} times slower, for "
                       f"{self._slow} records in a row", self.metric, value)


class DataStarved(TimeShare):
    """Training that waits for data for a large part of its time.

    The part is Σ wait / Σ time over the last `window` records, with time = `step_time` (1 where it is not recorded) and wait
    = `data_wait_fraction` times it: an input pipeline that stops once in a while counts by how long it stops.

    Args:
        fraction: From which share on. By default a half: then training takes twice as long as it has to.
        window: Over how many records, all of which it needs before it judges. The first record is left out, since the
            pipeline starts in it.
        policy: As for each `Alarm`, and so `name` and `quiet`.
    """

    needs = ("data_wait_fraction",)

    def __init__(self, *, fraction: float = 0.5, window: int = 50, policy: Policy = "log", name: str | None = None,
                 quiet: int | None = None):
        super().__init__(fraction, window, policy=policy, name=name, quiet=quiet)

    def check(self, record: Record) -> Verdict:
        waited, time = record.values.get("data_wait_fraction"), record.values.get("step_time", 1.0)
        if waited is None or not math.isfinite(waited) or not 0 < time < math.inf:
            return NOT_JUDGED
        if not self.keep((waited * time, time)):
            return None
        waits, times = zip(*self._kept)
        share = sum(waits) / sum(times)
        if share < self.fraction:
            return None
        return Finding(f"training waited for data for {share:.0%} of the time of the last {self.window} records: the input "
                       "pipeline is slower than the device. Give it more workers, or prepare the data ahead",
                       "data_wait_fraction", share)
