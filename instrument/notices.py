"""`tell`: what the product has to say to the user while training runs, as a warning that cannot stop it."""
from __future__ import annotations

import sys
import warnings


def tell(message: str, *, stacklevel: int = 2) -> None:
    """Warn; where warnings are errors, print to standard error instead, since training must go on.

    Args:
        message: One sentence or more, for the user.
        stacklevel: As for `warnings.warn`, seen from the caller.
    """
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except Warning:
        print(f"UserWarning: {message}", file=sys.stderr, flush=True)
