"""Which steps are measured: every k-th, the first one, and those that were asked for.

Owns the decision, on the host and in the graph. What a step does when it is not measured is the step's part.

There are two ways to leave a measurement out of a compiled graph, and neither serves everywhere. Two graphs, one with and
one without, make a step that is not measured as quick as the stock cell; but each graph has a random stream of its own,
which starts at the same seed, so that Dropout masks would come twice, and inside another compiled cell (a data sink) nobody
on the host could choose. A condition in the one graph serves there, and costs a little on each step. Hence: two graphs,
unless the network draws random numbers or the step lies in another graph. benchmarks/every.py measures both.
"""
from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from instrument.buffers import own_name

# Cells of MindSpore that draw random numbers while training.
RANDOM_CELLS = tuple(getattr(nn, name) for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "RReLU")
                     if hasattr(nn, name))


class Schedule(nn.Cell):
    """Whether the coming step is measured. A step is an update, which may take several calls.

    Args:
        every: Step 1 and each multiple of `every` are measured.
        accumulate: Calls that make one step.
        step_count: Number of the last step, int32 [].
        micro_step: Calls of the coming step that have been made, int32 [].
    """

    def __init__(self, every: int, accumulate: int, step_count: Parameter, micro_step: Parameter):
        super().__init__(auto_prefix=False)
        self.every = every
        self.accumulate = accumulate
        self.every_steps = Tensor(every, ms.int32)
        self.zero = Tensor(0, ms.int32)
        self.threshold = Tensor(0.5, ms.float32)
        self.step_count, self.micro_step = step_count, micro_step
        # Whether the coming step is measured, where the graph decides: it sets this for the step after.
        self.flag = Parameter(Tensor(1.0, ms.float32), name=own_name("measure"), requires_grad=False)
        self.asked = self.was_asked = False
        # What the host knows without asking the device.
        self.step: int | None = None  # number of the last step
        self.calls = 0  # of the coming step
        self.is_measured = True  # the coming step

    def measure_next(self) -> None:
        """Measure the next step that has not begun, in any case."""
        self.asked = True
        self.tell_device()

    def tell_device(self, is_call: bool = False) -> None:
        """Set the flag of the graph to what was asked for, unless a step has begun; `is_call`: that step comes now."""
        if self.asked and (self.accumulate == 1 or int(self.micro_step.asnumpy()) == 0):
            self.flag.set_data(Tensor(1.0, ms.float32))
            self.asked = not is_call

    def start_anew(self) -> None:
        """The vector has changed: measure the coming step, and drop a step that has begun."""
        if self.accumulate > 1:
            self.micro_step.set_data(Tensor(0, ms.int32))
        self.step = None
        self.measure_next()

    def set_step(self, step: int) -> None:
        """Take `step` for the number of the last step."""
        self.step = None
        self.flag.set_data(Tensor(float(self.asked or self.is_due(step + 1)), ms.float32))

    def is_due(self, step: int) -> bool:
        """Whether the step of this number is measured without being asked for."""
        return step == 1 or step % self.every == 0

    def decide(self) -> bool:
        """On the host, before a call: whether its step is measured."""
        if self.step is None:  # the first call, one after an exception, or after the graph has decided
            calls, self.calls = self.calls, int(self.micro_step.asnumpy())
            self.step = int(self.step_count.asnumpy())
            if self.calls != calls:
                self.is_measured = False  # it has begun, and whether measured is not known
        if self.calls == 0:
            self.was_asked = self.asked
            self.is_measured = self.asked or self.is_due(self.step + 1)
            self.asked = False
        return self.is_measured

    def done(self) -> None:
        """On the host: a call has been made."""
        self.calls += 1
        if self.calls == self.accumulate and self.step is not None:
            self.step, self.calls = self.step + 1, 0

    def forget(self) -> None:
        """A call has failed: the host no longer knows how many steps have been made."""
        self.step = None
        self.asked = self.asked or (self.was_asked and self.calls == 0)

    def hand_over(self) -> None:
        """From now on the graph decides."""
        if self.step is not None:
            self.flag.set_data(Tensor(float(self.asked or self.is_due(self.step + 1)), ms.float32))
            self.step = None

    def is_on(self):
        """In the graph: whether this step is measured, bool []."""
        return ops.Greater()(self.flag, self.threshold)

    def advance(self, step):
        """In the graph: set the flag for the step that follows number `step` (int32 [])."""
        rest = ops.FloorMod()(step + 1, self.every_steps)
        return ops.assign(self.flag, ops.cast(ops.Equal()(rest, self.zero), ms.float32))


def draws_random_numbers(network: nn.Cell) -> bool:
    """Whether a cell of the network is known to draw random numbers."""
    return any(isinstance(cell, RANDOM_CELLS) and _rate(cell) > 0 for _, cell in network.cells_and_names())


def _rate(cell: Any) -> float:
    """The share that a Dropout cell drops; 1 where it does not say."""
    if getattr(cell, "p", None) is not None:
        return float(cell.p)
    keep = getattr(cell, "keep_prob", None)
    return 1.0 if keep is None else 1 - float(keep)
