"""`Record`: what one step has to say on the host, and the copies that bring it there.

Owns what passes from the monitor to the writers: numbers, histograms, texts and alarms of a step (`Record`, `Incident`), and
what a writer is told of the run before the first of them (`RunInfo`). Knows nothing of callbacks, files and formats, and
does not import MindSpore.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from instrument.schema import Schema

# What the names of validation metrics begin with.
VALIDATION = "val/"


@dataclass(frozen=True)
class Incident:
    """An alarm's view of one stretch of steps: reported when it begins, and once more, with its length, when it is over.

    Attributes:
        alarm: Name of the alarm, such as `NonFinite`.
        state: `begin` or `end`; `open` where training ended and it was not over.
        first_step: The step at which it began.
        last_step: The last step so far at which it was seen.
        steps: How many recorded steps showed it so far.
        message: What is wrong, where, and what it was measured by: one sentence for people.
        metric: The metric that shows it; empty where no single one does.
        value: The metric's value when it began; None where there is none.
        where: The layer, parameter or loss part that it names; empty where none is to be named.
    """

    alarm: str
    state: Literal["begin", "end", "open"]
    first_step: int
    last_step: int
    steps: int
    message: str
    metric: str = ""
    value: float | None = None
    where: str = ""

    def __str__(self) -> str:
        if self.state == "begin":
            return f"{self.alarm} at step {self.first_step}: {self.message}"
        counted = "1 step" if self.steps == 1 else f"{self.steps} recorded steps"
        how = "ended" if self.state == "end" else "was not over when training ended"
        return f"{self.alarm} {how}: it was seen in {counted}, from step {self.first_step} to step {self.last_step}"


@dataclass(frozen=True)
class Record:
    """What was recorded of one step. Several records may have the same step, as training and validation have.

    Attributes:
        step: Number of the step, from 1.
        time: When it was recorded, in seconds since 1970 (UTC).
        values: `{metric name: value}`. NaN and infinities are values; a metric that was not measured is absent.
        histograms: `{name: counts}`, int64 [`bins.BINS`] each, as `instrument.bins` lays them out.
        texts: `{name: text}`, such as what a language model wrote.
        alarms: Incidents that began or ended with this step, or were open when training ended with it.
    """

    step: int
    time: float
    values: dict[str, float]
    histograms: Mapping[str, np.ndarray] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    alarms: tuple[Incident, ...] = ()

    @property
    def has_training(self) -> bool:
        """Whether any of its numbers is of training: a record of validation, or of a text, has none."""
        return any(not name.startswith(VALIDATION) for name in self.values)

    @classmethod
    def from_stats(cls, stats: Any, schema: Schema, *, time: float) -> Record:
        """Read the vector that an `InstrumentedStep` returned, with one device-to-host copy.

        Args:
            stats: The step's second output, a float32 Tensor of shape [K].
            schema: The `schema` of that step; its metric `step` becomes the record's.
            time: When, in seconds since 1970.

        Returns:
            The record. Its `step` is 0 if nothing has been measured yet.

        Raises:
            ValueError: `stats` is not a vector of K elements.

        Examples:
            >>> from instrument.schema import Metric
            >>> names = Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")
            >>> record = Record.from_stats([10.0, 2.5], Schema(names), time=1735387200.12)
            >>> record.step, record.values
            (10, {'loss': 2.5})
        """
        vector = np.asarray(stats.asnumpy() if hasattr(stats, "asnumpy") else stats)
        values = schema.unpack(vector)
        histograms = schema.histograms(vector) if schema.histogram_names else {}
        return cls(int(values.pop("step")), time, values, histograms)


@dataclass(frozen=True)
class RunInfo:
    """What a writer is told of the run before its first record.

    Attributes:
        name: Name of the run, that of its directory where it has one.
        directory: The run directory, absolute; None where there is none.
        config: What `config.json` holds; `config["hyper_parameters"]` is a flat `{name: number, text or bool}`.
        resumed: The run goes on where an earlier process left it.
        total_steps: Steps that this training will make in all, as far as known; None otherwise.
        resumed_step: The step after which a resumed run goes on, where it is known; otherwise the first record tells.
    """

    name: str = "run"
    directory: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False
    total_steps: int | None = None
    resumed_step: int | None = None


def to_float(value: Any) -> float | None:
    """The number that a Tensor, Parameter, array or Python number of one element holds; None for anything else."""
    array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "fiub" else None
