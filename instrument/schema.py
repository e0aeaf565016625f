"""What each element of the `stats` vector means: `Metric` and `Schema`.

Owns names, units, scopes, merge rules, and turning one vector into named floats. Knows nothing of how the numbers are
computed.
"""
from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from instrument.bins import CARRIED, from_carried
from instrument.nonfinite import FirstNonfinite, first_nonfinite

Scope = Literal["global", "local", "shard", "unverified"]
# The scopes of what is one number for all ranks, so that rank 0 records it for all.
ONE_FOR_ALL = ("global", "unverified")

# What stands in a vector for the norm of a gradient that was not computed: no norm is negative.
NO_GRADIENT = -1.0

Merge = Literal["identical", "sum", "mean", "rms", "max", "mean_of_max"]


@dataclass(frozen=True)
class Metric:
    """One element of the vector.

    Attributes:
        name: `group/statistic` or `group/statistic/object`; the object is MindSpore's own parameter or cell name.
        unit: `step`, `loss`, `1` (dimensionless, in the unit of the tensor measured), `calls`, `elements`,
            `parameters`, `nats`, `fraction`, `deviations` (standard deviations), `s` (seconds), `rank` (its number) or `flag`
            (0 or 1).
        scope: `global` is one number for all ranks of a data parallel job; `local` is this rank's own; `shard` is of the
            parts of tensors that this rank holds, and `unverified` one number for all ranks, in a parallel mode in which
            nothing has been verified on an accelerator.
        merge: how values of several calls, micro-batches or ranks make one: `identical` (they are all the same),
            `sum`, `mean` (weighted by elements where the numbers of elements differ), `rms` (root of the mean of
            squares, weighted likewise), `max`, or `mean_of_max` (the mean of each call's maximum: a sum over calls
            is all that a gradient can carry, so the largest of several calls is not known).
        is_optional: NaN stands for a value that was not known in this step: `unpack` leaves it out.
    """

    name: str
    unit: str
    scope: Scope
    merge: Merge
    is_optional: bool = False


def of_this_rank(metrics: Sequence[Metric], scope: Scope = "local") -> list[Metric]:
    """The same metrics where each process trains by itself, or holds parts: nothing is one number for all of them."""
    return [replace(metric, scope=scope, merge="mean" if metric.merge == "identical" else metric.merge)
            for metric in metrics]


