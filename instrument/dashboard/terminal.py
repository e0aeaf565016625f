"""`tail`: a run in the terminal while it trains in another process, from its files, as `ConsoleWriter` shows it.

Owns how lines of the files become records again, in the order of their steps. Knows nothing of MindSpore.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from instrument import locks, runs
from instrument.dashboard.tail import SeriesTail
from instrument.record import Incident, Record, RunInfo
from instrument.writers.base import Writer

_POLL = 0.2  # seconds between two looks at the files
_FIELDS = {field.name for field in fields(Incident)}


def tail(directory: Path, writer: Writer, *, live: bool = False, sleep: Callable[[float], None] = time.sleep) -> str:
    """Give the records of a run to a writer, those that are there and those that come, until nobody writes the run any more.

    Args:
        directory: The run directory.
        writer: Such as a `ConsoleWriter`.
        live: Show what is there after each look, and not only what is due: for a panel that is drawn anew in place.
        sleep: How to wait for more.

    Returns:
        How the run ended, as its `summary.json` says.
    """
    metrics, alarms = SeriesTail(directory, runs.METRICS), SeriesTail(directory, runs.ALARMS)
    told: RunInfo | None = None
    has_ended = False
    try:
        while True:
            total = runs.read_config(directory).get("total_steps")
            run = RunInfo(directory.name, directory, total_steps=total if isinstance(total, int) else None)
            if run != told:
                told = run
                writer.start(run)
            came = sorted([*_new(metrics, _metrics), *_new(alarms, _alarm)], key=lambda record: record.time)
            for record in came:
                writer.write(record)
            if came and live:
                writer.flush()
            if came:
                continue
            if has_ended:  # and all that it wrote before has been read since
                return str(runs.read_summary(directory).get("status", "it left no summary"))
            has_ended = not _is_written(directory)
            if not has_ended:
                sleep(_POLL)
    finally:
        writer.close()


def _is_written(directory: Path) -> bool:
    try:
        return locks.holder(directory) is not None
    except OSError:  # somebody else's run, of which we may only read: while it runs there is a lock
        return (directory / locks.LOCK).exists()


def _new(files: SeriesTail, parse: Callable[[dict[str, Any]], Record | None]) -> Iterator[Record]:
    for line in files.poll().content.splitlines():
        try:
            record = parse(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            continue  # a torn line, or one of another program
        if record is not None:
            yield record


def _metrics(line: dict[str, Any]) -> Record | None:
    if line.get("resumed") is True:
        return None
    values = {name: value for name, value in line.items()
              if isinstance(value, (int, float)) and name not in ("step", "time")}
    values.update({name: float(text) for name, text in line.get("nonfinite", {}).items()})
    return Record(int(line["step"]), float(line["time"]), values)


def _alarm(line: dict[str, Any]) -> Record | None:
    if "alarm" not in line:
        return None
    incident = Incident(**{name: value for name, value in line.items() if name in _FIELDS})
    return Record(int(line["step"]), float(line["time"]), {}, alarms=(incident,))
