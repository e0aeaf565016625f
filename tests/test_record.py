"""Record: one vector becomes named numbers, once."""
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from instrument.record import Record, to_float
from instrument.schema import Metric, Schema

SCHEMA = Schema([Metric("step", "step", "global", "identical"), Metric("loss", "loss", "local", "mean"),
                 Metric("grad/norm", "1", "global", "identical")])


class CountedTensor:
    """Stands for a Tensor, and counts the copies."""

    def __init__(self, values):
        self.values, self.copies = np.asarray(values, np.float32), 0

    def asnumpy(self):
        self.copies += 1
        return self.values


def test_a_vector_becomes_a_record_with_one_copy():
    stats = CountedTensor([10.0, 2.5, 0.75])
    assert Record.from_stats(stats, SCHEMA, time=5.5) == Record(10, 5.5, {"loss": 2.5, "grad/norm": 0.75})
    assert stats.copies == 1


def test_a_record_does_not_change_with_the_memory_it_was_read_from():
    stats = CountedTensor([10.0, 2.5, 0.75])
    record = Record.from_stats(stats, SCHEMA, time=0.0)
    stats.values[:] = -1.0
    assert record.values == {"loss": 2.5, "grad/norm": 0.75}


def test_nan_and_infinities_are_values():
    values = Record.from_stats(Tensor([1.0, np.nan, -np.inf], ms.float32), SCHEMA, time=0.0).values
    assert math.isnan(values["loss"]) and values["grad/norm"] == -math.inf


def test_a_vector_of_another_schema_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Record.from_stats(Tensor([1.0, 2.0], ms.float32), SCHEMA, time=0.0)


@pytest.mark.parametrize("value, number", [
    (3, 3.0), (0.5, 0.5), (True, 1.0), (np.float32(0.25), 0.25), (np.array([[7]]), 7.0),
    (Tensor(1.5, ms.float32), 1.5), (Tensor([2], ms.int32), 2.0), (Tensor(True), 1.0),
    (Parameter(Tensor([0.125], ms.float16), name="p"), 0.125),
])
def test_one_number_in_any_wrapping_is_a_float(value, number):
    result = to_float(value)
    assert result == number and type(result) is float


@pytest.mark.parametrize("value", [None, "0.1", [], [1.0, 2.0], {"loss": 1.0}, Tensor([1.0, 2.0], ms.float32)])
def test_what_is_not_one_number_has_no_float(value):
    assert to_float(value) is None
