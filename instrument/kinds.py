"""What kind of value an argument is: the questions that every module asks of its arguments. Knows nothing of MindSpore."""
from __future__ import annotations

import numbers
from typing import Any


def is_number(value: Any) -> bool:
    """Whether this is a real number and no flag."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether this is an integer and no flag."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
