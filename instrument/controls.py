"""`Controls`: what a step that measures can be asked from the host, whether it is ours or upgraded.

Owns how the taps' gate is closed again after a call, and how the network gets its own classes back.
"""
from __future__ import annotations

import math
from typing import Any, ClassVar

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import get_group_size

from instrument import _compat
from instrument.buffers import own_name
from instrument.joining import HOST_TIMES, Spread
from instrument.kinds import is_whole
from instrument.nonfinite import Place, execution_order
from instrument.notices import tell
from instrument.schema import Schema, Scope
from instrument.window import Window

_Base: Any = object  # a Cell comes behind it among the bases, whose attributes no type checker knows


class Controls(_Base):
    """Comes before a Cell among the bases. The class has `schedule`, `taps`, `ring`, `norm_stats`, `_schema`, and
    with `has_spread` `host_times`."""

    how_to_keep_a_window: ClassVar[str]
    _looks: int = 0

    def hide(self, name: str, value: Any) -> None:
        """Set an attribute outside the Cell tree: it is in no checkpoint, and renames nothing."""
        object.__setattr__(self, name, value)

    def _build(self) -> None:
        """Make what depends on whether there are taps."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """The network may get another step."""

    def observed_network(self) -> nn.Cell:
        """The network whose cells are named and measured."""
        return self.network

    @property
    def schema(self) -> Schema:
        """The metrics of the vector, in order. The parts of a loss that has several are in it from the first call on."""
        return self._schema

    @property
    def every(self) -> int:
        """One in so many steps is measured."""
        return self.schedule.every

    def set_step(self, step: int) -> None:
        """Go on counting from `step`: the next update is number `step + 1`. For a run that resumes."""
        self.step_count.set_data(Tensor(step, ms.int32))
        self.schedule.set_step(step)

    def measure_next(self) -> None:
        """Measure the next update whatever `every` says. On several ranks, call it on each before the same step: in a data
        parallel job a measured step can have an AllReduce more, in which the others would wait for ever."""
        self.schedule.measure_next()

    def tell_times(self, step_time: float, data_wait: float) -> None:
        """Say how long this rank took for its last step, for the spread over ranks; a `TrainingMonitor` does so by itself.

        They travel with the next measured steps, in the AllReduce that is there anyway, until others are told. Without
        `ranks=True` they are not used.

        Args:
            step_time: Seconds; NaN where it is not known.
            data_wait: Of these, seconds of waiting for data; likewise.
        """
        if self.has_spread:
            told = [float(each) if 0 <= float(each) < 1e9 else math.nan for each in (step_time, data_wait)]
            self.host_times.set_data(Tensor(np.array(told, np.float32)))

    def read_window(self, after: int | None = None) -> Window:
        """The vectors of measured steps that the device has kept, with one device-to-host copy.

        Args:
            after: Only steps with a higher number, each as it was done last where the run went back; by default, those that
                came after the last one read.

        Returns:
            (rows, overwritten); see `Window`.

        Raises:
            ValueError: The step was made without `window`.
            TypeError: `after` is no whole number.
        """
        if after is not None and not is_whole(after):
            raise TypeError(f"`after` must be the number of a step, or None, but it is {after!r}.")
        if self.ring is None:
            raise ValueError(f"this step keeps no window: {self.how_to_keep_a_window}.")
        return self.ring.read(after, len(self._schema))

    def owns(self, cell: nn.Cell) -> bool:
        """Whether this step has a tap on this very cell."""
        return self.taps is not None and any(cell is tapped for tapped in self.taps.cells)

    def remove_taps(self) -> None:
        """Give the network its own classes back. The step goes on without activation statistics.

        The vector changes with it: read a window before, and call this between updates, not between calls that make one. On
        several ranks, call it on each before the same step: what they reduce together must be alike, or they wait for ever.
        """
        self._let_go()
        if self.taps is not None:
            self.taps.remove()
            self.hide("taps", None)
            self._build()
            getattr(self, "compile_cache", set()).clear()  # the next call compiles anew, without taps

    def _choose_joining(self, scope: Scope, ranks: bool, *, can_join: bool = True) -> None:
        """What is joined over the ranks of a data parallel job, and whether they are compared: both take an AllReduce."""
        hide = self.hide
        hide("ranks", get_group_size() if getattr(self, "reducer_flag", False) else 1)
        hide("is_together", self.ranks > 1 and can_join and not _compat.sharded_by())
        hide("is_joined", self.is_together and scope == "global")
        hide("has_spread", self.is_together and bool(ranks))
        hide("joins", self.is_joined or self.has_spread)
        # The gradient that is trained on is of the mean of the ranks' losses, or else of their sum.
        hide("loss_shares", self.ranks if self.is_joined and self.mean else 1)
        # Processes that train by themselves have each a loss of their own.
        alone = _compat.rank_and_size()[1] == 1
        hide("scope", "global" if self.is_joined or (scope == "global" and alone) else "local")
        if self.has_spread:
            hide("spread", Spread(self.ranks))
            hide("host_times", state("host_times", np.full(HOST_TIMES, np.nan, np.float32)))
        elif ranks:
            tell("ranks=True has no effect: this is no data parallel job of several processes.", stacklevel=5)

    def _look_for_frozen(self) -> None:
        """Say which parameters the optimizer has that are frozen, and have PyNative mode leave out their gradients' norms.

        In graph mode, where a step must not cost what looking at all parameters does, each hundredth time alone.
        """
        self.hide("_looks", self._looks + 1)
        is_graph = _compat.is_graph_mode()
        if is_graph and self._looks % 100 != 1:
            return
        frozen = [i for i, parameter in enumerate(self.weights) if not parameter.requires_grad]
        self.norm_stats.tell_of_frozen(frozen)
        if not is_graph:
            self.norm_stats.leave_out(frozen)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the graph for these inputs, as `nn.Cell.compile` does."""
        return self._closing_the_gate(super().compile, *args, **kwargs)

    def _execution_order(self) -> list[Place]:
        cells = self.taps.in_order() if self.taps is not None else []
        return execution_order(self.observed_network(), cells, self.norm_stats.weights)

    def _closing_the_gate(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        self._look_for_frozen()
        try:
            return run(*args, **kwargs)
        except BaseException:
            _compat.abandon_gradient()
            raise
        finally:
            self.norm_stats.leave_out([])
            if self.taps is not None:
                self.taps.gate.is_open = False


def state(name: str, value: np.ndarray) -> Parameter:
    """A buffer of the step's own on the device, in no checkpoint."""
    return Parameter(Tensor(value), name=own_name(name), requires_grad=False)
