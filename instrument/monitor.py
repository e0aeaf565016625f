"""`TrainingMonitor`: the callback that turns each measured step into a record and hands it to the writers.

Owns when to read, what the host adds to the step's own numbers, and that nothing here stops training. Computing the
numbers is the step's part, and storing them the writers'.
"""
from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
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

    In a class of their own, since `Model.fit` refuses a callback whose own class defines them. MindSpore's
    `Callback.on_eval_*` call them too, so they ask for the mode.
    """

    def begin(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_begin(run_context)

    def epoch_begin(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_epoch_begin(run_context)

    def step_end(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_step_end(run_context)

    def end(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_end(run_context)


class TrainingMonitor(_OldHooks):
    """Records the numbers of each step while `Model.train` or `Model.fit` runs.

    With an `InstrumentedStep`, a record has all of the step's metrics, and each measured step is recorded once: calls
    that return the last vector again (accumulation, or statistics switched off for a step) make no record. With any
    other train cell it has the loss alone. The host adds:

    - `learning_rate`: of this step's update, absent where more steps have been made before it was read;
      `learning_rate/<group>` where groups have rates of their own;
    - `step_time`: seconds a call of the step, since the last record, with data loading and callbacks, and without
      evaluation between epochs. The first one includes compilation.

    Of a step that keeps a `window`, as for a data sink, all vectors since the last record make one record each; only the
    last of them has what the host adds.

    A record costs one device-to-host copy of the statistics, and then a few bytes for the learning rate.

    A writer that raises is reported by one warning and counted in `errors`, and training goes on; so it is with other
    errors in here. Writers are closed when training ends, also by an exception: `Model` leaves its callbacks' contexts
    then. In a loop of your own, use `with TrainingMonitor(...) as monitor:` and call the `on_train_*` hooks.

    Args:
        run_dir: Directory of a new run, which gets `config.json`, `metrics-*.jsonl` and TensorBoard's event files.
        writers: More destinations of the records.
        every: Record one call in `every`; nothing is copied on the others. The last call is recorded in any case.

    Raises:
        FileExistsError: `run_dir` already holds a run.
        ValueError: There is neither `run_dir` nor a writer, or `every` is not a positive integer.
        TypeError: One of `writers` is not a `Writer`.

    Example:
        >>> step = InstrumentedStep(net, opt)                                                     # doctest: +SKIP
        >>> Model(step).train(10, dataset, callbacks=[TrainingMonitor("runs/first")])             # doctest: +SKIP
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None, *, writers: Sequence[Writer] | None = None,
                 every: int = 1):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a positive number of steps, but it is {every!r}. Use 1 for each step.")
        self.every = every
        self.writers: list[Writer] = list(writers or ())
        for writer in self.writers:
            if not isinstance(writer, Writer):
                raise TypeError(f"writers must hold instances of instrument.writers.Writer, but {writer!r} is none. "
                                "Derive its class from Writer.")
        self.run_dir: Path | None = None
        if run_dir is not None:
            from instrument.writers import TensorBoardWriter  # tensorboardX loads only for who writes its files

            self.run_dir = runs.create(run_dir)
            self.writers[:0] = [JsonlWriter(self.run_dir), TensorBoardWriter(self.run_dir)]
        if not self.writers:
            raise ValueError("a monitor needs somewhere to write: give run_dir, writers, or both.")
        self.errors: Counter[str] = Counter()
        self.overwritten = 0  # measured steps that a window on the device lost before they were read
        self._contexts = 0  # how many `with` blocks we are in
        self._network: Any = None
        self._step_cell: Any = None  # the cell in the network that has a schema
        self._last_step = 0  # the step of the last record
        # Refers to the vector that it was read from: a call that measures nothing returns it again.
        self._last_stats: weakref.ref[Any] | None = None
        self._offset = 0  # steps of earlier calls of Model.train, for a train cell that does not number its steps
        # Calls of the step are counted by `cur_step_num`: in a data sink one hook stands for many calls.
        self._last_call = 0
        self._last_read = 0
        self._since: tuple[float, int] | None = None  # time and call from which step_time counts

    def __enter__(self) -> TrainingMonitor:
        self._contexts += 1
        return self

    def __exit__(self, *err: Any) -> None:
        self._contexts -= 1
        if self._contexts <= 0:  # Model.fit enters its callbacks once more for each evaluation
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
        call = self._last_call = params.get("cur_step_num", self._last_call + 1)
        if call - self._last_read >= self.every:  # not so for the second hook, where a loop calls both generations
            self._observe(params, call)

    def on_train_end(self, run_context: Any) -> None:
        if self._last_call > self._last_read:
            self._observe(run_context.original_args(), self._last_call)
        self.close()

    def close(self) -> None:
        """Close the writers. A later record opens them again."""
        for writer in self.writers:
            with self._reported(type(writer).__name__):
                writer.close()

    def _observe(self, params: Any, call: int) -> None:
        self._last_read = call
        records: list[Record] = []
        with self._reported("TrainingMonitor"):
            self._find_step(params.get("train_network"))
            records = [record for record in self._read(params.get("net_outputs"), call)
                       if record.step not in (0, self._last_step)]
        if not records:
            return
        self._last_step = records[-1].step
        added: dict[str, float] = {}
        with self._reported("learning_rate"):
            if self._is_latest(records[-1]):
                added.update(self._learning_rates(params, records[-1]))
        now = time.perf_counter()
        if self._since is not None and call > self._since[1]:
            added["step_time"] = (now - self._since[0]) / (call - self._since[1])
        self._since = now, call
        records[-1] = replace(records[-1], values={**records[-1].values, **added})
        for record in records:
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

    def _read(self, outputs: Any, call: int) -> list[Record]:
        """The steps that were measured since the last call, in order; one, unless the step kept a window of them."""
        if self._step_cell is None:
            loss = to_float(outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs)
            return [Record(self._offset + call, time.time(), {} if loss is None else {"loss": loss})]
        schema = self._step_cell.schema
        if self._last_stats is not None and self._last_stats() is outputs[1]:
            return []
        with contextlib.suppress(TypeError):
            self._last_stats = weakref.ref(outputs[1])  # weak, so that it keeps no memory on the device
        if getattr(self._step_cell, "window", None) is None:
            return [Record.from_stats(outputs[1], schema, time=time.time())]
        rows, overwritten = self._step_cell.read_window()
        if overwritten:
            self.overwritten += overwritten
            warnings.warn(f"{overwritten} measured steps were overwritten on the device before the monitor read them: make "
                          "the step with a larger `window`, or measure fewer steps by `every`.", stacklevel=2)
        return [Record.from_stats(row, schema, time=time.time()) for row in rows]

    def _is_latest(self, record: Record) -> bool:
        """Whether no step has been made after this one: the optimizer's learning rate is that of the last."""
        count = getattr(self._step_cell, "step_count", None)
        return count is None or int(count.asnumpy()) == record.step

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
                warnings.warn(f"{source} failed: {type(error).__name__}: {error}. Training goes on; more failures of "
                              "it are counted in the monitor's `errors`, and not reported.", stacklevel=2)


def _evaluating(run_context: Any) -> bool:
    return run_context.original_args().get("mode") == "eval"


def _instrumented(network: Any) -> Any:
    """The cell in `network`, which may wrap it, whose vector has the number of the step; None where there is none."""
    cells = network.cells_and_names() if hasattr(network, "cells_and_names") else [("", network)]
    schemas = ((cell, getattr(cell, "schema", None)) for _, cell in cells)
    return next((cell for cell, schema in schemas if isinstance(schema, Schema) and "step" in schema), None)
