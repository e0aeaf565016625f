"""`TrainingMonitor`: the callback that records what each measured step returned.

Owns when something is read, and what is done in the training thread: one copy of the vector, the clock and the learning rate.
Alarms that may act on training are looked at there too, by `ActingAlarms`. The rest is done in the background: `Recorder`
makes records, and the writers store them.
"""
from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspore.train.callback import Callback

from instrument import _compat
from instrument.acting import ActingAlarms
from instrument.alarms import Alarm, AlarmSet, default_alarms
from instrument.background import Background, WhenFull
from instrument.destinations import destinations
from instrument.host import HostStats
from instrument.kinds import is_whole
from instrument.loop import Loop
from instrument.notices import tell
from instrument.outlet import Outlet, Reported
from instrument.outputs import Call, Reading, StepOutputs
from instrument.pace import Epochs, Mark, Pace
from instrument.place import Place
from instrument.record import VALIDATION, to_float
from instrument.recorder import Recorder
from instrument.samples import TextSampler
from instrument.schema import Schema
from instrument.upgrade import StepOptions, begin
from instrument.writers import Writer
from instrument.writers.adapt import as_writer

# What the monitor may add to what the step measures.
ADDED = ("learning_rate", "learning_rate/0", "step_time", "data_wait", "data_wait_fraction", "samples_per_second",
         "tokens_per_second", "epoch", "perplexity", "val/loss")


