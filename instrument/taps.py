"""Taps: activation statistics carried out of a compiled graph as the gradient of a constant.

Owns placing taps on cells, taking them off, and turning what they carry into metrics. The mathematics is in
`stats.py`, the choice of cells in `select.py`.

A tap is an identity with a backward of its own. It takes the activation and a constant parameter, the slot; its backward
passes the activation's gradient on untouched and returns the statistics as the gradient of the slot. Nothing is written,
so there is nothing for the compiler to order, repeat or drop. What a tap carries must merge by addition, because the
gradients of several calls are added: call counts, element counts, sums. Divisions are done afterwards.

A cell is tapped by giving the object a subclass of its own class. The subclass holds the tap as a class attribute, so the
object's own state, its parameters, its checkpoint keys and its copies are what they were. Statistics are computed from the
backward's inputs, never in the forward: PyNative mode of 2.0.0 hands a backward the first step's output for ever.
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from instrument import _compat, stats
from instrument.losses import dtypes_of
from instrument.schema import Merge, Metric
from instrument.select import NamedCells

DEFAULT_STATS = ("count", "mean", "rms", "absmax", "nonfinite")
ALL_STATS = (*DEFAULT_STATS, "zero_fraction", "nonfinite_elements")

# statistic: (unit, how calls and ranks merge, numerator column, denominator column, whether the root is taken)
_RECIPES: dict[str, tuple[str, Merge, str, str, bool]] = {
    "count": ("calls", "sum", "calls", "one", False),
    "mean": ("1", "mean", "sum", "elements", False),
    "rms": ("1", "rms", "square_sum", "elements", True),
    "absmax": ("1", "mean_of_max", "absmax", "calls", False),
    "nonfinite": ("fraction", "mean", "nonfinite_calls", "calls", False),
    "zero_fraction": ("fraction", "mean", "zeros", "elements", False),
    "nonfinite_elements": ("elements", "sum", "nonfinite", "one", False),
}


class Gate:
    """Whether the compiler, or PyNative mode, now goes through the step: the only time when taps are there.

    Evaluation, `ms.export` and copies of the same network compile it with the gate closed and get the network's own
    graph, without a trace of the slots.
    """

    def __init__(self) -> None:
        self.is_open = False


class _GatedTap:
    """Class attribute of a tapped cell: the tap while the gate is open, else an identity."""

    def __init__(self, tap: nn.Cell, gate: Gate):
        self.tap = tap
        self.gate = gate

    def __get__(self, cell: Any, owner: type | None = None) -> nn.Cell:
        return self.tap if self.gate.is_open else _IDENTITY


_IDENTITY = nn.Identity()


class _Carrier(nn.Cell):
    """The identity whose backward returns the statistics; `columns` says which, in the slot's order."""

    def __init__(self, columns: Sequence[str], gradient_columns: Sequence[str]):
        super().__init__(auto_prefix=False)
        self.columns = tuple(columns)
        self.gradient_columns = tuple(gradient_columns)
        self.stack = ops.Stack()

    def construct(self, x, slot):
        return x

    def bprop(self, x, slot, out, dout):
        carried = stats.columns_of(x, self.columns)
        if self.gradient_columns:
            carried = carried + stats.columns_of(dout, self.gradient_columns)
        return dout, self.stack(carried)


class Tap(nn.Cell):
    """Measures the output of one cell.

    Args:
        name: The cell's name in `cells_and_names()`.
        statistics: Names out of `ALL_STATS`; the call count is always among them.
        gradients: Whether the same is measured of the gradient of the loss by this output.
    """

    def __init__(self, name: str, statistics: Sequence[str], gradients: bool):
        super().__init__(auto_prefix=False)
        self.name = name
        self.statistics = tuple(stat for stat in ALL_STATS if stat == "count" or stat in statistics)
        recipes = [_RECIPES[stat] for stat in self.statistics]
        needed = {column for recipe in recipes for column in recipe[2:4]} - {"one"} | {"calls"}
        self.columns = tuple(column for column in stats.COLUMNS if column in needed)
        self.gradient_columns = self.columns[1:] if gradients else ()
        self.slot = Parameter(Tensor(np.zeros(len(self.columns) + len(self.gradient_columns)), ms.float32),
                              name=f"instrument.tap.{name}")
        self.carrier = _Carrier(self.columns, self.gradient_columns)

    def construct(self, output):
        if isinstance(output, dict):
            keys = list(output.keys())
            chosen = first_float(self.name, dtypes_of(list(output.values())))
            output[keys[chosen]] = self.carrier(output[keys[chosen]], self.slot)
            return output
        if isinstance(output, (tuple, list)):
            chosen = first_float(self.name, dtypes_of(output))
            measured = self.carrier(output[chosen], self.slot)
            return output[:chosen] + (measured,) + output[chosen + 1:]
        first_float(self.name, dtypes_of((output,)))
        return self.carrier(output, self.slot)


@_compat.constexpr
def first_float(name: str, dtypes: tuple[Any, ...]) -> int:
    """Position of the first float tensor in the output of the cell `name`; TypeError where there is none."""
    for position, dtype in enumerate(dtypes):
        if dtype in _compat.FLOAT_TYPES:
            return position
    raise TypeError(f"cell {name!r} cannot be measured: its output has no float tensor, only {list(dtypes)}. "
                    "Leave it out by the argument `activations`; the network is unchanged, and `remove_taps()` gives it "
                    "its own classes back.")


