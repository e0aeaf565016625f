"""`Pace`: how long steps take, how much of that is waiting for data, and the throughput that follows; `Epochs` counts them.

Owns the clock of a run. Evaluation, text samples and whatever else is no training is left out of it.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """The clock after a call of the step."""

    call: int  # number of the call
    seconds: float  # of training up to here
    wait: float | None  # of these, waiting for data; None where it is not known


class Pace:
    """Follows a run by the hooks of a callback.

    Args:
        batch_size: Samples a call of the step on this rank.
        tokens_per_sample: Tokens a sample.
    """

    def __init__(self, *, batch_size: int | None = None, tokens_per_sample: int | None = None):
        self.batch_size, self.tokens_per_sample = batch_size, tokens_per_sample
        self._left_out = 0.0  # seconds that were no training
        self._wait: float | None = None
        self._idle_since: float | None = None  # the last hook's end, from which data is waited for; None while a step is made
        self._evaluations: list[float] = []  # when those that are not over began: an evaluation may have one inside
        self._taken: Mark | None = None

    def begin(self, call: int) -> None:
        """Training begins, or goes on after something else: the time since the last call does not count."""
        now = time.perf_counter()
        if self._idle_since is not None:
            self._left_out += now - self._idle_since
        self._idle_since = now
        if self._taken is None or self._taken.call > call:  # the calls are counted anew
            self._taken = Mark(call, now - self._left_out, self._wait)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """What is done in this context, in a hook, is no training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._left_out += time.perf_counter() - started

    def evaluation_begins(self) -> None:
        """What follows is no training."""
        self._evaluations.append(time.perf_counter())

    def evaluation_ends(self) -> None:
        """Training goes on."""
        began = self._evaluations.pop() if self._evaluations else None
        if began is None or self._evaluations:
            return
        taken = time.perf_counter() - began
        self._left_out += taken
        if self._idle_since is not None:
            self._idle_since += taken

    def forget(self) -> None:
        """Another call of `Model.train`: nothing that was seen before counts."""
        self._idle_since = self._taken = self._wait = None
        self._evaluations.clear()

    def step_begins(self) -> None:
        """The data of a step is there."""
        if self._idle_since is not None:
            self._wait = (self._wait or 0.0) + time.perf_counter() - self._idle_since
            self._idle_since = None

    def step_ended(self) -> None:
        """The hook after a step is through: what follows is waiting for the next one's data."""
        self._idle_since = time.perf_counter()

    def mark(self, call: int) -> Mark:
        """The clock, right after call number `call`."""
        return Mark(call, time.perf_counter() - self._left_out, self._wait)

    def take(self, mark: Mark) -> dict[str, float]:
        """What is known of the calls between the mark that was taken before and this one.

        Returns:
            `step_time` (seconds a call), `data_wait` (seconds a call; the data pipeline, and callbacks that come after the
            monitor), `data_wait_fraction` (share of the step time, 0 to 1), `samples_per_second`, `tokens_per_second`; what is
            not known is absent.
        """
        before, self._taken = self._taken, mark
        if before is None or mark.call <= before.call or mark.seconds <= before.seconds:
            return {}
        calls, seconds = mark.call - before.call, mark.seconds - before.seconds
        values = {"step_time": seconds / calls}
        if mark.wait is not None:
            wait = min(mark.wait - (before.wait or 0.0), seconds)
            values.update(data_wait=wait / calls, data_wait_fraction=wait / seconds)
        if self.batch_size is not None:
            values["samples_per_second"] = self.batch_size * calls / seconds
            if self.tokens_per_sample is not None:
                values["tokens_per_second"] = self.tokens_per_sample * values["samples_per_second"]
        return values


class Epochs:
    """How many epochs have been trained, over several calls of `Model.train` and in a run that is resumed."""

    def __init__(self) -> None:
        self._calls_before = 0  # this training, of those that count
        self._uncounted: int | None = None  # calls of the step before there was a run
        self._offset: float | None = None  # epochs to be added; None until it is known

    def begin(self, call: int, calls_before: int, *, resumed: bool) -> None:
        """A call of `Model.train` begins.

        Args:
            call: What `cur_step_num` is before it.
            calls_before: Calls of the step that were made before.
            resumed: The run goes on where an earlier process left it, so all of them count.
        """
        if resumed or self._uncounted is None:
            self._uncounted = 0 if resumed else calls_before
        self._calls_before = max(calls_before - self._uncounted - call, 0)
        self._offset = None

    def epoch_begins(self, params: Mapping[str, Any]) -> None:
        """The first epoch's number says whether epochs are counted on, by `initial_epoch`, or anew."""
        batches = params.get("batch_num") or 0
        if self._offset is None and batches > 0:
            self._offset = self._calls_before / batches if params.get("cur_epoch_num") in (None, 1) else 0.0

    def at(self, call: int, params: Mapping[str, Any]) -> dict[str, float]:
        """`epoch` after call number `call` of the step, 1.0 after the first epoch; absent where nothing tells it.

        Args:
            call: Number of the call, from 1.
            params: What the hook was told. Without `cur_epoch_num`, as in a loop of the user's, the calls tell it.
        """
        batches = params.get("batch_num") or 0
        if batches <= 0:
            return {}
        self.epoch_begins(params)
        number = params.get("cur_epoch_num")
        epoch = call / batches if number is None else number - 1 + ((call - 1) % batches + 1) / batches
        return {"epoch": (self._offset or 0.0) + epoch}
