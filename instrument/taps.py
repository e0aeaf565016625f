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

import functools
import gc
import itertools
import types
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from instrument import _compat, stats
from instrument.buffers import own_name
from instrument.histograms import Counter
from instrument.joining import Extremes
from instrument.losses import dtypes_of
from instrument.schema import Merge, Metric, Scope
from instrument.select import NamedCells

DEFAULT_STATS = ("count", "mean", "rms", "absmax", "nonfinite")
ALL_STATS = (*DEFAULT_STATS, "zero_fraction", "nonfinite_elements")



class Recipe(NamedTuple):
    """How one statistic comes of the carried columns: numerator / denominator, then what `kind` says of it.

    `root` is its square root; `maximum` is NaN where `witness` is, because a maximum may pass over NaN; `flag` is
    whether it is not finite. `witness` is another column that `kind` looks at.
    """

    unit: str
    merge: Merge
    numerator: str
    denominator: str = "one"
    kind: str = "ratio"
    witness: str = "one"
    is_linear: bool = False  # in the tensor: a scaled tensor has a scaled statistic


_RECIPES = {
    "count": Recipe("calls", "sum", "calls"),
    "mean": Recipe("1", "mean", "sum", "elements", is_linear=True),
    "rms": Recipe("1", "rms", "square_sum", "elements", "root", "absmax", is_linear=True),
    "absmax": Recipe("1", "mean_of_max", "absmax", "calls", "maximum", "square_sum", is_linear=True),
    "nonfinite": Recipe("flag", "max", "sum", kind="flag"),
    "zero_fraction": Recipe("fraction", "mean", "zeros", "elements"),
    "nonfinite_elements": Recipe("elements", "sum", "nonfinite"),
}


class Gate:
    """Whether the compiler, or PyNative mode, now goes through the step: the only time when taps are there.

    Evaluation, `ms.export` and copies of the same network compile it with the gate closed and get the network's own
    graph, without a trace of the slots.
    """

    def __init__(self) -> None:
        self.is_open = False


class GatedTap:
    """Class attribute of a tapped cell: the tap while the gate is open, else an identity."""

    def __init__(self, tap: nn.Cell, gate: Gate, closed: nn.Cell | None = None):
        self.tap = tap
        self.gate = gate
        self.closed = closed or _IDENTITY

    def __get__(self, cell: Any, owner: type | None = None) -> nn.Cell:
        return self.tap if self.gate.is_open else self.closed


_IDENTITY = nn.Identity()


class PlainCarrier(nn.Cell):
    """The identity whose backward returns the statistics; `columns` says which, in the slot's order."""

    measure: type = stats.Columns

    def __init__(self, columns: tuple[str, ...], gradient_columns: tuple[str, ...]):
        super().__init__(auto_prefix=False)
        self.columns = self.measure(columns)
        self.has_gradient = bool(gradient_columns)
        self.gradient_columns = self.measure(gradient_columns)
        self.concat = ops.Concat()

    def construct(self, x, slot, flag):
        return x

    def bprop(self, x, slot, flag, out, dout):
        return dout, self.statistics(x, dout), flag  # nobody asks for the gradient of the flag

    def statistics(self, x, dout):
        carried = self.columns(x)
        if self.has_gradient:
            carried = self.concat((carried, self.gradient_columns(dout)))
        return carried


class GatedCarrier(PlainCarrier):
    """The same, which carries zeros unless `flag` is set: for a graph that measures some steps and not others."""

    def __init__(self, columns: tuple[str, ...], gradient_columns: tuple[str, ...]):
        super().__init__(columns, gradient_columns)
        self.threshold = Tensor(0.5, ms.float32)
        self.nothing = Tensor(np.zeros(len(columns) + len(gradient_columns)), ms.float32)
        self.greater = ops.Greater()

    def bprop(self, x, slot, flag, out, dout):
        carried = self.nothing
        if self.greater(flag, self.threshold):
            carried = self.statistics(x, dout)
        return dout, carried, flag


# One carrier serves all taps that carry the same: the compiler then goes through it once for each shape.
_carrier = functools.lru_cache(maxsize=None)(PlainCarrier)
_gated_carrier = functools.lru_cache(maxsize=None)(GatedCarrier)

_ALWAYS = Tensor(1.0, ms.float32)

_identities, _turns = itertools.count(), itertools.count()
_by_identity: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()


