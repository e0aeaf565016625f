"""Names of the Parameters that a step keeps for itself.

A compiled graph refuses two Parameters of one name, and several steps can lie in one graph: those of a generator and a
discriminator, in a cell that calls both.
"""
from __future__ import annotations

import itertools

_numbers = itertools.count(1)


def own_name(name: str) -> str:
    """A name that no other Parameter of this process has. It is in no checkpoint."""
    return f"instrument.{name}.{next(_numbers)}"
