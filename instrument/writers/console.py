"""`ConsoleWriter`: the run at a glance, in the terminal or as plain lines in a log."""
from __future__ import annotations

import math
from collections import deque

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from instrument.record import Record
from instrument.writers.base import Writer

RMS = "activation/rms/"
_BARS = "▁▂▃▄▅▆▇█"
_REDRAW_SECONDS = 0.1
_WIDTH_WITH_TRENDS = 90


class ConsoleWriter(Writer):
    """Shows progress, time left, loss, gradient norm, learning rate and the block with the largest rms.

    A terminal gets a panel, drawn anew in place; anything else (a file, a pipe, the log of a batch job) gets a plain
    line every few steps. A number that a record lacks is shown as `-`.

    Args:
        total_steps: Number of steps of the whole run; None where it is not known, then without bar and time left.
        line_every: Steps from one plain line to the next; by default a twentieth of the run, or 10.
        console: rich's console; standard output by default.
    """

    def __init__(self, *, total_steps: int | None = None, line_every: int | None = None,
                 console: Console | None = None):
        self.total_steps = total_steps
        self.line_every = line_every or max((total_steps or 200) // 20, 1)
        self.console = console or Console(highlight=False)
        self._trends = {name: _Trend(total_steps) for name in ("loss", "grad/norm")}
        self._recent: deque[Record] = deque(maxlen=20)
        self._live: Live | None = None
        self._shown: Record | None = None

    def write(self, record: Record) -> None:
        self._recent.append(record)
        for name, trend in self._trends.items():
            trend.add(record.step, record.values.get(name, math.nan))
        if self.console.is_terminal:
            if self._live is None or self._shown is None or record.time - self._shown.time >= _REDRAW_SECONDS:
                self._draw(record)
        elif self._shown is None or record.step - self._shown.step >= self.line_every:
            self._print(record)

    def flush(self) -> None:
        """Show the newest record, whatever is due."""
        if self._recent and self._recent[-1] is not self._shown:
            (self._draw if self.console.is_terminal else self._print)(self._recent[-1])

    def close(self) -> None:
        self.flush()
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._recent.clear()
        self._shown = None

    def _draw(self, record: Record) -> None:
        self._shown = record
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
            self.console.show_cursor(True)  # MindSpore can end the process at Ctrl-C, and nobody would show it again
        self._live.update(self.panel(record), refresh=True)

    def _print(self, record: Record) -> None:
        self._shown = record
        figures = [f"{label} {value} {where}".rstrip() for label, value, where in _figures(record)]
        parts = [self._step_text(record), *figures, *self._pace()]
        self.console.print("  ".join(parts), soft_wrap=True, markup=False, highlight=False)

    def panel(self, record: Record) -> RenderableType:
        """What a terminal shows for the newest record."""
        figures = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
        trends = [*self._trends.values(), "", ""] if self.console.width >= _WIDTH_WITH_TRENDS else [""] * 4
        row = []
        for (label, value, where), trend in zip(_figures(record), trends):
            figures.add_column(label, no_wrap=True, min_width=24 if trend else len(label), ratio=1 if where else None)
            finite = value.lstrip("-") not in ("nan", "inf")
            row.append(Text.assemble((value, "bold" if finite else "bold red"), "  ", (f"{trend}", "cyan"), where))
        figures.add_row(*row)
        progress = Table.grid(expand=True, padding=(0, 2, 0, 0))
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True, justify="right", style="dim")
        bar = ProgressBar(self.total_steps, record.step, complete_style="cyan", finished_style="green") \
            if self.total_steps else Text()
        progress.add_row(Text(self._step_text(record), style="bold"), bar, "  ".join(self._pace()))
        return Panel(Group(progress, Text(), figures), box=box.ROUNDED, border_style="dim", padding=(0, 1))

    def _step_text(self, record: Record) -> str:
        total = f"/{self.total_steps}" if self.total_steps else ""
        return f"step {record.step:>{max(len(total) - 1, 0)}}{total}"

    def _pace(self) -> list[str]:
        """Seconds a step and time left, from the records at hand; the first step, which compiles, lies before them."""
        first, last = self._recent[0], self._recent[-1]
        if last.step <= first.step:
            return []
        seconds = (last.time - first.time) / (last.step - first.step)
        pace = f"{seconds:.2f} s/step" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms/step"
        if not self.total_steps or last.step > self.total_steps:
            return [pace]
        return [pace, f"{_clock(seconds * (self.total_steps - last.step))} left"]


class _Trend:
    """The course of one number in a few characters: over the whole run, or the last records of one without end."""

    def __init__(self, total_steps: int | None, width: int = 16):
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

    def __str__(self) -> str:
        means = [mean for _, mean, _ in self._columns]
        low, high = min(means, default=0.0), max(means, default=0.0)
        scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _figures(record: Record) -> list[tuple[str, str, str]]:
    """Label, text and place of the numbers that are shown."""
    values = record.values
    rate = next((value for name, value in values.items() if name.partition("/")[0] == "learning_rate"), None)
    blocks = {name[len(RMS):]: value for name, value in values.items() if name.startswith(RMS)}
    block = max(blocks, key=lambda name: (not math.isfinite(blocks[name]), blocks[name]), default="")
    return [("loss", _number(values.get("loss"), ".4f"), ""),
            ("gradient norm", _number(values.get("grad/norm"), "#.4g"), ""),
            ("learning rate", _number(rate, ".2e"), ""),
            ("largest rms", _number(blocks.get(block), "#.4g"), block)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