class Schema:
    """The ordered metrics of a `stats` vector.

    Args:
        metrics: One `Metric` for each element, in the vector's order.
        histograms: Names of the histograms that follow the metrics in the vector, `bins.CARRIED` elements each.

    Raises:
        ValueError: Two metrics or two histograms have one name.

    Examples:
        >>> schema = Schema([Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean")])
        >>> schema.unpack([3.0, 0.5])
        {'step': 3.0, 'loss': 0.5}
    """

    def __init__(self, metrics: Sequence[Metric], histograms: Sequence[str] = ()):
        self._reported: set[str] = set()
        # For `first_nonfinite`: a reference to what tells the order of execution, as the step knows it.
        self.order: Callable[[], Callable[[], Sequence[Any]] | None] | None = None
        self._kept_order: list[Any] | None = None  # of a copy, which must not keep the step
        self.replace(metrics, histograms)

    def replace(self, metrics: Sequence[Metric], histograms: Sequence[str] = ()) -> None:
        """Take other metrics: a step learns the parts of its loss when its network is compiled or called."""
        self.metrics: tuple[Metric, ...] = tuple(metrics)
        self.names: tuple[str, ...] = tuple(metric.name for metric in self.metrics)
        self.histogram_names: tuple[str, ...] = tuple(histograms)
        self._position = {name: i for i, name in enumerate(self.names)}
        every_name = self.names + self.histogram_names
        if len(set(every_name)) < len(every_name):
            twice = sorted({name for name in every_name if every_name.count(name) > 1})
            raise ValueError(f"metric names must be unique, but these occur twice: {', '.join(twice)}. "
                             "Rename the parameter, the cell or the loss part that they come from.")
        self._count_of = [self._call_count(name) for name in self.names]
        self._counts = np.array(sorted({count for count in self._count_of if count is not None}), np.intp)
        self._norms = np.array([i for i, name in enumerate(self.names) if name.startswith("grad/norm/")], np.intp)
        self._optional = np.array([i for i, metric in enumerate(self.metrics) if metric.is_optional], np.intp)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: with the order of execution as it is known now, in place of what tells it."""
        order_of = self.order() if self.order is not None else None
        kept = self._kept_order if order_of is None else list(order_of())
        return {**self.__dict__, "order": None, "_kept_order": kept, "_reported": set(self._reported)}

    def _call_count(self, name: str) -> int | None:
        """Position of the call count that says whether the metric `name` was measured, if it has one."""
        group, _, rest = name.partition("/")
        if group not in ("activation", "activation_grad", "attention"):
            return None
        stat, _, cell = rest.partition("/")
        counts = "attention" if group == "attention" else "activation"
        return None if (group, stat) == (counts, "count") else self._position.get(f"{counts}/count/{cell}")

    def __len__(self) -> int:
        """The length of the vector: that of its metrics and histograms."""
        return len(self.metrics) + CARRIED * len(self.histogram_names)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self.metrics)

    def __getitem__(self, name: str) -> Metric:
        return self.metrics[self.index(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._position

    def index(self, name: str) -> int:
        """Position of the metric `name` in the vector; KeyError with near names where there is none."""
        try:
            return self._position[name]
        except KeyError:
            near = difflib.get_close_matches(name, self.names, n=3, cutoff=0.3)
            raise KeyError(f"no metric {name!r}; near names: {', '.join(near) or 'none'}") from None

    def unpack(self, stats: Any) -> dict[str, float]:
        """Name the elements of one vector, with one device-to-host copy.

        Args:
            stats: The step's second output: a float32 Tensor of shape [K], or an array or sequence of K numbers.

        Returns:
            `{name: value}` in the schema's order. NaN and infinities are values, and are kept. The statistics of a
            cell that was called no time in the measured step (call count 0) are absent, with one warning a cell; so are,
            without one, what is optional and was not known, and the norm of a gradient that PyNative mode did not compute,
            since the parameter was frozen in this step.

        Raises:
            ValueError: `stats` does not have K elements.
        """
        values = self._vector(stats)
        unpacked = dict(zip(self.names, values.tolist()))
        for i in self._norms[values[self._norms] < 0]:
            del unpacked[self.names[i]]
        for i in self._optional[np.isnan(values[self._optional])] if len(self._optional) else ():
            del unpacked[self.names[i]]
        if values[self._counts].all():
            return unpacked  # the usual case, four times as fast
        known, unpacked = unpacked, {}
        for name, value, count in zip(self.names, values.tolist(), self._count_of):
            if count is not None and values[count] == 0:
                self._report_silent(*self.names[count].split("/count/", 1))
            elif name in known:
                unpacked[name] = value
        return unpacked

    def histograms(self, stats: Any) -> dict[str, np.ndarray]:
        """The histograms in one vector, with one device-to-host copy.

        Args:
            stats: As for `unpack`, which leaves the histograms out.

        Returns:
            `{name: counts}` in the schema's order; counts are int64 [`bins.BINS`], as `instrument.bins` lays them out. What
            was not counted in this step, because its `every` says so or its cell was not called, is absent.

        Raises:
            ValueError: `stats` does not have K elements.

        Examples:
            >>> step = InstrumentedStep(network, optimizer, histograms=[Histogram("weight", "0.weight")])
            >>> loss, stats = step(x, y)
            >>> int(step.schema.histograms(stats)["histogram/weight/0.weight"].sum()) == net[0].weight.size
            True
        """
        values = self._vector(stats)[len(self.metrics):].reshape(-1, CARRIED)
        return {name: from_carried(each) for name, each in zip(self.histogram_names, values)
                if np.isfinite(each).all() and each.any()}

    def first_nonfinite(self, stats: Any) -> FirstNonfinite | None:
        """Which weight, activation or gradient was not finite first, in the order in which the step computed them.

        Args:
            stats: The step's second output, or what `unpack` made of it.

        Returns:
            None where everything that was measured is finite. An order of execution is known only to the schema of an
            `InstrumentedStep`; another one takes its metrics in the vector's order.
        """
        values = stats if isinstance(stats, Mapping) else self.unpack(stats)
        order_of = self.order() if self.order is not None else None
        if order_of is not None:
            order = order_of()
        elif self._kept_order is not None:
            order = self._kept_order
        else:
            order = [*((kind, name[len(kind) + 6:]) for kind in ("weight", "grad") for name in self.names
                       if name.startswith(f"{kind}/norm/")), ("weight", ""), ("loss", ""), ("grad", "")]
        return first_nonfinite(values, order)

    def _vector(self, stats: Any) -> np.ndarray:
        values = np.asarray(stats.asnumpy() if hasattr(stats, "asnumpy") else stats, dtype=np.float64)
        if values.shape != (len(self),):
            raise ValueError(f"stats must be a vector of shape ({len(self)},), one element a metric, "
                             f"but its shape is {values.shape}. Pass the second output of the step that owns this schema.")
        return values

    def _report_silent(self, group: str, cell: str) -> None:
        if f"{group}/{cell}" in self._reported:
            return
        self._reported.add(f"{group}/{cell}")
        what, remedy = f"cell {cell!r}", "Leave the cell out by the argument `activations`."
        if group == "attention":
            what, remedy = f"the attention of cell {cell!r}", "Leave attention out by attention=False."
        warnings.warn(f"{what} was not measured: either this step's forward did not call it, or no gradient of "
                      "the loss flows through its output. Its statistics are left out where that is so. "
                      f"{remedy}", stacklevel=3)
