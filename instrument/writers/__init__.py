"""Destinations of records: `Writer` is the interface, and each backend is one module.

All but `JsonlWriter` are imported on first use: what they write with takes long to load. Those whose package is an extra
import it when they write their first record.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrument.writers.base import Writer
from instrument.writers.jsonl import JsonlWriter

if TYPE_CHECKING:
    from instrument.writers.adapt import as_writer
    from instrument.writers.console import ConsoleWriter
    from instrument.writers.csv import CsvWriter
    from instrument.writers.mlflow_tracking import MlflowWriter
    from instrument.writers.prometheus import PrometheusWriter
    from instrument.writers.summary import SummaryRecordWriter
    from instrument.writers.swanlab_runs import SwanLabWriter
    from instrument.writers.tensorboard import TensorBoardWriter
    from instrument.writers.weights_and_biases import WandbWriter

__all__ = ["ConsoleWriter", "CsvWriter", "JsonlWriter", "MlflowWriter", "PrometheusWriter", "SummaryRecordWriter",
           "SwanLabWriter", "TensorBoardWriter", "WandbWriter", "Writer", "as_writer"]

_LAZY = {
    "ConsoleWriter": "console",
    "CsvWriter": "csv",
    "MlflowWriter": "mlflow_tracking",
    "PrometheusWriter": "prometheus",
    "SummaryRecordWriter": "summary",
    "SwanLabWriter": "swanlab_runs",
    "TensorBoardWriter": "tensorboard",
    "WandbWriter": "weights_and_biases",
    "as_writer": "adapt",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
