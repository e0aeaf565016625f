"""Which cells are measured: from the argument `activations` to a list of named cells.

Owns the rules of choice. Places nothing and computes nothing.
"""
from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Union

from mindspore import nn
from mindspore.nn.layer import activation as activation_module

from instrument import _compat

Activations = Union[str, Sequence[Union[str, type]], type, Callable[[str, nn.Cell], bool], None]
NamedCells = list[tuple[str, nn.Cell]]

_CONTAINERS = (nn.CellList, nn.SequentialCell)


def select_cells(network: nn.Cell, activations: Activations) -> NamedCells:
    """The cells of `network` that `activations` chooses, in the order and with the names of `cells_and_names()`.

    Args:
        network: The network that returns the loss.
        activations: `"blocks"`, `"leaves"`, regular expressions (one that is found anywhere in a name chooses the cell),
            cell types, a callable `(name, cell) -> bool`, or None for no cell.

    Raises:
        ValueError: An expression or a type matches nothing, or a cell is named that cannot be measured.
        TypeError: `activations` is none of these.
    """
    cells = _compat.named_cells(network)
    if activations is None:
        return []
    if activations == "blocks":
        return measurable(_blocks(network, cells) or _leaves(cells))
    if activations == "leaves":
        return measurable(_leaves(cells))
    chosen = _explicit(cells, activations)
    for name, cell in chosen:
        reason = why_unmeasurable(cell)
        if reason:
            raise ValueError(f"cell {name!r} ({type(cell).__name__}) cannot be measured: {reason}. "
                             "Choose other cells by the argument `activations`.")
    return chosen


def measurable(chosen: NamedCells) -> NamedCells:
    """What of a default choice can be measured, with one warning about what cannot."""
    reasons = {name: why_unmeasurable(cell) for name, cell in chosen}
    left_out = [name for name, reason in reasons.items() if reason]
    if left_out:
        warnings.warn(f"{len(left_out)} of {len(chosen)} cells are not measured, {left_out[0]!r} for example: "
                      f"{reasons[left_out[0]]}.", stacklevel=4)
    return [(name, cell) for name, cell in chosen if reasons[name] is None]


def why_unmeasurable(cell: nn.Cell) -> str | None:
    """The reason why the output of this cell cannot be tapped, or None."""
    if _is_never_called(cell):
        return "a CellList is never called; its members are"
    if _compat.has_custom_bprop(cell):
        return "it gives its own bprop, which would stand for the tap's as well; a cell around it can be measured"
    if _compat.is_recomputed(cell) and not _compat.is_graph_mode():
        return "in PyNative mode the recomputation differentiates its own parameters alone; graph mode measures it"
    return None


def _is_never_called(cell: nn.Cell) -> bool:
    return isinstance(cell, nn.CellList) and type(cell).construct is nn.CellList.construct


def can_be_exactly_zero(cell: nn.Cell) -> bool:
    """Whether the cell is an activation function that sends an interval to exact zero, such as ReLU."""
    names = ("ReLU", "ReLU6", "HSwish", "HSigmoid", "SoftShrink", "HShrink", "Threshold", "Dropout")
    return any(base.__name__ in names for base in type(cell).__mro__)


def _explicit(cells: NamedCells, activations: Activations) -> NamedCells:
    if isinstance(activations, type):
        activations = [activations]
    if isinstance(activations, (list, tuple)):
        rules = [_rule(item, cells) for item in activations]
        return [(name, cell) for name, cell in cells if any(rule(name, cell) for rule in rules)]
    if callable(activations):
        return [(name, cell) for name, cell in cells if activations(name, cell)]
    raise TypeError("`activations` must be 'blocks', 'leaves', a list of regular expressions or cell types, a callable "
                    f"(name, cell) -> bool, or None, but it is {activations!r}. One expression goes into a list.")


def _rule(item: object, cells: NamedCells) -> Callable[[str, nn.Cell], bool]:
    if isinstance(item, str):
        try:
            expression = re.compile(item)
        except re.error as error:
            raise ValueError(f"`activations` has {item!r}, which is not a regular expression: {error}") from None

        found = [cell for name, cell in cells if expression.search(name)]
        # Lists of cells that are never called, as ".*" finds them too, are meant only where nothing else can be.
        meant = {id(cell) for cell in found if not _is_never_called(cell)} or set(map(id, found))

        def rule(name: str, cell: nn.Cell) -> bool:
            return id(cell) in meant
    elif isinstance(item, type) and issubclass(item, nn.Cell):
        def rule(name: str, cell: nn.Cell) -> bool:
            return isinstance(cell, item)
    else:
        raise TypeError(f"`activations` holds {item!r}, but must hold regular expressions (str) and subclasses of nn.Cell.")
    if not any(rule(name, cell) for name, cell in cells):
        near = difflib.get_close_matches(str(item), [name for name, _ in cells], n=5, cutoff=0.1)
        what = f"expression {item!r}" if isinstance(item, str) else f"type {item.__name__}"  # type: ignore[attr-defined]
        raise ValueError(f"`activations`: the {what} matches no cell of the network. Near names: {', '.join(near) or 'none'}. "
                         "All names: [name for name, _ in network.cells_and_names()].")
    return rule


def _owns_parameter(cell: nn.Cell) -> bool:
    return next(iter(cell.get_parameters(expand=True)), None) is not None


def _is_activation_function(cell: nn.Cell) -> bool:
    return any(base.__module__ == activation_module.__name__ for base in type(cell).__mro__)


def _leaves(cells: NamedCells) -> NamedCells:
    return [(name, cell) for name, cell in cells
            if not _compat.children(cell) and (_owns_parameter(cell) or _is_activation_function(cell))]


def _blocks(network: nn.Cell, cells: NamedCells) -> NamedCells:
    blocks = {id(cell) for cell in _repeated(network)}
    if not blocks:
        return []
    inside = {id(below) for _, cell in cells if id(cell) in blocks for _, below in cell.cells_and_names()}
    outside = [(name, cell) for name, cell in _leaves(cells) if id(cell) not in inside and _owns_parameter(cell)]
    position = {id(cell): i for i, (_, cell) in enumerate(cells)}
    last_block = max(position[block] for block in blocks)
    # The head is the last layer after the blocks that maps to the outputs: a norm alone is none.
    heads = [cell for _, cell in outside if position[id(cell)] > last_block and "Norm" not in type(cell).__name__]
    ends = {id(cell) for _, cell in outside if "Embedding" in type(cell).__name__} | {id(cell) for cell in heads[-1:]}
    return [(name, cell) for name, cell in cells if id(cell) in blocks | ends]


def _repeated(cell: nn.Cell) -> Iterator[nn.Cell]:
    """Members of the outermost containers of like cells: transformer blocks, residual blocks."""
    for child in _compat.children(cell):
        members = _compat.children(child) if isinstance(child, _CONTAINERS) else []
        alike = len({type(member) for member in members}) == 1 and not isinstance(members[0], _CONTAINERS)
        composite = alike and bool(_compat.children(members[0]))
        if alike and (composite or len(members) > 1) and _owns_parameter(members[0]):
            yield from members
        else:
            yield from _repeated(child)
