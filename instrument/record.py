"""`Record`: the numbers of one step on the host, and the copies that bring them there.

Owns what passes from the monitor to the writers. Knows nothing of callbacks, files and formats.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from instrument.schema import Schema


@dataclass(frozen=True)
class Record:
    """The numbers of one measured step.

    Attributes:
        step: Number of the step, from 1.
        time: When it was recorded, in seconds since 1970 (UTC).
        values: `{metric name: value}`. NaN and infinities are values; a metric that was not measured is absent.
    """

    step: int
    time: float
    values: dict[str, float]

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

        Example:
            >>> from instrument.schema import Metric
            >>> names = Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")
            >>> Record.from_stats([10.0, 2.5], Schema(names), time=1735387200.12)
            Record(step=10, time=1735387200.12, values={'loss': 2.5})
        """
        values = schema.unpack(stats)
        return cls(int(values.pop("step")), time, values)


def to_float(value: Any) -> float | None:
    """The number that a Tensor, Parameter, array or Python number of one element holds; None for anything else."""
    array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "fiub" else None
