"""What a step returned, read in the training thread: which steps it tells of, and at which learning rate they were made.

Owns that each measured step is read once, with one copy. What becomes of the numbers is the background's work.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from instrument import _compat
from instrument.learning_rate import is_scheduled, learning_rates
from instrument.notices import tell
from instrument.pace import Mark
from instrument.record import Record, to_float
from instrument.schema import Schema

# Up to here, float32 holds each whole number.
_EXACT = 2 ** 24


class Reading:
    """One step, as the training thread hands it to the background; a `Record` is made of it there.

    Attributes:
        step: Number of the step.
        time: When it was read, in seconds since 1970.
        values: What the host knows of it.
        vector: float32 [K], what the step itself has measured; None for a train cell without a vector.
        schema: What the elements of `vector` are.
        texts: As in a record.
    """

    # No dataclass: a frozen one takes five times as long to make, once a step.
    __slots__ = "schema", "step", "texts", "time", "values", "vector"

    def __init__(self, step: int, time: float, values: dict[str, float] | None = None, vector: np.ndarray | None = None,
                 schema: Schema | None = None, texts: Mapping[str, str] | None = None):
        self.step, self.time, self.values, self.vector, self.schema = step, time, values or {}, vector, schema
        self.texts = texts or {}

    def record(self) -> Record:
        """The step with its numbers named."""
        if self.vector is None or self.schema is None:
            return Record(self.step, self.time, self.values, texts=self.texts)
        try:
            record = Record.from_stats(self.vector, self.schema, time=self.time)
        except Warning:  # of a cell that was not measured, where warnings are errors; it comes only once
            record = Record.from_stats(self.vector, self.schema, time=self.time)
        record.values.update(self.values)  # its own, just made
        return replace(record, step=self.step, texts=self.texts)


class Call(NamedTuple):
    """A call of the step whose outputs have not been read yet."""

    outputs: Any
    number: int  # of the step, where the cell does not number its own
    mark: Mark
    time: float
    values: dict[str, float]


class StepOutputs:
    """Reads what the train network of one run returns.

    Args:
        network: The train network, which may be, or may hold, a cell with a schema.
        optimizer: The optimizer, where the train network has none as an attribute.
    """

    def __init__(self, network: Any, optimizer: Any = None):
        self.network = network
        self.cell = instrumented(network)
        owner = network if self.cell is None else self.cell
        self.optimizer = getattr(owner, "optimizer", None) or optimizer
        self.schema: Schema | None = None if self.cell is None else self.cell.schema
        self._has_loss = _compat.has_loss()
        self.overwritten = 0  # rows of the window that were lost since this was asked
        self._last_step = 0  # the last one read
        self._has_told = False  # that there is no vector
        self.steps_before = 0  # steps of earlier calls of Model.train, for a train cell that does not number its own
        self.is_scheduled = is_scheduled(self.optimizer)  # whether the rate follows from the number of updates
        self._updates_before: int | None = None  # what the optimizer counts more than the step does
        # Refers to the vector that it was read from: a call that measures nothing returns it again.
        self._last: weakref.ref[Any] | None = None

    def begin(self, call: int, calls_before: int) -> None:
        """Training begins after `call` calls; before it, `calls_before` were made of those that count as they do here."""
        self._updates_before = None
        self.steps_before = max(self.steps_before + calls_before - call, 0)

    def resume(self, call: int, last_recorded: int) -> None:
        """Go on with the number of steps that the loaded checkpoint tells, or else after the last one recorded.

        The checkpoint has it in the optimizer's `global_step`, which counts updates; MindSpore 2.0.0 does so only where the
        learning rate has a schedule.
        """
        updates = int(to_float(getattr(self.optimizer, "global_step", None)) or 0)
        made = updates * getattr(self.cell, "calls_an_update", 1) or last_recorded
        if self.cell is None:
            self.steps_before = made - call
        elif hasattr(self.cell, "set_step") and int(self.cell.step_count.asnumpy()) == 0:
            self.cell.set_step(made)

    def tell_times(self, values: Mapping[str, float]) -> None:
        """Have the step compare over ranks how long this one took, where it does such a thing."""
        if hasattr(self.cell, "tell_times"):
            self.cell.tell_times(values.get("step_time", math.nan), values.get("data_wait", math.nan))

    def steps_made(self, call: int) -> int:
        """Steps up to and with this call, the last one; asks the device."""
        count = getattr(self.cell, "step_count", None)
        return self.steps_before + call if count is None else int(count.asnumpy())

    @property
    def accumulate(self) -> int:
        """Calls a step."""
        return int(getattr(self.cell, "accumulate", 1))

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that the step clips its gradients to; None where it does not."""
        return getattr(self.cell, "clips_at", getattr(self.cell, "max_grad_norm", None))

    @property
    def window(self) -> int | None:
        """How many steps are kept on the device."""
        return getattr(self.cell, "window", None)

    @property
    def may_wait(self) -> bool:
        """Whether outputs can be read after the next call, so that the device need not be waited for.

        Not where the learning rate can be asked only now: one of a schedule, whose position is not known without the
        device. Nor with a window, which is read as a whole, nor where the step's number needs the device's counter.
        """
        if self.window is not None or self._last_step > _EXACT - 2 ** 16:
            return False
        return not self.is_scheduled or (self.cell is not None and not self._can_skip)

    @property
    def _can_skip(self) -> bool:
        """Whether a step may make no update, or what the cell counts is not updates."""
        return (self.schema is not None and "skipped" in self.schema) or getattr(self.cell, "counts_calls", False)

    def taken(self, outputs: Any) -> Any:
        """What the call returned, with the vector of an upgraded step, which keeps it beside its outputs."""
        snapshot = getattr(self.cell, "snapshot", None)
        return outputs if snapshot is None else (_first(outputs), snapshot())

    def is_new(self, outputs: Any) -> bool:
        """Whether these are not the outputs that were seen last, as a step returns them again that measures nothing."""
        stats = self._stats(outputs)
        if stats is None:
            return True
        if self._last is not None and self._last() is stats:
            return False
        try:
            self._last = weakref.ref(stats)  # weak, so that it keeps no memory on the device
        except TypeError:
            self._last = None
        return True

    def _stats(self, outputs: Any) -> Any:
        """The vector in what a call returned; None where there is none: a cell around the step may return the loss alone."""
        if self.cell is None or not isinstance(outputs, (tuple, list)) or len(outputs) < 2:
            return None
        stats = outputs[1]
        return None if isinstance(stats, (bool, int, float)) or getattr(stats, "ndim", 1) != 1 else stats

    def number_of(self, outputs: Any, call: int) -> int:
        """The step that the call just made has done, where its outputs do not tell it."""
        return self.steps_before + call if self.cell is None or self._stats(outputs) is not None else self.steps_made(call)

    def rates_now(self) -> dict[str, float]:
        """The learning rates that stand still until somebody sets them, which a callback may do right after a step."""
        if self.optimizer is None or self.is_scheduled:
            return {}
        return learning_rates(self.optimizer)

    def read(self, call: Call) -> list[Reading]:
        """The steps that the outputs tell of and that have not been read, in order: one, or all since then with a window.

        The copy waits for the device, if it has not done the step yet.
        """
        if self.cell is None or self.schema is None:
            return [self._loss_alone(call, call.number)]
        if self.window is None:
            stats = self._stats(call.outputs)
            if stats is None:
                if not self._has_told and not getattr(self.cell, "counts_calls", False):  # which has told itself
                    self._has_told = True
                    tell(f"the train cell, {type(self.network).__name__}, does not return what the step in it returns, so the "
                         "loss alone is recorded. Have it return the step's own outputs, (loss, stats).")
                return [self._loss_alone(call, call.number)]
            return self._reading(_host_copy(stats), call, call.values)
        rows, overwritten = self.cell.read_window()
        self.overwritten += overwritten
        readings = []
        for i, row in enumerate(rows):
            readings += self._reading(np.asarray(row), call, call.values if i == len(rows) - 1 else {})
        return readings

    def _loss_alone(self, call: Call, step: int) -> Reading:
        loss = to_float(_first(call.outputs)) if self._has_loss else None
        return Reading(step, call.time, {**({} if loss is None else {"loss": loss}), **call.values})

    def _reading(self, row: np.ndarray, call: Call, values: dict[str, float]) -> list[Reading]:
        """What one vector tells; nothing if that has been read, or is no step."""
        assert self.schema is not None
        if row.shape != (len(self.schema),):
            raise ValueError(f"the step returned a vector of shape {row.shape}, but its schema has {len(self.schema)} "
                             "elements.")
        step = self._whole(float(row[self.schema.index("step")]))
        if step == 0 or step == self._last_step:
            return []
        self._last_step = step
        return [Reading(step, call.time, values, row, self.schema)]

    def _whole(self, step: float) -> int:
        """The number of a step, which is float32 in the vector; 0 where there is none."""
        if 0 <= step < _EXACT:
            return int(step)
        if not math.isfinite(step):
            return 0
        if not hasattr(self.cell, "step_count"):
            return int(step)
        if self.window is not None:  # rows that follow each other, of which the last may be long past
            return max(int(step), self._last_step + 1)
        last, every = int(self.cell.step_count.asnumpy()), getattr(self.cell, "every", 1)
        alike = [each for each in range(last, max(last - 2 * every, 0), -1) if np.float32(each) == step]
        return next((each for each in alike if each % every == 0), alike[0] if alike else int(step))

    def scheduled_rates(self, reading: Reading, *, is_last: bool) -> dict[str, float]:
        """The rates of a schedule in this step; {} where they are not known."""
        if self.optimizer is None or not self.is_scheduled:
            return {}
        count = getattr(self.cell, "step_count", None)
        if count is not None and not self._can_skip:
            if self._updates_before is None:
                self._updates_before = int(to_float(self.optimizer.global_step) or 0) - int(count.asnumpy())
            return learning_rates(self.optimizer, update=reading.step + self._updates_before - 1)
        # The optimizer knows its last update alone: how many were left out since an earlier step is not known.
        if not is_last or (count is not None and int(count.asnumpy()) != reading.step):
            return {}
        skipped = False
        if reading.vector is not None and self.schema is not None and "skipped" in self.schema:
            skipped = bool(reading.vector[self.schema.index("skipped")])
        return learning_rates(self.optimizer, skipped=skipped)


def _host_copy(stats: Any) -> np.ndarray:
    """One copy, since on a CPU `asnumpy` gives a view."""
    return np.array(stats.asnumpy() if hasattr(stats, "asnumpy") else stats, np.float32)


def _first(outputs: Any) -> Any:
    """Where the loss is in what a train cell returns."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs


def instrumented(network: Any) -> Any:
    """The cell in `network`, which may wrap it, whose vector has the number of the step; None where there is none."""
    cells = network.cells_and_names() if hasattr(network, "cells_and_names") else [("", network)]
    schemas = ((cell, getattr(cell, "schema", None)) for _, cell in cells)
    return next((cell for cell, schema in schemas if isinstance(schema, Schema) and "step" in schema), None)
