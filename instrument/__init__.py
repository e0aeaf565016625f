from instrument.norms import NormStats
from instrument.schema import Metric, Schema
from instrument.step import InstrumentedStep

__all__ = ["InstrumentedStep", "Metric", "NormStats", "Schema"]
