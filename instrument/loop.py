"""`Loop`: a training loop of the user's own, recorded as `Model.train` is.

Owns the calls of the monitor's hooks around each step, and how the vector of a function comes by the number of its step.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.train.callback import RunContext

from instrument import _compat
from instrument.kinds import is_whole
from instrument.notices import tell
from instrument.record import VALIDATION, to_float
from instrument.schema import Merge, Metric, Schema, Scope

if TYPE_CHECKING:
    from instrument.monitor import TrainingMonitor


class Loop:
    """Calls a step, and has a `TrainingMonitor` record what it returns. Made by `TrainingMonitor.loop`, which says the rest.

    Called like the step, it returns what the step returns. The time from one call to the next is `data_wait`: what fetching a
    batch takes, and whatever else the loop does there. It can be entered by `with` several times, each of which goes on with
    the numbers of steps; called after that, it calls the step and records nothing.

    Attributes:
        should_stop: Whether an alarm with `policy="stop"` has asked that training end. (One with `policy="raise"` raises
            `AlarmRaised` from the call of the step.)
    """

    def __init__(self, monitor: TrainingMonitor, step: Callable[..., Any], *, schema: Schema | None, optimizer: Any,
                 epochs: int | None, steps_per_epoch: int | None, accumulate: int):
        if not callable(step):
            raise TypeError(f"`step` must be a training step: a Cell or a function, but it is {step!r}.")
        if schema is not None and not isinstance(schema, Schema):
            raise TypeError(f"`schema` must be the schema of the vector that `step` returns, but it is {schema!r}. Use "
                            "norm_stats.schema.")
        if schema is not None and hasattr(step, "schema"):
            raise ValueError(f"`step` ({type(step).__name__}) has a schema of its own: leave out `schema`.")
        if schema is not None and "step" in schema:
            raise ValueError("`schema` is that of a step, which numbers its steps itself: give that step as `step`, and not a "
                             "function around it.")
        for name, number in (("epochs", epochs), ("steps_per_epoch", steps_per_epoch), ("accumulate", accumulate)):
            if number is not None and not (is_whole(number) and number >= 1):
                raise ValueError(f"`{name}` must be a whole number from 1, but it is {number!r}.")
        if schema is None and not isinstance(step, nn.Cell) and not hasattr(step, "schema"):
            tell(f"`step` is a {type(step).__name__} of which only the loss can be recorded, with what the host knows: give "
                 "`schema` if it returns (loss, stats), or the InstrumentedStep itself.", stacklevel=4)
        self._monitor, self._step = monitor, step
        self._numbered = None if schema is None else _Numbered(schema, optimizer, accumulate)
        self._params: dict[str, Any] = {"train_network": self._numbered or step, "optimizer": optimizer, "mode": "train",
                                        "cur_step_num": 0, "epoch_num": epochs or 0, "batch_num": steps_per_epoch or 0}
        self._context = RunContext(self._params)
        self._is_open = self._was_open = False
        self._told: set[str] = set()

    def __enter__(self) -> Loop:
        self._context = RunContext(self._params)  # nobody has asked this one to stop
        self._monitor.__enter__()
        try:
            before = self._monitor.last_step
            self._monitor.on_train_begin(self._context)
            if self._numbered is not None and self._numbered.made == 0:
                self._numbered.set_step(before)  # of another loop of this monitor
            self._monitor.on_train_epoch_begin(self._context)
        except BaseException as error:
            self._monitor.__exit__(type(error), error, error.__traceback__)
            raise
        self._is_open = self._was_open = True
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._is_open = False
        try:
            if error is None:
                self._monitor.on_train_end(self._context)
        except BaseException as own:  # an alarm that raises, at the last step
            kind, error, trace = type(own), own, own.__traceback__
            raise
        finally:
            self._monitor.__exit__(kind, error, trace)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """One step, recorded."""
        if not self._is_open:
            self._say("a training loop is recorded inside of its `with` block: what this call of the step returns is not."
                      if self._was_open else "a training loop is recorded inside of `with monitor.loop(step) as train_step:`, "
                      "where train_step is called: what is called without it is not.")
            return self._step(*inputs, **keywords)
        self._monitor.on_train_step_begin(self._context)
        outputs = self._step(*inputs, **keywords)
        self._params["cur_step_num"] += 1
        self._params["net_outputs"] = outputs if self._numbered is None else self._taken(outputs)
        self._monitor.on_train_step_end(self._context)
        return outputs

    def _taken(self, outputs: Any) -> Any:
        assert self._numbered is not None
        taken, problem = self._numbered.taken(outputs)
        if problem:
            self._say(f"the vector of a step is not recorded: with `schema` the step has to return (loss, stats), {problem}.")
        return taken

    def _say(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            tell(message, stacklevel=5)

    @property
    def should_stop(self) -> bool:
        """See the class."""
        return bool(self._context.get_stop_requested())

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[dict[str, float]]:
        """What is done inside is no training: its time is left out, and what is put into the dictionary is recorded.

        It does nothing to the network: `network.set_train(False)` before, and `True` after it, is the loop's part. Of an
        evaluation that fails nothing is recorded.

        Examples:
            >>> step = InstrumentedStep(network, optimizer)
            >>> with TrainingMonitor("runs/loop").loop(step) as train_step:
            ...     outputs = train_step(x, y)
            ...     with train_step.evaluation() as results:
            ...         results["accuracy"] = 0.5                  # recorded as val/accuracy
        """
        results: dict[str, float] = {}
        params: dict[str, Any] = {"mode": "eval"}
        context = RunContext(params)
        self._monitor.on_eval_begin(context)
        try:
            yield results
        except BaseException:
            with contextlib.suppress(Exception):  # the error is the user's, whatever alarms say
                self._monitor.on_eval_end(context)
            raise
        named = {name[len(VALIDATION):] if name.startswith(VALIDATION) else name: value for name, value in results.items()}
        unknown = [name for name, value in named.items() if to_float(value) is None]
        if unknown:
            self._say(f"results of an evaluation are recorded where they are numbers, or tensors of one element: "
                      f"{', '.join(map(repr, unknown))} is left out.")
        params["eval_results"] = named
        self._monitor.on_eval_end(context)


class _Numbered:
    """Stands for a train cell: a function that returns a loss and a vector in which steps have no number.

    Args:
        schema: Of the vector.
        optimizer: For the learning rate.
        calls_an_update: How many calls make one update.

    Attributes:
        made: How many calls there were.
    """

    counts_calls = True  # and not updates, which the optimizer may make or not

    def __init__(self, schema: Schema, optimizer: Any, calls_an_update: int):
        alone = _compat.rank_and_size()[1] == 1
        scope: Scope = "global" if alone else "local"
        merge: Merge = "identical" if alone else "mean"
        self._added = [Metric("step", "step", "global", "identical")]
        if "loss" not in schema:
            self._added.append(Metric("loss", "loss", scope, merge))
        self._given = schema
        self.schema = Schema([*self._added, *schema], schema.histogram_names)
        self.optimizer, self.calls_an_update = optimizer, calls_an_update
        self.made = 0

    @property
    def step_count(self) -> Tensor:
        return Tensor(self.made, ms.int64)

    def set_step(self, step: int) -> None:
        self.made = step

    def taken(self, outputs: Any) -> tuple[Any, str]:
        """The outputs of a call, with a vector that has the number of the step; and why there is no vector."""
        self.made += 1
        if not isinstance(outputs, (tuple, list)) or len(outputs) < 2:
            return outputs, f"and it returned {type(outputs).__name__}"
        loss, stats = outputs[:2]
        if stats is None:  # not measured
            return loss, ""
        shapes = [tuple(getattr(each, "shape", ())) for each in (loss, stats)]
        if np.prod(shapes[0], dtype=int) != 1 or shapes[1] != (len(self._given),):
            return None, (f"a scalar and a vector of shape ({len(self._given)},), and it returned two of shapes {shapes[0]} "
                          f"and {shapes[1]}")
        added = [self.made, loss] if len(self._added) > 1 else [self.made]
        return (loss, _Vector(added, stats)), ""


class _Vector:
    """A vector with more in front of it, which is copied to the host when it is read."""

    def __init__(self, added: list[Any], stats: Any):
        self._parts = [each if hasattr(each, "asnumpy") else np.array(each, np.float32) for each in (*added, stats)]

    def asnumpy(self) -> np.ndarray:
        parts = [each.asnumpy() if hasattr(each, "asnumpy") else each for each in self._parts]
        return np.concatenate([np.asarray(each, np.float32).reshape(-1) for each in parts])