class Tap(nn.Cell):
    """Measures the output of one cell.

    Args:
        name: The cell's name in `cells_and_names()`.
        statistics: Names out of `ALL_STATS`; the call count is always among them.
        gradients: Whether the same is measured of the gradient of the loss by this output.
        counter: Counts the output's magnitudes in a slot of its own, or None.
    """

    group = "activation"  # of the metrics' names
    recipes = _RECIPES

    def __init__(self, name: str, statistics: Sequence[str], gradients: bool, counter: Counter | None = None):
        super().__init__(auto_prefix=False)
        self.cell_name = name
        self.turn: int | None = None  # when the forward comes to it, known once the network has been compiled or called
        self.identity = next(_identities)
        _by_identity[self.identity] = self
        self.statistics, self.columns = self.choose(statistics)
        self.gradient_columns = self.columns[1:] if gradients else ()
        self.slot = Parameter(Tensor(np.zeros(len(self.columns) + len(self.gradient_columns)), ms.float32),
                              name=own_name(f"tap.{self.group}.{name}"))
        self.set_flag(None)
        self.counter = counter or _IDENTITY

    def set_flag(self, flag: Parameter | None) -> None:
        """Measure only where `flag` (float32 []) is 1 when the step runs; None: always."""
        self.carrier = self.make_carrier(flag is not None)
        object.__setattr__(self, "flag", _ALWAYS if flag is None else flag)

    def choose(self, statistics: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The statistics in their order, and the columns that they need."""
        chosen = tuple(stat for stat in ALL_STATS if stat == "count" or stat in statistics)
        recipes = [_RECIPES[stat] for stat in chosen]
        needed = {column for recipe in recipes for column in (recipe.numerator, recipe.denominator, recipe.witness)}
        return chosen, tuple(column for column in stats.COLUMNS if column in needed)

    def make_carrier(self, is_gated: bool) -> nn.Cell:
        """The identity that carries the columns; with `is_gated`, where its flag is set."""
        return (_gated_carrier if is_gated else _carrier)(self.columns, self.gradient_columns)

    def attributes(self, own: Any, gate: Gate) -> dict[str, Any]:
        """The class attributes that make a subclass of `own` a tapped one."""
        return {"construct": construct, "_instrument_construct": own.construct, "_instrument_tap": GatedTap(self, gate)}

    def construct(self, output):
        if isinstance(output, Tensor):
            first_float(self.cell_name, self.identity, (output.dtype,))
            return self.counter(self.carrier(output, self.slot, self.flag))
        if isinstance(output, dict):
            keys = list(output.keys())
            chosen = first_float(self.cell_name, self.identity, dtypes_of(list(output.values())))
            output[keys[chosen]] = self.counter(self.carrier(output[keys[chosen]], self.slot, self.flag))
            return output
        chosen = first_float(self.cell_name, self.identity, dtypes_of(output))
        measured = self.counter(self.carrier(output[chosen], self.slot, self.flag))
        if isinstance(output, list):
            return output[:chosen] + [measured] + output[chosen + 1:]
        return output[:chosen] + (measured,) + output[chosen + 1:]


@_compat.constexpr
def first_float(name: str, identity: int, dtypes: tuple[Any, ...]) -> int:
    """Position of the first float tensor in the output of the cell `name`; TypeError where there is none.

    Tells the tap of this identity that it is its turn: compiling, or running in PyNative mode, goes through the cells in
    the order of the forward.
    """
    tap = _by_identity[identity]
    if tap.turn is None:
        tap.turn = next(_turns)
    for position, dtype in enumerate(dtypes):
        if dtype in _compat.FLOAT_TYPES:
            return position
    found = ", ".join("no tensor" if dtype is None else str(dtype) for dtype in dtypes)
    raise TypeError(f"cell {name!r} cannot be measured: its output has no float tensor, only [{found}], and what is inside a "
                    "tuple or dict in it is not looked into. Choose a cell inside it, or leave it out, by the argument "
                    "`activations`; the network is unchanged, and `remove_taps()` gives it its own classes back.")


def construct(self, *args, **kwargs):  # the name matters: the executor parses the method of that name
    """The construct of a tapped cell."""
    return self._instrument_tap(self._instrument_construct(*args, **kwargs))


def tapped_class(cell: nn.Cell, tap: Tap, gate: Gate, owner: Any) -> type:
    """A subclass of the class of `cell` whose construct measures what the original one returns."""
    own = type(cell)
    # The compiler of 2.0.0 merges cells whose classes have one module and qualified name: this one is of one cell.
    about = {"__module__": own.__module__, "__doc__": own.__doc__, "__qualname__": f"{own.__qualname__}@{tap.cell_name}"}
    # The compiler takes super() for that of the object's own class, so that a method of `own` would find itself there.
    # A class between ours and `own` holds what the methods of `own` override, and ours the methods of `own`.
    above = super(own, cell)  # type: ignore[arg-type, misc]
    methods = {name: value for name, value in vars(own).items()
               if isinstance(value, types.FunctionType) and not name.startswith("__") and hasattr(above, name)}
    overridden = {name: getattr(above, name).__func__ for name in methods}
    between = type(own.__name__, (own,), {**about, **overridden})
    return type(own.__name__, (between,), {
        **about, **methods, **tap.attributes(own, gate), "_instrument_class": own, "_instrument_owner": weakref.ref(owner)})


class Taps:
    """The taps of one step: placed when made, taken off by `remove`.

    Args:
        chosen: Named cells to tap, from `select_cells`.
        statistics: For each cell the statistics to measure.
        gradients: Whether activation gradients are measured too.
        owner: The step, which has a method `owns(cell)`; cells whose owner is gone are free for another one.
        others: Names, cells and taps beside. A cell can have one of these and be chosen as well.
        counters: For names of cells, what counts magnitudes there.
        network: What the cells are in.
    """

    def __init__(self, chosen: NamedCells, statistics: Sequence[Sequence[str]], gradients: bool, owner: Any,
                 others: Sequence[tuple[str, nn.Cell, Tap]] = (), counters: Mapping[str, Counter] = MappingProxyType({}), *,
                 network: nn.Cell | None = None):
        self.gate = Gate()
        self.cells = [cell for _, cell in chosen] + [cell for _, cell, _ in others]
        self.taps = [Tap(name, wanted, gradients, counters.get(name)) for (name, _), wanted in zip(chosen, statistics)]
        self.taps += [tap for *_, tap in others]
        self.counters = {name: counters[name] for name, _ in chosen if name in counters}
        sizes = [tap.slot.size for tap in self.taps]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]  # where each slot starts behind the ones before it
        self.length = sum(sizes)
        for cell, tap in zip(self.cells, self.taps):
            cell.__class__ = tapped_class(cell, tap, self.gate, owner)
        self.kept_apart = [] if network is None else _compat.keep_apart(network, self.cells)

    def remove(self) -> None:
        """Give every tapped cell its own class back."""
        for cell in self.cells:
            _strip(cell)
        for cell, arguments in self.kept_apart:
            cell.cell_init_args = arguments
        self.cells, self.kept_apart = [], []

    def in_order(self) -> list[tuple[str, nn.Cell]]:
        """The measured cells with their names, in the order of the forward; first of all those it has come to."""
        turns = [(tap.turn is None, tap.turn, i) for i, tap in enumerate(self.taps)
                 if tap.group == "activation"]
        return [(self.taps[i].cell_name, self.cells[i]) for *_, i in sorted(turns)]

    def metrics(self, scope: Scope = "local") -> list[Metric]:
        """What `ActivationStats` returns, in its order; `scope` is `global` where the slots of all ranks are joined."""
        metrics = []
        for tap in self.taps:
            for *_, recipe, is_gradient in _rows(tap, 0, 0):
                stat = next(name for name, known in tap.recipes.items() if known is recipe)
                group = "activation_grad" if is_gradient else tap.group
                merge = recipe.merge if scope == "local" else "identical"
                metrics.append(Metric(f"{group}/{stat}/{tap.cell_name}", recipe.unit, scope, merge))
        return metrics

    def extremes(self) -> Extremes:
        """What of the slots does not merge over ranks by addition."""
        rows = [row for start, tap in zip(self.starts, self.taps) for row in _rows(tap, start, self.length)]
        maxima = [row for row in rows if row[3].merge == "mean_of_max"]
        return Extremes([row[0] for row in maxima], [row[1] for row in maxima],
                        [row[0] for row in rows if row[3].unit == "calls"], self.length)


class ActivationStats(nn.Cell):
    """Divides what the taps carried into metrics, all of them at once: the number of operators does not grow with taps.

    Args:
        taps: The placed taps.
        scaled: Whether activation gradients carry a loss scale.
        joined: Whether the slots are those of all ranks, as `Joining` returns them.
        ranks: The loss is the mean over so many losses that were differentiated each by itself.
    """

    def __init__(self, taps: Taps, scaled: bool, joined: bool = False, ranks: int = 1):
        super().__init__(auto_prefix=False)
        rows = [row for start, tap in zip(taps.starts, taps.taps) for row in _rows(tap, start, taps.length)]
        if joined:  # their maxima have been divided
            rows = [(row[0], taps.length, *row[2:]) if row[3].merge == "mean_of_max" else row for row in rows]
        numerators, denominators, witnesses = np.array([row[:3] for row in rows], np.int32).T
        kinds = np.array([row[3].kind for row in rows])
        is_gradient = np.array([row[4] for row in rows])
        self.numerators, self.denominators, self.witnesses = Tensor(numerators), Tensor(denominators), Tensor(witnesses)
        self.has_roots, self.roots = bool((kinds == "root").any()), Tensor(kinds == "root")
        self.has_maxima, self.maxima = bool((kinds == "maximum").any()), Tensor(kinds == "maximum")
        self.has_flags, self.flags = bool((kinds == "flag").any()), Tensor(kinds == "flag")
        scaled_ones = is_gradient & np.array([row[3].is_linear for row in rows])
        self.scaled, self.scaled_ones = (scaled or ranks > 1) and bool(scaled_ones.any()), Tensor(scaled_ones)
        self.has_ranks, self.ranks = ranks > 1, Tensor(float(ranks), ms.float32)
        self.one = Tensor([1.0], ms.float32)
        self.concat = ops.Concat()
        self.gather = ops.Gather()
        self.select = ops.Select()

    def construct(self, carried, scale):
        """Divide.

        Args:
            carried: The slots' gradients, a tuple of float32 vectors.
            scale: Loss scale, float32 scalar.

        Returns:
            float32 [K], laid out by `Taps.metrics`.
        """
        raw = self.concat(carried + (self.one,))
        values = self.gather(raw, self.numerators, 0) / self.gather(raw, self.denominators, 0)
        witnesses = self.gather(raw, self.witnesses, 0)
        ratios = values
        if self.has_roots:
            values = self.select(self.roots, stats.root(ratios, self.one, witnesses), values)
        if self.has_maxima:
            values = self.select(self.maxima, stats.or_nan(ratios, witnesses), values)
        if self.has_flags:
            values = self.select(self.flags, stats.is_nonfinite(ratios), values)
        if self.scaled:
            if self.has_ranks:
                scale = scale * self.ranks
            values = self.select(self.scaled_ones, values / scale, values)
        return values


def _rows(tap: Tap, start: int, one: int) -> list[tuple[int, int, int, Recipe, bool]]:
    """For each metric of a tap: positions of numerator, denominator and witness; the recipe; whether of the gradient."""
    here = {"one": one, **{column: start + i for i, column in enumerate(tap.columns)}}
    there = {**here, **{column: start + len(tap.columns) + i for i, column in enumerate(tap.gradient_columns)}}
    rows = []
    for positions, is_gradient in ((here, False), (there, True)) if tap.gradient_columns else ((here, False),):
        for stat in tap.statistics[1:] if is_gradient else tap.statistics:  # the call count is there once
            recipe = tap.recipes[stat]
            rows.append((positions[recipe.numerator], positions[recipe.denominator], positions[recipe.witness], recipe,
                         is_gradient))
    return rows


def own_class(cell: nn.Cell) -> Any:
    """The class of the cell without taps."""
    own = type(cell)
    while "_instrument_class" in vars(own):
        own = vars(own)["_instrument_class"]
    return own


def _strip(cell: nn.Cell) -> None:
    if own_class(cell) is not type(cell):
        cell.__class__ = own_class(cell)


def owners_of(network: nn.Cell) -> list[Any]:
    """The steps in use that have taps on cells of this network."""
    owners = [vars(type(cell)).get("_instrument_owner", lambda: None)() for _, cell in network.cells_and_names()]
    return [owner for owner in owners if owner is not None]


def release(network: nn.Cell) -> None:
    """Take off taps that came with a copy of a network, or whose step is gone."""
    for _, cell in network.cells_and_names():
        owner = vars(type(cell)).get("_instrument_owner", lambda: None)()
        if owner is None or not owner.owns(cell):
            _strip(cell)


def check_free(chosen: NamedCells) -> None:
    """ValueError where a cell has a tap of a step that is still in use."""
    for name, cell in chosen:
        if "_instrument_class" not in vars(type(cell)):
            continue
        gc.collect()  # Cells refer to each other, so a step that was let go of may still wait for the collector
        if vars(type(cell))["_instrument_owner"]() is not None:
            raise ValueError(f"cell {name!r} is already measured by another InstrumentedStep. Choose other cells by "
                             "`activations`, which may be None, where two steps share a part of their networks, or "
                             "call remove_taps() on the other step first; instrument.remove_taps(network) does so where "
                             "nothing refers to it any more.")
        _strip(cell)
