"""`InstrumentMonitor`: `TrainingMonitor` as a callback in MindFormers' YAML.

Owns what is particular to MindFormers' trainer: settings from YAML, and what MindFormers' own output tuple says where the step
cannot be measured.
"""
from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from instrument import _compat
from instrument.mindformers import releases, settings
from instrument.monitor import TrainingMonitor
from instrument.notices import tell
from instrument.observer import Observer
from instrument.record import to_float
from instrument.schema import Metric, Schema
from instrument.upgrade import begin, find_step

_MONITOR_NAMES = tuple(name for name in inspect.signature(TrainingMonitor.__init__).parameters if name != "self")


class InstrumentMonitor(TrainingMonitor):
    """Records each step of a MindFormers run: `callbacks: - type: InstrumentMonitor`.

    When training begins, before anything is compiled, it upgrades the training step that the trainer has made, as
    `instrument.upgrade` says. A step that cannot be upgraded is left alone, with one warning that says why; what the step
    itself returns is recorded then.

    Args:
        run_dir: Directory of the run, as for `TrainingMonitor`.
        given: The other arguments of `TrainingMonitor`, and the fields of `instrument.upgrade.StepOptions`. None, an empty
            key in YAML, stands for the default; `activations: none` measures no cell. `every` is that of the step.
            `histograms` and `alarms` are lists of mappings, as `- {type: NonFinite, policy: stop}`, and so is `writers`;
            `alarms: none` has none. `measure: False` leaves the step as it is.

    Raises:
        ValueError: A name is unknown; the message has near ones. Or a value cannot work.
    """

    def __init__(self, run_dir: str | None = None, **given: Any):
        settings.check_names("callbacks: InstrumentMonitor", given, {*_MONITOR_NAMES, *settings.STEP_NAMES})
        given = settings.filled(given)
        self.options = settings.step_options(given)
        self._names_step = sorted(name for name in given if name in settings.STEP_NAMES)
        own = {name: value for name, value in given.items() if name not in settings.STEP_NAMES}
        # This class upgrades by itself, since it records more of a step that cannot be.
        super().__init__(run_dir, **{**settings.with_objects(own), "measure": False})
        self._may_upgrade = own.get("measure") is not False
        self._step: Any = None
        self._tuple: _TupleStep | None = None
        releases.warn_if_untested()
        place = {"run_dir": str(self.run_dir) if self.run_dir else None}
        settings.show("InstrumentMonitor", {**place, **vars(self.options), **own})

    @property
    def step(self) -> Any:
        """The training step of the trainer; None before training begins."""
        return self._step

    def on_train_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        if self._step is None or self._step is not find_step(params.get("train_network")):
            self._find(params)
        super().on_train_begin(self._translated(run_context))

    def on_train_step_end(self, run_context: Any) -> None:
        super().on_train_step_end(self._translated(run_context))

    def on_train_end(self, run_context: Any) -> None:
        super().on_train_end(self._translated(run_context))

    def _find(self, params: Any) -> None:
        """Find the step, and upgrade it."""
        self._step = step = find_step(params.get("train_network"))
        is_measured = isinstance(step, Observer)
        if is_measured and self._names_step:
            tell(f"InstrumentMonitor: {', '.join(self._names_step)} have no effect, since the step is measured already; set "
                 "them in runner_wrapper.", stacklevel=4)
        may_upgrade = self._may_upgrade and not is_measured
        reason = begin(params, (self.options if self._names_step else None) if may_upgrade else False)
        self._tuple = None
        if not isinstance(step, Observer):
            self._tuple = _TupleStep(step, releases.steps_before(params), self.options.every)
        if reason is not None:
            tell(f"InstrumentMonitor cannot measure in the training step: {reason}. The step is left alone, and what it "
                 "returns is recorded: the loss; and as far as it returns them the overflow flag, the loss scale, and the "
                 "gradient norm before clipping, which MindFormers computes with use_clip_grad.", stacklevel=4)

    def _translated(self, run_context: Any) -> Any:
        """The context with what an `InstrumentedStep` would return, where the step is not measured."""
        if self._tuple is None:
            return run_context
        params = run_context.original_args()
        changed = params.copy() if type(params) is dict else type(params)(params)
        changed["train_network"] = self._tuple
        changed["net_outputs"] = self._tuple.outputs(params)
        return _Context(run_context, changed)


class _Context:
    """A RunContext with other parameters."""

    def __init__(self, context: Any, params: Any):
        self._context, self._params = context, params

    def original_args(self) -> Any:
        return self._params

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _TupleStep:
    """What a step that is not measured returns, read as if it were measured. Has what `TrainingMonitor` asks of a step.

    MindFormers tells its elements by their number: (loss, overflow, loss scale), then the learning rate, then the gradient
    norm of all ranks before clipping, which is None without clipping, then local norms. The loss of a pipeline is one on the
    last stage alone.
    """

    def __init__(self, step: Any, first_step: int, every: int):
        self.optimizer = getattr(step, "optimizer", None)
        self._first_step, self._every = first_step, every
        self._has_loss, self._losses_summed = _compat.has_loss(), releases.losses_summed(step)
        self.schema = Schema([_metric(name) for name in ("step", "loss") if name == "step" or self._has_loss])
        self._last: tuple[int, Any] | None = None

    def outputs(self, params: Mapping[str, Any]) -> Any:
        """(loss, vector) of the last call."""
        call, given = params.get("cur_step_num", 0), params.get("net_outputs")
        if self._last is None or (self._last[0] != call and (self._first_step + call) % self._every == 0):
            values = {"step": float(self._first_step + call), **_named(given)}
            if "loss" in values:
                values["loss"] /= self._losses_summed
            if not self._has_loss:
                values.pop("loss", None)
            if tuple(values) != self.schema.names and len(values) > 1:
                self.schema.replace([_metric(name) for name in values])
            row = [values.get(name, math.nan) for name in self.schema.names]
            self._last = call, (values.get("loss"), np.array(row, np.float32))
        return self._last[1]


_UNITS = {"step": "step", "loss": "loss", "loss_scale": "1", "overflow": "flag", "grad/norm": "1"}


def _metric(name: str) -> Metric:
    return Metric(name, _UNITS[name], "local" if name == "loss" else "global", "identical")


def _named(outputs: Any) -> dict[str, float]:
    """The numbers in what a step returned."""
    elements = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    names = ["loss", "overflow", "loss_scale", None, "grad/norm"] if len(elements) in (3, 4, 5, 7) else ["loss"]
    read = {name: _mean(element) for name, element in zip(names, elements) if name is not None}
    return {name: value for name, value in read.items() if value is not None}


def _mean(value: Any) -> float | None:
    if value is None:
        return None
    if hasattr(value, "asnumpy"):
        return float(np.mean(value.asnumpy().astype(np.float64)))
    return to_float(value)
