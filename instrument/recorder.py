"""`Recorder`: what the background thread makes of a step that was read: a record, with the host's numbers and the alarms.

Owns everything about a record that training need not wait for. Runs in one thread at a time.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from instrument.alarms import AlarmSet
from instrument.background import Kept
from instrument.host import HostStats
from instrument.outputs import Reading
from instrument.record import VALIDATION, Record
from instrument.schema import ONE_FOR_ALL, Metric, Schema

# What is the same on each rank besides the schema's metrics that are one number for all.
_GLOBAL = ("learning_rate", "epoch", VALIDATION)


class Finish(Kept):
    """Queued at the end of training: incidents that are still open end here."""


class Recorder:
    """Makes records.

    Args:
        alarms: Those that are looked at here.
        host: The machine's numbers.
        perplexity: Whether the loss is a mean in nats a token, so that its exponential is the perplexity.
        rank: This process; ranks other than 0 leave out what is the same on all.
    """

    def __init__(self, alarms: AlarmSet, host: HostStats, *, perplexity: bool = False, rank: int = 0):
        self.alarms, self._host, self._perplexity, self._rank = alarms, host, perplexity, rank
        self.report: Callable[[str, BaseException], None] = lambda name, error: None  # of an alarm that fails
        self.wants_measurement = False  # an incident began: the next step should be measured
        self.last_step = 0
        self._schema: Schema | None = None
        self._global_names: tuple[Sequence[Metric], frozenset[str]] = ((), frozenset())

    def records_of(self, item: Reading | Record | Finish) -> Sequence[Record]:
        """The records of what the monitor has queued."""
        if isinstance(item, Finish):
            ended = self.alarms.finish()
            return [Record(self.last_step, time.time(), {}, alarms=ended)] if ended else []
        record = item.record() if isinstance(item, Reading) else item
        self.last_step = max(record.step, 1)
        added: dict[str, float] = self._host.sample() if record.has_training else {}
        if self._perplexity:
            for prefix in ("", VALIDATION):
                if f"{prefix}loss" in record.values:
                    added[f"{prefix}perplexity"] = perplexity(record.values[f"{prefix}loss"])
        record = replace(record, values={**record.values, **added})
        incidents = self.alarms.observe(record)
        for name, error in self.alarms.errors:
            self.report(name, error)
        self.wants_measurement = self.wants_measurement or any(each.state == "begin" for each in incidents)
        if self._rank != 0:
            record = self._local(record)
        return [replace(record, alarms=(*record.alarms, *incidents))]

    def know(self, schema: Schema) -> None:
        """Take the schema of the records that come: one that an alarm has seen before brings none."""
        self._schema = schema

    def _local(self, record: Record) -> Record:
        """The record without what rank 0 has recorded for all."""
        metrics = self._schema.metrics if self._schema is not None else ()  # others, when parts of a loss become known
        if metrics is not self._global_names[0]:
            found = frozenset(each.name for each in metrics if each.scope in ONE_FOR_ALL)
            self._global_names = metrics, found | {"perplexity"} if "loss" in found else found
        names = self._global_names[1]
        values = {name: value for name, value in record.values.items() if name not in names and not name.startswith(_GLOBAL)}
        # Histograms of weights and reduced gradients are the same on all ranks; of activations, where the loss is.
        histograms = {} if "loss" in names else {name: counts for name, counts in record.histograms.items()
                                                 if name.startswith("histogram/activation/")}
        return replace(record, values=values, histograms=histograms)


def perplexity(loss: float) -> float:
    """exp(loss), for a loss in nats a token; infinite above what a float64 holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
