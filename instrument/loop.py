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
from instrument.schema import Merge, Metric, Schema, Scope

if TYPE_CHECKING:
    from instrument.monitor import TrainingMonitor


class Loop:
    """Calls a step, and has a `TrainingMonitor` record what it returns. Made by `TrainingMonitor.loop`, which says the rest.

    Called like the step, it returns what the step returns. The time from one call to the next is `data_wait`: what fetching a
    batch takes, and whatever else the loop does there.

    Attributes:
        should_stop: Whether an alarm with `policy="stop"` has asked that training end. (One with `policy="raise"` raises
            `AlarmRaised` from the call of the step.)
    """

    def __init__(self, monitor: TrainingMonitor, step: Callable[..., Any], *, schema: Schema | None, optimizer: Any,
                 epochs: int | None, steps_per_epoch: int | None):
        if not callable(step):
            raise TypeError(f"`step` must be a training step: a Cell or a function, but it is {step!r}.")
        if schema is not None and not isinstance(schema, Schema):
            raise TypeError(f"`schema` must be the schema of the vector that `step` returns, but it is {schema!r}. Use "
                            "norm_stats.schema.")
        if schema is not None and hasattr(step, "schema"):
            raise ValueError(f"`step` ({type(step).__name__}) has a schema of its own: leave out `schema`.")
        for name, number in (("epochs", epochs), ("steps_per_epoch", steps_per_epoch)):
            if number is not None and not (is_whole(number) and number >= 1):
                raise ValueError(f"`{name}` must be a whole number from 1, or None, but it is {number!r}.")
        if schema is None and not isinstance(step, nn.Cell) and not hasattr(step, "schema"):
            tell(f"`step` is a {type(step).__name__} of which only the loss can be recorded, with what the host knows: give "
                 "`schema` if it returns (loss, stats), or the InstrumentedStep itself.", stacklevel=4)
        self._monitor, self._step = monitor, step
        self._numbered = None if schema is None else _Numbered(schema, optimizer)
        self._params: dict[str, Any] = {"train_network": self._numbered or step, "optimizer": optimizer, "mode": "train",
                                        "cur_step_num": 0, "epoch_num": epochs or 0, "batch_num": steps_per_epoch or 0}
        self._context = RunContext(self._params)

    def __enter__(self) -> Loop:
        self._monitor.__enter__()
        self._monitor.on_train_begin(self._context)
        self._monitor.on_train_epoch_begin(self._context)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self._monitor.on_train_end(self._context)
        finally:
            self._monitor.__exit__(kind, error, trace)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """One step, recorded."""
        self._monitor.on_train_step_begin(self._context)
        outputs = self._step(*inputs, **keywords)
        self._params["cur_step_num"] += 1
        self._params["net_outputs"] = outputs if self._numbered is None else self._numbered.taken(outputs)
        self._monitor.on_train_step_end(self._context)
        return outputs

    @property
    def should_stop(self) -> bool:
        """See the class."""
        return bool(self._context.get_stop_requested())

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[dict[str, float]]:
        """What is done inside is no training: its time is left out, and what is put into the dictionary is recorded.

        Example:
            >>> step = InstrumentedStep(network, optimizer)
            >>> with TrainingMonitor("runs/loop").loop(step) as train_step:
            ...     outputs = train_step(x, y)
            ...     with train_step.evaluation() as results:
            ...         results["accuracy"] = 0.5                  # recorded as val/accuracy
        """
        results: dict[str, float] = {}
        context = RunContext({"mode": "eval", "eval_results": results})
        self._monitor.on_eval_begin(context)
        try:
            yield results
        finally:
            self._monitor.on_eval_end(context)


class _Numbered:
    """Stands for a train cell: a function that returns a loss and a vector in which steps have no number.

    Args:
        schema: Of the vector.
        optimizer: For the learning rate.
    """

    def __init__(self, schema: Schema, optimizer: Any):
        alone = _compat.rank_and_size()[1] == 1
        scope: Scope = "global" if alone else "local"
        merge: Merge = "identical" if alone else "mean"
        added = [Metric("step", "step", "global", "identical"), Metric("loss", "loss", scope, merge)]
        self.schema = Schema([*(metric for metric in added if metric.name not in schema), *schema])
        self._added = [metric.name for metric in added if metric.name not in schema]
        self.optimizer = optimizer
        self._count = 0

    @property
    def step_count(self) -> Tensor:
        return Tensor(self._count, ms.int64)

    def set_step(self, step: int) -> None:
        self._count = step

    def taken(self, outputs: Any) -> tuple[Any, Any]:
        """The outputs of a call, with a vector that has the number of the step."""
        if not isinstance(outputs, (tuple, list)) or len(outputs) < 2:
            raise TypeError("with `schema`, the step must return (loss, stats), of which stats is the vector that the schema "
                            f"names, but it returned {type(outputs).__name__}.")
        self._count += 1
        known = {"step": self._count, "loss": outputs[0]}
        return outputs[0], _Vector([known[name] for name in self._added], outputs[1])


class _Vector:
    """A vector with more in front of it, which is copied to the host when it is read."""

    def __init__(self, added: list[Any], stats: Any):
        self._added, self._stats = added, stats

    def asnumpy(self) -> np.ndarray:
        added = [each.asnumpy() if hasattr(each, "asnumpy") else each for each in self._added]
        stats = self._stats.asnumpy() if hasattr(self._stats, "asnumpy") else self._stats
        return np.concatenate([np.asarray(each, np.float32).reshape(-1) for each in (*added, stats)])
