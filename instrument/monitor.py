"""`TrainingMonitor`: the callback that turns each measured step into a record and hands it to the writers.

Owns when to read, what the host adds to the step's own numbers, and that nothing here stops training. How the numbers
are computed, and how they are stored, is the step's and the writers' part.
"""
from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspore.train.callback import Callback

from instrument import runs
from instrument.learning_rate import learning_rates
from instrument.record import Record, to_float
from instrument.schema import Schema
from instrument.writers import JsonlWriter, Writer


class _OldHooks(Callback):
    """The hook names before `on_train_*`, for loops that still call them.

    In a class of their own: `Model.fit` refuses a callback whose own class defines them.
    """

    def begin(self, run_context: Any) -> None:
        if _training(run_context):
            self.on_train_begin(run_context)

    def epoch_begin(self, run_context: Any) -> None:
        if _training(run_context):
            self.on_train_epoch_begin(run_context)

    def step_end(self, run_context: Any) -> None:
        if _training(run_context):
            self.on_train_step_end(run_context)

    def end(self, run_context: Any) -> None:
        if _training(run_context):
            self.on_train_end(run_context)


class TrainingMonitor(_OldHooks):
    """Records the numbers of each step while `Model.train` or `Model.fit` runs.

    With an `InstrumentedStep`, a record has all of the step's metrics, and each measured step is recorded once: steps that
    return the last vector again (accumulation, or statistics switched off for a step) give none. With any other train
    cell it has the loss alone. Added on the host:

    - `learning_rate`: of this step's update (`learning_rate/<group>` where groups differ);
    - `step_time`: seconds a call of the step, between this record and the one before it, data and callbacks
      included. The first one of a run includes compilation. Evaluation between epochs is not counted.

    One record costs one device-to-host copy of the statistics, then a few bytes for the learning rate.

    A writer that raises is reported by one warning, and counted in `errors`; training goes on. So do other errors here.
    Writers are closed when training ends, by an exception too: `Model` leaves its callbacks' `with` blocks then. In a
    loop of your own, write `with TrainingMonitor(...) as monitor:`.

    Args:
        run_dir: Directory of a new run, which gets `config.json`, `metrics-*.jsonl` and TensorBoard's event files.
        writers: More destinations of the records.
        every: Record one step in `every`; on the others nothing is copied. The last step is recorded in any case.

    Raises:
        FileExistsError: `run_dir` already holds a run.
        ValueError: There is neither `run_dir` nor a writer, or `every` is not a positive integer.
        TypeError: One of `writers` is not a `Writer`.

    Example:
        >>> step = InstrumentedStep(net, opt)                                                       # doctest: +SKIP
        >>> Model(step).train(10, dataset, callbacks=[TrainingMonitor("runs/first")])               # doctest: +SKIP
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None, *, writers: Sequence[Writer] | None = None,
                 every: int = 1):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a positive number of steps, but it is {every!r}. Use 1 for each step.")
        if run_dir is None and not writers:
            raise ValueError("a monitor needs somewhere to write: give run_dir, writers, or both.")
        for writer in writers or ():
            if not isinstance(writer, Writer):
                raise TypeError(f"writers must hold instances of instrument.writers.Writer, but {writer!r} is none. "
                                "Derive its class from Writer.")
        self.every = every
        self.run_dir: Path | None = None
        self.writers: list[Writer] = list(writers or ())
        self.errors: Counter[str] = Counter()
        if run_dir is not None:
            from instrument.writers import TensorBoardWriter
            self.run_dir = runs.create(run_dir)
            self.writers[:0] = [JsonlWriter(self.run_dir), TensorBoardWriter(self.run_dir)]
        self._entered = 0
        self._step_cell: Any = None
        self._network: Any = None
        self._last_step = 0  # number of the step in the last record
        self._offset = 0  # steps of earlier calls of Model.train, for a train cell that does not number its steps
        self._last_call = 0  # cur_step_num when a hook was last called
        self._last_read = 0  # cur_step_num when the statistics were last copied
        self._since: tuple[float, int] | None = None  # when, and at which cur_step_num, step_time starts to count

    def __enter__(self) -> TrainingMonitor:
        self._entered += 1
        return self

    def __exit__(self, *err: Any) -> None:
        # Model.fit enters its callbacks once more for each evaluation.
        self._entered -= 1
        if self._entered <= 0:
            self.close()

    def on_train_begin(self, run_context: Any) -> None:
        call = run_context.original_args().get("cur_step_num", 0)
        self._offset = max(self._last_step - call, 0)
        self._last_call = self._last_read = call
        self._since = None

    def on_train_epoch_begin(self, run_context: Any) -> None:
        self._since = time.perf_counter(), run_context.original_args().get("cur_step_num", 0)

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        call = params.get("cur_step_num", self._last_call + 1)
        if call == self._last_call:  # a loop that calls the old and the new hook
            return
        self._last_call = call
        if call - self._last_read >= self.every:
            self._observe(params, call)

    def on_train_end(self, run_context: Any) -> None:
        if self._last_call > self._last_read:
            self._observe(run_context.original_args(), self._last_call)
        self.close()

    def close(self) -> None:
        """Close the writers. A later step opens them again."""
        for writer in self.writers:
            with self._reported(type(writer).__name__):
                writer.close()

    def _observe(self, params: Any, call: int) -> None:
        self._last_read = call
        record = None
        with self._reported("TrainingMonitor"):
            self._find_step(params.get("train_network"))
            record = self._read(params.get("net_outputs"), call)
        if record is None or record.step in (0, self._last_step):
            return
        self._last_step = record.step
        with self._reported("learning_rate"):
            record = replace(record, values={**record.values, **self._learning_rates(params, record)})
        now = time.perf_counter()
        if self._since is not None and call > self._since[1]:
            step_time = (now - self._since[0]) / (call - self._since[1])
            record = replace(record, values={**record.values, "step_time": step_time})
        self._since = now, call
        for writer in self.writers:
            with self._reported(type(writer).__name__):
                writer.write(record)

    def _find_step(self, network: Any) -> None:
        if network is self._network:
            return
        self._network, self._step_cell = network, _instrumented(network)
        if self.run_dir is not None and self._step_cell is not None:
            with self._reported(runs.CONFIG):
                runs.write_schema(self.run_dir, self._step_cell.schema)

    def _read(self, outputs: Any, call: int) -> Record:
        if self._step_cell is not None:
            return Record.from_stats(outputs[1], self._step_cell.schema, time=time.time())
        loss = to_float(outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs)
        return Record(self._offset + call, time.time(), {} if loss is None else {"loss": loss})

    def _learning_rates(self, params: Any, record: Record) -> dict[str, float]:
        cell = self._network if self._step_cell is None else self._step_cell
        optimizer = getattr(cell, "optimizer", None) or params.get("optimizer")
        return {} if optimizer is None else learning_rates(optimizer, skipped=bool(record.values.get("skipped")))

    @contextlib.contextmanager
    def _reported(self, source: str) -> Iterator[None]:
        """Keep an error of `source` from stopping training: the first one is a warning, and all are counted."""
        try:
            yield
        except Exception as error:
            self.errors[source] += 1
            if self.errors[source] == 1:
                warnings.warn(f"{source} failed: {type(error).__name__}: {error}. Training goes on; further failures of it "
                              "are counted in the monitor's `errors`, and not reported.", stacklevel=2)


def _training(run_context: Any) -> bool:
    # Callback.on_eval_* call the old hooks; only Model says which mode it is in.
    return run_context.original_args().get("mode") != "eval"


def _instrumented(network: Any) -> Any:
    """The cell in `network`, which may wrap it, that has a schema; None where there is none."""
    if isinstance(getattr(network, "schema", None), Schema):
        return network
    cells = network.cells_and_names() if hasattr(network, "cells_and_names") else ()
    return next((cell for _, cell in cells if isinstance(getattr(cell, "schema", None), Schema)), None)
