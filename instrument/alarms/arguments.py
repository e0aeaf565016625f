"""What can be said against the arguments of an alarm. (`instrument.arguments` is the step's, and needs MindSpore.)"""
from __future__ import annotations

import math
from typing import Any

from instrument.kinds import is_number, is_whole


def whole(argument: str, value: Any, *, least: int = 1) -> int:
    """`value` if it is a whole number from `least` on, else ValueError."""
    if not is_whole(value) or value < least:
        raise ValueError(f"`{argument}` must be a whole number from {least}, but it is {value!r}.")
    return int(value)


def number(argument: str, value: Any, *, least: float = 0.0, most: float = math.inf, hint: str = "") -> float:
    """`value` if it is a number above `least` and up to `most`, else ValueError; infinity is refused."""
    if not is_number(value) or not least < float(value) <= most or value == math.inf:
        limit = f"above {least:g}" if most == math.inf else f"above {least:g} and up to {most:g}"
        raise ValueError(f"`{argument}` must be a number {limit}, but it is {value!r}.{hint and ' ' + hint}")
    return float(value)


def warm_up_within(warm_up: Any, window: int, *, least: int = 1) -> int:
    """`warm_up` if it is a whole number from `least` to `window`, else ValueError."""
    checked = whole("warm_up", warm_up, least=least)
    if checked > window:
        raise ValueError(f"`warm_up` must be at most `window`, {window}, but it is {warm_up!r}.")
    return checked
