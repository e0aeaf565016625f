"""The first thing that was not finite: which weight, activation or gradient, in the order in which a step computes them.

Owns the order of execution and the search through it. Reads numbers that have been measured, and measures nothing.

A step reads weights, computes activations and the loss, and then gradients from the last cell to the first. Whatever is
computed of a NaN is NaN, so the first one in this order is where it came from, or stands right behind it.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # what reads runs needs no MindSpore
    from mindspore import Parameter, nn

Kind = Literal["weight", "activation", "loss", "activation_grad", "grad"]
Place = tuple[Kind, str]


@dataclass(frozen=True)
class FirstNonfinite:
    """What was not finite first.

    Attributes:
        kind: `weight`, `activation`, `loss`, `activation_grad` (gradient of the loss by a cell's output) or `grad` (of a
            parameter).
        name: The parameter or cell; empty for the loss, and where only totals were measured.
        clean_kind: Kind of the nearest one before it that was finite; None where there is none, as when the input is bad.
        clean_name: Its name; None likewise.
    """

    kind: Kind
    name: str
    clean_kind: Kind | None = None
    clean_name: str | None = None

    def __str__(self) -> str:
        text = f"{self.kind} {self.name}".rstrip()
        if self.clean_kind is None:
            return f"{text} (nothing measured before it was finite)"
        if self.clean_kind == "weight" and not self.clean_name:  # their total
            return f"{text} (after the weights, which were all finite)"
        text = f"{text} (after {self.clean_kind} {self.clean_name}".rstrip() + ", which was finite"
        # Of parameters all are measured; of cells, those that were chosen.
        return text + ("; what lies between them was not measured)" if self.kind in ("activation", "activation_grad") else ")")


def first_nonfinite(values: Mapping[str, float], order: Iterable[Place]) -> FirstNonfinite | None:
    """Search.

    Args:
        values: `{metric name: value}` of one step.
        order: What may be bad, in the order of execution.

    Returns:
        The first one that is not finite; None where all that was measured is finite.
    """
    order = list(order)
    # A cell that is called several times has one number for all calls, and so no place of its own: others come first.
    several = {name for kind, name in order if kind == "activation" and values.get(f"activation/count/{name}", 1) > 1}
    found = _search(values, [place for place in order if place[1] not in several or place[0] in ("weight", "grad")])
    return found or _search(values, order)


def _search(values: Mapping[str, float], order: Iterable[Place]) -> FirstNonfinite | None:
    clean: Place | None = None
    for kind, name in order:
        bad = _is_bad(values, kind, name)
        if bad:
            return FirstNonfinite(kind, name, *(clean or (None, None)))
        if bad is not None:
            clean = kind, name
    return None


def _is_bad(values: Mapping[str, float], kind: Kind, name: str) -> bool | None:
    """Whether it is not finite; None where that was not measured."""
    if kind == "loss":
        return _not_finite(values.get("loss"))
    if kind in ("weight", "grad"):
        # A norm of one parameter is NaN too where its squares are too small for a float32; the total then is finite.
        total = _not_finite(values.get(f"{kind}/norm"))
        if not name or not total:
            return total
        elements = values.get(f"{kind}/nonfinite/{name}")
        if elements is not None:  # `counts=True`
            return elements > 0
        return _not_finite(values.get(f"{kind}/norm/{name}"))
    flag = values.get(f"{kind}/nonfinite/{name}")
    if flag is not None:
        return flag > 0
    seen = [_not_finite(values.get(f"{kind}/{stat}/{name}")) for stat in ("mean", "rms", "absmax", "nonfinite_elements")]
    return None if all(one is None for one in seen) else any(seen)


def _not_finite(value: float | None) -> bool | None:
    return None if value is None else not math.isfinite(value)


def execution_order(network: nn.Cell, cells: Sequence[tuple[str, nn.Cell]], weights: Sequence[Parameter]) -> list[Place]:
    """Weights, measured cells, the loss and gradients in the order in which a step of `network` computes them.

    Args:
        network: The network that returns the loss.
        cells: The measured cells in the order of the forward.
        weights: Parameters whose norms are measured.

    Returns:
        (kind, name) of each; a cell's parameters stand with it, those of no measured cell with the ones defined before.
    """
    place: dict[int, int] = {}
    positions = {id(cell): i for i, (_, cell) in enumerate(cells)}
    for _, cell in network.cells_and_names():  # outer cells come first, so that the innermost measured one counts
        if id(cell) in positions:
            place.update((id(parameter), positions[id(cell)]) for parameter in cell.get_parameters())
    known = [parameter for parameter in network.get_parameters() if any(parameter is weight for weight in weights)]
    at, last = [], -1
    for parameter in known:
        last = place.get(id(parameter), last)
        at.append(last)
    forward = sorted(range(len(known)), key=lambda i: at[i])
    order: list[Place] = [("weight", known[i].name) for i in forward] + [("weight", "")]
    order += [("activation", name) for name, _ in cells] + [("loss", "")]
    for position in range(len(cells) - 1, -2, -1):
        if position >= 0:
            order.append(("activation_grad", cells[position][0]))
        order += [("grad", known[i].name) for i in reversed(forward) if at[i] == position]
    return order + [("grad", "")]
