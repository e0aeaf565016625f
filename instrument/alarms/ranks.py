"""`SlowRank`: one process of a data parallel job that all the others wait for."""
from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from instrument.alarms.base import NOT_JUDGED, Finding, Policy, Verdict
from instrument.alarms.shares import TimeShare
from instrument.record import Record


class _Step(NamedTuple):
    lost: float  # seconds that the last rank waited longer for its data than the first
    time: float  # seconds of the whole step
    rank: int  # which rank was last


class SlowRank(TimeShare):
    """A rank whose data comes late: all ranks then wait for it, in the reduction of the gradients.

    What that costs is Σ (max - min) / Σ time over the last `window` records, with the largest and the smallest `data_wait`
    of a rank, and the largest `step_time`; in the numerator, the records in which this rank waited the longest. It must be
    more than half of what all ranks cost, or else they take turns, and come of a quarter of the records at least, since one
    long pause is no slow rank. It is what the first rank loses: with two that are slow alike, the others gain nothing by
    mending one. `data_wait` has callbacks in it that come after the monitor. A rank that computes slowly makes the steps of
    all of them long alike, which no rank's clock can tell.

    Args:
        fraction: From which share of the time on. By default a tenth.
        window: Over how many records, all of which it needs before it judges. The first record is left out, since the
            pipelines start in it.
        policy: As for each `Alarm`, and so `name` and `quiet`.

    Raises:
        ValueError: A number is out of its range.
    """

    needs: tuple[str, ...] = ("rank/max/data_wait",)
    hint = ("Make the step by InstrumentedStep(..., ranks=True), or measure a stock one with StepOptions(ranks=True), in a "
            "data parallel job of several processes.")

    def __init__(self, *, fraction: float = 0.1, window: int = 50, policy: Policy = "log", name: str | None = None,
                 quiet: int | None = None):
        super().__init__(fraction, window, policy=policy, name=name, quiet=quiet)

    def check(self, record: Record) -> Verdict:
        values = record.values
        least, most, rank = (values.get(f"rank/{what}/data_wait", math.nan) for what in ("min", "max", "argmax"))
        time = values.get("rank/max/step_time", math.nan)
        if not (math.isfinite(most - least) and math.isfinite(rank) and 0 < time < math.inf):
            return NOT_JUDGED
        if not self.keep(_Step(min(most - least, time), time, int(rank))):
            return None
        lost: dict[int, float] = defaultdict(float)
        for step in self._kept:
            lost[step.rank] += step.lost
        slowest, seconds = max(lost.items(), key=lambda item: item[1])
        share = seconds / sum(step.time for step in self._kept)
        times = sum(step.rank == slowest for step in self._kept)
        if share < self.fraction or 2 * seconds <= sum(lost.values()) or 4 * times < len(self._kept):
            return None
        return Finding(f"rank {slowest} waited for its data the longest in {times} of the last {len(self._kept)} records, "
                       f"and the first rank was ready before it by {share:.0%} of the time: look at its disk, its network, "
                       "its data workers, and callbacks that run on it alone", "rank/max/data_wait", most,
                       where=f"rank {slowest}")
