"""What `ConsoleWriter` shows, one piece each: the course of a number, the pace, the alarms that are open, numbers as text.

Knows nothing of terminals, so that all of it is plain text or a number.
"""
from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping

from instrument.record import VALIDATION, Incident

RMS = "activation/rms/"
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Trend:
    """The course of one number in a few characters: over the whole run, or the last records of one without end."""

    def __init__(self, total_steps: int | None, *, width: int = 16):
        self._total, self._width = total_steps, width
        self._columns: deque[tuple[int, float, int]] = deque(maxlen=width)  # place, mean, number of values

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        place = (step - 1) * self._width // self._total if self._total else step
        count = 0
        mean = 0.0
        if self._columns and self._columns[-1][0] == place:
            _, mean, count = self._columns.pop()
        self._columns.append((place, mean + (value - mean) / (count + 1), count + 1))

    def text(self, *, ascii_only: bool = False) -> str:
        means = [mean for _, mean, _ in self._columns]
        low, high = min(means, default=0.0), max(means, default=0.0)
        bars = _ASCII_BARS if ascii_only else _BARS
        # Halves first: the difference of two large numbers can overflow.
        scale = (len(bars) - 1) / (high / 2 - low / 2) if high > low else 0.0
        return "".join(bars[round((mean / 2 - low / 2) * scale)] for mean in means)


class Pace:
    """Seconds a step, over the last ten seconds or, where steps take longer, the last twenty records.

    Records that come together, as all those of a data sink do, count as one mark: the time between them says nothing. The
    first step, which compiles, lies before the first mark.
    """

    _TOGETHER, _LEAST = 0.5, 0.05  # seconds

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float, int]] = deque(maxlen=20)  # times of the first and last record, and last step

    def add(self, step: int, time: float) -> None:
        if self._marks:
            begun, last, at = self._marks[-1]
            if step < at or time < last:  # another run begins, or the clock was set back
                self._marks.clear()
            elif time - begun < self._TOGETHER:
                self._marks[-1] = begun, time, step
                return
        self._marks.append((time, time, step))

    def seconds(self) -> float | None:
        """None while it is not known."""
        if len(self._marks) < 2:
            return None
        (_, first_time, first), (_, last_time, last) = self._marks[0], self._marks[-1]
        if last <= first or last_time - first_time < self._LEAST:
            return None
        return (last_time - first_time) / (last - first)


class OpenIncidents:
    """The incidents that have begun and not ended."""

    def __init__(self) -> None:
        self._open: list[Incident] = []

    def __iter__(self) -> Iterator[Incident]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def take(self, incident: Incident) -> None:
        if incident.state == "begin":
            self._open.append(incident)
            return
        for like in (lambda each: _identity(each) == _identity(incident), lambda each: each.alarm == incident.alarm
                     and each.first_step == incident.first_step):
            found = next((place for place, each in enumerate(self._open) if like(each)), None)
            if found is not None:
                del self._open[found]
                return


def _identity(incident: Incident) -> tuple[str, int, str, str]:
    return incident.alarm, incident.first_step, incident.metric, incident.where


def said(incident: Incident) -> str:
    """An incident in one sentence, with the layer that it names."""
    sentence, where = plain(str(incident)), plain(incident.where)
    return sentence if where in sentence else f"{sentence} ({where})"


def plain(text: str) -> str:
    """Without control characters: what a file says must not move the cursor, or set the window's title.

    Examples:
        >>> plain("loss \\x1b]0;hello\\x07")
        'loss �]0;hello�'
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def figures(values: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Label, text and place of the numbers that are always shown."""
    rate = next((value for name, value in values.items() if name.partition("/")[0] == "learning_rate"), None)
    blocks = {name[len(RMS):]: value for name, value in values.items() if name.startswith(RMS)}
    block = max(blocks, key=lambda name: (not math.isfinite(blocks[name]), blocks[name]), default="")
    return [("loss", number(values.get("loss"), ".4f"), ""),
            ("gradient norm", number(values.get("grad/norm"), "#.4g"), ""),
            ("learning rate", number(rate, ".2e"), ""),
            ("largest rms", number(blocks.get(block), "#.4g"), plain(block))]


def throughput(values: Mapping[str, float]) -> list[str]:
    """What is there of tokens and samples a second, and of the share of time that the step waits for data."""
    texts = [f"{short(values[name])} {unit}" for name, unit in (
        ("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")) if name in values]
    if "data_wait_fraction" in values:
        texts.append(f"{100 * values['data_wait_fraction']:.0f} % waiting for data")
    return texts


def validation(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Name and text of each validation metric."""
    return [(plain(name[len(VALIDATION):]), number(value, "#.4g")) for name, value in values.items()
            if name.startswith(VALIDATION)]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(float(value), form)


def short(value: float) -> str:
    """Three digits and a letter for thousands or millions.

    Examples:
        >>> short(12345.0), short(3.21), short(987654321.0)
        ('12.3k', '3.21', '988M')
    """
    value = float(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if math.isfinite(value) and abs(value) >= 0.9995 * size:
            value /= size
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}{letter}"
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s/step" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms/step"
