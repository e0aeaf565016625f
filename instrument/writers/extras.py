"""`require`: import a package that is an extra of this one, or say how to get it."""
from __future__ import annotations

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: Name of the module, such as `tensorboardX` or `mindspore.train.summary`.
        extra: Name of the extra in `pyproject.toml` that brings it.

    Returns:
        The module.

    Raises:
        ImportError: It is not installed; the message is the line that installs it. Where it is installed and something
            that it imports is missing, the error is the original one.

    Examples:
        >>> require("json", "none").dumps([1])
        '[1]'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks a package of its own: its message names that one
        raise ImportError(f'{module} is not installed. Install it by: pip install "mindspore-instrument[{extra}]"',
                          name=module) from error
