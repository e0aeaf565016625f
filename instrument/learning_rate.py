"""The learning rates that an optimizer used in the step just done, read without changing its state."""
from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn
from mindspore import dtype as mstype

from instrument.record import to_float


def is_scheduled(optimizer: Any) -> bool:
    """Whether the rate follows from how many updates have been made, as by a schedule cell or a table."""
    if hasattr(optimizer, "param_groups"):
        return False
    return bool(getattr(_inner(optimizer), "dynamic_lr", False))


def learning_rates(optimizer: Any, *, update: int | None = None, skipped: bool = False) -> dict[str, float]:
    """The learning rate of an optimizer's last update, or of another one.

    Reads a number, a Parameter, a table of rates by step, a schedule cell, any of these by parameter group, and the
    `param_groups` of `mindspore.experimental.optim` and `mindspore.mint.optim`. `Optimizer.get_lr` is never called: on
    2.0.0 it advances `global_step`. The step is done when this is called, so no copy here waits for the device.

    Args:
        optimizer: The optimizer of the step; one that wraps another, such as `nn.LARS`, has the rate of the inner one.
        update: Which update, from 0; the last one by default, which the optimizer's counter on the device tells.
        skipped: The step left its update out (overflow): read the rate that this update would have had.

    Returns:
        `{"learning_rate": rate}`, or `{"learning_rate/<group>": rate}` where groups have rates of their own. `<group>`
        is the position in the list of groups that made the optimizer. An optimizer that does not keep this list, as a
        class of the user's may, has its different rates numbered in the order of its parameters. Empty where there is
        no rate to read.
    """
    if hasattr(optimizer, "param_groups"):
        return _named({i: to_float(group["lr"]) for i, group in enumerate(optimizer.param_groups)})
    held: Any = getattr(optimizer, "origin_learning_rate", None)  # nn.LARS(use_clip=True): the usual place has a dummy
    optimizer = _inner(optimizer)
    if held is None:
        held = getattr(optimizer, "learning_rate", None)
    groups = _by_group(optimizer, list(held)) if getattr(optimizer, "is_group_lr", False) else {0: held}
    position = None
    if getattr(optimizer, "dynamic_lr", False):
        position = _schedule_position(optimizer, skipped) if update is None else Tensor([update], mstype.int32)
    known: dict[int, float | None] = {}
    for rate in groups.values():
        if id(rate) not in known:  # groups may share one, and evaluating a schedule costs a launch
            known[id(rate)] = to_float(rate if position is None else rate(position))
    return _named({group: known[id(rate)] for group, rate in groups.items()})


def _inner(optimizer: Any) -> Any:
    """The optimizer that has the rates: `nn.LARS` wraps it, unless it keeps them itself."""
    if getattr(optimizer, "origin_learning_rate", None) is None and isinstance(getattr(optimizer, "opt", None), nn.Optimizer):
        return optimizer.opt
    return optimizer


def _schedule_position(optimizer: Any, skipped: bool) -> Tensor:
    """What the optimizer gave its schedule: each release evaluates it at `global_step`, and then adds one to that."""
    updates = int(to_float(optimizer.global_step) or 0)
    return Tensor([updates if skipped else max(updates - 1, 0)], mstype.int32)


def _by_group(optimizer: Any, rates: list[Any]) -> dict[int, Any]:
    """`{group: rate}`, from the optimizer's own list, which has one rate a parameter and does not know the groups."""
    place = {id(parameter): i for i, parameter in enumerate(optimizer.parameters)}
    given = getattr(optimizer, "init_params", {}).get("params")
    groups = {}
    for i, group in enumerate(given if isinstance(given, (list, tuple)) else ()):
        first = next(iter(group.get("params", ())), None)  # none in the entry that gives the order of the parameters
        if id(first) in place:
            groups[i] = rates[place[id(first)]]
    return groups or dict(enumerate({id(rate): rate for rate in rates}.values()))


def _named(rates: dict[int, float | None]) -> dict[str, float]:
    several = len(rates) > 1
    return {f"learning_rate/{group}" if several else "learning_rate": rate
            for group, rate in rates.items() if rate is not None}
