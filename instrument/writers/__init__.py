"""Destinations of records: `Writer` is the interface, and each backend is one module.

`ConsoleWriter` and `TensorBoardWriter` are imported on first use: rich and tensorboardX take long to load.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrument.writers.base import Writer
from instrument.writers.jsonl import JsonlWriter

if TYPE_CHECKING:
    from instrument.writers.console import ConsoleWriter
    from instrument.writers.tensorboard import TensorBoardWriter

__all__ = ["ConsoleWriter", "JsonlWriter", "TensorBoardWriter", "Writer"]

_LAZY = {"ConsoleWriter": "console", "TensorBoardWriter": "tensorboard"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
