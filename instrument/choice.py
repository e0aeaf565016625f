"""`Choice`: what is measured of a network, chosen by the options of a step, before anything is placed in it.

Owns how the options for cells, statistics, histograms and attention come together.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mindspore import Parameter, nn

from instrument import _compat
from instrument.attention import attention_taps
from instrument.histograms import Counter, Histogram, choose_cells
from instrument.select import Activations, NamedCells, can_be_exactly_zero, select_cells
from instrument.taps import DEFAULT_STATS, Taps


class Choice(NamedTuple):
    """What is measured of a network.

    Attributes:
        cells: Those whose outputs are measured or counted.
        statistics: Of each of them; empty where it is only counted.
        counted: `{name of a cell: every}`.
        attention: (name, cell, tap) of each cell that shows its attention.
    """

    cells: NamedCells
    statistics: list[tuple[str, ...]]
    counted: dict[str, int]
    attention: list[tuple[str, nn.Cell, Any]]

    @property
    def tapped(self) -> NamedCells:
        """All cells that get a tap."""
        return self.cells + [(name, cell) for name, cell, _ in self.attention]

    def only(self, is_there: Callable[[str], bool]) -> Choice:
        """The same without cells for whose names `is_there` is false."""
        kept = [(cell, statistics) for cell, statistics in zip(self.cells, self.statistics) if is_there(cell[0])]
        return Choice([cell for cell, _ in kept], [statistics for _, statistics in kept],
                      {name: every for name, every in self.counted.items() if is_there(name)},
                      [each for each in self.attention if is_there(each[0])])

    def taps(self, step: nn.Cell, network: nn.Cell, step_count: Parameter, gradients: bool) -> Taps | None:
        """Place the taps, of which `step` is the owner; None where there are none."""
        if not self.tapped:
            return None
        counters = {name: Counter(name, every, step_count) for name, every in self.counted.items()}
        return Taps(self.cells, self.statistics, gradients, step, self.attention, counters, network=network)


def choose(network: nn.Cell, *, activations: Activations, activation_stats: Sequence[str], counts: bool,
           histograms: Sequence[Histogram], attention: bool) -> Choice:
    """Choose by the options of a step, which say what they mean.

    Raises:
        ValueError: An expression or a type matches nothing, or a cell is named that cannot be measured.
        TypeError: `activations` is nothing that chooses cells.
    """
    cells = select_cells(network, activations)
    statistics = [_statistics_of(cell, activation_stats, counts) for _, cell in cells]
    counted = choose_cells(histograms, network)
    only_counted = [(name, cell) for name, (cell, _) in counted.items() if name not in dict(cells)]
    return Choice(cells + only_counted, statistics + [()] * len(only_counted),
                  {name: every for name, (_, every) in counted.items()}, attention_taps(network) if attention else [])


def _statistics_of(cell: nn.Cell, wanted: Sequence[str], counts: bool) -> tuple[str, ...]:
    if counts:
        return (*wanted, "zero_fraction", "nonfinite_elements")
    if tuple(wanted) == DEFAULT_STATS and can_be_exactly_zero(cell):
        return (*wanted, "zero_fraction")
    return tuple(wanted)


def frozen_weights(network: nn.Cell, trained: Sequence[Parameter]) -> list[Parameter]:
    """The network's other weights of float type; running averages of normalisation layers are no weights."""
    averages = {id(parameter) for _, cell in network.cells_and_names() for attribute, parameter in cell._params.items()
                if attribute in ("moving_mean", "moving_variance", "running_mean", "running_var")}
    known = averages | {id(parameter) for parameter in trained}
    return [p for p in network.get_parameters() if id(p) not in known and p.dtype in _compat.FLOAT_TYPES]
