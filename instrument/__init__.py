"""See inside MindSpore training while it runs.

    from instrument import InstrumentedStep, TrainingMonitor

    step = InstrumentedStep(net, opt)                  # in place of nn.TrainOneStepCell(net, opt)
    loss, stats = step(x, y)                           # stats: one float32 vector, computed in the graph
    step.schema.unpack(stats)                          # {"step": 1.0, "loss": 2.3, "grad/norm": 0.8, ...}

    Model(step).train(10, dataset, callbacks=[TrainingMonitor("runs/first")])      # or: record every step
    instrument.read("runs/first")["loss"]              # and read it back: steps and values, as NumPy arrays
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrument.schema import Metric, Schema

if TYPE_CHECKING:
    from instrument.attention import AttentionProbe, attention_probe
    from instrument.histograms import Histogram
    from instrument.monitor import TrainingMonitor
    from instrument.norms import NormStats
    from instrument.reading import read
    from instrument.step import InstrumentedStep, remove_taps

__all__ = ["AttentionProbe", "Histogram", "InstrumentedStep", "Metric", "NormStats", "Schema", "TrainingMonitor",
           "attention_probe", "read", "remove_taps"]

# Imported on first use: all but `read` need MindSpore, which takes seconds, and which tools that read runs do without.
_LAZY = {"AttentionProbe": "attention", "Histogram": "histograms", "InstrumentedStep": "step", "NormStats": "norms",
         "TrainingMonitor": "monitor", "attention_probe": "attention", "read": "reading", "remove_taps": "step"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