class _OldHooks(Callback):
    """The hook names before `on_train_*`, for loops that still call them.

    In a class of their own, since `Model.fit` refuses a callback whose own class defines them. MindSpore's
    `Callback.on_eval_*` call them too, so they ask for the mode.
    """

    _is_used = False  # whether any hook was called

    def begin(self, run_context: Any) -> None:
        self._is_used = True
        if not _evaluating(run_context):
            self.on_train_begin(run_context)

    def epoch_begin(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_epoch_begin(run_context)

    def step_begin(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_step_begin(run_context)

    def step_end(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_step_end(run_context)

    def end(self, run_context: Any) -> None:
        if not _evaluating(run_context):
            self.on_train_end(run_context)


class TrainingMonitor(_OldHooks):
    """Records the numbers of each step while `Model.train` or `Model.fit` runs.

    With an `InstrumentedStep`, a record has all of the step's metrics, and each measured step is recorded once: calls
    that return the last vector again (accumulation, or statistics switched off for a step) make no record. MindSpore's own
    training steps, and MindFormers', are made to measure when training begins, and return what they always have. With a train
    cell that cannot be made so, of which one warning says why, a record has the loss alone. What the host adds is in the
    README's table of metrics: learning rate, step time, waiting for data, throughput, epoch, memory, validation metrics of
    `Model.fit` as `val/<name>`.

    Of a step that keeps a `window`, as for a data sink, all vectors since the last record make one record each; only the
    last of them has what the host adds.

    A record costs training one device-to-host copy of the statistics, and some tens of microseconds. The copy is made after
    the next step has been started, where that is possible, so that the device need not wait. One background thread does
    the rest. A writer that raises or hangs is reported by one warning and counted in `errors`, and training goes on; so
    it is with other errors in here.

    What was recorded is brought to disk when training ends, also by an exception (`Model` leaves its callbacks' contexts
    then) or SIGTERM. A loop of your own is recorded by `loop`.

    Args:
        run_dir: Directory of the run, which gets `config.json`, `metrics-*.jsonl`, `alarms.jsonl`, TensorBoard's event
            files and more. Where it holds a run already, the next free name is taken and printed.
        writers: More destinations: instances of `Writer`, functions of a record, or objects with `write`, `add_scalar` or
            `log`.
        every: Record one call in `every`; nothing is copied on the others. The last call is recorded in any case.
        measure: What a stock training step is made to measure, as `instrument.upgrade.StepOptions`; None for the default
            ones, which are those of `InstrumentedStep`; False leaves the step as it is. An `InstrumentedStep` has its own.
        alarms: What to warn of; by default `instrument.alarms.default_alarms()`, [] for nothing. LossMonitor's own stop at NaN
            does not work with a step that returns a tuple: `NonFinite(policy="stop")` does that.
        batch_size: Samples a call of the step on this rank, for `samples_per_second`.
        tokens_per_sample: Tokens a sample, for `tokens_per_second`; the loss is taken for a mean in nats a token then, and
            `perplexity` recorded.
        resume: Go on in `run_dir`, if it holds a run. The step's number comes from the checkpoint that you load.
        hyper_parameters: `{name: number, text or bool}`, for `config.json` and whoever compares runs.
        text_samples: What a language model writes, every few steps.
        queue_size: How many records may wait for the writers.
        when_full: `drop` leaves out the oldest record that waits, and counts it in `dropped`; `wait` makes training wait.
        writer_timeout: Seconds after which a writer that does not return is given up.
        flush_seconds: Writers are flushed so often: what a killed process loses at most.

    Attributes:
        overwritten: Measured steps that a window on the device lost before they were read.

    Raises:
        RunInUse: `resume` of a run that another process writes.
        ValueError: There is neither `run_dir` nor a writer, or a number is out of its range.
        TypeError: One of `writers` or `alarms` is none.

    Examples:
        >>> step = InstrumentedStep(network, optimizer)
        >>> Model(step).train(10, dataset, callbacks=[TrainingMonitor("runs/mine")], dataset_sink_mode=False)
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None, *, writers: Sequence[Any] | None = None,
                 every: int = 1, measure: StepOptions | bool | None = None,
                 alarms: Sequence[Alarm] | None = None, batch_size: int | None = None,
                 tokens_per_sample: int | None = None, resume: bool = False,
                 hyper_parameters: Mapping[str, Any] | None = None,
                 text_samples: TextSampler | Sequence[TextSampler] = (), queue_size: int = 4096,
                 when_full: WhenFull = "drop", writer_timeout: float = 30.0, flush_seconds: float = 2.0):
        numbers = {"every": every, "batch_size": batch_size, "tokens_per_sample": tokens_per_sample, "queue_size": queue_size}
        for name, number in numbers.items():
            if number is not None and not (is_whole(number) and number >= 1):
                raise ValueError(f"{name} must be a positive whole number, but it is {number!r}.")
        if tokens_per_sample is not None and batch_size is None:
            raise ValueError("tokens_per_sample needs batch_size, the samples a call of the step, to make tokens_per_second.")
        for name, seconds in (("flush_seconds", flush_seconds), ("writer_timeout", writer_timeout)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, but it is {seconds!r}.")
        samplers = [text_samples] if isinstance(text_samples, TextSampler) else list(text_samples)
        for sampler in samplers:
            if not isinstance(sampler, TextSampler):
                raise TypeError(f"text_samples must be a TextSampler or a list of them, but it holds {sampler!r}. Use "
                                "TextSampler(generate, prompts, every=100).")
        if when_full not in ("drop", "wait"):
            raise ValueError(f'when_full must be "drop" or "wait", but it is {when_full!r}.')
        if not (measure is None or isinstance(measure, (bool, StepOptions))):
            raise TypeError(f"measure must be StepOptions, None for the default ones, or False, but it is {measure!r}.")
        self._named = -1  # elements of the vector whose names are in config.json
        self._given_alarms = list(alarms or ())  # until it is known what they have to look at
        alarms = default_alarms() if alarms is None else list(alarms)
        AlarmSet(alarms)  # raises where one is none, or two have one name
        given = [as_writer(writer) for writer in writers or ()]  # before a directory is made
        if run_dir is None and not given:
            raise ValueError("a monitor needs somewhere to write: give run_dir, writers, or both.")
        self.every = every
        self.measure = measure
        self.alarms = alarms
        self.text_samples = samplers
        self.rank, self.ranks = _compat.rank_and_size()
        config = {"hyper_parameters": dict(hyper_parameters or {})}
        self._place = None if run_dir is None else \
            Place(run_dir, resume=resume, config=config, rank=self.rank, ranks=self.ranks)
        self.writers: list[Writer] = destinations(self._place, given, rank=self.rank)
        self.overwritten = 0
        self._pace = Pace(batch_size=batch_size, tokens_per_sample=tokens_per_sample)
        self._epochs = Epochs()
        self._rates: dict[str, float] | None = None  # before the call that is being made
        self._last_rates: dict[str, float] = {}  # those read last
        on_device = _compat.device_target() != "CPU"
        host = HostStats(device=_compat.device_id() if on_device else None, device_memory=_compat.device_memory)
        self._recorder = Recorder(AlarmSet([alarm for alarm in alarms if alarm.policy == "log"]), host,
                                  perplexity=tokens_per_sample is not None, rank=self.rank)
        background = Background(self.writers, self._recorder.records_of, capacity=queue_size, when_full=when_full,
                                timeout=writer_timeout, flush_seconds=flush_seconds)
        self._recorder.report = background.report
        self._outlet = Outlet(background, self._place, self._summary, self._before_the_end)
        self._acting = ActingAlarms([alarm for alarm in alarms if alarm.policy != "log"], self._outlet, self._measure_next)
        self._outputs: StepOutputs | None = None
        self._calls: deque[Call] = deque()  # not read yet; the last one is read after the next one has been started
        self._training: Any = None  # the context of Model.train while it runs
        self._mark: Mark | None = None  # the clock after the last call
        self._contexts = 0  # how many `with` blocks we are in
        # The step of the last record; of a run that goes on, until training begins.
        self._last_step = self._place.recorded if self._place is not None else 0
        # Calls of the step are counted by `cur_step_num`: in a data sink one hook stands for many calls.
        self._last_call = 0
        self._last_seen = 0  # the last call that was recorded, or looked at

    @property
    def run_dir(self) -> Path | None:
        """The directory that was taken, absolute; None without one, and on ranks other than 0 before their first record."""
        return None if self._place is None else self._place.directory

    @property
    def last_step(self) -> int:
        """The step of the last record; of a run that goes on, the last one that it has until training begins."""
        return self._last_step

    @property
    def errors(self) -> Counter[str]:
        """How often each writer, alarm or other part failed."""
        return self._outlet.background.errors

    @property
    def dropped(self) -> int:
        """Records that were left out since writers did not keep up: once if all missed it, else once for each that did."""
        return self._outlet.background.dropped

    def __enter__(self) -> TrainingMonitor:
        self._contexts += 1
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._contexts -= 1
        if self._contexts <= 0:  # Model.fit enters its callbacks once more for each evaluation
            if error is not None and self._outlet.status == "running":
                self._outlet.status = f"failed: {kind.__name__}: {error}"
            if error is None and not self._is_used:
                tell("TrainingMonitor has recorded nothing, since none of its hooks was called. Give it to Model.train as one "
                     "of `callbacks`, or in a loop of your own use `with monitor.loop(step) as train_step:` and call "
                     "train_step.", stacklevel=3)
            self.close()

    def __getstate__(self) -> None:
        raise TypeError("a TrainingMonitor holds a thread and open files, so it cannot be copied or pickled. Make one for "
                        "each run.")

    def loop(self, step: Callable[..., Any], *, schema: Schema | None = None, optimizer: Any = None,
             epochs: int | None = None, steps_per_epoch: int | None = None, accumulate: int = 1) -> Loop:
        """Record a training loop of your own, in which each call of the step goes through what this returns.

        Args:
            step: An `InstrumentedStep`, one of the stock steps, which is made to measure as in `Model.train`, or a function.
            schema: Where `step` is a function that returns `(loss, stats)`: what is in `stats`, as `norm_stats.schema`.
                The number of the step and the loss are added. A function without it has its loss recorded alone.
            optimizer: For the learning rate, where `step` is a function.
            epochs: How many epochs will be trained, for the time that is left; None: not known.
            steps_per_epoch: Calls an epoch, for `epoch`; likewise.
            accumulate: Where `step` is a function: so many calls make one update. A run that resumes goes on after as many
                calls as the updates that the loaded optimizer has made took.

        Returns:
            A context manager that is called like `step`, and has `should_stop` and `evaluation()`; see `instrument.loop.Loop`.

        Raises:
            TypeError: `step` cannot be called, or `schema` is none.
            ValueError: A number is out of its range, or `schema` is that of a step, which has one of its own.

        Examples:
            >>> step = InstrumentedStep(network, optimizer)
            >>> with TrainingMonitor("runs/loop").loop(step, epochs=3, steps_per_epoch=1) as train_step:
            ...     for epoch in range(3):
            ...         loss, stats = train_step(x, y)
            >>> instrument.read("runs/loop")["loss"].step
            array([1, 2, 3])
        """
        return Loop(self, step, schema=schema, optimizer=optimizer, epochs=epochs, steps_per_epoch=steps_per_epoch,
                    accumulate=accumulate)

    def on_train_begin(self, run_context: Any) -> None:
        self._catch_up()  # of a call of Model.train that failed
        self._is_used = True
        params = run_context.original_args()
        call = params.get("cur_step_num", 0)
        self._upgrade(params)
        self._outlet.status = "running"
        self._training, self._mark, self._rates = run_context, None, None
        self._pace.forget()
        total = None
        with self._reported("TrainingMonitor"):
            self._find_step(params)
            if self._outputs is not None:
                self._outputs.begin(call, self._last_call)
                recorded = None if self._place is None else self._place.resumed_after()
                if recorded is not None:
                    self._outputs.resume(call, recorded)
                    self._place.goes_on_after(self._outputs.steps_made(call))  # type: ignore[union-attr]
                made = self._outputs.steps_made(call) * self._outputs.accumulate
                self._epochs.begin(call, made, resumed=recorded is not None)
                total = self._total_steps(params, call)
        self._last_call = self._last_seen = call
        self._outlet.open(total)

    def _total_steps(self, params: Any, call: int) -> int | None:
        """The number of the last step of this call of `Model.train`, whose `epoch_num` are the epochs that it makes."""
        calls = (params.get("epoch_num") or 0) * (params.get("batch_num") or 0)
        if calls <= 0 or self._outputs is None:
            return None
        return self._outputs.steps_made(call) + calls // self._outputs.accumulate

    def on_train_epoch_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        self._pace.begin(params.get("cur_step_num", 0))
        with self._reported("epoch"):
            self._epochs.epoch_begins(params)

    def on_train_step_begin(self, run_context: Any) -> None:
        self._pace.step_begins()
        self._rates = None
        if self._outputs is not None and self._last_call + 1 - self._last_seen >= self.every:
            with self._reported("learning_rate"):
                self._rates = self._last_rates = self._outputs.rates_now()

    def on_train_step_end(self, run_context: Any) -> None:
        self._is_used = True
        params = run_context.original_args()
        call = self._last_call = params.get("cur_step_num", self._last_call + 1)
        self._mark, self._training = self._pace.mark(call), run_context
        if call - self._last_seen >= self.every:  # not so for the second hook, where a loop calls both generations
            with self._reported("TrainingMonitor"):
                self._observe(params, call, run_context)
            self._rates = None  # those of the next step are asked for before it, or after it where no hook is called then
        self._pace.step_ended()

    def on_train_end(self, run_context: Any) -> None:
        self._training = None  # nothing is left to be stopped
        self._observe_last(run_context.original_args(), run_context)
        self._read_the_rest(run_context)
        for sampler in self.text_samples:
            self._sample(sampler)
        if self._outlet.status == "running":
            self._outlet.status = "finished"
        self.close()

    def on_eval_begin(self, run_context: Any) -> None:
        self._pace.evaluation_begins()

    def on_eval_end(self, run_context: Any) -> None:
        self._is_used = True
        self._pace.evaluation_ends()
        params = run_context.original_args()
        # Model.fit evaluates in a context of its own, in which no training can be stopped.
        context = self._training or run_context
        if self.ranks == 1:  # of several, one alone may evaluate: an alarm would stop it a step before the others
            self._read_the_rest(context)  # what was trained comes before what it is worth
        with self._reported("validation"):
            results = params.get("eval_results") or params.get("metrics") or {}
            values = {f"{VALIDATION}{'loss' if name == 'eval_loss' else name}": to_float(value)
                      for name, value in results.items()}
            known = {name: value for name, value in values.items() if value is not None}
            if known:
                step = self._last_step if self._outputs is None else self._outputs.steps_made(self._last_call)
                self._acting.look([Reading(max(step, self._last_step), time.time(), known)])
        self._put(context)

    def close(self) -> None:
        """Bring what was recorded to the writers, and close them. A later record opens them again."""
        self._outlet.close()

    def _catch_up(self) -> None:
        """Read all that was made, where training has ended by an exception or a signal."""
        training, self._training = self._training, None
        if training is not None:
            self._observe_last(training.original_args(), None)
        self._read_the_rest(None)

    def _before_the_end(self) -> None:
        self._catch_up()
        self._acting.finish(self._last_step, time.time())

    def _summary(self) -> dict[str, Any]:
        return {"last_step": self._last_step, "overwritten": self.overwritten}

    def _upgrade(self, params: Any) -> None:
        """Have the train network's step measure, where it is a stock one."""
        if self._outputs is not None and self._outputs.network is params.get("train_network"):
            return
        if params.get("train_network") is None:
            tell("TrainingMonitor was told of no `train_network`: the loss alone is recorded, with what the host "
                 "knows. In a loop of your own use `with monitor.loop(step) as train_step:` and call train_step.",
                 stacklevel=4)
            return
        reason = begin(params, self.measure)
        if reason is not None:
            tell(f"TrainingMonitor cannot measure in the training step: {reason}. The step is left alone, and its loss is "
                 "recorded, with what the host knows. measure=False says that this is meant.", stacklevel=4)

    def _find_step(self, params: Any) -> None:
        network = params.get("train_network")
        if self._outputs is not None and self._outputs.network is network:
            return
        self._outputs = StepOutputs(network, params.get("optimizer"))
        self._outputs.begin(self._last_seen, self._last_step)
        schema = self._outputs.schema
        if schema is None:
            return
        self._recorder.know(schema)
        for watch in (self._acting, self._recorder.alarms):
            watch.locate_by(schema.first_nonfinite)
        for alarm in self._given_alarms:
            if not alarm.sees([*schema.names, *ADDED]):
                tell(alarm.unmet, stacklevel=4)
        self._given_alarms = []
        self._name_metrics(schema)

    def _name_metrics(self, schema: Schema) -> None:
        self._named = len(schema)
        if self._place is not None:
            with self._reported("config.json"):
                self._place.name_metrics(schema, self._outputs.max_grad_norm if self._outputs is not None else None)

    def _observe(self, params: Any, call: int, run_context: Any) -> None:
        """Take the outputs of the call just made; they are read now, or after the next one."""
        self._last_seen = call
        if self._outputs is None or self._outputs.network is not params.get("train_network"):
            self._find_step(params)
        assert self._outputs is not None
        outputs = self._outputs.taken(params.get("net_outputs"))
        if not self._outputs.is_new(outputs):
            return
        schema = self._outputs.schema
        if schema is not None and len(schema) != self._named:  # parts of the loss are known from the first call on
            self._name_metrics(schema)
        values: dict[str, float] = {}
        with self._reported("epoch"):
            values = self._epochs.at(call, params)
        if self._rates is None:
            with self._reported("learning_rate"):
                self._rates = self._outputs.rates_now()
        if self._rates:
            values.update(self._rates)
        self._calls.append(Call(outputs, self._outputs.number_of(outputs, call), self._mark or self._pace.mark(call),
                                time.time(), values))
        # Several ranks have to see a step at the same time, since an alarm may stop them, whatever else one of them does.
        at_once = self.ranks == 1 and bool(self.text_samples)
        self._read(run_context, keep=0 if at_once or not self._outputs.may_wait else 1)
        if self._recorder.wants_measurement:
            self._recorder.wants_measurement = False
            self._measure_next()
        for sampler in self.text_samples:
            if self._last_step > 0 and sampler.is_due(self._last_step):
                self._sample(sampler)
        self._outlet.report()

    def _observe_last(self, params: Any, run_context: Any) -> None:
        """Take the outputs of the last call, where `every` passed it over."""
        if self._outputs is None or self._last_call <= self._last_seen or params.get("cur_step_num") != self._last_call:
            return
        with self._reported("TrainingMonitor"):
            rates = self._outputs.rates_now()
            # Somebody may have set another one since: one that has not changed is known.
            self._rates = rates if rates == self._last_rates else {}
            self._observe(params, self._last_call, run_context)

    def _read_the_rest(self, run_context: Any) -> None:
        """Read the last call's outputs too, unless that has been done."""
        self._read(run_context, keep=0)

    def _read(self, run_context: Any, *, keep: int) -> None:
        """Read calls up to the last `keep`. Interrupted, as by Ctrl-C, it goes on where it was when it is called again."""
        while len(self._calls) > keep and self._outputs is not None:
            call, readings = self._calls[0], []
            with self._reported("TrainingMonitor"):
                readings = self._outputs.read(call)
                if self._outputs.overwritten:
                    lost, self._outputs.overwritten = self._outputs.overwritten, 0
                    self.overwritten += lost
                    tell(f"{lost} measured steps were overwritten on the device before the monitor read them: make the step "
                         "with a larger `window`, or measure fewer steps by `every`.")
                if readings:
                    self._last_step = readings[-1].step
                    readings[-1].values.update(self._pace.take(call.mark))
                    self._outputs.tell_times(readings[-1].values)
                for reading in readings if self._outputs.is_scheduled else ():
                    with self._reported("learning_rate"):
                        reading.values.update(self._outputs.scheduled_rates(reading, is_last=reading is readings[-1]))
            self._acting.look(readings)
            if self._calls and self._calls[0] is call:
                self._calls.popleft()
        self._put(run_context)

    def _put(self, run_context: Any) -> None:
        """Queue what has been read, and act on incidents: a policy may raise."""
        self._acting.put(run_context, self._training)

    def _measure_next(self) -> None:
        cell: Any = None if self._outputs is None else self._outputs.cell
        # Ranks see incidents of their own, and at times of their own, but must measure a step together or not at all.
        if getattr(cell, "every", 1) > 1 and hasattr(cell, "measure_next") and not getattr(cell, "joins", False):
            cell.measure_next()

    def _sample(self, sampler: TextSampler) -> None:
        with self._reported("TextSampler"), self._pace.left_out():
            step = self._last_step
            if self._calls and self._outputs is not None:  # the weights are further on than what has been read
                step = self._outputs.steps_made(self._last_call)
            self._outlet.put(Reading(max(step, 1), time.time(), texts=sampler.sample()))

    def _reported(self, source: str) -> Reported:
        return self._outlet.reported(source)


def _evaluating(run_context: Any) -> bool:
    return run_context.original_args().get("mode") == "eval"
