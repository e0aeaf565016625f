"""`Notes`: what a run says besides its metrics, in memory and within bounds: alarms, texts and histograms.

Which lines count is decided as in `instrument.reading`. Is called by `Store` alone, which holds the lock.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from instrument.bins import BINS

# More histograms of one name are thinned out, every second one first; more texts and alarms go, the oldest first.
_HISTOGRAMS, _TEXTS, _ALARMS = 512, 1000, 10_000
_TEXT_LENGTH = 100_000


@dataclass
class Alarm:
    """One stretch of steps with an alarm; the fields are those of `instrument.record.Incident`."""

    alarm: str
    first_step: int
    last_step: int
    message: str
    metric: str = ""
    where: str = ""
    value: float | None = None
    active: bool = True
    open_at: int = 0  # the last step at which training ended before the alarm was over


class Notes:
    """Alarms, texts and histograms of one run; made empty.

    Attributes:
        skipped: Lines that were no record.
        alarms: All of them, the oldest first.
        texts: `[{"step", "time", "name", "text"}]`, the oldest first.
        histograms: `{name: [(step, first bin, counts from that bin on)]}`, the oldest first.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.alarms: list[Alarm] = []
        self._known: dict[tuple[str, int, str], Alarm] = {}  # the same
        self._left_open: list[Alarm] = []  # of these, those that were not over when training ended
        self.texts: list[dict[str, Any]] = []
        self.histograms: dict[str, list[tuple[int, int, np.ndarray]]] = {}

    def add_alarms(self, lines: bytes) -> None:
        """Whole lines of `alarms.jsonl`."""
        for line in self._documents(lines, self._void_alarms):
            try:
                self._add_alarm(line)
            except (KeyError, TypeError, ValueError):
                self.skipped += 1
        self._keep(self.alarms[-_ALARMS:])

    def add_texts(self, lines: bytes) -> None:
        """Whole lines of `samples.jsonl`."""
        def void(step: int) -> None:
            self.texts = [text for text in self.texts if text["step"] <= step]

        for line in self._documents(lines, void):
            if isinstance(line.get("text"), str):
                self.texts.append({"step": line["step"], "time": line.get("time"), "name": str(line.get("name", "")),
                                   "text": line["text"][:_TEXT_LENGTH]})
            else:
                self.skipped += 1
        del self.texts[:-_TEXTS]

    def add_histograms(self, lines: bytes) -> None:
        """Whole lines of `histograms-*.jsonl`."""
        def void(step: int) -> None:
            for name, kept in self.histograms.items():
                self.histograms[name] = [each for each in kept if each[0] <= step]

        for line in self._documents(lines, void):
            try:
                for name, each in line["histograms"].items():
                    low, counts = int(each["low"]), np.asarray(each["counts"], np.int64)
                    if counts.ndim != 1 or not 0 <= low <= low + len(counts) <= BINS or (counts < 0).any():
                        raise ValueError("no histogram")
                    kept = self.histograms.setdefault(str(name), [])
                    kept.append((line["step"], low, counts))
                    if len(kept) > 1 and kept[-2][0] >= line["step"]:  # of several at one step the last counts
                        kept[:] = sorted({each[0]: each for each in kept}.values(), key=lambda each: each[0])
                    if len(kept) > _HISTOGRAMS:
                        del kept[1:-1:2]
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self.skipped += 1

    def _documents(self, lines: bytes, void: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        for raw in lines.splitlines():
            try:
                line = orjson.loads(raw)
                if type(line["step"]) is not int:
                    raise TypeError
            except (orjson.JSONDecodeError, KeyError, TypeError):
                self.skipped += 1
                continue
            if line.get("resumed") is True:
                void(line["step"])
            else:
                yield line

    def _add_alarm(self, line: dict[str, Any]) -> None:
        name, first = str(line["alarm"]), line["first_step"]
        if type(first) is not int:
            raise TypeError("first_step must be a whole number")
        where = str(line.get("where") or "")
        value = line.get("value")
        nonfinite = line.get("nonfinite")
        if isinstance(nonfinite, dict) and "value" in nonfinite:
            value = float(nonfinite["value"])
        alarm = self._known.get((name, first, where))
        if alarm is None:
            if len(self.alarms) >= 2 * _ALARMS:
                self._keep(self.alarms[-_ALARMS:])
            alarm = Alarm(name, first, first, str(line.get("message") or ""), str(line.get("metric") or ""), where,
                          None if value is None else float(value))
            self._known[name, first, where] = alarm
            self.alarms.append(alarm)
        last = line.get("last_step")
        alarm.last_step = max(last, first) if type(last) is int else first
        alarm.active = line.get("state") != "end"
        if line.get("state") == "open":
            alarm.open_at = line["step"]
            self._left_open.append(alarm)

    def has_gone_on(self, step: int) -> bool:
        """Training goes on at this step: what was open when it ended would be told anew. Whether anything was."""
        over = [alarm for alarm in self._left_open if alarm.open_at < step]
        for alarm in over:
            alarm.active = False
            self._left_open.remove(alarm)
        return bool(over)

    def _keep(self, alarms: list[Alarm]) -> None:
        self.alarms = alarms
        self._known = {(alarm.alarm, alarm.first_step, alarm.where): alarm for alarm in alarms}

    def _void_alarms(self, step: int) -> None:
        self._keep([alarm for alarm in self.alarms if alarm.first_step <= step])
        for alarm in self.alarms:
            alarm.last_step = min(alarm.last_step, step)
            alarm.active = False  # the process that would have told its end is gone
