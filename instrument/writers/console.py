"""`ConsoleWriter`: the run at a glance, in the terminal or as plain lines in a log.

Owns how it is laid out, and when it is drawn. What is shown is worked out by `console_parts.py`.
"""
from __future__ import annotations

import math

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from instrument.record import Record, RunInfo
from instrument.writers import console_parts as parts
from instrument.writers.base import Writer
from instrument.writers.terminal import Screen

_REDRAW_SECONDS = 0.1
_WIDTH_WITH_TRENDS = 90
_OPEN_SHOWN = 3
_STARVED = 0.2  # share of the step's time that waits for data


class ConsoleWriter(Writer):
    """Shows progress, time left, loss, gradient norm, learning rate, the block with the largest rms, validation and alarms.

    A terminal gets a panel, drawn anew in place; anything else (a file, a pipe, the log of a batch job) gets a plain
    line every few steps. A number that a record lacks is shown as `-`; tokens and samples a second, the share of time that
    the step waits for data, and validation appear where they are measured. What is not finite is red.

    An incident of an alarm is printed once when it begins, and once when it ends; those that are open stay marked in the
    panel. What the program prints appears above the panel. What passes Python's `sys.stdout` and `sys.stderr` by, as
    MindSpore's own log from C++ does, cannot be caught, and leaves parts of an old panel above the new one.

    Args:
        total_steps: Number of steps of the whole run; by default what the run says by `start`. Where neither knows it, there
            is no bar and no time left.
        line_every: Steps from one plain line to the next; by default a twentieth of the run, or 10.
        console: rich's console; standard output by default.
    """

    shows_alarms = True

    def __init__(self, *, total_steps: int | None = None, line_every: int | None = None,
                 console: Console | None = None):
        self.total_steps = total_steps
        self.line_every = line_every
        self.console = console or Console(highlight=False)
        self._asked = total_steps
        self._name = ""
        self._trends = {name: parts.Trend(total_steps) for name in ("loss", "grad/norm")}
        self._pace = parts.Pace()
        self._incidents = parts.OpenIncidents()
        self._validation: tuple[int, list[tuple[str, str]]] = 0, []
        self._newest: Record | None = None  # of training
        self._shown: Record | None = None
        self._changed = False  # something besides the newest record has to be drawn
        self._screen = Screen(self.console)

    def start(self, run: RunInfo) -> None:
        if self._asked is None and run.total_steps != self.total_steps:
            self.total_steps = run.total_steps
            self._trends = {name: parts.Trend(run.total_steps) for name in self._trends}
        self._name = parts.plain(run.name) if run.directory is not None else ""

    def write(self, record: Record) -> None:
        self._tell(record)
        if record.has_training:
            self._newest = record
            self._pace.add(record.step, record.time)
            for name, trend in self._trends.items():
                trend.add(record.step, record.values.get(name, math.nan))
        shown = self._shown
        if self.console.is_terminal:
            if self._changed or shown is None or _due(record.time - shown.time, _REDRAW_SECONDS):
                self._draw(self._newest or record)
        elif self._newest is record and (shown is None or _due(record.step - shown.step, self._every())):
            self._print(record)

    def flush(self) -> None:
        """Show the newest record, whatever is due."""
        if self._newest is not None and (self._newest is not self._shown or self._changed and self.console.is_terminal):
            (self._draw if self.console.is_terminal else self._print)(self._newest)

    def close(self) -> None:
        self.flush()
        self._screen.stop()
        self._pace, self._incidents = parts.Pace(), parts.OpenIncidents()
        self._newest = self._shown = None

    def _every(self) -> int:
        return self.line_every or max((self.total_steps or 200) // 20, 1)

    def _tell(self, record: Record) -> None:
        """Print what is said once: incidents, and in a log validation."""
        for incident in record.alarms:
            self._incidents.take(incident)
            self._changed = True
            sentence = Text(parts.said(incident), style="green" if incident.state == "end" else "bold red")
            if self.console.is_terminal:
                self._screen.print(sentence)
            else:
                self.console.print(sentence, soft_wrap=True)
        measured = parts.validation(record.values)
        if measured:
            self._validation = record.step, measured
            self._changed = True
            if not self.console.is_terminal:
                self._line([self._step_text(record), "validation", *(f"{name} {value}" for name, value in measured)])

    def _print(self, record: Record) -> None:
        self._shown = record
        figures = [f"{label} {value} {where}".rstrip() for label, value, where in parts.figures(record.values)]
        self._line([self._step_text(record), *figures, *self._time(record), *parts.throughput(record.values)])

    def _line(self, texts: list[str]) -> None:
        self.console.print("  ".join(texts), soft_wrap=True, markup=False, highlight=False)

    def _draw(self, record: Record) -> None:
        self._shown, self._changed = record, False
        self._screen.show(self.panel(record))

    def panel(self, record: Record) -> RenderableType:
        """What a terminal shows for the newest record of training."""
        lines: list[RenderableType] = [self._progress(record)]
        rates = parts.throughput(record.values)
        if rates:
            starved = record.values.get("data_wait_fraction", 0.0) > _STARVED
            lines.append(_one_line(Text("  ").join(
                Text(text, style="yellow" if starved and text.endswith("data") else "dim") for text in rates)))
        lines += [Text(), self._figures(record)]
        step, measured = self._validation
        if measured:
            texts = [Text.assemble((f"{name} ", "dim"), (value, _style(value))) for name, value in measured]
            lines += [Text(), _one_line(Text.assemble((f"validation at step {step}    ", "dim"), Text("   ").join(texts)))]
        opened = list(self._incidents)
        if opened:
            lines.append(Text())
            lines += [_one_line(Text(parts.said(incident), style="bold red")) for incident in opened[:_OPEN_SHOWN]]
            if len(opened) > _OPEN_SHOWN:
                lines.append(Text(f"and {len(opened) - _OPEN_SHOWN} more", style="bold red"))
        return Panel(Group(*lines), box=box.ROUNDED, border_style="red" if opened else "dim", padding=(0, 1),
                     title=Text(self._name, style="dim") if self._name else None, title_align="left")

    def _progress(self, record: Record) -> Table:
        progress = Table.grid(expand=True, padding=(0, 2, 0, 0))
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True, justify="right", style="dim")
        bar = ProgressBar(self.total_steps, record.step, complete_style="cyan", finished_style="green") \
            if self.total_steps else Text()
        progress.add_row(Text(self._step_text(record), style="bold"), bar, "  ".join(self._time(record)))
        return progress

    def _figures(self, record: Record) -> Table:
        figures = Table(box=None, expand=True, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
        wide = self.console.width >= _WIDTH_WITH_TRENDS
        ascii_only = self.console.options.ascii_only
        trends = [trend.text(ascii_only=ascii_only) if wide else "" for trend in self._trends.values()]
        row, room = [], self.console.width - 6  # within the panel's sides and the table's
        for (label, value, where), trend in zip(parts.figures(record.values), [*trends, "", ""]):
            width = 24 if trend else max(len(label), len(value))
            text = Text.assemble((f"{value:<6}" if trend else value, _style(value)))  # so that a trend stays where it is
            text.append(f"  {trend}" if trend else "", "cyan")
            if where:
                text.append("  " + _tail(where, max(room - len(value) - 2, 12)))
            figures.add_column(label, no_wrap=True, min_width=width, ratio=1 if where else None)
            row.append(text)
            room -= width + 2
        figures.add_row(*row)
        return figures

    def _step_text(self, record: Record) -> str:
        total = f"/{self.total_steps}" if self.total_steps else ""
        return f"step {record.step:>{max(len(total) - 1, 0)}}{total}"

    def _time(self, record: Record) -> list[str]:
        """Seconds a step and time left."""
        seconds = self._pace.seconds()
        if seconds is None:
            return []
        if not self.total_steps or record.step > self.total_steps:
            return [parts.duration(seconds)]
        return [parts.duration(seconds), f"{parts.clock(seconds * (self.total_steps - record.step))} left"]


def _due(passed: float, wait: float) -> bool:
    return not 0 <= passed < wait  # below 0: the clock was set back, or steps are counted anew


def _style(value: str) -> str:
    return "bold red" if value.lstrip("-") in ("nan", "inf") else "bold"


def _one_line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _tail(name: str, room: int) -> str:
    """The end of a long name, which is what tells layers apart."""
    return name if len(name) <= room else "…" + name[1 - room:]