def tapped_construct(self, *args, **kwargs):
    """The construct of a tapped cell."""
    return self._instrument_tap(self._instrument_construct(*args, **kwargs))


class Taps:
    """The taps of one step: placed when made, taken off by `remove`.

    Args:
        chosen: Named cells to tap, from `select_cells`.
        statistics: For each cell the statistics to measure.
        gradients: Whether activation gradients are measured too.
        owner: The step, which has a method `owns(cell)`; cells whose owner is gone are free for another one.

    Raises:
        ValueError: A cell is tapped by another step that is still in use.
    """

    def __init__(self, chosen: NamedCells, statistics: Sequence[Sequence[str]], gradients: bool, owner: Any):
        self.gate = Gate()
        self.cells = [cell for _, cell in chosen]
        for name, cell in chosen:
            _free(name, cell)
        self.taps = [Tap(name, wanted, gradients) for (name, _), wanted in zip(chosen, statistics)]
        for cell, tap in zip(self.cells, self.taps):
            own = type(cell)
            cell.__class__ = type(own.__name__, (own,), {
                "__module__": own.__module__, "__doc__": own.__doc__, "__qualname__": own.__qualname__,
                "construct": tapped_construct, "_instrument_construct": own.construct,
                "_instrument_tap": _GatedTap(tap, self.gate), "_instrument_owner": weakref.ref(owner)})

    def remove(self) -> None:
        """Give every tapped cell its own class back."""
        for cell in self.cells:
            _strip(cell)
        self.cells = []

    def metrics(self) -> list[Metric]:
        """What `ActivationStats` returns, in its order."""
        metrics = []
        for tap in self.taps:
            for group, columns in (("activation", tap.columns), ("activation_grad", tap.gradient_columns)):
                for stat in tap.statistics if columns else ():
                    if (group, stat) != ("activation_grad", "count"):
                        unit, merge = _RECIPES[stat][:2]
                        metrics.append(Metric(f"{group}/{stat}/{tap.name}", unit, "local", merge))
        return metrics


class ActivationStats(nn.Cell):
    """Divides what the taps carried into metrics, all of them at once: the number of operators does not grow with taps.

    Args:
        taps: The placed taps.
        scaled: Whether activation gradients carry a loss scale.
    """

    def __init__(self, taps: Taps, scaled: bool):
        super().__init__(auto_prefix=False)
        rows = []  # for each metric: numerator, denominator and witness positions, root or not, gradient or not
        start = 0
        one = sum(tap.slot.size for tap in taps.taps)  # a constant 1 stands behind all slots
        for tap in taps.taps:
            here = {"one": one, **{column: start + i for i, column in enumerate(tap.columns)}}
            there = {**here, **{column: start + len(tap.columns) + i for i, column in enumerate(tap.gradient_columns)}}
            for positions, is_gradient in ((here, False), (there, True)) if tap.gradient_columns else ((here, False),):
                for stat in tap.statistics:
                    if not (is_gradient and stat == "count"):
                        _, _, numerator, denominator, takes_root = _RECIPES[stat]
                        seen = next((positions[c] for c in ("absmax", "sum") if c in positions), positions["elements"])
                        rows.append((positions[numerator], positions[denominator], seen, takes_root,
                                     is_gradient and stat in ("mean", "rms", "absmax")))
            start += tap.slot.size
        numerators, denominators, seen, takes_root, is_gradient = np.array(rows, np.int32).T
        self.numerators, self.denominators, self.seen = Tensor(numerators), Tensor(denominators), Tensor(seen)
        self.takes_root, self.is_scaled = Tensor(takes_root == 1), Tensor(is_gradient == 1)
        self.scaled = scaled and bool(is_gradient.any())
        self.one = Tensor([1.0], ms.float32)
        self.concat = ops.Concat()
        self.gather = ops.Gather()
        self.select = ops.Select()

    def construct(self, carried, scale):
        """Args: carried: the slots' gradients, a tuple; scale: loss scale, float32 scalar. Returns: float32 vector."""
        raw = self.concat(carried + (self.one,))
        values = self.gather(raw, self.numerators, 0) / self.gather(raw, self.denominators, 0)
        roots = stats.root(values, self.one, self.gather(raw, self.seen, 0))
        values = self.select(self.takes_root, roots, values)
        if self.scaled:
            values = self.select(self.is_scaled, values / scale, values)
        return values


def _strip(cell: nn.Cell) -> None:
    if "_instrument_tap" in vars(type(cell)):
        cell.__class__ = type(cell).__mro__[1]


def _free(name: str, cell: nn.Cell) -> None:
    """Take a dead step's tap, or one that came with a copy, off a cell; ValueError if a live step owns it."""
    if "_instrument_tap" not in vars(type(cell)):
        return
    owner = vars(type(cell))["_instrument_owner"]
    if owner() is not None and not owner().owns(cell):
        _strip(cell)  # a deepcopy of a tapped network
        return
    gc.collect()  # Cells refer to each other, so a step that was let go of may still wait for the collector
    if owner() is not None:
        raise ValueError(f"cell {name!r} is already measured by another InstrumentedStep. Use one step a network, or call "
                         "remove_taps() on the other step first.")
    _strip(cell)
